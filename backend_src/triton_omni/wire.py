# SPDX-License-Identifier: Apache-2.0
"""START HERE: the messages between stages, one frozen type a link, with shapes and dtypes on each field.

A message becomes named tensors (`to_tensors`) that Triton's ensemble carries to the next stage, which reads them
back (`from_tensors`). Large tensors (rows, codes) stay on their device; all the rest is one JSON text, META.
This module knows nothing of Triton; `serving/tensors.py` turns named tensors into Triton's.

A session on each link: `OPEN` once, then any number of `DATA` (rows or codes, perhaps text), `TEXT` and
`HEARTBEAT`, and one message with `last` set or one `ERROR`. Sequence numbers count every message but heartbeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, TypeVar

import msgspec
import torch
from torch import Tensor

from triton_omni.engine import Sampling, StreamOptions
from triton_omni.errors import ErrorCode, InternalError, OmniError, StageName, from_code

PROTOCOL_VERSION = 1

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


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What the later stages must know of a request; travels once, with `OPEN`."""

    request_id: str
    want_audio: bool
    audio_format: AudioFormat
    voice: str
    seed: int
    talker: Sampling
    token2wav: StreamOptions = StreamOptions()
    prompt_tokens: int
    max_rows: int
    """Upper bound of the rows of this session: prompt and longest reply."""
    accepted_ns: int
    """System-wide monotonic clock when the request was accepted, nanoseconds."""


class ThinkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The thinker's part of the final `info`."""

    finish_reason: str
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


class ThinkerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Thinker to talker."""

    key: SessionKey
    kind: Kind
    sequence: int = 0
    text: str = ""
    rows: Tensor | None = None
    """[N, H], the links' dtype, on the thinker's device: the next N hidden rows of prompt and reply."""
    positions: Tensor | None = None
    """int64 [3, P + 2], CPU, with `OPEN`: M-RoPE positions of prompt, text_bos and first reply token."""
    session: Session | None = None
    last: bool = False
    """No further text or rows; `report` is filled."""
    report: ThinkerReport | None = None
    failure: Failure | None = None
    sent_ns: int = 0
    """System-wide monotonic clock when the stage gave the message away, nanoseconds."""

    def to_tensors(self, hidden_size: int, dtype: torch.dtype) -> dict[str, Value]:
        """ROWS [N, H], POSITIONS [3, P + 2], TEXT, META; absent tensors have no rows, since none may be left out."""
        rows = self.rows if self.rows is not None else torch.empty(0, hidden_size, dtype=dtype)
        positions = self.positions if self.positions is not None else torch.empty(3, 0, dtype=torch.int64)
        return {"ROWS": rows, "POSITIONS": positions, "TEXT": self.text.encode(), "META": _pack(self, _ThinkerMeta)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value]) -> ThinkerMessage:
        """Read a message back.

        Raises:
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        meta = _unpack(_bytes(tensors, "META"), _ThinkerMeta)
        rows, positions = _filled(tensors, "ROWS", 0), _filled(tensors, "POSITIONS", 1)
        return cls(rows=rows, positions=positions, text=_text(tensors), **_fields(meta))


class TalkerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Talker to token2wav."""

    key: SessionKey
    kind: Kind
    sequence: int = 0
    text: str = ""
    codes: Tensor | None = None
    """int32 [N] on the talker's device: the next N codec codes, 50 a second."""
    session: Session | None = None
    codes_done: bool = False
    """No further codes; text may still follow when the talker stops before the thinker."""
    last: bool = False
    """No further text or codes; the reports are filled."""
    thinker: ThinkerReport | None = None
    talker: TalkerReport | None = None
    failure: Failure | None = None
    sent_ns: int = 0
    """System-wide monotonic clock when the stage gave the message away, nanoseconds."""

    def to_tensors(self) -> dict[str, Value]:
        """CODES [N], TEXT, META."""
        codes = self.codes if self.codes is not None else torch.empty(0, dtype=torch.int32)
        return {"CODES": codes, "TEXT": self.text.encode(), "META": _pack(self, _TalkerMeta)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value]) -> TalkerMessage:
        """Read a message back.

        Raises:
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        meta = _unpack(_bytes(tensors, "META"), _TalkerMeta)
        return cls(codes=_filled(tensors, "CODES", 0), text=_text(tensors), **_fields(meta))


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Token2wav to the client: one response of the stream."""

    text: str = ""
    audio: Tensor | None = None
    """fp32 [S], CPU: mono samples in [-1, 1] at 24 kHz; only with `audio_format` f32."""
    audio_base64: str = ""
    info: str = ""
    """JSON, on the last response only."""

    def to_tensors(self) -> dict[str, Value]:
        """text_output, audio_output [S], audio_base64, info."""
        return {
            "text_output": self.text.encode(),
            "audio_output": self.audio if self.audio is not None else torch.empty(0),
            "audio_base64": self.audio_base64.encode(),
            "info": self.info.encode(),
        }


class _Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON part common to both links."""

    version: int
    key: SessionKey
    kind: Kind
    sequence: int = 0
    session: Session | None = None
    last: bool = False
    failure: Failure | None = None
    sent_ns: int = 0


class _ThinkerMeta(_Meta, frozen=True, kw_only=True, omit_defaults=True):
    report: ThinkerReport | None = None


class _TalkerMeta(_Meta, frozen=True, kw_only=True, omit_defaults=True):
    codes_done: bool = False
    thinker: ThinkerReport | None = None
    talker: TalkerReport | None = None


MetaT = TypeVar("MetaT", bound=_Meta)


def _pack(message: ThinkerMessage | TalkerMessage, meta: type[_Meta]) -> bytes:
    fields = {name: getattr(message, name) for name in meta.__struct_fields__ if name != "version"}
    return msgspec.json.encode(meta(version=PROTOCOL_VERSION, **fields))


def _unpack(text: bytes, meta: type[MetaT]) -> MetaT:
    try:
        found = msgspec.json.decode(text, type=meta)
    except msgspec.DecodeError as error:
        raise InternalError(f"META is not a message of this protocol: {error}") from error
    if found.version != PROTOCOL_VERSION:
        raise InternalError(f"message of protocol version {found.version}, this stage speaks {PROTOCOL_VERSION}")
    return found


def _fields(meta: _Meta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in meta.__struct_fields__ if name != "version"}


def _bytes(tensors: Mapping[str, Value], name: str) -> bytes:
    value = tensors.get(name)
    if not isinstance(value, bytes):
        raise InternalError(f"{name}: expected one byte string, found {type(value).__name__}")
    return value


def _text(tensors: Mapping[str, Value]) -> str:
    try:
        return _bytes(tensors, "TEXT").decode()
    except UnicodeDecodeError as error:
        raise InternalError(f"TEXT is not UTF-8: {error}") from error


def _filled(tensors: Mapping[str, Value], name: str, dim: int) -> Tensor | None:
    value = tensors.get(name)
    if not isinstance(value, Tensor):
        raise InternalError(f"{name}: expected a tensor, found {type(value).__name__}")
    return value if value.shape[dim] else None
