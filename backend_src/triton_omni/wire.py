# SPDX-License-Identifier: Apache-2.0
"""START HERE: the messages between stages, one frozen type a link, with shapes and dtypes on each field.

A message becomes two named tensors (`to_tensors`) that Triton's ensemble carries to the next stage, which reads them
back (`from_tensors`): rows or codes, which stay on their device, and META, all the rest as MessagePack behind one
byte with the protocol's version. Each tensor more would cost every message on both sides of Triton.
This module knows nothing of Triton; `serving/tensors.py` turns named tensors into Triton's.

A session on each link: `OPEN` once, then any number of `DATA` (rows or codes, perhaps text), `TEXT` and
`HEARTBEAT`, and one message with `last` set or one `ERROR`. Sequence numbers count every message but heartbeats.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from triton_omni.engine import Sampling, StreamOptions
from triton_omni.errors import ErrorCode, InternalError, OmniError, StageName, from_code
from triton_omni.ledger_layout import PROTOCOL_VERSION

Value = Tensor | bytes
AudioFormat = Literal["f32", "pcm16", "wav"]


class Kind(StrEnum):
    """What a message is for."""

    OPEN = "open"
    DATA = "data"
    TEXT = "text"
    HEARTBEAT = "heartbeat"
    ERROR = "error"


class SessionKey(msgspec.Struct, frozen=True):
    """Which session a message belongs to; minted by the thinker, checked by every stage against the ledger."""

    slot: int
    generation: int
    nonce: str
    """128 random bits in hexadecimal: a client that calls a stage directly cannot guess it."""

    @property
    def name(self) -> str:
        """Short name for engines and logs."""
        return f"s{self.slot}g{self.generation}"


class MediaTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens of a prompt stand for media; the marks around them are text."""

    audio: int = 0
    """Of sounds, those of videos that are heard included."""
    image: int = 0
    video: int = 0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What the later stages must know of a request; travels once, with `OPEN`."""

    request_id: str
    want_audio: bool
    audio_format: AudioFormat
    voice: str
    seed: int
    priority: int = 0
    """Who gets the next place in an engine's batch: the lowest, then the oldest."""
    talker: Sampling
    token2wav: StreamOptions = StreamOptions()
    prompt_tokens: int
    media_tokens: MediaTokens = MediaTokens()
    """Of the `prompt_tokens`."""
    max_rows: int
    """Upper bound of the rows of this session: prompt and longest reply."""
    accepted_ns: int
    """System-wide monotonic clock when the request was accepted, nanoseconds."""
    traceparent: str = ""
    """W3C's, of the thinker's part in the request; empty = nobody traces it."""


class ThinkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The thinker's part of the final `info`."""

    finish_reason: str
    stop_string: str | None = None
    """Which of the request's stop strings ended the reply."""
    prompt_tokens: int
    reply_tokens: int
    first_token_ns: int
    finished_ns: int


class TalkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The talker's part of the final `info`."""

    finish_reason: str
    codes: int
    first_code_ns: int
    finished_ns: int


class Failure(msgspec.Struct, frozen=True):
    """An error travelling in-band to token2wav, which alone answers the client once a session is open."""

    stage: StageName
    code: ErrorCode
    message: str
    retry_after_ms: int | None = None

    @classmethod
    def of(cls, error: OmniError, stage: StageName) -> Failure:
        """The failure that `error` means when `stage` raised it."""
        return cls(error.stage or stage, error.code, error.message, error.retry_after_ms)

    def to_error(self) -> OmniError:
        """The exception to answer with."""
        return from_code(self.code, self.message, stage=self.stage, retry_after_ms=self.retry_after_ms)


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the messages of both links have."""

    key: SessionKey
    kind: Kind
    sequence: int = 0
    text: str = ""
    session: Session | None = None
    last: bool = False
    """No further text, rows or codes; the reports are filled."""
    failure: Failure | None = None
    placed: int = 0
    """Rows or codes that go by the next stage's ring, all told; in what says that no more come."""
    sent_ns: int = 0
    """System-wide monotonic clock when the stage gave the message away, nanoseconds."""


@functools.cache
def _no_rows(hidden_size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, hidden_size, dtype=dtype)


_NO_CODES: Final = torch.empty(0, dtype=torch.int32)


class ThinkerMessage(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Thinker to talker."""

    rows: Tensor | None = None
    """[N, H], the links' dtype, on the thinker's device: the next N hidden rows of prompt and reply."""
    positions: Tensor | None = None
    """int64 [3, P + 2], CPU, with `OPEN`: M-RoPE positions of prompt, text_bos and first reply token."""
    report: ThinkerReport | None = None

    def to_tensors(self, hidden_size: int, dtype: torch.dtype) -> dict[str, Value]:
        """ROWS [N, H] and META; absent rows are a tensor of no rows, since none may be left out."""
        rows = self.rows if self.rows is not None else _no_rows(hidden_size, dtype)
        return {"ROWS": rows, "META": _pack(msgspec.structs.replace(self, rows=None))}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value]) -> ThinkerMessage:
        """Read a message back; its positions are its own memory.

        Raises:
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        message = _unpack(tensors, _THINKER_DECODER)
        return msgspec.structs.replace(message, rows=_filled(tensors, "ROWS"))


class TalkerMessage(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Talker to token2wav."""

    codes: Tensor | None = None
    """int32 [N] on the talker's device: the next N codec codes, 50 a second."""
    codes_done: bool = False
    """No further codes; text may still follow when the talker stops before the thinker."""
    thinker: ThinkerReport | None = None
    talker: TalkerReport | None = None

    def to_tensors(self) -> dict[str, Value]:
        """CODES [N] and META."""
        codes = self.codes if self.codes is not None else _NO_CODES
        return {"CODES": codes, "META": _pack(msgspec.structs.replace(self, codes=None))}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value]) -> TalkerMessage:
        """Read a message back.

        Raises:
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        message = _unpack(tensors, _TALKER_DECODER)
        return msgspec.structs.replace(message, codes=_filled(tensors, "CODES"))


def _encode_positions(value: Any) -> bytes:
    """int64 [3, P] as its bytes; the only tensor that META holds."""
    if not isinstance(value, Tensor) or value.dtype != torch.int64:
        raise NotImplementedError(f"META cannot hold {type(value).__name__}")
    return value.numpy().tobytes()


def _decode_positions(kind: type, value: Any) -> Tensor:
    if kind is not Tensor or not isinstance(value, bytes) or len(value) % _POSITION_BYTES:
        raise ValueError("positions are not three rows of 64-bit numbers")
    # A copy, since `frombuffer` shares memory, and bytes may not be written to.
    return torch.frombuffer(bytearray(value), dtype=torch.int64).view(3, -1) if value else torch.empty(3, 0).long()


_POSITION_BYTES: Final = 3 * 8
_VERSION_BYTE: Final = bytes([PROTOCOL_VERSION])
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_positions)
_THINKER_DECODER: Final = msgspec.msgpack.Decoder(ThinkerMessage, dec_hook=_decode_positions)
_TALKER_DECODER: Final = msgspec.msgpack.Decoder(TalkerMessage, dec_hook=_decode_positions)

MessageT = TypeVar("MessageT", ThinkerMessage, TalkerMessage)


def _pack(message: ThinkerMessage | TalkerMessage) -> bytes:
    return _VERSION_BYTE + _ENCODER.encode(message)


def _unpack(tensors: Mapping[str, Value], decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    meta = tensors.get("META")
    if not isinstance(meta, bytes):
        raise InternalError(f"META: expected bytes, found {type(meta).__name__}")
    if not meta.startswith(_VERSION_BYTE):
        found = meta[0] if meta else "unknown"
        raise InternalError(f"message of protocol version {found}, this stage speaks {PROTOCOL_VERSION}")
    try:
        return decoder.decode(memoryview(meta)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InternalError(f"META is not a message of this protocol: {error}") from error


def _filled(tensors: Mapping[str, Value], name: str) -> Tensor | None:
    value = tensors.get(name)
    if not isinstance(value, Tensor):
        raise InternalError(f"{name}: expected a tensor, found {type(value).__name__}")
    return value if len(value) else None
