# SPDX-License-Identifier: Apache-2.0
"""Messages between stages: every one is read back as it was sent, and what is not ours is refused."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_omni.answer import Answer
from triton_omni.engine import Sampling, StreamOptions
from triton_omni.errors import DeadlineExceeded, InternalError, Overloaded
from triton_omni.wire import (
    PROTOCOL_VERSION,
    Failure,
    Kind,
    MediaTokens,
    Session,
    SessionKey,
    TalkerMessage,
    TalkerReport,
    ThinkerMessage,
    ThinkerReport,
)

HIDDEN = 4
KEY = SessionKey(slot=3, generation=17, nonce="0123456789abcdef" * 2)
SESSION = Session(
    request_id="r-é-1",
    want_audio=True,
    audio_format="wav",
    voice="Chelsie",
    seed=2**53 - 1,
    talker=Sampling(temperature=0.9, top_p=0.8, top_k=40, repetition_penalty=1.05, max_tokens=77, seed=5),
    token2wav=StreamOptions(solver="euler", num_steps=4, guidance_scale=0.25, mode="offline"),
    prompt_tokens=12,
    media_tokens=MediaTokens(audio=3, image=4, video=1),
    max_rows=34,
    accepted_ns=123456789012345678,
)
THINKER_REPORT = ThinkerReport(
    finish_reason="length", prompt_tokens=12, reply_tokens=9, first_token_ns=10, finished_ns=20
)
TALKER_REPORT = TalkerReport(finish_reason="stop", codes=40, first_code_ns=30, finished_ns=40)
FAILURE = Failure("talker", "too_large", "12 rows, at most 10")
POSITIONS = torch.arange(9).reshape(3, 3)
ROWS = torch.arange(8.0, dtype=torch.bfloat16).reshape(2, HIDDEN)
CODES = torch.tensor([5, 8191, 0], dtype=torch.int32)

THINKER_MESSAGES = {
    "open": {"kind": Kind.OPEN, "session": SESSION, "positions": POSITIONS},
    "rows": {"kind": Kind.DATA, "sequence": 4, "rows": ROWS, "text": "grüße 👋"},
    "text": {"kind": Kind.TEXT, "sequence": 5, "text": "\x00\n\"'\\ 漢字"},
    "heartbeat": {"kind": Kind.HEARTBEAT},
    "last": {"kind": Kind.TEXT, "sequence": 2**40, "last": True, "report": THINKER_REPORT},
    "error": {"kind": Kind.ERROR, "sequence": 6, "failure": FAILURE},
}
TALKER_MESSAGES = {
    "open": {"kind": Kind.OPEN, "session": SESSION},
    "codes": {"kind": Kind.DATA, "sequence": 4, "codes": CODES, "text": "grüße 👋"},
    "codes done": {"kind": Kind.TEXT, "sequence": 5, "codes_done": True},
    "heartbeat": {"kind": Kind.HEARTBEAT},
    "last": {
        "kind": Kind.DATA,
        "sequence": 6,
        "codes": CODES,
        "codes_done": True,
        "last": True,
        "thinker": THINKER_REPORT,
        "talker": TALKER_REPORT,
    },
    "error": {"kind": Kind.ERROR, "sequence": 6, "failure": FAILURE},
}


def assert_same(found, sent):
    for name in sent.__struct_fields__:
        value, expected = getattr(found, name), getattr(sent, name)
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)
        else:
            assert value == expected, name


def thinker_tensors(message):
    return message.to_tensors(HIDDEN, torch.bfloat16)


@pytest.mark.parametrize("fields", THINKER_MESSAGES.values(), ids=THINKER_MESSAGES)
def test_a_thinker_message_is_read_back_as_it_was(fields):
    message = ThinkerMessage(key=KEY, **fields)
    assert_same(ThinkerMessage.from_tensors(thinker_tensors(message)), message)


@pytest.mark.parametrize("fields", TALKER_MESSAGES.values(), ids=TALKER_MESSAGES)
def test_a_talker_message_is_read_back_as_it_was(fields):
    message = TalkerMessage(key=KEY, **fields)
    assert_same(TalkerMessage.from_tensors(message.to_tensors()), message)


@given(
    text=st.text(),
    slot=st.integers(0, 1023),
    generation=st.integers(1, 2**32 - 1),
    sequence=st.integers(0, 2**62),
    last=st.booleans(),
)
def test_any_text_and_numbers_are_read_back(text, slot, generation, sequence, last):
    key = SessionKey(slot, generation, KEY.nonce)
    message = TalkerMessage(key=key, kind=Kind.TEXT, sequence=sequence, text=text, last=last)
    assert_same(TalkerMessage.from_tensors(message.to_tensors()), message)


def test_absent_tensors_travel_without_rows_but_with_the_links_shape_and_dtype():
    tensors = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.HEARTBEAT))
    assert (tensors["ROWS"].shape, tensors["ROWS"].dtype) == ((0, HIDDEN), torch.bfloat16)
    assert tensors.keys() == {"ROWS", "META"}
    codes = TalkerMessage(key=KEY, kind=Kind.HEARTBEAT).to_tensors()["CODES"]
    assert (codes.shape, codes.dtype) == ((0,), torch.int32)


def test_the_large_tensor_itself_travels():
    message = ThinkerMessage(key=KEY, kind=Kind.DATA, rows=ROWS)
    assert thinker_tensors(message)["ROWS"] is ROWS
    assert ThinkerMessage.from_tensors(thinker_tensors(message)).rows is ROWS
    assert TalkerMessage(key=KEY, kind=Kind.DATA, codes=CODES).to_tensors()["CODES"] is CODES


VERSION = bytes([PROTOCOL_VERSION])


def with_meta(**changes):
    tensors = dict(TalkerMessage(key=KEY, kind=Kind.DATA, sequence=1, codes=CODES).to_tensors())
    meta = msgspec.msgpack.decode(tensors["META"][1:])
    found = {k: v for k, v in {**meta, **changes}.items() if v is not None}
    tensors["META"] = VERSION + msgspec.msgpack.encode(found)
    return tensors


@pytest.mark.parametrize(("first", "found"), [(b"\x01", "1"), (b"\xff", "255"), (b"", "unknown")])
def test_another_protocol_version_is_refused(first, found):
    tensors = with_meta()
    meta = first and first + tensors["META"][1:]
    with pytest.raises(
        InternalError, match=f"message of protocol version {found}, this stage speaks {PROTOCOL_VERSION}"
    ):
        TalkerMessage.from_tensors({**tensors, "META": meta})


@pytest.mark.parametrize(
    "changes",
    [{"key": None}, {"kind": "goodbye"}, {"sequence": "one"}, {"key": {"slot": 1}}, {"last": 1}, {"text": 1}],
)
def test_a_meta_of_another_shape_is_refused(changes):
    with pytest.raises(InternalError, match="META is not a message of this protocol"):
        TalkerMessage.from_tensors(with_meta(**changes))


@pytest.mark.parametrize("meta", [b"", b"\x80", b"\x90", b"hello", b"\xff", b"\x81\xa3key"])
@pytest.mark.parametrize("kind", [ThinkerMessage, TalkerMessage])
def test_a_foreign_meta_is_refused(kind, meta):
    message = kind(key=KEY, kind=Kind.HEARTBEAT)
    tensors = thinker_tensors(message) if kind is ThinkerMessage else message.to_tensors()
    with pytest.raises(InternalError, match="META is not a message of this protocol"):
        kind.from_tensors({**tensors, "META": VERSION + meta})


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("META", None, "META: expected bytes, found NoneType"),
        ("META", CODES, "META: expected bytes, found Tensor"),
        ("CODES", b"123", "CODES: expected a tensor, found bytes"),
        ("CODES", None, "CODES: expected a tensor, found NoneType"),
    ],
)
def test_a_tensor_of_the_wrong_kind_is_refused_by_name(name, value, sentence):
    with pytest.raises(InternalError, match=sentence):
        TalkerMessage.from_tensors({**with_meta(), name: value})


def test_text_that_is_no_utf8_is_refused():
    meta = with_meta(text="abc")["META"].replace(b"abc", b"ab\xff")
    with pytest.raises(InternalError, match="META is not a message of this protocol: 'utf-8'"):
        TalkerMessage.from_tensors({**with_meta(), "META": meta})


@pytest.mark.parametrize("positions", [b"1234567", b"x" * 32, "x" * 24, [1, 2, 3], 3])
def test_positions_that_are_not_three_rows_are_refused(positions):
    tensors = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.OPEN, session=SESSION, positions=POSITIONS))
    meta = {**msgspec.msgpack.decode(tensors["META"][1:]), "positions": positions}
    with pytest.raises(InternalError, match="META is not a message of this protocol: positions are not three rows"):
        ThinkerMessage.from_tensors({**tensors, "META": VERSION + msgspec.msgpack.encode(meta)})


@pytest.mark.parametrize("positions", [torch.empty(3, 0).long(), torch.arange(12).reshape(3, 4)[:, ::2], POSITIONS.T])
def test_positions_of_any_length_and_layout_are_read_back(positions):
    message = ThinkerMessage(key=KEY, kind=Kind.OPEN, positions=positions)
    found = ThinkerMessage.from_tensors(thinker_tensors(message)).positions
    assert torch.equal(found, positions)
    found.add_(1)


def test_a_message_carries_no_other_tensor_than_its_links():
    with pytest.raises(NotImplementedError):
        ThinkerMessage(key=KEY, kind=Kind.OPEN, positions=torch.zeros(3, 2)).to_tensors(HIDDEN, torch.float32)


def test_rows_and_codes_are_taken_from_their_tensor_alone():
    meta = with_meta(codes=b"x" * 24)
    assert TalkerMessage.from_tensors(meta).codes is CODES


def test_a_key_names_slot_and_generation_but_not_its_nonce():
    assert KEY.name == "s3g17"


def test_a_failure_keeps_the_stage_that_knew_better():
    assert Failure.of(Overloaded("full"), "talker") == Failure("talker", "overloaded", "full")
    assert Failure.of(Overloaded("full", stage="token2wav"), "talker").stage == "token2wav"


def test_a_failure_becomes_the_error_that_it_was():
    error = Failure.of(DeadlineExceeded("late"), "thinker").to_error()
    assert type(error) is DeadlineExceeded
    assert (error.message, error.stage) == ("late", "thinker")


def test_the_hint_when_to_retry_survives_a_failure_in_band():
    assert Failure.of(Overloaded("full", retry_after_ms=250), "talker").to_error().retry_after_ms == 250


def test_an_answer_is_what_the_client_sees():
    samples = torch.tensor([0.5, -0.5])
    tensors = Answer(text="héllo", audio=samples, info='{"seed":1}').to_tensors()
    assert tensors["text_output"] == "héllo".encode()
    assert tensors["audio_output"] is samples
    assert tensors["audio_base64"] == b""
    assert tensors["info"] == b'{"seed":1}'
    assert Answer().to_tensors()["audio_output"].shape == (0,)
