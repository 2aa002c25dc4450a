# SPDX-License-Identifier: Apache-2.0
"""Scripts whose figures stand in documents: GPU memory by the settings, and CPU seconds to decode a video."""

from __future__ import annotations

import runpy
from pathlib import Path

import av
import pytest

from triton_omni.core.settings import TalkerSettings, ThinkerSettings

ROOT = Path(__file__).parents[2]
MEMORY = runpy.run_path(str(ROOT / "scripts" / "gpu_memory.py"))
DECODING = runpy.run_path(str(ROOT / "scripts" / "decode_cost.py"))


def test_documents_have_the_memory_that_the_settings_give() -> None:
    table, _, tokens = MEMORY["document"]().strip().partition("\n\n")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), "run python scripts/gpu_memory.py"
    assert tokens in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "thinker", "talker"), [("tiny", 384, 640), ("3b", 40_960, 16_384), ("7b", 64_512, 56_320)]
)
def test_a_cached_token_takes_its_keys_values_and_row(size: str, thinker: int, talker: int) -> None:
    needs = MEMORY["Needs"].of(size)
    assert (needs.thinker_token, needs.talker_token) == (thinker, talker)


@pytest.mark.parametrize("settings", [ThinkerSettings(), TalkerSettings()])
def test_fewer_sequences_need_fewer_cached_tokens(settings: ThinkerSettings | TalkerSettings) -> None:
    small = MEMORY["_small"](settings.engine)
    assert small.cached_tokens == max(4 * small.usual_len, 32_768) < settings.engine.cached_tokens


@pytest.mark.parametrize(("pixel_s", "byte_s"), [(3.6e-9, 0.1e-6), (1e-9, 0.0), (0.0, 2e-7)])
def test_costs_of_a_pixel_and_a_byte_give_both_clips_back(pixel_s: float, byte_s: float) -> None:
    cost, sizes = DECODING["Cost"], [(6_000_000, 40_000), (6_000_000, 900_000)]
    clips = [cost(pixels * pixel_s + size * byte_s, pixels, size) for pixels, size in sizes]
    assert DECODING["fitted"](*clips) == pytest.approx((pixel_s, byte_s), abs=1e-15)


@pytest.mark.parametrize("codec", DECODING["CODECS"], ids=lambda codec: codec.name)
def test_every_frame_of_a_measured_clip_is_decoded(codec: object) -> None:
    if codec.encoder not in av.codecs_available:  # type: ignore[attr-defined]
        pytest.skip("the installed FFmpeg cannot encode it")
    count = 6  # x265 leaves packets without times where a clip is shorter than its reordering of two frames
    cost = DECODING["decode"](DECODING["encode"](codec, "moving", count))
    assert cost.pixels == count * DECODING["WIDTH"] * DECODING["HEIGHT"]
