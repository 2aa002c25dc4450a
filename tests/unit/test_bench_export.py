# SPDX-License-Identifier: Apache-2.0
"""Profile exports of perf_analyzer: read as it writes them, and its input data written as it reads it."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from bench_exports import BEGIN, INFO, MS, experiment, response, streamed, write
from triton_omni_client.audio import wav_header
from triton_omni_client.bench import profile_export
from triton_omni_client.bench.profile_export import read_profile_export
from triton_omni_client.bench.records import INTERRUPTED, Chunk
from triton_omni_client.bench.report import Report
from triton_omni_client.bench.workload import PROMPTS, Workload, of_length, perf_analyzer_input, read_prompts
from triton_omni_client.errors import BadRequest
from triton_omni_client.messages import Media


def test_a_streamed_export_gives_the_figures_of_a_measurement(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", experiment("concurrency", 2, streamed(BEGIN + 50 * MS), streamed(BEGIN)))
    (run,), notes = read_profile_export(path)
    assert run.load.label == "concurrency 2"
    record = run.records[0]
    assert (record.start_s, record.end_s) == (pytest.approx(0.05), pytest.approx(0.811))
    assert record.text_at_s == pytest.approx((0.1, 0.2))
    assert [chunk.seconds for chunk in record.chunks] == [0.24, 0.48]
    assert [chunk.at_s for chunk in record.chunks] == pytest.approx([0.4, 0.8])
    assert (record.reply_tokens, record.prompt_tokens, record.codes, record.seed) == (8, 5, 36, 7)
    summary = run.summary
    assert summary.time_to_first_audio_s.p50 == pytest.approx(0.4)
    assert (summary.underruns, summary.silence_s) == (2, pytest.approx(0.32))
    assert summary.duration_s == pytest.approx(0.861)
    assert notes == list(profile_export.MISSING)


def test_of_an_export_that_was_cut_off_the_whole_requests_count(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", *[experiment("concurrency", at, *[streamed(BEGIN)] * 2) for at in (1, 2)])
    whole = json.dumps(json.loads(path.read_text()), separators=(",", ":")).encode()  # as perf_analyzer writes it
    (end,) = {65536 * blocks for blocks in range(9)} & set(range(whole.rindex(b'"timestamp"') + 20, len(whole)))
    path.write_bytes(whole[:end])
    runs, notes = read_profile_export(path)
    assert [(len(run.records), run.complete) for run in runs] == [(2, True), (1, False)]
    assert all(len(record.chunks) == 2 for run in runs for record in run.records)
    assert profile_export.CUT_OFF in notes
    for data, reason in (
        (whole[: end - 1], r"p\.json: cut off or damaged: .*line 1 column \d+ \(char \d+\)"),
        (whole[:400] + whole[500:], r"p\.json: cut off or damaged: .*line 1 column 4\d\d"),
        (whole[:65536], "cut off before the first"),
    ):
        path.write_bytes(data)
        with pytest.raises(BadRequest, match=reason):
            read_profile_export(path)


def test_a_request_rate_is_an_open_loop_without_its_schedule(tmp_path: Path) -> None:
    runs, notes = read_profile_export(write(tmp_path / "p.json", experiment("request_rate", 1.5, streamed(BEGIN))))
    assert runs[0].load.label == "rate 1.5/s"
    assert profile_export.NO_SCHEDULE in notes


def test_a_unary_export_says_that_it_knows_no_first_audio(tmp_path: Path) -> None:
    unary = {
        "timestamp": BEGIN,
        "request_inputs": {"text_input": "Tell me a story"},
        "response_timestamps": [BEGIN + 900 * MS],
        "response_outputs": [response("Once upon", [0.1] * 24_000, info=INFO)],
    }
    runs, notes = read_profile_export(write(tmp_path / "p.json", experiment("concurrency", 1, unary)))
    assert profile_export.ONE_RESPONSE in notes
    both = experiment("concurrency", 1, unary), experiment("concurrency", 2, streamed(BEGIN))
    assert f"some runs: {profile_export.ONE_RESPONSE}" in read_profile_export(write(tmp_path / "both.json", *both))[1]
    (record,) = runs[0].records
    assert record.chunks == (Chunk(pytest.approx(0.9), 1.0),)  # type: ignore[arg-type]
    assert runs[0].summary.audio_gap_s.count == 0
    assert (runs[0].summary.underruns, runs[0].summary.silence_per_request_s.count) == (None, 0)
    (written,) = Report({}, {}, runs).to_json()["runs"]
    (request,) = written["requests"]
    assert (written["summary"]["silence_s"], request["metrics"]["underruns"]) == (None, None)


@pytest.mark.parametrize("form", ["pcm16", "wav"])
def test_encoded_audio_counts_as_what_it_decodes_to(tmp_path: Path, form: str) -> None:
    pieces = [(wav_header(None) if form == "wav" else b"") + bytes(9_600), bytes(4_800)]
    request = {
        "timestamp": BEGIN,
        "request_inputs": {"sampling_parameters": json.dumps({"audio_format": form})},
        "response_timestamps": [BEGIN + 100 * MS, BEGIN + 200 * MS],
        "response_outputs": [response(encoded=base64.b64encode(piece).decode()) for piece in pieces],
    }
    runs, _ = read_profile_export(write(tmp_path / "p.json", experiment("concurrency", 1, request)))
    assert [chunk.seconds for chunk in runs[0].records[0].chunks] == [0.2, 0.1]


def test_an_export_without_outputs_still_has_latencies(tmp_path: Path) -> None:
    request = {"timestamp": BEGIN, "response_timestamps": [BEGIN + 100 * MS, BEGIN + 300 * MS]}
    runs, notes = read_profile_export(write(tmp_path / "p.json", experiment("concurrency", 1, request)))
    assert profile_export.NO_OUTPUTS in notes
    assert runs[0].summary.latency_s.max == pytest.approx(0.3)
    assert runs[0].summary.time_to_first_audio_s.count == 0


def test_a_request_without_response_and_one_outside_of_the_contract_are_no_replies(tmp_path: Path) -> None:
    silent = {"timestamp": BEGIN, "request_inputs": {}, "response_timestamps": [], "response_outputs": []}
    broken = silent | {"response_timestamps": [BEGIN + MS], "response_outputs": [response(info="{")]}
    runs, _ = read_profile_export(write(tmp_path / "p.json", experiment("concurrency", 1, silent, broken)))
    assert [record.error for record in runs[0].records] == [INTERRUPTED, "internal"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"experiments": [{}]}',
        '{"experiments": [{"experiment": {"mode": "other", "value": 1}, "requests": []}]}',
        json.dumps({"experiments": [experiment("concurrency", 1, streamed(BEGIN, '{"audio_format": "mp3"}'))]}),
    ],
)
def test_what_is_no_profile_export_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadRequest, match="not a profile export"):
        read_profile_export(path)


def test_a_missing_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot be read: No such file"):
        read_profile_export(tmp_path / "none.json")


# --- what is asked


def test_requests_take_the_prompts_in_turn_and_a_seed_each() -> None:
    workload = Workload(prompts=("a", "b"), seed=5, thinker={"max_tokens": 9})
    requests = [workload.request(index) for index in range(3)]
    assert [(request.text, request.seed) for request in requests] == [("a", 5), ("b", 6), ("a", 7)]
    assert requests[0].sampling_parameters() == {"seed": 5, "thinker": {"max_tokens": 9}}


def test_media_are_shown_with_every_prompt() -> None:
    request = Workload(prompts=("a",), media=[Media("image", b"png")]).request(1)
    assert request.text is None
    assert request.media == [b"png"]


def test_perf_analyzer_is_given_the_same_requests() -> None:
    workload = Workload(seed=3, talker={"max_tokens": 50})
    data = json.loads(perf_analyzer_input(workload, 10))["data"]
    assert len(data) == 10
    for index, entry in enumerate(data):
        assert entry.keys() == {"text_input", "sampling_parameters"}
        assert entry["text_input"] == [PROMPTS[index % len(PROMPTS)]]
        (parameters,) = entry["sampling_parameters"]
        assert json.loads(parameters) == {"seed": 3 + index, "talker": {"max_tokens": 50}}


def test_perf_analyzer_is_given_media_as_data_uris_with_their_number() -> None:
    workload = Workload(system="Be brief.", media=[Media("image", b"\x89png"), Media("audio", b"RIFF")])
    (entry,) = json.loads(perf_analyzer_input(workload, 1))["data"]
    assert entry.keys() == {"messages", "media", "sampling_parameters"}
    system, user = json.loads(entry["messages"][0])
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["image", "audio", "text"]
    assert entry["media"]["shape"] == [2]
    found = [
        base64.b64decode(uri.removeprefix("data:application/octet-stream;base64,"), validate=True)
        for uri in entry["media"]["content"]
    ]
    assert found == [b"\x89png", b"RIFF"]


def test_prompts_are_the_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("One.\n\n  Two. \n", encoding="utf-8")
    assert read_prompts(path) == ("One.", "Two.")
    path.write_text("\n \n")
    with pytest.raises(BadRequest, match="no line"):
        read_prompts(path)
    with pytest.raises(BadRequest, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


def test_a_prompt_has_as_many_words_as_asked() -> None:
    assert of_length("a b c", 2) == "a b"
    assert of_length("a b c", 7) == "a b c a b c a"
