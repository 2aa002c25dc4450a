# SPDX-License-Identifier: Apache-2.0
"""From a client's bytes to a preprocessed request: defaults, limits, seeds, voices, and who refuses what."""

import json
import threading
from dataclasses import dataclass, field

import pytest
import torch

from media_samples import image_file
from preprocessors import facts_of, preprocessors
from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import EngineSettings, RequestLimits, ThinkerSettings
from triton_omni.request.parse import MAX_SEED, RawRequest, talker_seed
from triton_omni.session.engine import Sampling, StreamOptions, ThinkerPlaced
from triton_omni.session.wire import MediaTokens
from triton_omni.thinker.preprocessing import SHORT_BYTES


@dataclass
class Engine:
    """Takes prompts as they are and remembers what it was asked."""

    max_model_len: int = 4096
    prompts: list = field(default_factory=list)
    max_tokens: list = field(default_factory=list)
    schemas: list = field(default_factory=list)
    salts: list = field(default_factory=list)

    def check_schema(self, schema, salt=None):
        self.schemas.append(schema)
        self.salts.append(salt)
        if "bogus" in schema:
            raise BadRequest("thinker.json_schema: bogus")

    def media_tokens(self, media):
        return 100 * sum(len(items) for items in media.values())

    def prepare(self, prompt, *, max_tokens=1):
        if len(prompt.token_ids) + max_tokens > self.max_model_len:
            raise TooLarge("too long")
        self.prompts.append(prompt)
        self.max_tokens.append(max_tokens)
        return ThinkerPlaced(prompt.token_ids, torch.arange(len(prompt.token_ids)).expand(3, -1), prompt)


@pytest.fixture
def checkpoint(tiny_checkpoint):
    return facts_of(tiny_checkpoint)


@pytest.fixture(scope="module")
def make(tiny_checkpoint):
    with preprocessors(tiny_checkpoint, Engine) as made:
        yield made


def raw(text="hello", **parameters):
    return RawRequest(text_input=text.encode(), sampling_parameters=json.dumps(parameters).encode(), request_id="r-1")


def test_a_plain_request_gets_the_deployments_defaults(make, checkpoint):
    preprocessor, _ = make(timeout_s=33.0, max_new_tokens=50)
    timeouts = []
    preprocessed = preprocessor.preprocess(raw(), 123, timeouts.append)
    config, speakers = checkpoint[1:]
    prompt = len(preprocessed.placed.prompt_token_ids)
    session = preprocessed.session
    assert prompt > 0
    assert timeouts == [33.0]
    assert (session.request_id, session.accepted_ns) == ("r-1", 123)
    assert (session.want_audio, session.audio_format, session.voice) == (True, "f32", speakers.default.name)
    assert (session.prompt_tokens, session.max_rows) == (prompt, prompt + 50)
    assert preprocessed.sampling == Sampling(max_tokens=50, seed=session.seed)
    codes = config.talker.sampling.max_new_tokens
    assert session.talker == Sampling(0.9, 0.8, 40, 0.0, 1.05, codes, talker_seed(session.seed))
    assert session.token2wav == StreamOptions()


def test_tokens_of_media_are_counted_by_kind(make, monkeypatch):
    preprocessor, engine = make()
    ids = {kind: getattr(preprocessor._renderer.ids, kind) for kind in ("audio", "image", "video")}
    placed = ThinkerPlaced(
        (ids["video"], 5, ids["audio"], ids["image"], ids["audio"], 6), torch.zeros(3, 6).long(), None
    )
    monkeypatch.setattr(engine, "prepare", lambda *_, **__: placed)
    assert preprocessor.preprocess(raw(), 0).session.media_tokens == MediaTokens(audio=2, image=1, video=1)


def test_what_a_request_asks_for_reaches_every_stage(make):
    preprocessor, engine = make()
    timeouts = []
    preprocessed = preprocessor.preprocess(
        raw(
            voice="Ethan",
            seed=7,
            audio_format="wav",
            timeout=2.5,
            thinker={"temperature": 0.5, "max_tokens": 9},
            talker={"top_k": 3, "max_tokens": 11},
            token2wav={"solver": "euler", "num_steps": 4},
        ),
        0,
        timeouts.append,
    )
    session = preprocessed.session
    assert (session.voice, session.seed, session.audio_format) == ("Ethan", 7, "wav")
    assert timeouts == [2.5]
    assert preprocessed.sampling == Sampling(temperature=0.5, max_tokens=9, seed=7)
    assert (session.talker.top_k, session.talker.max_tokens, session.talker.seed) == (3, 11, talker_seed(7))
    assert session.token2wav == StreamOptions(solver="euler", num_steps=4)
    assert engine.max_tokens == [9]


@pytest.mark.parametrize("seed", [0, 7, MAX_SEED])
def test_the_talkers_seed_is_no_requests(make, seed):
    preprocessed = make()[0].preprocess(raw(seed=seed), 0)
    assert (preprocessed.sampling.seed, preprocessed.session.seed) == (seed, seed)
    assert MAX_SEED < preprocessed.session.talker.seed == talker_seed(seed) < 2**64


def test_a_schema_is_compiled_before_media_are_decoded(make):
    preprocessor, engine = make()
    preprocessed = preprocessor.preprocess(raw(thinker={"json_schema": {"type": "string"}}), 0)
    assert engine.schemas == [preprocessed.sampling.json_schema] == ['{"type":"string"}']
    assert engine.salts == [None]
    with pytest.raises(BadRequest, match="bogus"):
        preprocessor.preprocess(raw(thinker={"json_schema": {"type": "bogus"}}), 0)
    assert len(engine.prompts) == 1


def test_a_schema_is_checked_under_the_salt_of_its_prompt(make):
    preprocessor, engine = make()
    for asked in ({"cache_salt": "mine"}, {"cache_salt": "mine", "cache": False}):
        preprocessor.preprocess(raw(thinker={"json_schema": {"type": "string"}}, **asked), 0)
    assert engine.salts == [engine.prompts[0].cache_salt, None]
    assert engine.salts[0]


def test_an_id_outside_the_checkpoints_vocabulary_is_refused(make, checkpoint):
    size = checkpoint[1].thinker.decoder.vocab_size
    with pytest.raises(BadRequest, match=f"token id {size} is not in the vocabulary, 0 to {size - 1}"):
        make()[0].preprocess(raw(thinker={"logit_bias": {str(size): 1}}), 0)


def test_text_alone_wants_no_audio(make):
    assert not make()[0].preprocess(raw(modalities=["text"]), 0).session.want_audio


def test_a_seed_is_drawn_for_each_request_that_gives_none(make):
    preprocessor, _ = make()
    seeds = {preprocessor.preprocess(raw(), 0).session.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**53 for seed in seeds)


def test_a_reply_without_a_limit_may_use_what_the_prompt_leaves(make):
    preprocessor, _ = make(max_new_tokens=4000, engine=EngineSettings(max_model_len=200, max_num_batched_tokens=64))
    preprocessed = preprocessor.preprocess(raw(), 0)
    assert preprocessed.sampling.max_tokens == 200 - preprocessed.session.prompt_tokens
    assert preprocessed.session.max_rows == 200


def test_media_without_room_in_a_prompt_are_not_all_decoded(make):
    """The third picture is none, and nobody finds out: two have no room."""
    preprocessor, engine = make(engine=EngineSettings(max_model_len=199, max_num_batched_tokens=64))
    messages = json.dumps([{"role": "user", "content": [{"type": "image"}] * 3}]).encode()
    with pytest.raises(TooLarge) as refused:
        preprocessor.preprocess(RawRequest(messages=messages, media=(image_file(), image_file(), b"none")), 0)
    assert refused.value.message == (
        "the prompt has 200 tokens up to medium 1 (image) without its text; this deployment's limit is 199 "
        "(max_model_len): send shorter, smaller or fewer media"
    )
    assert engine.prompts == []


def test_a_medium_becomes_a_part_of_the_prompt(make):
    preprocessor, engine = make()
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    messages = json.dumps([{"role": "user", "content": content}]).encode()
    preprocessor.preprocess(RawRequest(messages=messages, media=(image_file(),)), 0)
    assert list(engine.prompts[0].multi_modal_data) == ["image"]
    assert len(engine.prompts[0].multi_modal_data["image"]) == 1


def test_the_engine_is_asked_for_room_for_the_least_length(make):
    preprocessor, engine = make(max_new_tokens=50)
    preprocessed = preprocessor.preprocess(
        raw(thinker={"min_tokens": 30}, talker={"min_tokens": 20, "max_tokens": 20}), 0
    )
    assert engine.max_tokens == [30]
    assert (preprocessed.sampling.min_tokens, preprocessed.sampling.max_tokens) == (30, 50)
    assert (preprocessed.session.talker.min_tokens, preprocessed.session.talker.max_tokens) == (20, 20)


@pytest.mark.parametrize(
    ("request_", "kind", "names"),
    [
        (RawRequest(), BadRequest, ["text_input", "messages"]),
        (raw(voice="Nobody"), BadRequest, ["voice", "Nobody"]),
        (raw(volume=3), BadRequest, ["volume"]),
        (raw(thinker={"max_tokens": 51}), TooLarge, ["thinker.max_tokens", "51", "50"]),
        (raw("x" * 101), TooLarge, ["text_input", "101", "100"]),
        (RawRequest(text_input=b"a", sampling_parameters=b"[1]"), BadRequest, ["sampling_parameters"]),
        (RawRequest(text_input=b"\xff"), BadRequest, ["text_input"]),
    ],
    ids=["nothing", "voice", "unknown key", "reply too long", "text too long", "no object", "no utf-8"],
)
def test_what_cannot_be_served_is_refused_by_name_before_the_engine_is_asked(make, request_, kind, names):
    preprocessor, engine = make(max_new_tokens=50, limits=RequestLimits(max_request_bytes=100))
    with pytest.raises(kind) as refused:
        preprocessor.preprocess(request_, 0)
    assert all(name in refused.value.message for name in names), refused.value.message
    assert engine.prompts == []


def test_a_prompt_that_fills_the_engine_is_refused_by_the_engine(make):
    preprocessor, engine = make()
    engine.max_model_len = 10
    with pytest.raises(TooLarge, match="too long"):
        preprocessor.preprocess(raw(), 0)


def test_a_short_text_is_prepared_at_once_and_as_ever(make):
    preprocessor, _ = make()
    chat = json.dumps([{"role": "user", "content": "hello"}]).encode()
    for asked in (raw(seed=1), RawRequest(messages=chat, sampling_parameters=b'{"seed": 1}')):
        timeouts = []
        now, later = preprocessor.preprocess_at_once(asked, 5, timeouts.append), preprocessor.preprocess(asked, 5)
        assert now.session == later.session
        assert now.placed.prompt_token_ids == later.placed.prompt_token_ids
        assert timeouts == [ThinkerSettings().timeout_s]


@pytest.mark.parametrize(
    "asked",
    [
        raw("x" * SHORT_BYTES),
        raw(thinker={"json_schema": {"type": "object"}}),
        RawRequest(text_input=b"what is this?", media=(b"\x89PNG",)),
        RawRequest(
            messages=json.dumps(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                    }
                ]
            ).encode()
        ),
    ],
    ids=["long", "schema", "medium", "medium in the chat"],
)
def test_what_may_take_long_is_not_prepared_at_once(make, asked):
    preprocessor, engine = make()
    assert preprocessor.preprocess_at_once(asked, 0) is None
    assert not engine.schemas
    assert not engine.prompts


@pytest.mark.parametrize("salt", ["a caller's secret", "\u96ea", "\u0000", "x" * 256])
def test_the_engine_gets_a_salt_of_this_start_alone(make, salt):
    found = []
    for _ in range(2):
        preprocessor, engine = make()
        for asked in (salt, salt, salt[:-1] + "?"):
            preprocessor.preprocess(raw(cache_salt=asked), 0)
        found.append([prompt.cache_salt for prompt in engine.prompts])
    (same, again, other), (elsewhere, *_) = found
    assert same == again
    assert len({same, other, elsewhere, salt}) == 4


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"]], ids=len)
def test_a_prompt_alone_takes_the_least_that_the_talker_needs(make, modalities):
    preprocessor, engine = make()
    asked = {"thinker": {"temperature": 1, "min_tokens": 9, "stop": ["!"]}, "talker": {"min_tokens": 7}}
    preprocessed = preprocessor.preprocess(raw(prefill_only=True, cache_salt="mine", modalities=modalities, **asked), 0)
    assert preprocessed.sampling == Sampling(max_tokens=2, min_tokens=2)
    session = preprocessed.session
    assert (session.prefill_only, session.talker) == (True, Sampling(max_tokens=1))
    assert (session.want_audio, session.max_rows) == (len(modalities) > 1, session.prompt_tokens + 2)
    assert engine.max_tokens == [2]


def test_a_prompt_alone_is_refused_where_none_is_kept(make):
    preprocessor, engine = make(prefix_caching=False)
    with pytest.raises(BadRequest, match=r"prefill_only: this deployment keeps no prompts; .* set prefix_caching"):
        preprocessor.preprocess(raw(prefill_only=True, cache_salt="mine"), 0)
    assert not engine.prompts


def test_a_short_text_that_is_wrong_is_refused_at_once(make):
    preprocessor, _ = make()
    with pytest.raises(BadRequest, match=r"sampling_parameters\.timeout: "):
        preprocessor.preprocess_at_once(raw(timeout=-1), 0)


def test_many_threads_prepare_at_once(make):
    preprocessor, _ = make()
    texts = [f"question {'x ' * n}" for n in range(1, 9)]
    alone = [preprocessor.preprocess(raw(text, seed=1), 0).placed.prompt_token_ids for text in texts]
    found = [None] * len(texts)

    def prepare(n):
        for _ in range(5):
            found[n] = preprocessor.preprocess(raw(texts[n], seed=1), 0).placed.prompt_token_ids

    threads = [threading.Thread(target=prepare, args=(n,)) for n in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
    assert len(set(alone)) == len(texts)
