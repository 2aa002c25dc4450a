# SPDX-License-Identifier: Apache-2.0
"""Many requests on one server: streams, seeds, one request's independence of all others, the edges of a reply."""

from __future__ import annotations

import numpy as np
import pytest

from reference.hf import HfReference, Sampling
from server.asking import BATCH_TOLERANCE, DIFFERENT, SAMPLED, ask, ask_together, request
from server.probes import LISTENING_THINKER
from server.serving import Served
from triton_omni_client import AudioDelta, BadRequest, TextDelta


def test_eight_different_requests_at_once_get_what_each_gets_alone(server: Served) -> None:
    alone = {name: ask(server, f"alone: {name}", **options) for name, options in DIFFERENT.items()}
    asked = {name: request(f"together: {name}", **options) for name, options in DIFFERENT.items()}
    together = ask_together(server, asked)
    records = server.records
    for name in DIFFERENT:
        assert records.tokens(f"together: {name}") == records.tokens(f"alone: {name}")
        assert records.codes(f"together: {name}") == records.codes(f"alone: {name}")
        assert together[name].text == alone[name].text
        np.testing.assert_allclose(together[name].audio, alone[name].audio, rtol=0, atol=BATCH_TOLERANCE)
    assert len({records.codes(f"alone: {name}") for name in DIFFERENT}) == len(DIFFERENT)


def test_more_sequences_than_fit_the_engines_wait_and_end_right(server: Served) -> None:
    expected = ask(server, "queue: alone", text="why", seed=11)
    asked = {f"queue: {i}": request(f"queue: {i}", text="why", seed=11) for i in range(8)}
    for reply in ask_together(server, asked).values():
        assert reply.text == expected.text
        np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)


def test_audio_arrives_before_the_thinker_has_finished(server: Served) -> None:
    # The thinker waits for token2wav after 40 tokens: without streaming, all its text would come before.
    thinker = {"min_tokens": 60, "max_tokens": 60}
    stream = server.client.stream(request("streams", text="hello", seed=LISTENING_THINKER, thinker=thinker))
    kinds = [type(delta) for delta in stream]
    first_audio = kinds.index(AudioDelta)
    last_text = len(kinds) - 1 - kinds[::-1].index(TextDelta)
    assert first_audio < last_text
    assert kinds.index(TextDelta) < first_audio
    assert kinds.count(TextDelta) > 10
    assert kinds.count(AudioDelta) > 2


def test_a_seed_repeats_the_reply_and_another_one_does_not(server: Served) -> None:
    first, again, other = (
        ask(server, f"seed {name}", text="hello", seed=seed, thinker=SAMPLED)
        for name, seed in (("first", 21), ("again", 21), ("other", 22))
    )
    assert again.text == first.text
    np.testing.assert_allclose(again.audio, first.audio, rtol=0, atol=BATCH_TOLERANCE)
    assert other.text != first.text


def test_a_seed_alone_changes_the_sound_of_the_same_codes(server: Served) -> None:
    greedy = {"text": "hello", "talker": {"temperature": 0}}
    one, two = ask(server, "noise 1", seed=31, **greedy), ask(server, "noise 2", seed=32, **greedy)
    assert server.records.codes("noise 1") == server.records.codes("noise 2")
    assert one.audio.shape == two.audio.shape
    assert np.abs(one.audio - two.audio).max() > 100 * BATCH_TOLERANCE


def test_a_drawn_seed_is_reported_and_repeats_the_reply(server: Served) -> None:
    drawn = [ask(server, f"drawn {i}", text="hello", thinker=SAMPLED) for i in range(2)]
    assert drawn[0].info is not None
    assert drawn[1].info is not None
    assert drawn[0].info.seed != drawn[1].info.seed
    again = ask(server, "drawn again", text="hello", thinker=SAMPLED, seed=drawn[0].info.seed)
    assert again.text == drawn[0].text
    np.testing.assert_allclose(again.audio, drawn[0].audio, rtol=0, atol=BATCH_TOLERANCE)


def test_one_reply_token_gives_text_and_no_audio(server: Served) -> None:
    reply = ask(server, "one token", text="hello", seed=1, thinker={"max_tokens": 1})
    full = ask(server, "all tokens", text="hello", seed=1)
    assert reply.info is not None
    assert server.records.tokens("one token") == server.records.tokens("all tokens")[:1]
    assert full.text.startswith(reply.text)
    assert len(reply.audio) == 0
    assert reply.info.codes == 0
    assert reply.info.finish_reason == {"thinker": "length", "talker": "stop", "token2wav": "stop"}


def test_length_limits_of_thinker_and_talker_are_named_and_codes_are_hf_s(server: Served, hf: HfReference) -> None:
    from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT

    reply = ask(
        server,
        "length",
        text="hello",
        voice="Chelsie",
        seed=1,
        thinker={"max_tokens": 12},
        talker={"temperature": 0, "max_tokens": 40},
    )
    chat = [{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}, {"role": "user", "content": "hello"}]
    limits = {"thinker": Sampling(max_tokens=12), "talker": Sampling(repetition_penalty=1.05, max_tokens=40)}
    expected = hf.generate(hf.prepare(chat), speak=False, **limits)
    assert reply.info is not None
    assert server.records.tokens("length") == expected.thinker.token_ids
    assert server.records.codes("length") == expected.talker.codes
    assert reply.info.finish_reason == {"thinker": "length", "talker": "length", "token2wav": "stop"}
    assert (reply.info.reply_tokens, reply.info.codes) == (12, len(expected.talker.codes))


def test_a_reply_of_fixed_lengths_has_exactly_so_many_tokens_and_codes(server: Served) -> None:
    stages = {"thinker": {"min_tokens": 70, "max_tokens": 70}, "talker": {"min_tokens": 400, "max_tokens": 400}}
    reply = ask(server, "fixed", text="hello", seed=1, **stages)
    free = ask(server, "free", text="hello", seed=1)
    assert reply.info is not None
    assert free.info is not None
    assert (reply.info.reply_tokens, reply.info.codes) == (70, 400)
    assert reply.info.finish_reason == {"thinker": "length", "talker": "length", "token2wav": "stop"}
    assert len(reply.audio) == 400 * 480
    assert (free.info.reply_tokens, free.info.codes) != (70, 400)


def test_a_text_only_request_sends_no_row_and_no_code(server: Served) -> None:
    spoken = ask(server, "spoken", text="hello", seed=1)
    server.wait_until_idle()
    before = server.link_bytes()
    assert sum(before.values()) > 0
    reply = ask(server, "silent", text="hello", seed=1, modalities=["text"])
    server.wait_until_idle()
    assert server.link_bytes() == before
    assert sum(event["rows"] for event in server.records.received("silent", "talker")) == 0
    assert reply.text == spoken.text
    assert len(reply.audio) == 0
    assert reply.info is not None
    assert reply.info.codes == 0
    assert reply.info.finish_reason["thinker"] == "stop"


def test_rows_and_codes_of_a_reply_pass_the_links_once(server: Served) -> None:
    reply = ask(server, "rows", text="hello", seed=1)
    assert reply.info is not None
    assert reply.info.prompt_tokens is not None
    assert reply.info.reply_tokens is not None
    rows = sum(event["rows"] for event in server.records.received("rows", "talker"))
    assert rows == reply.info.prompt_tokens + reply.info.reply_tokens - 1  # the last token has no row
    assert len(server.records.codes("rows")) == reply.info.codes


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
def test_encoded_audio_has_the_samples_of_f32(server: Served, audio_format: str) -> None:
    plain = ask(server, f"f32 beside {audio_format}", text="hello", seed=41)
    encoded = ask(server, audio_format, text="hello", seed=41, audio_format=audio_format)
    half_a_step = 0.5 / 32767
    np.testing.assert_allclose(encoded.audio, plain.audio, rtol=0, atol=half_a_step + BATCH_TOLERANCE)


def test_info_tells_times_in_their_order(server: Served) -> None:
    reply = ask(server, "times", text="hello", seed=1)
    assert reply.info is not None
    assert reply.info.raw["request_id"] == "times"
    assert reply.info.time_to_first_text_ms is not None
    assert reply.info.time_to_first_audio_ms is not None
    assert 0 < reply.info.time_to_first_text_ms < reply.info.time_to_first_audio_ms
    for stage in ("thinker", "talker", "token2wav"):
        times = reply.info.stage_ms[stage]
        assert times["first"] is not None
        assert times["done"] is not None
        assert 0 < times["first"] < times["done"]


def test_no_words_of_a_client_are_in_the_server_s_log(server: Served) -> None:
    secret = "xylophone-of-the-seventh-sea"
    reply = ask(server, "secret", text=secret, seed=1)
    with pytest.raises(BadRequest):
        ask(server, "refused secret", text=secret, voice=secret)
    assert secret not in server.log()
    assert reply.text not in server.log()
