# SPDX-License-Identifier: Apache-2.0
"""A real server's metrics, logs, traces and the doctor's opinion after requests of every kind."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from observed import OF_A_GPU, OF_THE_GATEWAY, alert_rules, dashboard_queries, named_metrics
from otlp_receiver import Receiver, attributes, receive_spans
from server.probes import CRAWLING_THINKER, FAILING_TOKEN2WAV
from server.serving import TINY, Served, serve, wait_for
from triton_omni.doctor import cli
from triton_omni.session.ledger_table import GENERATION, STAGES, Table
from triton_omni.supervisor.probe import REQUEST_ID
from triton_omni_client import (
    BadRequest,
    Cancelled,
    Internal,
    Media,
    OmniClientError,
    Overloaded,
    Request,
)

MARKER = "q7Zmarker"
"""In everything that a request can hold but its id."""
SESSIONS = 3
WHOLE = 3 + 1
"""Whole replies, the server's own first one among them."""
SETTINGS = {**TINY, "thinker": {**TINY["thinker"], "max_sessions": SESSIONS}}
PARENT = "b7ad6b7169203331"
TRACES = {
    "stream": "0af7651916cd43dd8448eb211c80319c",
    "unary": "1bf7651916cd43dd8448eb211c80319d",
    "client": "2cf7651916cd43dd8448eb211c80319e",
}
SHORT = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 40}}
LONG: dict[str, Any] = {"seed": CRAWLING_THINKER, "thinker": {"min_tokens": 200, "max_tokens": 200}}
"""Half a minute."""
DEADLINE_S = 10
"""Seconds in which a request has reached every stage."""


@dataclass(frozen=True)
class Observed:
    """A server after all requests, and who received its spans."""

    server: Served
    receiver: Receiver
    events: list[dict[str, Any]]
    """Records of its log that are events."""
    at_start: dict[str, float]
    """Metrics of its stages before it was asked anything."""

    def metrics(self, name: str) -> dict[str, float]:
        """Series of one metric: their labels beside `stage`, as they are written, and values."""
        return {series.removeprefix(name): value for series, value in self.server.metrics(f"{name}{{").items()}

    def total(self, name: str) -> float:
        """The sum of a metric's series."""
        return sum(self.metrics(name).values())

    def of(self, request_id: str) -> list[tuple[str, str, str | None]]:
        """(stage, event, code) of each event of a request."""
        return [(e["stage"], e["event"], e.get("code")) for e in self.events if e.get("request") == request_id]


@pytest.fixture(scope="module")
def observed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with receive_spans() as receiver:
        environment = {
            "OMNI_LOG_FORMAT": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        folder = tmp_path_factory.mktemp("observed")
        with serve(folder, tiny_checkpoint, SETTINGS, environment, measured=True, warm_up=True) as server:
            # Metrics other than gauges of held resources are published once a second; READY does not wait for that.
            wait_for(lambda: any(server.metrics("omni_audio_seconds_total").values()), server.log)
            at_start = server.metrics("omni_")
            ask_everything(server)
            server.wait_until_idle()
            server.wait_until_published()
            yield Observed(server, receiver, list(events_of(server.log())), at_start)
            server.stop()
        log = server.log()
        assert MARKER not in log
        assert '"level": "ERROR"' not in log


def events_of(log: str) -> Iterator[dict[str, Any]]:
    for line in log.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            if "event" in record:
                yield record


def ask_everything(server: Served) -> None:
    ask_whole_replies(server)
    ask_wrong_ones(server)
    ask_ones_that_end_early(server)


def ask_whole_replies(server: Served) -> None:
    for way, path in (("stream", "qwen2_5_omni/generate_stream"), ("unary", "qwen2_5_omni_unary/generate")):
        body = {
            "id": way,
            "text_input": f"{MARKER} {way}",
            "sampling_parameters": json.dumps({"seed": 1, **SHORT}),
            "parameters": {"traceparent": f"00-{TRACES[way]}-{PARENT}-01"},
        }
        status, text = server.post(f"/v2/models/{path}", json.dumps(body))
        assert status == 200, text
    server.ask("client", MARKER, seed=1, traceparent=f"00-{TRACES['client']}-{PARENT}-01", **SHORT)


def ask_wrong_ones(server: Served) -> None:
    wrong = [
        Request(text=MARKER, request_id="voice", voice=MARKER),
        Request.ask(MARKER, [Media("image", MARKER.encode() * 99)], request_id="medium"),
        Request(text=MARKER * 9999, request_id="large"),
    ]
    for request in wrong:
        refused(server, request, OmniClientError)
    for parameters in (
        json.dumps({MARKER: MARKER}),
        MARKER,
        json.dumps({"thinker": {"stop": [MARKER], "seed": MARKER}}),
    ):
        body = {"id": "parameters", "text_input": MARKER, "sampling_parameters": parameters}
        assert server.post("/v2/models/qwen2_5_omni_unary/generate", json.dumps(body))[0] == 400


def ask_ones_that_end_early(server: Served) -> None:
    # Not by the Python client, which cancels at a request's deadline, too.
    late = json.dumps({**LONG, "timeout": DEADLINE_S})
    body = {"id": "late", "text_input": MARKER, "sampling_parameters": late}
    assert "[omni:timeout;" in server.post("/v2/models/qwen2_5_omni_unary/generate", json.dumps(body))[1]
    refused(server, Request(text=MARKER, request_id="failing", seed=FAILING_TOKEN2WAV), Internal)
    server.wait_until_idle()
    streams = [server.client.stream(Request(text=MARKER, request_id=f"doomed {i}", **LONG)) for i in range(SESSIONS)]
    for stream in streams:
        next(stream)
    refused(server, Request(text=MARKER, request_id="too many"), Overloaded)
    for stream in streams:
        stream.close()


def refused(server: Served, request: Request, error: type[OmniClientError]) -> None:
    with pytest.raises(error) as caught:
        server.client.stream(request).collect()
    assert not isinstance(caught.value, Cancelled)


def test_a_server_has_spoken_before_it_is_asked(observed: Observed) -> None:
    assert [event["stage"] for event in observed.events if event.get("request") == REQUEST_ID].count("token2wav") >= 2
    assert observed.at_start['omni_audio_seconds_total{stage="token2wav"}'] > 0
    for stage in STAGES:
        assert any(f'stage="{stage}"' in name for name in observed.at_start)


def test_every_request_ended_in_exactly_one_way(observed: Observed) -> None:
    ended = {label.split('"')[1]: value for label, value in observed.metrics("omni_requests_ended_total").items()}
    received = observed.total("omni_requests_received_total")
    assert sum(ended.values()) == received == WHOLE + 6 + 2 + SESSIONS + 1
    assert ended == {"finished": WHOLE, "refused": 6 + 1, "timed_out": 1, "failed": 1, "cancelled": SESSIONS}
    errors = Counter[str]()
    for label, value in observed.metrics("omni_errors_total").items():
        errors[label.split('code="')[1].split('"')[0]] += int(value)
    assert errors.pop("bad_request") + errors.pop("too_large") == 6
    assert errors == {"timeout": 1, "internal": 1, "overloaded": 1, "cancelled": SESSIONS}


def test_every_metric_that_dashboard_and_alerts_ask_for_is_exported(observed: Observed) -> None:
    exported = {name.partition("{")[0] for prefix in ("omni_", "nv_") for name in observed.server.metrics(prefix)}
    for query in [*dashboard_queries().values(), *(rule["expr"] for rule in alert_rules())]:
        named = {name for name in named_metrics(query) - OF_A_GPU if not name.startswith(OF_THE_GATEWAY)}
        assert named <= exported, query


def test_times_and_amounts_are_those_of_the_replies(observed: Observed) -> None:
    assert observed.total("omni_reply_seconds_count") == WHOLE
    assert observed.total("omni_first_text_seconds_count") >= WHOLE
    assert observed.total("omni_first_audio_seconds_count") >= WHOLE
    assert 0 < observed.total("omni_first_audio_seconds_sum") < observed.total("omni_reply_seconds_sum") + 60
    assert observed.total("omni_codes_total") >= 3 * 40 * 0.5
    assert observed.total("omni_audio_seconds_total") > 0
    assert {name: observed.total(name) for name in ("omni_sessions_limit", "omni_leaked_sessions")} == {
        "omni_sessions_limit": SESSIONS,
        "omni_leaked_sessions": 0,
    }
    assert len(observed.metrics("omni_kv_blocks_limit")) == len(observed.metrics("omni_stage_starts")) == len(STAGES)


def test_the_doctor_finds_an_idle_server_and_a_busy_one_sound(
    observed: Observed, capsys: pytest.CaptureFixture[str]
) -> None:
    server = observed.server
    arguments = ["--server", str(server.supervisor.pid), "--persist", "60"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    assert f"{SESSIONS} of {SESSIONS} slots free" in told
    with ExitStack() as running:
        for number in range(2):
            running.enter_context(server.client.stream(Request(text="hello", request_id=f"busy {number}", **LONG)))
        wait_for(lambda: len(server.held()) > 3, server.held)
        assert cli.main(arguments) == 0
        assert "sessions open, the oldest for" in capsys.readouterr().out
    server.wait_until_idle()


def test_the_doctor_finds_a_session_that_nobody_serves(observed: Observed, capsys: pytest.CaptureFixture[str]) -> None:
    path = cli.server_of_process(observed.server.supervisor.pid).ledger
    assert path is not None
    table = Table(path)
    before = table.word(GENERATION, slot=SESSIONS)
    try:
        table.set_word(GENERATION, 7, slot=SESSIONS)
        assert cli.main(["--server", str(observed.server.supervisor.pid), "--persist", "1"]) == 1
    finally:
        table.set_word(GENERATION, before, slot=SESSIONS)
        table.close()
    assert "the ledger has 1 session open, the thinker holds 0" in capsys.readouterr().out


def test_every_line_of_a_start_that_looks_like_an_error_is_explained(observed: Observed) -> None:
    start = observed.server.log().partition("Started GRPCInferenceService")[0]
    told = re.findall(r"^[EW]\d{4} .*?\] \"(.*)\"$", start, re.MULTILINE)
    told += re.findall(r"^\S+ \S+ WARNING (.*)$", start, re.MULTILINE)
    document = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    known = [name.rstrip("…. ") for name in re.findall(r"`(?:[EW]… |WARNING )\"?([^`\"]*)\"?`", document)]
    assert known
    assert [line for line in told if not any(line.startswith(name) for name in known)] == []


def test_each_stage_logs_what_became_of_a_request_under_its_name(observed: Observed) -> None:
    told = observed.of("stream")
    assert told[0] == ("thinker", "accepted", None)
    assert ("token2wav", "first_audio", None) in told
    assert {(stage, "finished", None) for stage in STAGES} <= set(told)
    assert {(stage, "failed", "internal") for stage in STAGES} <= set(observed.of("failing"))
    assert {(stage, "timed_out", "timeout") for stage in STAGES} <= set(observed.of("late"))
    assert {(stage, "cancelled", "cancelled") for stage in STAGES} <= set(observed.of("doomed 0"))
    assert ("thinker", "refused", "bad_request") in observed.of("voice")
    assert observed.of("too many") == [("thinker", "refused", "overloaded")]
    sessions = {e["session"] for e in observed.events if e.get("request") == "stream"}
    assert len(sessions) == 1


@pytest.mark.parametrize("way", TRACES)
def test_a_trace_has_a_span_a_stage_under_the_client_s(observed: Observed, way: str) -> None:
    wait_for(lambda: len(observed.receiver.of_trace(TRACES[way])) == 3, observed.receiver.spans)
    spans = observed.receiver.of_trace(TRACES[way])
    assert spans.keys() == set(STAGES)
    assert spans["thinker"].parent_span_id.hex() == PARENT
    assert {spans[stage].parent_span_id for stage in ("talker", "token2wav")} == {spans["thinker"].span_id}
    assert {attributes(span)["omni.outcome"] for span in spans.values()} == {"finished"}
    assert {attributes(span)["omni.request"] for span in spans.values()} == {way}


def test_spans_of_all_requests_hold_nothing_that_a_user_wrote(observed: Observed) -> None:
    failed = [span for span in observed.receiver.spans() if attributes(span).get("error.type") == "overloaded"]
    assert len(failed) == 1
    assert not any(MARKER.encode() in request.SerializeToString() for request in observed.receiver.received)


def test_logs_of_all_requests_hold_nothing_that_a_user_wrote(observed: Observed) -> None:
    assert len(observed.events) > 30
    assert MARKER not in observed.server.log()
    with pytest.raises(BadRequest):
        observed.server.ask("once more", MARKER, voice=MARKER)
    observed.server.wait_until_idle()
    assert "once more" in observed.server.log()
