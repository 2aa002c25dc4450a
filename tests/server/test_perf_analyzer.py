# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's perf_analyzer itself before a real server: the client's replies, and an export that `bench` reads."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from media_samples import media_files
from server.perf_analyzer import WAYS, PerfAnalyzer, find_perf_analyzer
from server.serving import Served
from triton_omni_client import Reply, cli
from triton_omni_client.audio import SAMPLE_RATE
from triton_omni_client.bench.profile_export import NO_SCHEDULE, ONE_RESPONSE
from triton_omni_client.bench.workload import Workload
from triton_omni_client.media import load_media

REQUESTS = 3
TOKENS, CODES = 6, 40
KINDS = ["--image", "--audio", "--video"]
OPTIONS = f"--requests {REQUESTS} --fixed-lengths --max-tokens {TOKENS} --talker-max-tokens {CODES}".split()


@pytest.fixture
def perf_analyzer(server: Served, tmp_path_factory: pytest.TempPathFactory) -> PerfAnalyzer:
    return find_perf_analyzer(server, tmp_path_factory.mktemp("libraries"))


class Asked:
    """A file of requests, as the documented command line writes it, and the client's own replies to them."""

    def __init__(self, folder: Path, server: Served, media: list[Path]) -> None:
        self.file = folder / "in.json"
        shown = [word for kind, path in zip(KINDS[: len(media)], media, strict=True) for word in (kind, str(path))]
        bench("--write-perf-analyzer-input", str(self.file), *OPTIONS, *shown)
        lengths = {
            stage: {"max_tokens": count, "min_tokens": count}
            for stage, count in (("thinker", TOKENS), ("talker", CODES))
        }
        workload = Workload(media=[load_media(path) for path in media], **lengths)
        requests = [workload.request(index) for index in range(REQUESTS)]
        with ThreadPoolExecutor(REQUESTS) as threads:
            replies = threads.map(lambda request: server.client.stream(request).collect(), requests)
            self.replies = dict(zip([request.seed for request in requests], replies, strict=True))


def bench(*arguments: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module", params=["text", "media"])
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_server: Served) -> Asked:
    folder = tmp_path_factory.mktemp("asked")
    return Asked(folder, shared_server, media_files(folder) if request.param == "media" else [])


only_text = pytest.mark.parametrize("asked", ["text"], indirect=True)


@pytest.mark.parametrize("way", ["stream", "unary gRPC", "unary HTTP"])
def test_its_replies_are_the_client_s_and_bench_reads_its_export(
    perf_analyzer: PerfAnalyzer, asked: Asked, way: str, key: str, tmp_path: Path
) -> None:
    check_measurement(perf_analyzer, asked, way, key, tmp_path)


@only_text
def test_a_request_rate_is_measured_too(perf_analyzer: PerfAnalyzer, asked: Asked, key: str, tmp_path: Path) -> None:
    check_measurement(perf_analyzer, asked, "arrivals", key, tmp_path)


@only_text
@pytest.mark.parametrize("way", ["stream", "unary HTTP"])
def test_without_the_key_it_ends_at_once_and_says_why(perf_analyzer: PerfAnalyzer, asked: Asked, way: str) -> None:
    result = perf_analyzer.run(WAYS[way], "none", "--input-data", str(asked.file))
    assert result.returncode != 0
    assert "is restricted" in result.stdout


def check_measurement(perf_analyzer: PerfAnalyzer, asked: Asked, way: str, key: str, folder: Path) -> None:
    export, report = folder / "export.json", folder / "report.json"
    options = ["--input-data", str(asked.file), "--request-count", str(REQUESTS)]
    perf_analyzer.measure(WAYS[way], key, export, *options)
    (experiment,) = json.loads(export.read_text(encoding="utf-8", errors="replace"))["experiments"]
    assert len(experiment["requests"]) == REQUESTS
    for request in experiment["requests"]:
        check_reply(request, asked.replies)
    bench("--from-profile-export", str(export), "-o", str(report), "--no-plots")
    check_report(json.loads(report.read_text()), asked.replies, way)


def check_reply(request: dict[str, Any], replies: dict[int | None, Reply]) -> None:
    """Check that its answer is the client's answer."""
    expected = replies[json.loads(request["request_inputs"]["sampling_parameters"])["seed"]]
    outputs = request["response_outputs"]
    assert "".join(output["text_output"] for output in outputs) == expected.text
    (info,) = [json.loads(output["info"]) for output in outputs if output["info"]]
    assert expected.info is not None
    assert info["usage"] == expected.info.raw["usage"]
    details = info["usage"]["prompt_tokens_details"]
    assert (details["video_tokens"] > 0) == ("media" in request["request_inputs"])


def check_report(report: dict[str, Any], replies: dict[int | None, Reply], way: str) -> None:
    """Our own figures from its export: as much speech as the client got, and when it came."""
    (run,) = report["runs"]
    assert (run["load"]["mode"], run["summary"]["completed"]) == ("open" if way == "arrivals" else "closed", REQUESTS)
    assert (NO_SCHEDULE in report["notes"]) == (way == "arrivals")
    assert (ONE_RESPONSE in report["notes"]) == way.startswith("unary")
    seconds = sum(len(reply.audio) for reply in replies.values()) / SAMPLE_RATE
    assert run["summary"]["audio_s"]["mean"] * REQUESTS == pytest.approx(seconds)
    for request in run["requests"]:
        first, whole = request["metrics"]["time_to_first_audio_s"], request["metrics"]["latency_s"]
        assert 0 < first <= whole
        assert (first == whole) == way.startswith("unary")
