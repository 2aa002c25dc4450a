# SPDX-License-Identifier: Apache-2.0
"""Calls of functions on their way through the three stages: never spoken, told at once, and whole at the end."""

import dataclasses
import json
import threading

import pytest
import torch

import session_rig
from fakes import FakeThinkerEngine
from session_rig import finished, pipeline
from triton_omni.session.answer import is_account
from triton_omni.session.engine import CallPiece
from waiting import wait_for

PIECES = (
    CallPiece(0, "call-a", "get_weather"),
    CallPiece(0, arguments='{"city": '),
    CallPiece(0, arguments='"Zürich"}'),
    CallPiece(1, "call-b", "hang_up", "{}"),
)
CALLS = [
    {"id": "call-a", "name": "get_weather", "arguments": '{"city": "Zürich"}'},
    {"id": "call-b", "name": "hang_up", "arguments": "{}"},
]


@pytest.fixture(autouse=True, params=["messages", "ring"])
def way(request, monkeypatch):
    """The carrier of the reply's rows and codes from one stage to the next."""
    monkeypatch.setattr(session_rig, "BY_RING", request.param == "ring")


class CallingEngine(FakeThinkerEngine):
    """Says so many words, and then calls, a piece a step; the first piece waits for `may_call`."""

    def __init__(self, words):
        super().__init__(length=words + len(PIECES))
        self.words = words
        self.may_call = threading.Event()
        self.may_call.set()
        self.may_end = threading.Event()
        self.may_end.set()

    def has_work(self):
        waits = any(
            not (self.may_end if state.position > self.words else self.may_call).is_set()
            for state in self.open_keys.values()
            if state.position >= self.words
        )
        return super().has_work() and not waits

    def _advance(self, key, state):
        output = super()._advance(key, state)
        token = output.token_ids[0]
        if token < self.words:
            return output
        # The row of the last word comes with the next token; where none was said, that of the prompt alone.
        rows = output.rows if token in (0, self.words) else None
        ended = output.finish_reason and "tool_calls"
        calls = (PIECES[token - self.words],)
        return dataclasses.replace(output, text="", rows=rows, calls=calls, rows_done=True, finish_reason=ended)


def infos(reply):
    return [info for response in reply.responses if (info := bytes(response["info"]).decode())]


def pieces_of(reply):
    return [piece for info in infos(reply) if not is_account(info) for piece in json.loads(info)["tool_call_deltas"]]


@pytest.mark.parametrize("words", [0, 1, 5])
def test_words_are_spoken_and_calls_are_told(words):
    with pipeline(thinker=CallingEngine(words)) as p:
        reply = finished(p.ask("12345"))
        assert reply.text == "".join(f"w{number} " for number in range(words))
        rows = range(5, 5 + words)
        assert torch.equal(reply.samples, torch.tensor(rows).float().repeat_interleave(2) / 1000)
        told = [{name: value for name, value in vars(piece).items() if value is not None} for piece in PIECES]
        assert pieces_of(reply) == told
        info = json.loads(reply.info)
        assert info["tool_calls"] == CALLS
        assert info["finish_reason"] == {"thinker": "tool_calls", "talker": "stop", "token2wav": "stop"}
        assert [is_account(found) for found in infos(reply)].count(True) == 1
        p.wait_until_empty()


def test_what_precedes_a_call_is_spoken_to_its_end_while_the_call_is_written():
    thinker = CallingEngine(5)
    thinker.may_end.clear()
    with pipeline(thinker=thinker) as p:
        ensemble = p.ask("12345")
        wait_for(lambda: p.engines[1].steps > 5 and not p.engines[1].open_keys)
        wait_for(lambda: len(ensemble.reply.samples) == 10)
        wait_for(lambda: pieces_of(ensemble.reply))
        assert thinker.open_keys
        assert not any(map(is_account, infos(ensemble.reply)))
        thinker.may_end.set()
        assert json.loads(finished(ensemble).info)["tool_calls"] == CALLS
        p.wait_until_empty()


def test_a_reply_without_calls_has_none():
    with pipeline() as p:
        reply = finished(p.ask("12345"))
        assert json.loads(reply.info)["tool_calls"] == []
        assert len(infos(reply)) == 1
