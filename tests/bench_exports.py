# SPDX-License-Identifier: Apache-2.0
"""Profile exports as perf_analyzer writes them, for the benchmark's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN = 1_795_231_486_273_726_513
MS = 1_000_000
INFO = '{"usage": {"reply_tokens": 8, "prompt_tokens": 5, "codes": 36, "samples": 17280}, "seed": 7}'


def response(text: str = "", audio: Any = 0.0, encoded: str = "", info: str = "") -> dict[str, Any]:
    """Return a response as perf_analyzer 2.51.0 writes it: an empty FP32 tensor becomes a meaningless number."""
    return {"text_output": text, "info": info, "audio_output": audio, "audio_base64": encoded}


def streamed(begin: int, parameters: str = '{"seed": 7}') -> dict[str, Any]:
    return {
        "timestamp": begin,
        "request_inputs": {"text_input": "Tell me a story", "sampling_parameters": parameters},
        "response_timestamps": [begin + at * MS for at in (100, 200, 400, 800, 810, 811)],
        "response_outputs": [
            response("Once"),
            response(" upon"),
            response(audio=[0.1] * 5_760),
            response(audio=[0.1] * 11_520),
            response(audio=-2.7e-17, info=INFO),
            response(audio=-8.6e32),
        ],
    }


def experiment(mode: str, value: float, *requests: dict[str, Any]) -> dict[str, Any]:
    load = {"mode": mode, "value": value}
    return {"experiment": load, "requests": list(requests), "window_boundaries": [BEGIN, BEGIN + 4_000 * MS]}


def write(path: Path, *experiments: dict[str, Any]) -> Path:
    whole = {"experiments": experiments, "version": "2.51.0", "service_kind": "triton", "endpoint": ""}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path
