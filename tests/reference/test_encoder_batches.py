# SPDX-License-Identifier: Apache-2.0
"""Media of requests that come together go through each encoder together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from media_samples import picture, tone
from reference.hf import HfReference
from reference.thinker_rig import REPLY, make_engine, run, token_ids
from triton_omni.engine import ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def about(hf: HfReference, kind: str, medium: Any) -> ThinkerPrompt:
    ids = token_ids(hf, {"type": kind}, {"type": "text", "text": "what is this?"})
    return ThinkerPrompt(ids, {kind: [medium]})


def test_requests_that_come_together_share_each_encoders_pass(tiny_checkpoint: Path, hf: HfReference) -> None:
    prompts = {
        "small image": about(hf, "image", Image.fromarray(picture(56, 56))),
        "short sound": about(hf, "audio", tone(0.6)),
        "large image": about(hf, "image", Image.fromarray(picture(112, 84, seed=3))),
        "long sound": about(hf, "audio", tone(1.5)),
    }
    engine = make_engine(tiny_checkpoint, max_num_batched_tokens=1024)
    passes: list[str] = []
    for name in ("visual", "audio_tower"):
        getattr(engine._model, name).register_forward_pre_hook(lambda *_, name=name: passes.append(name))
    together = run(engine, prompts)
    assert sorted(passes) == ["audio_tower", "visual"]
    for key, prompt in prompts.items():
        alone = run(engine, {key: prompt})[key]
        assert together[key].token_ids == alone.token_ids
    assert sorted(passes) == ["audio_tower"] * 3 + ["visual"] * 3
    assert REPLY.max_tokens >= len(alone.token_ids) > 0
    engine.close()


def test_the_vision_tower_has_run_before_the_first_image(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton_omni.vllm_hooks.thinker_networks import ThinkerNetwork

    embed, seen = ThinkerNetwork.embed_multimodal, []
    monkeypatch.setattr(ThinkerNetwork, "embed_multimodal", lambda self, **kwargs: seen.append(embed(self, **kwargs)))
    make_engine(tiny_checkpoint).close()
    ((embedding,),) = seen
    assert embedding.shape[0] == 1
    assert embedding.isfinite().all()
