# SPDX-License-Identifier: Apache-2.0
"""Spans of requests: one a stage, in one trace, exported where one is configured; else nothing, at no cost."""

import os
import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fake_pb_utils import Request, text_tensor
from fakes import FakeEnsemble, thinker_message
from otlp_receiver import attributes, receive_spans
from processes import UNMEASURED
from session_rig import finished, pipeline
from triton_omni.core.settings import SettingsError, ThinkerSettings
from triton_omni.core.tracing import NO_TRACER
from triton_omni.request.parse import RawRequest
from triton_omni.stub.adapter import read_client_request
from triton_omni.stub.launch import make_tracer
from triton_omni.stub.otel import OtelTracer

STAGES = ("thinker", "talker", "token2wav")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exported():
    return InMemorySpanExporter()


@pytest.fixture
def tracers(exported):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    yield [OtelTracer(stage, provider) for stage in STAGES]
    provider.shutdown()


def ask(p, traceparent="", text=b"12345"):
    ensemble = FakeEnsemble(p.thinker, p.talker, p.token2wav)
    ensemble.submit(RawRequest(text_input=text, request_id="r1", traceparent=traceparent))
    finished(ensemble)
    p.wait_until_empty()
    return ensemble


def by_name(exported):
    spans = exported.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_a_request_is_one_trace_with_a_span_a_stage_under_the_client_s(exported, tracers):
    with pipeline(tracers=tracers) as p:
        ask(p, TRACEPARENT)
    spans = by_name(exported)
    assert spans.keys() == set(STAGES)
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    thinker = spans["thinker"]
    assert f"{thinker.parent.span_id:016x}" == PARENT
    for stage in ("talker", "token2wav"):
        assert spans[stage].parent.span_id == thinker.context.span_id
        assert thinker.start_time <= spans[stage].start_time
        assert spans[stage].end_time <= thinker.end_time
    assert all(span.status.is_ok is False or span.status.description is None for span in spans.values())
    assert {span.attributes["omni.outcome"] for span in spans.values()} == {"finished"}
    assert {span.attributes["omni.request"] for span in spans.values()} == {"r1"}
    assert spans["talker"].attributes["omni.codes"] > 0
    assert [event.name for event in spans["token2wav"].events] == ["first_audio"]


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "\x00" * 99])
def test_who_names_no_trace_gets_one_of_its_own(exported, tracers, traceparent):
    with pipeline(tracers=tracers) as p:
        ask(p, traceparent)
    spans = by_name(exported)
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert spans["thinker"].parent is None


def test_a_span_that_is_not_sampled_leaves_none_of_its_request(exported, tracers):
    with pipeline(tracers=tracers) as p:
        ask(p, f"00-{TRACE}-{PARENT}-00")
    assert by_name(exported) == {}


def test_a_refusal_and_a_failure_are_errors_by_their_code(exported, tracers):
    with pipeline(tracers=tracers, settings=ThinkerSettings(max_sessions=1)) as p:
        ask(p, text=b"bad")
        refused = by_name(exported)
        assert refused.keys() == {"thinker"}
        assert refused["thinker"].attributes["error.type"] == "bad_request"
        assert refused["thinker"].status.status_code.name == "ERROR"
        exported.clear()
        p.engines[2].fail_key = "any"
        ask(p)
        failed = by_name(exported)
        assert failed.keys() == set(STAGES)
        assert {span.status.description for span in failed.values()} == {"internal"}
        exported.clear()
        slot = p.thinker._slots.allocate()
        finished(p.ask("12345"))
        assert by_name(exported)["thinker"].attributes["error.type"] == "overloaded"
        p.thinker._slots.release(slot)


def test_spans_hold_nothing_that_a_user_wrote(exported, tracers):
    with pipeline(tracers=tracers) as p:
        ask(p, text=b"marker")
        ask(p, text=b"bad")
    assert "marker" not in "".join(span.to_json() for span in exported.get_finished_spans())


def test_without_a_tracer_nothing_is_sent_along():
    with pipeline() as p:
        ensemble = ask(p, TRACEPARENT)
        opened = [thinker_message(tensors) for tensors in ensemble.to_talker]
        assert {message.session.traceparent for message in opened if message.session} == {""}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_traces_are_off_unless_an_endpoint_is_configured(environment):
    assert make_tracer("thinker", environment) is NO_TRACER


def test_another_protocol_is_refused_by_name():
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_PROTOCOL: spans leave by http/protobuf, not 'grpc'"):
        make_tracer("thinker", environment)


def test_a_stage_without_traces_loads_nothing_of_opentelemetry():
    code = (
        "import sys; from triton_omni.stub import adapter; from triton_omni.stub.launch import make_tracer\n"
        "make_tracer('thinker', {}); sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environment = os.environ | UNMEASURED
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


@pytest.mark.parametrize(("named", "service"), [({}, "triton-omni"), ({"OTEL_SERVICE_NAME": "mine"}, "mine")])
def test_spans_reach_a_collector_before_the_stage_has_closed(monkeypatch, named, service):
    with receive_spans() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, **named}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        tracer = make_tracer("talker", environment)
        begun = time.monotonic_ns() - 2_000_000_000
        span = tracer.start_span(TRACEPARENT, begun)
        assert span.traceparent.startswith(f"00-{TRACE}-")
        span.end("timeout", outcome="timed_out", codes=3, by=None)
        tracer.close()
        found = receiver.of_trace(TRACE)["talker"]
        assert receiver.services() == {service}
    assert attributes(found) == {"omni.outcome": "timed_out", "omni.codes": 3, "error.type": "timeout"}
    assert 1.9e9 < found.end_time_unix_nano - found.start_time_unix_nano < 4e9


@pytest.mark.parametrize(
    ("parameters", "traced", "found"),
    [
        (f'{{"traceparent": "{TRACEPARENT}"}}', True, TRACEPARENT),
        (f'{{"traceparent": "{TRACEPARENT}"}}', False, ""),
        ('{"traceparent": 7}', True, ""),
        ("{}", True, ""),
        ("", True, ""),
    ],
)
def test_the_header_is_a_parameter_of_the_request_and_read_where_somebody_traces(parameters, traced, found):
    request = Request([text_tensor("text_input", "hello")], parameters=parameters)
    assert read_client_request(request, traced=traced).traceparent == found
