# SPDX-License-Identifier: Apache-2.0
"""The training's own forward pass gives what HF's gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import forward
from training.parts import part
from training.sizes import TOY, VOCAB


@pytest.fixture(scope="module")
def thinker() -> Any:
    torch.manual_seed(0)
    model = part("thinker", TOY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
def test_text_rows(thinker: Any) -> None:
    ids = torch.randint(0, VOCAB.base, (3, 17))
    embeds = thinker.model.embed_tokens(ids)
    positions = forward.text_positions(embeds)
    wanted = thinker.model(inputs_embeds=embeds, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(forward.think(thinker.model, embeds, positions), wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_sounds_of_several_lengths(thinker: Any) -> None:
    frames = torch.tensor([399, 200, 37, 250])
    mel = torch.randn(4, 128, 400)
    packed = torch.cat([sound[:, :count] for sound, count in zip(mel, frames.tolist(), strict=True)], 1)
    wanted = thinker.audio_tower(packed, feature_lens=frames).last_hidden_state
    rows = forward.hear(thinker.audio_tower, mel, frames).rows
    counts = [forward.audio_tokens(count) for count in frames.tolist()]
    got = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("pairs", "height", "width"), [(1, 12, 12), (1, 8, 14), (2, 20, 28)])
@torch.no_grad()
def test_pictures_and_frames(thinker: Any, pairs: int, height: int, width: int) -> None:
    patches = torch.randn(2, pairs, height * width, 1176)
    grid = torch.tensor([[pairs, height, width]] * 2)
    wanted = thinker.visual(patches.reshape(-1, 1176), grid_thw=grid).pooler_output
    got = forward.see(thinker.visual, patches, height, width)
    torch.testing.assert_close(got.reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "shape", "seconds"),
    [("image", (1, 5, 6), 1.0), ("image", (1, 4, 7), 1.0), ("video", (2, 10, 14), 1.0), ("video", (4, 12, 12), 0.84)],
)
def test_positions(thinker: Any, kind: str, shape: tuple[int, int, int], seconds: float) -> None:
    pairs, height, width = shape
    bos, eos = VOCAB.id_of("<|vision_bos|>"), VOCAB.id_of("<|vision_eos|>")
    token = VOCAB.id_of(f"<|{kind.upper()}|>")
    count = pairs * height * width
    rows = [[5] * before + [bos] + [token] * count + [eos] + [6] * (20 - before) for before in (3, 9)]
    grid = torch.tensor([[pairs, height * 2, width * 2]] * 2)
    ids = torch.tensor(rows)
    given = (
        {"image_grid_thw": grid}
        if kind == "image"
        else {"video_grid_thw": grid, "second_per_grids": torch.tensor([seconds] * 2)}
    )
    wanted, _ = thinker.get_rope_index(ids, attention_mask=torch.ones_like(ids), **given)
    got = forward.vision_positions(torch.tensor([4, 10]), ids.shape[1], shape, torch.tensor([seconds] * 2))
    assert torch.equal(got, wanted)
