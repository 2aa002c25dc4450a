# SPDX-License-Identifier: Apache-2.0
"""Records of the log: one line each, plain or JSON, of what happens to a request in every stage."""

import json
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakePreprocessor, FakeThinkerEngine
from session_rig import finished, pipeline
from triton_omni.core.logs import (
    LONGEST_VALUE,
    LastingFailure,
    PlainFormatter,
    configure_logging,
    json_formatter,
    log_event,
)
from triton_omni.core.settings import SettingsError
from triton_omni.supervisor.options import parse_options
from waiting import IN_TIME_S

LOGGER = logging.getLogger("triton_omni.test")


def record(message="", *args, **options):
    return LOGGER.makeRecord(LOGGER.name, logging.INFO, "file", 1, message, args, **{"exc_info": None, **options})


def events(caplog):
    """(stage, event, code) of every record about a request, and their fields."""
    told = [vars(r) for r in caplog.records if hasattr(r, "event")]
    return [(r.get("stage"), r["event"], r.get("code")) for r in told], told


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "triton_omni")
    return caplog


def test_a_reply_is_told_by_every_stage_under_its_names(told):
    with pipeline() as p:
        finished(p.ask("12345"))
        p.wait_until_empty()
    names, fields = events(told)
    assert names[0] == ("thinker", "accepted", None)
    assert names.index(("token2wav", "first_audio", None)) < names.index(("token2wav", "finished", None))
    assert {name for name in names if name[1] == "finished"} == {
        (stage, "finished", None) for stage in ("thinker", "talker", "token2wav")
    }
    assert len(names) == 5
    assert {(found["request"], found["session"]) for found in fields} == {("r1", "s0g1")}
    by_stage = {found["stage"]: found for found in fields}
    assert (by_stage["thinker"]["prompt_tokens"], by_stage["thinker"]["reply_tokens"]) == (5, 10)
    assert by_stage["talker"]["codes"] > 0
    assert by_stage["token2wav"]["audio_s"] == pytest.approx(by_stage["talker"]["codes"] * 2 / 24000, abs=1e-4)


def test_a_request_is_told_of_behind_the_launch_that_its_listener_waits_for(told, monkeypatch):
    seen = []

    class Engine(FakeThinkerEngine):
        def step(self):
            seen.append(events(told)[0])
            return super().step()

    with pipeline(thinker=Engine()) as p:
        # The loop hears of the request and of its sequence in one turn, however slow the one is who tells.
        loop, stands, asked = p.thinker._loop, threading.Event(), threading.Event()
        monkeypatch.setattr(loop, "_turn", lambda turn=loop._turn: (stands.set(), asked.wait(IN_TIME_S), turn()))
        assert stands.wait(IN_TIME_S)
        ensemble = p.ask("12345")
        asked.set()
        finished(ensemble)
        p.wait_until_empty()
    assert seen[:2] == [[], [("thinker", "accepted", None)]]


def test_a_request_is_told_of_while_nothing_can_be_launched(told):
    with pipeline() as p:
        assert p.ask("bad").reply.done.wait(IN_TIME_S)
        p.wait_until_empty()
    assert [event for _, event, _ in events(told)[0]] == ["accepted", "refused"]


@pytest.mark.parametrize("engine", range(3))
def test_a_failure_is_told_by_every_stage_with_its_code(told, engine):
    with pipeline() as p:
        p.engines[engine].fail_key = "any"
        finished(p.ask("12345"))
        p.wait_until_empty()
    ended = [name for name in events(told)[0] if name[1] not in ("accepted", "first_audio")]
    assert sorted(ended) == [(stage, "failed", "internal") for stage in ("talker", "thinker", "token2wav")]


def test_a_cancel_is_told_by_every_stage(told):
    with pipeline(thinker=FakeThinkerEngine(length=10**9)) as p:
        p.engines[0].step_s = 0.001
        ensemble = p.ask("12345")
        ensemble.cancelled = True
        finished(ensemble)
        p.wait_until_empty()
    ended = [name for name in events(told)[0] if name[1] not in ("accepted", "first_audio")]
    assert ended
    assert {name[1:] for name in ended} == {("cancelled", "cancelled")}


def test_a_refusal_and_a_deadline_are_told_with_their_code(told):
    with pipeline() as p:
        finished(p.ask("bad"))
        p.wait_until_empty()
    with pipeline(preprocessor=FakePreprocessor(timeout_s=0.1)) as p:
        p.engines[0].step_s = 0.05
        finished(p.ask("12345"))
        p.wait_until_empty()
    names = events(told)[0]
    assert ("thinker", "refused", "bad_request") in names
    assert ("thinker", "timed_out", "timeout") in names
    assert "is bad" not in told.text


@given(st.text())
def test_a_record_is_one_line_whatever_a_client_calls_its_request(name):
    told = record("request %s", name)
    plain = PlainFormatter().format(told)
    assert len(plain.splitlines()) == 1
    assert plain.isprintable() or all(ord(letter) > 127 for letter in plain if not letter.isprintable())
    assert json.loads(json_formatter().format(told))["message"] == f"request {name}"


def test_an_event_s_fields_are_quoted_where_they_must_be_and_cut(told):
    log_event(
        LOGGER, "accepted", request='a "b"\nfinished', session="s0g1", seconds=1.23456789, code=None, long="x" * 999
    )
    [found] = told.records
    assert found.getMessage() == (
        f'accepted request="a \\"b\\"\\nfinished" session=s0g1 seconds=1.2346 long={"x" * LONGEST_VALUE}'
    )
    line = json.loads(json_formatter().format(found))
    assert (line["event"], line["request"], line["seconds"]) == ("accepted", 'a "b"\nfinished', 1.2346)
    assert line.keys() == {"time", "level", "logger", "message", "event", "request", "session", "seconds", "long"}
    assert datetime.fromisoformat(line["time"]) == datetime.fromtimestamp(found.created, UTC)


def test_an_exception_is_a_field_of_json_and_lines_of_its_own_else():
    try:
        int("a cause")
    except ValueError:
        told = record("it failed", exc_info=sys.exc_info())
    told.vllm_process_name = "APIServer"  # vLLM names its process in every record, also in this project's
    line = json_formatter().format(told)
    assert "\n" not in line
    assert json.loads(line).keys() == {"time", "level", "logger", "message", "exception"}
    assert json.loads(line)["exception"].endswith("'a cause'")
    assert PlainFormatter().format(told).splitlines()[1] == "Traceback (most recent call last):"


def test_a_failure_that_lasts_is_news_once_a_cause_and_once_over():
    failure = LastingFailure()
    assert not failure.ends()
    assert [failure.begins(cause) for cause in ("", "", "full", "full", "")] == [True, False, True, False, True]
    assert [failure.ends(), failure.ends(), failure.begins(""), failure.ends()] == [True, False, True, True]


@pytest.mark.parametrize(("chosen", "is_json"), [("", False), ("plain", False), ("json", True)])
def test_the_environment_chooses_the_format(chosen, is_json):
    code = (
        "import logging\n"
        "from triton_omni.core.logs import configure_logging\n"
        "configure_logging(); logging.getLogger('x').info('hello')"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env={"OMNI_LOG_FORMAT": chosen}, capture_output=True, text=True, check=True
    ).stderr
    assert told.endswith(" INFO x hello\n") != is_json
    assert (json.loads(told)["message"] == "hello") if is_json else ("{" not in told)


def test_an_unknown_level_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("OMNI_LOG_LEVEL", "chatty")
    with pytest.raises(SettingsError, match=r"OMNI_LOG_LEVEL must be one of DEBUG, INFO, .*, not 'chatty'"):
        configure_logging()


def test_another_format_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setenv("OMNI_LOG_FORMAT", "xml")
    with pytest.raises(SettingsError, match="OMNI_LOG_FORMAT must be plain or json, not 'xml'"):
        configure_logging()
    assert parse_options(["--model-repository", "x", "--log-format", "json"]).environment == {"OMNI_LOG_FORMAT": "json"}
    assert parse_options(["--model-repository", "x"]).environment == {}
    with pytest.raises(SystemExit):
        parse_options(["--model-repository", "x", "--log-format", "xml"])
    assert "invalid choice: 'xml'" in capsys.readouterr().err
