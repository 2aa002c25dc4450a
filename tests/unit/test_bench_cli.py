# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni bench` against a scripted server over real gRPC: what it prints, writes and exits with."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from typer.testing import CliRunner, Result

import triton_omni_client
from bench_exports import BEGIN, experiment, streamed, write
from client_fakes import INFO, FakeTriton, chunk, failure, final, inputs_of, parameters_of, serve_grpc, tell
from command_line import unframed
from triton_omni_client import cli
from triton_omni_client.bench.cli import subtitle
from triton_omni_client.bench.records import Load
from triton_omni_client.bench.report import Report
from triton_omni_client.bench.runner import Plan
from triton_omni_client.bench.workload import PROMPTS, Workload
from waiting import IN_TIME_S

NOWHERE = "http://127.0.0.1:1/metrics"


class FakeEnsemble(FakeTriton):
    """Also answers what a server is."""

    def ServerMetadata(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    def ModelConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        response = service_pb2.ModelConfigResponse()
        response.config.name = request.name
        for name in ("thinker", "talker"):
            response.config.ensemble_scheduling.step.add(model_name=name)
        tell(response.config, checkpoint="Qwen/Qwen2.5-Omni-7B")
        return response

    def ModelMetadata(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelMetadataResponse(name=request.name, versions=["1"])


@pytest.fixture
def server() -> Iterator[FakeEnsemble]:
    fake = FakeEnsemble()
    with serve_grpc(fake):
        yield fake


def _bench(url: str, output: Path, *arguments: str) -> Result:
    command = ["bench", "--url", url, "--metrics-url", NOWHERE, "-o", str(output), *arguments]
    return CliRunner().invoke(cli.app, command)


def _report(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_loads_are_measured_in_turn_and_reported(server: FakeEnsemble, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    arguments = ["--concurrency", "1,2", "--rate", "200", "--requests", "3", "--warm-up", "1", "--seed", "5"]
    result = _bench(server.url, path, *arguments)
    assert result.exit_code == 0, result.output
    report = _report(path)
    assert [run["load"] for run in report["runs"]] == [
        {"mode": "closed", "value": 1},
        {"mode": "closed", "value": 2},
        {"mode": "open", "value": 200},
    ]
    for run in report["runs"]:
        assert (run["complete"], run["summary"]["completed"], run["summary"]["errors"]) == (True, 3, {})
        assert [request["warm_up"] for request in run["requests"]] == [True, False, False, False]
        assert [chunk[1] for chunk in run["requests"][0]["chunks"]] == [0.02, 0.02]
        assert run["requests"][0]["reply_tokens"] == INFO["usage"]["reply_tokens"]
    assert report["environment"]["server"] == {
        "name": "triton",
        "version": "2.51.0",
        "models": ["qwen2_5_omni:1", "thinker:1", "talker:1"],
        "checkpoint": "Qwen/Qwen2.5-Omni-7B",
    }
    assert "concurrency 1" in result.stdout
    assert "rate 200/s" in result.stdout
    assert len(server.requests) == 12
    assert [parameters_of(request)["seed"] for request in server.requests[:4]] == [5, 6, 7, 8]
    assert (tmp_path / "r-time-to-first-audio-closed.png").exists()
    assert f"written: {path}" in result.stderr


def test_plots_name_the_checkpoint_the_server_and_the_day() -> None:
    server = {"version": "2.51.0", "checkpoint": "Qwen/Qwen2.5-Omni-7B"}
    environment: dict[str, Any] = {"date": "2026-11-24T10:00:00+00:00", "gpus": ["NVIDIA H200"], "server": server}
    assert subtitle(Report(environment, {})) == "NVIDIA H200 · Qwen/Qwen2.5-Omni-7B · Triton 2.51.0 · 2026-11-24"
    environment["server"] = {"version": "2.51.0"}  # a report of before
    assert subtitle(Report(environment, {})) == "NVIDIA H200 · Triton 2.51.0 · 2026-11-24"
    environment["gpus"] = ["NVIDIA H200", "NVIDIA H200"]
    assert subtitle(Report(environment, {})).startswith("2 × NVIDIA H200 · Triton")  # noqa: RUF001 - as in print


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("there", "is a folder"),
        ("nowhere/r.json", "its folder does not exist"),
        ("r.png", "the report is JSON, not png"),
    ],
)
@pytest.mark.parametrize("check", [(), ("--check",)])
def test_a_report_that_could_not_be_written_is_refused_before_anything_is_measured(
    server: FakeEnsemble, tmp_path: Path, name: str, says: str, check: tuple[str, ...]
) -> None:
    (tmp_path / "there").mkdir()
    result = _bench(server.url, tmp_path / name, "--concurrency", "1", *check)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert server.requests == []


def test_every_option_reaches_the_requests(server: FakeEnsemble, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One two three.\n")
    arguments = ["--concurrency", "1", "--requests", "1", "--warm-up", "0", "--no-plots"]
    arguments += ["--prompts", str(prompts), "--prompt-words", "2", "--max-tokens", "9", "--talker-max-tokens", "50"]
    arguments += ["--voice", "Ethan", "--audio-format", "pcm16", "--timeout", "9", "--talker-json", '{"top_k": 3}']
    result = _bench(server.url, tmp_path / "r.json", *arguments)
    assert result.exit_code == 0, result.output
    (request,) = server.requests
    assert parameters_of(request) == {
        "seed": 0,
        "voice": "Ethan",
        "audio_format": "pcm16",
        "timeout": 9.0,
        "thinker": {"max_tokens": 9},
        "talker": {"top_k": 3, "max_tokens": 50},
    }
    workload = _report(tmp_path / "r.json")["workload"]
    assert (workload["prompts"], workload["prompts_from"]) == (["One two"], str(prompts))
    assert not list(tmp_path.glob("*.png"))


def test_listeners_hear_a_reply_before_they_ask_again(server: FakeEnsemble, tmp_path: Path) -> None:
    arguments = ["--concurrency", "1", "--requests", "4", "--warm-up", "0", "--no-plots"]
    result = _bench(server.url, tmp_path / "r.json", *arguments, "--ramp-up", "0.01", "--listen")
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r.json")
    assert (report["workload"]["ramp_up_s"], report["workload"]["listens"]) == (0.01, True)
    requests = report["runs"][0]["requests"]
    for before, after in itertools.pairwise(requests):
        heard_s = before["chunks"][0][0] + sum(length for _, length in before["chunks"])
        assert after["start_s"] >= before["start_s"] + heard_s


def test_a_crowd_waits_for_its_last(server: FakeEnsemble, tmp_path: Path) -> None:
    arguments = ["--concurrency", "2", "--requests", "4", "--warm-up", "0", "--no-plots", "--crowds"]
    result = _bench(server.url, tmp_path / "r.json", *arguments)
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r.json")
    assert report["workload"]["crowds"] is True
    first, second, third, fourth = sorted(report["runs"][0]["requests"], key=lambda request: request["index"])
    assert (first["start_s"], third["start_s"]) == (second["start_s"], fourth["start_s"])
    assert third["start_s"] >= max(first["end_s"], second["end_s"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "2", "--crowds"], "not with --rate"),
        (["--rate", "2", "--listen"], "not with --rate"),
        (["--rate", "2", "--ramp-up", "3"], "not with --rate"),
        (["--concurrency", "2", "--listen", "--text-only"], "not with --text-only"),
        (["--concurrency", "2", "--crowds", "--listen"], "not with --listen or --ramp-up"),
        (["--concurrency", "2", "--crowds", "--ramp-up", "3"], "not with --listen or --ramp-up"),
    ],
)
def test_loads_that_contradict_each_other_are_refused(
    server: FakeEnsemble, tmp_path: Path, arguments: list[str], says: str
) -> None:
    result = _bench(server.url, tmp_path / "r.json", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert server.requests == []


def test_fixed_lengths_are_least_and_longest_at_once(server: FakeEnsemble, tmp_path: Path) -> None:
    arguments = ["--concurrency", "1", "--requests", "1", "--warm-up", "0", "--no-plots", "--fixed-lengths"]
    both = [*arguments, "--max-tokens", "150", "--talker-max-tokens", "1000"]
    assert _bench(server.url, tmp_path / "r.json", *both).exit_code == 0
    assert _bench(server.url, tmp_path / "r.json", *arguments, "--max-tokens", "9", "--text-only").exit_code == 0
    spoken, written = (parameters_of(request) for request in server.requests)
    assert spoken["thinker"] == {"max_tokens": 150, "min_tokens": 150}
    assert spoken["talker"] == {"max_tokens": 1000, "min_tokens": 1000}
    assert (written["thinker"], "talker" in written) == ({"max_tokens": 9, "min_tokens": 9}, False)


def _tokens(text: str) -> int:
    """A tokenizer: 20 for the template, one for each started three letters of a word."""
    return 20 + sum(-(-len(word) // 3) for word in text.split())


def _counting(request: Any, _context: Any) -> Iterator[Any]:
    tokens = _tokens(inputs_of(request)["text_input"][0].decode())
    if tokens > 60:
        yield failure("the prompt is too long [omni:too_large;stage=thinker]")
        return
    usage = INFO["usage"] | {"prompt_tokens": tokens}
    yield chunk(text="Hi", info=INFO | {"usage": usage})
    yield final()


@pytest.mark.parametrize("tokens", [22, 50, 59])
def test_prompts_are_brought_to_a_length_in_tokens(server: FakeEnsemble, tmp_path: Path, tokens: int) -> None:
    server.script = _counting
    arguments = ["--concurrency", "1", "--requests", "8", "--warm-up", "0", "--no-plots", "--max-tokens", "7"]
    result = _bench(server.url, tmp_path / "r.json", *arguments, "--prompt-tokens", str(tokens))
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r.json")
    assert report["workload"]["prompt_tokens"] == [tokens] * len(PROMPTS)
    assert [request["prompt_tokens"] for request in report["runs"][0]["requests"]] == [tokens] * 8
    probes, measured = server.requests[:-8], server.requests[-8:]
    assert {json.dumps(parameters_of(request)) for request in probes} == {
        json.dumps({"modalities": ["text"], "seed": 0, "thinker": {"max_tokens": 1}})
    }
    assert [parameters_of(request)["thinker"] for request in measured] == [{"max_tokens": 7}] * 8
    assert len(probes) < 20 * len(PROMPTS)


def test_a_length_that_cannot_be_had_is_told(server: FakeEnsemble, tmp_path: Path) -> None:
    server.script = _counting
    arguments = ["--concurrency", "1", "--requests", "1", "--warm-up", "0", "--no-plots"]
    result = _bench(server.url, tmp_path / "r.json", *arguments, "--prompt-tokens", "70")
    assert result.exit_code == 0, result.output
    assert any("60 tokens where 70 were asked for" in note for note in _report(tmp_path / "r.json")["notes"])
    result = _bench(server.url, tmp_path / "r.json", *arguments, "--prompt-tokens", "20")
    assert (result.exit_code, "even one character" in result.stderr) == (1, True)


def test_a_system_prompt_takes_the_place_of_the_servers(server: FakeEnsemble, tmp_path: Path) -> None:
    arguments = ["--concurrency", "1", "--requests", "1", "--warm-up", "0", "--no-plots", "--system", ""]
    assert _bench(server.url, tmp_path / "r.json", *arguments).exit_code == 0
    inputs = inputs_of(server.requests[0])
    assert "text_input" not in inputs
    assert json.loads(inputs["messages"][0]) == [
        {"role": "system", "content": ""},
        {"role": "user", "content": PROMPTS[0]},
    ]
    assert _report(tmp_path / "r.json")["workload"]["system"] == ""


@pytest.mark.parametrize("whole", [0, 1])
def test_errors_are_counted_and_fail_a_run_without_a_whole_reply(
    server: FakeEnsemble, tmp_path: Path, whole: int
) -> None:
    usual, asked = server.script, itertools.count()

    def script(*given: Any) -> Any:
        if next(asked) < whole:
            return usual(*given)
        return iter([chunk(text="so far"), failure("full [omni:overloaded;stage=thinker]")])

    server.script = script
    result = _bench(server.url, tmp_path / "r.json", "--concurrency", "2", "--requests", "3", "--warm-up", "0")
    assert result.exit_code == (0 if whole else 1)
    assert ("error: not one reply was whole at concurrency 2\n" in result.stderr) == (not whole)
    assert f"errors: {3 - whole} overloaded; the first: full" in result.stdout
    (run,) = _report(tmp_path / "r.json")["runs"]
    assert run["summary"]["errors"] == {"overloaded": 3 - whole}
    assert {request["stage"] for request in run["requests"] if request["error"]} == {"thinker"}


def test_a_server_that_does_not_say_what_it_is_leaves_notes(tmp_path: Path) -> None:
    with serve_grpc(FakeTriton()) as plain:
        result = _bench(plain.url, tmp_path / "r.json", "--concurrency", "1", "--requests", "1")
    assert result.exit_code == 0
    notes = " ".join(_report(tmp_path / "r.json")["notes"])
    assert "did not answer ServerMetadataRequest: UNIMPLEMENTED" in notes


def test_without_matplotlib_the_report_is_written_and_says_so(
    server: FakeEnsemble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = _bench(server.url, tmp_path / "r.json", "--concurrency", "1", "--requests", "1")
    assert result.exit_code == 0, result.output
    assert any("matplotlib is not installed" in note for note in _report(tmp_path / "r.json")["notes"])


def test_an_unready_server_is_one_sentence(server: FakeEnsemble, tmp_path: Path) -> None:
    server.is_ready = False
    result = _bench(server.url, tmp_path / "r.json")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: no connection to {server.url}: ")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "many"],
        ["--concurrency", "0"],
        ["--concurrency", "1.5"],
        ["--rate", "-1"],
        ["--rate", "2", "--listen"],
        ["--rate", "nan"],
        ["--audio-format", "mp3"],
        ["--thinker-json", "{"],
        ["--requests", "0"],
        ["--fixed-lengths", "--max-tokens", "9"],
        ["--fixed-lengths", "--talker-max-tokens", "9"],
        ["--fixed-lengths", "--text-only"],
        ["--prompt-tokens", "9", "--prompt-words", "9"],
        ["--prompt-tokens", "0"],
        ["--seed", "-1"],
        ["--seed", str(2**63 - 1)],
        ["--ramp-up", "nan"],
        ["--max-tokens", "9", "--thinker-json", '{"max_tokens": 8}'],
        ["--prompts", "nowhere.txt"],
        ["--image", "nowhere.png"],
        ["--from-profile-export", "nowhere.json"],
    ],
)
def test_wrong_usage_exits_with_2_and_asks_nobody(server: FakeEnsemble, tmp_path: Path, arguments: list[str]) -> None:
    assert _bench(server.url, tmp_path / "r.json", *arguments).exit_code == 2
    assert server.requests == []


@pytest.mark.parametrize("url", ["foo", "", "localhost:8002/metrics", "http://", "http://[::1"])
def test_an_address_of_metrics_that_is_none_is_refused(server: FakeEnsemble, tmp_path: Path, url: str) -> None:
    result = _bench(server.url, tmp_path / "r.json", "--check", "--metrics-url", url)
    assert result.exit_code == 2
    said = f"'--metrics-url': {url!r} is no HTTP URL such as http://localhost:8002/metrics"
    assert unframed(said) in unframed(result.stderr)


def test_a_file_of_prompts_without_any_is_wrong_usage(server: FakeEnsemble, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    result = _bench(server.url, tmp_path / "r.json", "--prompts", str(tmp_path / "empty.txt"))
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed("no line holds a prompt") in unframed(result.stderr)


def test_a_file_of_prompts_that_is_no_text_is_told_in_plain_words(server: FakeEnsemble, tmp_path: Path) -> None:
    path = tmp_path / "p.bin"
    path.write_bytes(b"ab\xff")
    result = _bench(server.url, tmp_path / "r.json", "--prompts", str(path))
    assert (result.exit_code, server.requests) == (2, [])
    assert unframed(f"prompts {path}: not text in UTF-8 at byte 2") in unframed(result.stderr)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--concurrency", "is no list of whole numbers such as 1,8,32"),
        ("--rate", "is no list of numbers such as 2,4.5"),
    ],
)
def test_a_load_that_is_none_is_told_what_one_is(tmp_path: Path, option: str, says: str) -> None:
    result = _bench("127.0.0.1:1", tmp_path / "r.json", option, "2.5x")
    assert result.exit_code == 2
    assert unframed(f"'2.5x' {says}") in unframed(result.stderr)


def test_checking_asks_nobody_and_measures_nothing(server: FakeEnsemble, tmp_path: Path) -> None:
    assert _bench(server.url, tmp_path / "r.json", "--check", "--concurrency", "1,2").exit_code == 0
    assert _bench(server.url, tmp_path / "r.json", "--check", "--concurrency", "none").exit_code == 2
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


def test_interrupt_writes_what_was_measured_and_exits_with_130(server: FakeEnsemble, tmp_path: Path) -> None:
    def script(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="Hi", audio=np.zeros(240, np.float32))
        if len(server.requests) < 3:
            yield final()
        else:
            server.cancelled.wait(IN_TIME_S)

    server.script = script
    path = tmp_path / "r.json"
    command = [sys.executable, "-m", "triton_omni_client", "bench", "--url", server.url, "--metrics-url", NOWHERE]
    command += ["-o", str(path), "--concurrency", "1,2", "--requests", "5", "--warm-up", "0", "--no-plots"]
    environment = os.environ | {"PYTHONPATH": str(Path(triton_omni_client.__file__).parents[1])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + IN_TIME_S
        while len(server.requests) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"cut short" in stdout
    (run,) = _report(path)["runs"]
    assert (run["complete"], run["summary"]["completed"], run["summary"]["interrupted"]) == (False, 2, 1)
    assert server.cancelled.wait(IN_TIME_S)


def test_a_profile_export_is_reported_without_a_server(tmp_path: Path) -> None:
    export = write(tmp_path / "p.json", *(experiment("concurrency", at, *[streamed(BEGIN)] * 20) for at in (1, 4)))
    result = _bench("127.0.0.1:1", tmp_path / "r.json", "--from-profile-export", str(export))
    assert result.exit_code == 0, result.output
    report = _report(tmp_path / "r.json")
    assert [run["summary"]["time_to_first_audio_s"]["p95"] for run in report["runs"]] == [0.4, 0.4]
    assert report["workload"] == {"profile_export": str(export)}
    assert "note: errors: perf_analyzer stops at the first one" in result.stdout
    assert (tmp_path / "r-real-time-factor-closed.png").exists()


def test_the_input_data_of_perf_analyzer_is_written_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    result = _bench("127.0.0.1:1", tmp_path / "r.json", "--write-perf-analyzer-input", str(path), "--requests", "9")
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text(encoding="utf-8"))["data"]
    assert [entry["text_input"][0] for entry in data] == [*PROMPTS, PROMPTS[0]]
    refused = _bench("127.0.0.1:1", path, "--write-perf-analyzer-input", str(tmp_path / "no" / "in.json"))
    assert (refused.exit_code, "cannot be written" in refused.stderr) == (2, True)


@pytest.mark.parametrize("second", ["--check", "--from-profile-export"])
def test_only_one_option_that_measures_nothing_is_taken(tmp_path: Path, second: str) -> None:
    export = write(tmp_path / "p.json", experiment("concurrency", 1, streamed(BEGIN)))
    given = [second] if second == "--check" else [second, str(export)]
    path = tmp_path / "in.json"
    result = _bench("127.0.0.1:1", tmp_path / "r.json", "--write-perf-analyzer-input", str(path), *given)
    assert (result.exit_code, path.exists(), "not with" in result.stderr) == (2, False, True)


def test_a_report_of_an_export_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    export = write(tmp_path / "p.json", experiment("concurrency", 1, streamed(BEGIN)))
    result = _bench("127.0.0.1:1", Path("/dev/full"), "--from-profile-export", str(export), "--no-plots")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: bad_request: /dev/full: cannot be written: No space left on device\n")


def test_a_load_has_enough_requests_for_its_percentiles() -> None:
    plan = Plan("", "", "", [], Workload())
    found = [(plan.requests_of(load), plan.warm_up_of(load)) for load in (Load("closed", 1), Load("closed", 32))]
    assert found == [(20, 2), (128, 32)]
    assert (plan.requests_of(Load("open", 0.5)), plan.warm_up_of(Load("open", 0.5))) == (20, 2)
    assert (plan.requests_of(Load("open", 4.0)), plan.warm_up_of(Load("open", 4.0))) == (120, 4)
