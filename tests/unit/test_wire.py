# SPDX-License-Identifier: Apache-2.0
"""Messages between stages: every one is read back as it was sent, and what is not ours is refused."""

import functools
import operator
import re

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triton_omni.core.errors import DeadlineExceeded, InternalError, Overloaded
from triton_omni.session.answer import Answer
from triton_omni.session.engine import PrefixKeys, Sampling, StreamOptions
from triton_omni.session.ledger_table import CAPACITY
from triton_omni.session.wire import (
    MAX_META_BYTES,
    MAX_NAME,
    PROTOCOL_VERSION,
    SEAL_BYTES,
    Failure,
    Kind,
    MediaTokens,
    Seal,
    Session,
    SessionKey,
    TalkerMessage,
    TalkerReport,
    ThinkerMessage,
    ThinkerReport,
    Unsealed,
)

HIDDEN = 4
KEY = SessionKey(slot=3, generation=17)
SECRET = bytes(range(32))
SEAL = Seal(SECRET, "talker")
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
TALKER_REPORT = TalkerReport(finish_reason="stop", codes=40, cached_tokens=64, first_code_ns=30, finished_ns=40)
FAILURE = Failure("talker", "too_large", "12 rows, at most 10")
POSITIONS = torch.arange(9).reshape(3, 3)
ROWS = torch.arange(8.0, dtype=torch.bfloat16).reshape(2, HIDDEN)
CODES = torch.tensor([5, 8191, 0], dtype=torch.int32)

THINKER_MESSAGES = {
    "open": {"kind": Kind.OPEN, "session": SESSION, "positions": POSITIONS},
    "open with names": {
        "kind": Kind.OPEN,
        "session": SESSION,
        "positions": POSITIONS,
        "prefixes": PrefixKeys(16, (bytes(range(32)), bytes(32))),
    },
    "rows": {"kind": Kind.DATA, "sequence": 4, "rows": ROWS, "text": "grüße 👋"},
    "text": {"kind": Kind.TEXT, "sequence": 5, "text": "\x00\n\"'\\ 漢字"},
    "heartbeat": {"kind": Kind.HEARTBEAT},
    "last": {"kind": Kind.TEXT, "sequence": 2**32 - 1, "last": True, "report": THINKER_REPORT},
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
    return message.to_tensors(HIDDEN, torch.bfloat16, SEAL)


def read_thinker(tensors):
    return ThinkerMessage.from_tensors(tensors, SEAL)


def read_talker(tensors):
    return TalkerMessage.from_tensors(tensors, SEAL)


def content(tensors):
    return bytes(SEAL.open(tensors["META"]))


@pytest.mark.parametrize("fields", THINKER_MESSAGES.values(), ids=THINKER_MESSAGES)
def test_a_thinker_message_is_read_back_as_it_was(fields):
    message = ThinkerMessage(key=KEY, **fields)
    assert_same(read_thinker(thinker_tensors(message)), sized(message, message.rows))


@pytest.mark.parametrize("fields", TALKER_MESSAGES.values(), ids=TALKER_MESSAGES)
def test_a_talker_message_is_read_back_as_it_was(fields):
    message = TalkerMessage(key=KEY, **fields)
    assert_same(read_talker(message.to_tensors(SEAL)), sized(message, message.codes))


def sized(message, tensor):
    return msgspec.structs.replace(message, size=0 if tensor is None else len(tensor))


@given(
    text=st.text(),
    slot=st.integers(0, 1023),
    generation=st.integers(1, 2**32 - 1),
    sequence=st.integers(0, 2**32 - 1),
    last=st.booleans(),
)
def test_any_text_and_numbers_are_read_back(text, slot, generation, sequence, last):
    key = SessionKey(slot, generation)
    message = TalkerMessage(key=key, kind=Kind.TEXT, sequence=sequence, text=text, last=last)
    assert_same(read_talker(message.to_tensors(SEAL)), message)


def test_absent_tensors_travel_without_rows_but_with_the_links_shape_and_dtype():
    tensors = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.HEARTBEAT))
    assert (tensors["ROWS"].shape, tensors["ROWS"].dtype) == ((0, HIDDEN), torch.bfloat16)
    assert tensors.keys() == {"ROWS", "META"}
    codes = TalkerMessage(key=KEY, kind=Kind.HEARTBEAT).to_tensors(SEAL)["CODES"]
    assert (codes.shape, codes.dtype) == ((0,), torch.int32)


def test_the_large_tensor_itself_travels():
    message = ThinkerMessage(key=KEY, kind=Kind.DATA, rows=ROWS)
    assert thinker_tensors(message)["ROWS"] is ROWS
    assert read_thinker(thinker_tensors(message)).rows is ROWS
    assert TalkerMessage(key=KEY, kind=Kind.DATA, codes=CODES).to_tensors(SEAL)["CODES"] is CODES


VERSION = bytes([PROTOCOL_VERSION])


def with_meta(**changes):
    """A message with other fields, which no caller could seal."""
    return changed(TalkerMessage(key=KEY, kind=Kind.DATA, sequence=1, codes=CODES).to_tensors(SEAL), changes)


def changed(tensors, changes):
    meta = msgspec.msgpack.decode(content(tensors)[1:])
    for path, value in changes.items():
        *above, last = path.split(".")
        inner = functools.reduce(operator.getitem, above, meta)
        inner[last] = value
        if value is None:
            del inner[last]
    return {**tensors, "META": SEAL.sign(VERSION + msgspec.msgpack.encode(meta))}


@pytest.mark.parametrize(("first", "found"), [(b"\x01", "1"), (b"\xff", "255"), (b"", "unknown")])
def test_another_protocol_version_is_refused(first, found):
    tensors = with_meta()
    meta = SEAL.sign(first and first + content(tensors)[1:])
    with pytest.raises(
        InternalError, match=f"message of protocol version {found}, this stage speaks {PROTOCOL_VERSION}"
    ):
        read_talker({**tensors, "META": meta})


@pytest.mark.parametrize(
    "changes",
    [{"key": None}, {"kind": "goodbye"}, {"sequence": "one"}, {"key": {"slot": 1}}, {"last": 1}, {"text": 1}],
)
def test_a_meta_of_another_shape_is_refused(changes):
    with pytest.raises(InternalError, match="META is not a message of this protocol"):
        read_talker(with_meta(**changes))


OUT_OF_RANGE = {
    "key.slot": [-1, CAPACITY, 10**12],
    "key.generation": [0, -1, 2**32],
    "number": [-1, 2**32],
    "sequence": [-1, 2**32],
    "size": [-1, 2**32],
    "placed": [-1, 2**32],
    "sent_ns": [-1],
    "session.request_id": ["x" * (MAX_NAME + 1), 1],
    "session.voice": ["x" * (MAX_NAME + 1)],
    "session.traceparent": ["x" * (MAX_NAME + 1)],
    "session.audio_format": ["mp3"],
    "session.want_audio": [1],
    "session.seed": [-1, 2**63],
    "session.priority": [-101, 101],
    "session.prompt_tokens": [0, -1, 2**32],
    "session.max_rows": [0, 2**32],
    "session.accepted_ns": [-1],
    "session.media_tokens": [{"audio": -1}, {"image": 2**32}],
    "session.talker.temperature": [-0.1, 2.1, float("nan"), float("inf")],
    "session.talker.top_p": [0.0, 1.1, float("nan")],
    "session.talker.top_k": [-1, 2**21],
    "session.talker.min_p": [-0.1, 1.1],
    "session.talker.repetition_penalty": [0.0, 11.0, float("nan")],
    "session.talker.max_tokens": [0, 131073],
    "session.talker.min_tokens": [-1, 131073],
    "session.talker.presence_penalty": [-2.1, 2.1],
    "session.talker.frequency_penalty": [-2.1, 2.1],
    "session.talker.seed": [-1],
    "session.token2wav.preset": ["", "x" * 65],
    "session.token2wav.solver": ["heun"],
    "session.token2wav.num_steps": [1, 65],
    "session.token2wav.guidance_scale": [-0.1, 10.1, float("nan")],
    "session.token2wav.mode": ["live"],
    "session.token2wav.max_lead_s": [0.5, 121.0],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in OUT_OF_RANGE.items() for value in values]
)
def test_a_field_out_of_its_range_is_refused_by_its_name(path, value):
    opening = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.OPEN, session=SESSION, positions=POSITIONS))
    assert read_thinker(opening).session == SESSION
    with pytest.raises(InternalError) as refused:
        read_thinker(changed(opening, {path: value}))
    assert f"$.{path}" in refused.value.message


REPORTS = {
    "report.finish_reason": ["gone"],
    "report.prompt_tokens": [-1],
    "report.reply_tokens": [2**32],
    "report.first_token_ns": [-1],
    "report.finished_ns": [-1],
    "report.stop_string": ["x" * (MAX_NAME + 1)],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REPORTS.items() for value in values])
def test_a_report_out_of_its_range_is_refused_by_its_name(path, value):
    last = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.TEXT, last=True, report=THINKER_REPORT))
    with pytest.raises(InternalError, match=re.escape(f"$.{path}")):
        read_thinker(changed(last, {path: value}))


@pytest.mark.parametrize("message", [{"kind": Kind.OPEN}, {"kind": Kind.TEXT, "session": SESSION}])
def test_an_open_has_a_session_and_nothing_else_has(message):
    with pytest.raises(InternalError, match="a session in a message of kind"):
        read_talker(TalkerMessage(key=KEY, **message).to_tensors(SEAL))


FOREIGN = {
    "no seal": lambda meta: meta[:-SEAL_BYTES],
    "a shorter one": lambda meta: meta[:-1],
    "one of another server": lambda meta: Seal(bytes(32), "talker").sign(meta[:-SEAL_BYTES]),
    "one of another stage": lambda meta: Seal(SECRET, "thinker").sign(meta[:-SEAL_BYTES]),
    "one of another message": lambda meta: meta[:-SEAL_BYTES] + SEAL.sign(b"x")[-SEAL_BYTES:],
    "a changed byte": lambda meta: meta[:9] + bytes([meta[9] ^ 1]) + meta[10:],
    "a byte more": lambda meta: meta[:-SEAL_BYTES] + b"x" + meta[-SEAL_BYTES:],
    "nothing": lambda meta: b"",
    "far too much": lambda meta: SEAL.sign(bytes(MAX_META_BYTES)),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_the_stage_before_has_not_sealed_is_not_read(name):
    tensors = TalkerMessage(key=KEY, kind=Kind.DATA, codes=CODES).to_tensors(SEAL)
    with pytest.raises(Unsealed, match="no seal of the stage before"):
        # Its codes are not even asked for.
        read_talker({"META": FOREIGN[name](tensors["META"])})


@pytest.mark.parametrize(
    "codes",
    [CODES[:2], torch.cat([CODES, CODES]), torch.empty(0, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)],
)
def test_another_number_of_codes_than_was_sealed_is_refused(codes):
    tensors = TalkerMessage(key=KEY, kind=Kind.DATA, codes=CODES).to_tensors(SEAL)
    with pytest.raises(InternalError, match="CODES: META tells of 3, found a tensor"):
        read_talker({**tensors, "CODES": codes})


@pytest.mark.parametrize("codes", [CODES.long(), CODES.float(), CODES[:, None]])
def test_codes_of_another_kind_are_refused(codes):
    tensors = TalkerMessage(key=KEY, kind=Kind.DATA, codes=CODES).to_tensors(SEAL)
    with pytest.raises(InternalError, match=re.escape("CODES: expected int32 [N], found")):
        read_talker({**tensors, "CODES": codes})


@pytest.mark.parametrize("rows", [torch.ones(2), torch.ones(2, 1, HIDDEN), torch.ones(2, HIDDEN, dtype=torch.int32)])
def test_rows_of_another_kind_are_refused(rows):
    tensors = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.DATA, rows=ROWS))
    with pytest.raises(InternalError, match=re.escape("ROWS: expected numbers [N, H], found")):
        read_thinker({**tensors, "ROWS": rows})


@pytest.mark.parametrize("meta", [b"", b"\x80", b"\x90", b"hello", b"\xff", b"\x81\xa3key"])
@pytest.mark.parametrize("kind", [ThinkerMessage, TalkerMessage])
def test_a_foreign_meta_is_refused(kind, meta):
    with pytest.raises(InternalError, match="META is not a message of this protocol"):
        kind.from_tensors({"META": SEAL.sign(VERSION + meta)}, SEAL)


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
        read_talker({**with_meta(), name: value})


def test_text_that_is_no_utf8_is_refused():
    meta = SEAL.sign(content(with_meta(text="abc")).replace(b"abc", b"ab\xff"))
    with pytest.raises(InternalError, match="META is not a message of this protocol: 'utf-8'"):
        read_talker({**with_meta(), "META": meta})


@pytest.mark.parametrize("positions", [b"1234567", b"x" * 32, "x" * 24, [1, 2, 3], 3])
def test_positions_that_are_not_three_rows_are_refused(positions):
    tensors = thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.OPEN, session=SESSION, positions=POSITIONS))
    with pytest.raises(InternalError, match="META is not a message of this protocol: positions are not three rows"):
        read_thinker(changed(tensors, {"positions": positions}))


@pytest.mark.parametrize("positions", [torch.empty(3, 0).long(), torch.arange(12).reshape(3, 4)[:, ::2], POSITIONS.T])
def test_positions_of_any_length_and_layout_are_read_back(positions):
    message = ThinkerMessage(key=KEY, kind=Kind.OPEN, session=SESSION, positions=positions)
    found = read_thinker(thinker_tensors(message)).positions
    assert torch.equal(found, positions)
    found.add_(1)


def test_a_message_carries_no_other_tensor_than_its_links():
    with pytest.raises(NotImplementedError):
        thinker_tensors(ThinkerMessage(key=KEY, kind=Kind.OPEN, positions=torch.zeros(3, 2)))


def test_rows_and_codes_are_taken_from_their_tensor_alone():
    meta = with_meta(codes=b"x" * 24)
    assert read_talker(meta).codes is CODES


def test_a_key_names_slot_and_generation():
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
