# SPDX-License-Identifier: Apache-2.0
"""Reads what NVIDIA's perf_analyzer wrote with `--profile-export-file`, and makes this benchmark's records of it.

The file has, for each load (`experiments`), the requests with the times of their responses in nanoseconds (`timestamp`,
`response_timestamps`) and the responses' outputs (`response_outputs`). It was read off files that perf_analyzer 2.51.0
and 2.60.0 wrote. `MISSING` lists the figures that an export lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from triton_omni_client.errors import BadRequest, OmniClientError
from triton_omni_client.messages import AudioDelta, AudioFormat, Delta, Info, Tensor, TextDelta
from triton_omni_client.outputs import OutputDecoder

from .records import Load, LoadMode, RecordBuilder, RequestRecord
from .report import Run

_NS = 1e-9
_MODES: dict[str, LoadMode] = {"concurrency": "closed", "request_rate": "open"}

MISSING = (
    "errors: perf_analyzer stops at the first one and exports none",
    "warm-up: the export does not mark it, so every request of its measurement windows is counted",
    "GPU memory and utilisation, server version: not in the export",
)
NO_SCHEDULE = "latencies of a request rate count from the sending: the export does not have the scheduled arrival"
ONE_RESPONSE = (
    "one response a request: time to first text and first audio are those of the whole reply, and nothing is known of "
    "gaps, underruns and silence"
)
NO_OUTPUTS = "no text, audio and token figures: the export has no response_outputs"
CUT_OFF = (
    "perf_analyzer has cut this export off, as it does where an empty tensor's memory, which it writes all the same, "
    "holds no number: only the requests before are counted"
)
"""It ends with exit code 0 then, and leaves the whole blocks of the file that it had written."""
_BLOCK_BYTES = 65536
_NEXT_REQUEST = '},{"timestamp":'
"""No text of a request or a reply holds it: quotes are escaped there."""


def read_profile_export(path: Path) -> tuple[list[Run], list[str]]:
    """The runs of an export, and notes on what it does not tell.

    Raises:
        BadRequest: the file cannot be read, or is no such export.
    """
    try:
        export, cut_off = _read(path)
        runs = [_run(experiment) for experiment in export["experiments"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"{path}: not a profile export of perf_analyzer: {error!r}") from error
    if cut_off:
        runs[-1] = replace(runs[-1], complete=False)
    return runs, [*MISSING, *([CUT_OFF] if cut_off else []), *_notes(export["experiments"], runs)]


def _read(path: Path) -> tuple[dict[str, Any], bool]:
    """See `_parsed`, of a file.

    Raises:
        BadRequest: it cannot be read, or is no JSON.
        ValueError: it was cut off too early.
    """
    try:
        return _parsed(path.read_bytes())
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        damaged = error.doc.lstrip().startswith("{")
        fault = "cut off or damaged" if damaged else "not a profile export of perf_analyzer: no JSON"
        raise BadRequest(f"{path}: {fault}: {error}") from error


def _parsed(data: bytes) -> tuple[dict[str, Any], bool]:
    """Return the file's content, and True if it was cut off; the request in which it ends is then left out."""
    text = data.decode("utf-8", errors="replace")
    try:
        return json.loads(text), False
    except json.JSONDecodeError as error:
        if len(data) % _BLOCK_BYTES:
            raise
        whole, begun, _ = text.rpartition(_NEXT_REQUEST)
        if not begun:
            raise ValueError("it was cut off before the first request is whole; measure again") from error
        return json.loads(whole + "}]}]}"), True


def _notes(experiments: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[str]:
    found = []
    if any(run.load.mode == "open" for run in runs):
        found.append(NO_SCHEDULE)
    if unary := [run for run in runs if not run.streamed]:
        found.append(ONE_RESPONSE if len(unary) == len(runs) else f"some runs: {ONE_RESPONSE}")
    if not any(request.get("response_outputs") for entry in experiments for request in entry["requests"]):
        found.append(NO_OUTPUTS)
    return found


def _run(experiment: Mapping[str, Any]) -> Run:
    load = experiment["experiment"]
    requests = experiment["requests"]
    begin = min((int(request["timestamp"]) for request in requests), default=0)
    records = [_record(index, request, begin) for index, request in enumerate(requests)]
    responses = [len(request["response_timestamps"]) for request in requests]
    streamed = max(responses, default=0) != 1
    return Run(Load(_MODES[load["mode"]], float(load["value"])), records, streamed=streamed)


def _record(index: int, request: Mapping[str, Any], begin_ns: int) -> RequestRecord:
    start_s = (int(request["timestamp"]) - begin_ns) * _NS
    builder = RecordBuilder(index, start_s, start_s)
    times = [(int(time) - begin_ns) * _NS for time in request["response_timestamps"]]
    outputs = request.get("response_outputs") or [{}] * len(times)
    decoder = OutputDecoder(_audio_format(request))
    try:
        for now_s, output in zip(times, outputs, strict=True):
            for delta in _deltas(output, decoder):
                builder.add(delta, now_s)
    except OmniClientError as error:
        builder.fail(error)
    if not times:
        builder.interrupt()
    return builder.build(times[-1] if times else start_s)


def _deltas(output: Mapping[str, Any], decoder: OutputDecoder) -> Iterator[Delta]:
    """Return the deltas of one response. Only the length of FP32 audio is looked at, so its values need no
    conversion.
    """
    if text := output.get("text_output"):
        yield TextDelta(text)
    # perf_analyzer writes an empty FP32 tensor as one number that means nothing, and a longer one as an array.
    samples = output.get("audio_output")
    if isinstance(samples, list):
        yield AudioDelta(np.zeros(len(samples), np.float32))
    if encoded := output.get("audio_base64"):
        yield from decoder.feed({"audio_base64": Tensor.of_bytes("audio_base64", [encoded.encode()])})
    if info := output.get("info"):
        yield Info.from_json(info)


def _audio_format(request: Mapping[str, Any]) -> AudioFormat:
    """Return the format in `sampling_parameters`, which the export keeps; `f32` by default."""
    text = request.get("request_inputs", {}).get("sampling_parameters") or "{}"
    asked = json.loads(text).get("audio_format", "f32")
    if asked not in get_args(AudioFormat):
        raise ValueError(f"audio_format {asked!r}")
    found: AudioFormat = asked
    return found
