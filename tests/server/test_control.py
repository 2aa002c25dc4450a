# SPDX-License-Identifier: Apache-2.0
"""A request's options for its reply, through a real server: text and speech, refusals, and defaults."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from reference.hf_token2wav import HfToken2Wav, solved_by, streamed_waveform
from server.serving import TINY, Served
from triton_omni.core.settings import Token2WavSettings
from triton_omni_client import BadRequest, Info, Reply, Request, ThinkerOptions, Token2WavOptions

SAME = 1e-5
"""A waveform may differ by this when it is solved again."""
GREEDY: dict[str, Any] = {"text": "hello", "seed": 71, "talker": {"temperature": 0}}
SPOKEN: dict[str, Any] = {**GREEDY, "voice": "Ethan"}
LIKE_HF = 1e-4
LONGEST_CHUNK_S = 1.44
SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}


def told(reply: Reply) -> Info:
    assert reply.info is not None
    return reply.info


def reply_rows(server: Served, request_id: str, reply: Reply) -> int:
    """Hidden rows of the reply that the talker was given."""
    sent = sum(event["rows"] for event in server.records.received(request_id, "talker"))
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


def test_speech_is_made_no_faster_than_it_is_heard_where_that_is_asked(server: Served) -> None:
    spoken = {
        **SPOKEN,
        "thinker": ThinkerOptions(max_tokens=8),
        "talker": {"temperature": 0, "min_tokens": 200, "max_tokens": 200},
    }
    quick = Token2WavOptions(solver="euler", num_steps=4)
    free = server.ask("control: free", **spoken, token2wav=quick)
    begun = time.monotonic()
    paced = server.ask("control: paced", **spoken, token2wav=Token2WavOptions(**quick, max_lead_s=1.0))
    lasted = len(paced.audio) / 24_000
    assert time.monotonic() - begun > lasted - 1 - LONGEST_CHUNK_S
    np.testing.assert_allclose(paced.audio, free.audio, rtol=0, atol=SAME)
    assert lasted == 4


def test_a_reply_is_json_of_its_schema(server: Served) -> None:
    reply = server.ask("control: json", **GREEDY, thinker=ThinkerOptions(json_schema=SCHEMA))
    jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert told(reply).finish_reason["thinker"] == "stop"
    assert len(reply.audio)


def test_what_is_chosen_of_the_solver_is_what_hf_s_sampler_does_with_it(server: Served, tiny_checkpoint: Path) -> None:
    chosen: dict[str, Any] = {"num_steps": 5, "guidance_scale": 1.0}
    asked: dict[str, Token2WavOptions] = {
        mode: {"mode": mode, "solver": "euler", **chosen} for mode in ("offline", "streaming")
    }
    ours = {mode: server.ask(f"control: {mode}", **SPOKEN, token2wav=asked[mode]).audio for mode in asked}
    plain = server.ask("control: shipped", **SPOKEN)
    codes, hf = torch.tensor(server.records.codes("control: shipped")), HfToken2Wav(tiny_checkpoint)
    assert server.records.codes("control: offline") == server.records.codes("control: streaming") == tuple(codes)
    with solved_by("euler"):
        offline = hf.waveform(codes, "Ethan", SPOKEN["seed"], **chosen)
        streamed = torch.cat(
            streamed_waveform(hf, codes, Token2WavSettings().plans["balanced"], "Ethan", SPOKEN["seed"], **chosen)
        )
    np.testing.assert_allclose(ours["offline"], offline.numpy(), rtol=0, atol=LIKE_HF)
    np.testing.assert_allclose(ours["streaming"], streamed.numpy(), rtol=0, atol=LIKE_HF)
    assert np.abs(ours["streaming"] - plain.audio).max() > 100 * LIKE_HF


def test_a_preset_of_a_request_is_what_its_settings_spelled_out_are(server: Served) -> None:
    asked: dict[str, Token2WavOptions] = {
        "named": {"preset": "fast"},
        "spelled": TINY["token2wav"]["presets"]["fast"],
        "not asked": {},
    }
    heard = {name: server.ask(f"control: {name}", **SPOKEN, token2wav=options).audio for name, options in asked.items()}
    np.testing.assert_allclose(heard["named"], heard["spelled"], rtol=0, atol=SAME)
    assert np.abs(heard["named"] - heard["not asked"]).max() > 100 * SAME
    with pytest.raises(BadRequest, match=r"preset: 'best' is not one of \['fast', 'reference'\]") as refused:
        server.ask("control: no preset", **SPOKEN, token2wav={"preset": "best"})
    assert refused.value.stage == "token2wav"


def test_info_of_every_way_to_ask_tells_the_same(server: Served) -> None:
    request = Request(text="hello", seed=71, talker={"temperature": 0}, thinker={"max_tokens": 9})
    streamed, unary = told(server.client.stream(request).collect()), told(server.http.unary(request))
    for info in (streamed, unary):
        assert info.finish_reason == {"thinker": "length", "talker": "stop", "token2wav": "stop"}
        assert (info.reply_tokens, info.seed, info.raw["sample_rate"]) == (9, 71, 24000)
        assert info.samples == 480 * (info.codes or 0) > 0
        assert info.prompt_tokens == info.prompt_tokens_details["text_tokens"] > 9
        assert info.stop_string is None
    assert unary.raw["usage"] == streamed.raw["usage"]


def test_info_of_a_reply_without_speech_tells_of_the_thinker_alone(server: Served) -> None:
    info = told(server.ask("control: silent", "hello", modalities=["text"]))
    assert info.finish_reason == {"thinker": "stop", "talker": None, "token2wav": None}
    assert (info.codes, info.samples, info.time_to_first_audio_ms) == (0, 0, None)
    assert info.time_to_first_text_ms is not None
    # Greedy text needs no seed, and one is drawn and told all the same.
    assert info.seed is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"json_schema": {"type": "bogus"}}, "thinker.json_schema.type: cannot be compiled: 'Invalid type: bogus'"),
        ({"logit_bias": {1 << 20: 1}}, r"thinker.logit_bias: token id 1048576 is not in the vocabulary"),
        ({"stop": [""]}, r"thinker.stop\[0\]: .*must have 1 or more characters"),
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
