# SPDX-License-Identifier: Apache-2.0
"""What a request says of its reply, through a real server: what is shown and spoken, refused, and left alone."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from server.serving import Served
from triton_omni_client import BadRequest, Info, Reply, ThinkerOptions

SAME = 1e-5
"""A waveform may differ by this when it is solved again."""
GREEDY: dict[str, Any] = {"text": "hello", "seed": 71, "talker": {"temperature": 0}}
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}


def told(reply: Reply) -> Info:
    assert reply.info is not None
    return reply.info


def reply_rows(server: Served, request_id: str, reply: Reply) -> int:
    """Hidden rows of the reply that the talker was given."""
    sent = sum(event["rows"] for event in server.records.of(request_id, "talker", "message"))
    return int(sent) - (told(reply).prompt_tokens or 0)


def test_of_a_stopped_reply_what_is_shown_is_spoken(server: Served) -> None:
    plain = server.ask("control: plain", **GREEDY)
    stop = plain.text[12:15]
    stopped = server.ask("control: stopped", **GREEDY, thinker=ThinkerOptions(stop=["never", stop]))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert (told(stopped).finish_reason["thinker"], told(stopped).stop_string) == ("stop", stop)
    assert told(plain).stop_string is None
    # A reply of as many tokens and one more, which has no row, is spoken alike.
    rows = reply_rows(server, "control: stopped", stopped)
    short = server.ask("control: short", **GREEDY, thinker=ThinkerOptions(max_tokens=rows + 1))
    assert server.records.codes("control: stopped") == server.records.codes("control: short")
    np.testing.assert_allclose(stopped.audio, short.audio, rtol=0, atol=SAME)
    assert 0 < len(stopped.audio) < len(plain.audio)


def test_a_reply_is_json_of_its_schema(server: Served) -> None:
    reply = server.ask("control: json", **GREEDY, thinker=ThinkerOptions(json_schema=SCHEMA))
    jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert told(reply).finish_reason["thinker"] == "stop"
    assert len(reply.audio)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": {"type": "bogus"}}, "thinker.json_schema: cannot be compiled: 'Invalid type: bogus'"),
        ({"logit_bias": {1 << 20: 1}}, r"thinker.logit_bias: token id 1048576 is not in the vocabulary"),
        ({"stop": [""]}, r"thinker.stop\[0\]: .*at least 1 character"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server: Served, options: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        server.ask("control: refused", "hello", thinker=options)


def test_penalties_biases_and_priority_change_one_reply_and_no_other(server: Served) -> None:
    plain = server.ask("control: before", **GREEDY)
    first = server.records.tokens("control: before")[0]
    steered = ThinkerOptions(presence_penalty=1.5, frequency_penalty=0.5, logit_bias={first: -100.0})
    other = server.ask("control: steered", **GREEDY, thinker=steered, priority=-100)
    assert first not in server.records.tokens("control: steered")
    again = server.ask("control: after", **GREEDY)
    assert other.text != plain.text == again.text
    np.testing.assert_allclose(again.audio, plain.audio, rtol=0, atol=SAME)
