# SPDX-License-Identifier: Apache-2.0
"""Decode steps of both engines by the fused kernels against vLLM's own, in bfloat16 on a GPU, graphs and all."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference.hf import HfReference
from reference.talker.rig import DEVICE, HfTalker, make_engine
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
on_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="fused decode steps need a GPU")

RELATIVE_ERROR = {"none": 0.02, "fp8": 0.15}
"""Largest errors by precision: bfloat16 has 8 bits of mantissa, E4M3 has 4. vLLM rounds the rows of FP8 products to
E4M3, fused steps do not. HF in float32 gets the same tolerance (`test_precision.py`).
"""
TOKENS = 40


def thinker(checkpoint: Path, *, prefix_caching: bool = False, quantization: Any = "none", **engine: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

        sizes = EngineSettings(max_num_seqs=4, max_model_len=1024, max_num_batched_tokens=512, threads=1, **engine)
        settings = ThinkerSettings(engine=sizes, prefix_caching=prefix_caching, quantization=quantization)
        return ThinkerVllmEngine(checkpoint, settings, DEVICE)


def replies(
    engine: Any, prompts: dict[str, tuple[int, ...]], temperature: float
) -> dict[str, tuple[list[int], Tensor]]:
    """Tokens and hidden rows of each prompt's reply, all at once."""
    sampling = Sampling(max_tokens=TOKENS, min_tokens=TOKENS, temperature=temperature, seed=3)
    for key, ids in prompts.items():
        engine.add_sequence(key, engine.prepare(ThinkerPrompt(ids)), sampling, want_rows=True)
    tokens: dict[str, list[int]] = {key: [] for key in prompts}
    rows: dict[str, list[Tensor]] = {key: [] for key in prompts}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens[output.key] += output.token_ids
            rows[output.key] += [] if output.rows is None else [output.rows.float().cpu()]
    engine.close()
    return {key: (tokens[key], torch.cat(rows[key])[len(ids) :]) for key, ids in prompts.items()}


@on_gpu
@pytest.mark.parametrize(
    ("quantization", "temperature", "least"), [("none", 0.0, 5), ("none", 1.0, 2), ("fp8", 0.0, 1)]
)
def test_thinker_rows_of_a_reply(
    tiny_checkpoint: Path, hf: HfReference, quantization: str, temperature: float, least: int
) -> None:
    text = "Tell me about the sea. "
    prompts = {str(count): tuple(hf.processor.tokenizer(text * count)["input_ids"]) for count in (1, 12, 40)}
    plain, fused = (
        replies(thinker(tiny_checkpoint, fused_decode=is_fused, quantization=quantization), prompts, temperature)
        for is_fused in (False, True)
    )
    for key, (tokens, rows) in plain.items():
        ours, ours_rows = fused[key]
        same = next((place for place in range(TOKENS) if ours[place] != tokens[place]), TOKENS)
        # Two tokens may be nearly equal, or a draw near the bound of two, and replies part there; until then every
        # row is comparable.
        assert same >= least, key
        kept = min(same, len(rows))
        error = float((ours_rows[:kept] - rows[:kept]).norm() / rows[:kept].norm())
        assert 0 < error < RELATIVE_ERROR[quantization], (key, error)


@on_gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_layers_of_a_thinker_are_fused_whole(tiny_checkpoint: Path, quantization: str) -> None:
    from triton_omni.vllm_hooks.kernels.decode_product import reads_e4m3
    from triton_omni.vllm_hooks.shared.fused_decode import decoder_of
    from triton_omni.vllm_hooks.shared.fused_layers import FusedLayer

    engine = thinker(tiny_checkpoint, fused_decode=True, quantization=quantization)
    _, layers = decoder_of(engine._model)
    whole = quantization == "none" or reads_e4m3(DEVICE)
    assert [isinstance(layer.forward, FusedLayer) for layer in layers] == [whole] * len(layers)
    engine.close()


def test_rows_that_are_kept_are_those_that_were_given(tiny_checkpoint: Path, hf: HfReference) -> None:
    engine = thinker(tiny_checkpoint, prefix_caching=True)
    sampling = Sampling(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0)

    def turn(ids: tuple[int, ...], salt: str, *, spoken: bool = True) -> tuple[tuple[int, ...], list[Tensor], int]:
        placed = engine.prepare(ThinkerPrompt(ids, cache_salt=salt))
        engine.add_sequence(salt, placed, sampling, want_rows=spoken)
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        tokens = tuple(token for output in outputs for token in output.token_ids)
        rows = [output.rows.float().cpu() for output in outputs if output.rows is not None]
        return tokens, rows, max(output.cached_tokens for output in outputs)

    prompt = tuple(hf.processor.tokenizer("Tell me about the sea. " * 12)["input_ids"])
    tokens, given, _ = turn(prompt, "spoken")
    silent, none, _ = turn(prompt, "silent", spoken=False)
    assert (silent, none) == (tokens, [])
    for salt in ("spoken", "silent"):
        _, rows, cached = turn((*prompt, *tokens, *prompt[:5]), salt)
        assert cached > len(prompt)
        assert torch.equal(torch.cat(rows)[:cached], torch.cat(given)[:cached])
    engine.close()


@on_gpu
def test_talker_codes(tiny_checkpoint: Path, hf: HfReference) -> None:
    voice = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint)).default.text_bos_id
    talker: Any = HfTalker(hf.model)
    case = talker.case(3, 33, 9, voice, image=True)
    seen: dict[bool, list[int]] = {}
    for fused in (False, True):
        engine: Any = make_engine(tiny_checkpoint, ahead=True, dtype="bfloat16", fused_decode=fused)
        engine.open("a", case.prompt, Sampling(max_tokens=TOKENS, min_tokens=TOKENS))
        engine.feed("a", case.rows.to(DEVICE, torch.bfloat16))
        engine.end("a")
        codes = seen[fused] = []
        while engine.has_work():
            codes += [int(code) for output in engine.step() if output.codes is not None for code in output.codes]
        engine.close()
    same = next((place for place in range(TOKENS) if seen[True][place] != seen[False][place]), TOKENS)
    assert same > 4


@on_gpu
def test_talker_codes_of_who_waits_among_others(tiny_checkpoint: Path, hf: HfReference) -> None:
    """One has all its rows, two get theirs by threes, or at once."""
    voice = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint)).default.text_bos_id
    talker: Any = HfTalker(hf.model)
    cases = {key: talker.case(seed, 33, 24, voice) for key, seed in (("whole", 3), ("b", 4), ("c", 5))}
    seen: dict[bool, dict[str, list[int]]] = {}
    for waits in (False, True):
        engine: Any = make_engine(tiny_checkpoint, ahead=True, dtype="bfloat16", fused_decode=True)
        rows = {key: case.rows.to(DEVICE, torch.bfloat16) for key, case in cases.items()}
        codes = seen[waits] = {key: [] for key in cases}

        def step(engine: Any = engine, codes: dict[str, list[int]] = codes) -> None:
            for output in engine.step():
                codes[output.key] += [] if output.codes is None else output.codes.tolist()

        for key, case in cases.items():
            engine.open(key, case.prompt, Sampling(temperature=0.0, max_tokens=200, min_tokens=200))
            engine.feed(key, rows[key][: 33 + (3 if waits and key != "whole" else 24)])
        engine.end("whole")
        for start in range(36, 57, 3) if waits else ():
            while len(codes["b"]) < start - 33 or len(codes["c"]) < start - 33:
                step()
            for key in "bc":
                engine.feed(key, rows[key][start : start + 3])
        while len(codes["b"]) < 24 or len(codes["c"]) < 24:
            step()
        engine.close()
    for key, plain in seen[False].items():
        count = min(len(plain), len(seen[True][key]), 24)
        same = next((place for place in range(count) if plain[place] != seen[True][key][place]), count)
        # Half precision may part two codes that are nearly equal, as sums are in another order.
        assert same > 4, (key, same)


def test_what_the_kernels_do_not_compute_is_said(tiny_checkpoint: Path) -> None:
    from triton_omni.vllm_hooks.shared.fused_decode import why_not_fused

    engine = thinker(tiny_checkpoint)
    assert why_not_fused(engine._model, torch.float32) == "they are of half precision, the network is torch.float32"
    expected = None if DEVICE.type == "cuda" else "attention is CPU_ATTN, not FLASH_ATTN"
    assert why_not_fused(engine._model, torch.bfloat16) == expected
    vision = engine._model.visual
    assert why_not_fused(vision, torch.bfloat16) == "the network has no decoder layers of a known kind"
    engine.close()
