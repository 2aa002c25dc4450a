# SPDX-License-Identifier: Apache-2.0
"""START HERE: the messages between stages, one frozen type a link, with shapes and dtypes on each field.

A message is two named tensors (`to_tensors`, `from_tensors`) that Triton's ensemble carries to the next stage. ROWS or
CODES stay on their device. META holds a byte of protocol version, MessagePack, and the sender's seal. Each tensor more
would cost every message on both sides of Triton. This module knows nothing of Triton; `stub/tensors.py` turns named
tensors into Triton's.

A session on each link: `OPEN` once, then any number of `DATA` (rows or codes, perhaps text), `TEXT` and
`HEARTBEAT`, and one message with `last` set or one `ERROR`. Sequence numbers count every message but heartbeats.

A client can call a stage by its name, and hand it any tensor. So a stage takes no META without the seal of the stage
before, and each only once; it checks every field against its range before it uses any.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from triton_omni.core.errors import ErrorCode, InternalError, OmniError, StageName, from_code
from triton_omni.core.settings import MAX_NAME
from triton_omni.session.engine import CallPiece, FinishReason, PrefixKeys, Sampling, StreamOptions
from triton_omni.session.ledger_table import CAPACITY, COUNT_MASK, PROTOCOL_VERSION

SEAL_BYTES: Final = 16
MAX_META_BYTES: Final = 16 << 20
"""Positions of a prompt of 131072 tokens are 3 MiB."""

Value = Tensor | bytes
Count = Annotated[int, Meta(ge=0, le=COUNT_MASK)]
Nanoseconds = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
AudioFormat = Literal["f32", "pcm16", "wav"]


class Kind(StrEnum):
    """Purpose of a message."""

    OPEN = "open"
    DATA = "data"
    TEXT = "text"
    HEARTBEAT = "heartbeat"
    ERROR = "error"


class SessionKey(msgspec.Struct, frozen=True):
    """Identifies the session of a message; the thinker mints it, every stage checks it against the ledger."""

    slot: Annotated[int, Meta(ge=0, lt=CAPACITY)]
    generation: Annotated[int, Meta(ge=1, le=COUNT_MASK)]

    @property
    def name(self) -> str:
        """Short name for engines and logs."""
        return f"s{self.slot}g{self.generation}"


class MediaTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Number of a prompt's tokens that stand for each kind of medium; the marks around them are text."""

    audio: Count = 0
    """Tokens of sound, including the sound of videos."""
    image: Count = 0
    video: Count = 0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a request for the later stages; travels once, with `OPEN`."""

    request_id: Name
    want_audio: bool
    audio_format: AudioFormat
    voice: Name
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Order of places in an engine's batch: the lowest first, then the oldest."""
    prefill_only: bool = False
    """True: prompts enter the caches of thinker and talker, and there is no reply."""
    talker: Sampling
    token2wav: StreamOptions = StreamOptions()
    prompt_tokens: Annotated[int, Meta(ge=1, le=COUNT_MASK)]
    media_tokens: MediaTokens = MediaTokens()
    """Media tokens among the `prompt_tokens`."""
    max_rows: Annotated[int, Meta(ge=1, le=COUNT_MASK)]
    """Upper bound of the rows of this session: prompt and longest reply."""
    accepted_ns: Nanoseconds
    """System-wide monotonic clock when the request was accepted, nanoseconds."""
    traceparent: Name = ""
    """W3C's, of the thinker's part in the request; empty = nobody traces it."""


class ThinkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The thinker's part of the final `info`."""

    finish_reason: FinishReason
    stop_string: Name | None = None
    """Stop string of the request that ended the reply."""
    prompt_tokens: Count
    cached_tokens: Count = 0
    """Prompt tokens that the prefix cache had."""
    reply_tokens: Count
    first_token_ns: Nanoseconds
    finished_ns: Nanoseconds


class TalkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The talker's part of the final `info`."""

    finish_reason: FinishReason
    codes: Count
    cached_tokens: Count = 0
    """Tokens of the prompt whose rows the talker had no need of."""
    first_code_ns: Nanoseconds
    finished_ns: Nanoseconds


class Failure(msgspec.Struct, frozen=True):
    """An error travelling in-band to token2wav, which alone answers the client once a session is open."""

    stage: StageName
    code: ErrorCode
    message: str
    retry_after_ms: Count | None = None

    @classmethod
    def of(cls, error: OmniError, stage: StageName) -> Failure:
        """The failure that `error` means when `stage` raised it."""
        return cls(error.stage or stage, error.code, error.message, error.retry_after_ms)

    def to_error(self) -> OmniError:
        """The exception to answer with."""
        return from_code(self.code, self.message, stage=self.stage, retry_after_ms=self.retry_after_ms)


class _Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields that the messages of both links share."""

    key: SessionKey
    kind: Kind
    number: Count = 0
    """Number of the message in its session and link, heartbeats included; it only grows."""
    sequence: Count = 0
    """The same without heartbeats, without a gap."""
    size: Count = 0
    """Rows or codes of the message."""
    text: str = ""
    calls: tuple[CallPiece, ...] = ()
    """Pieces of the reply's calls, after `text`."""
    session: Session | None = None
    last: bool = False
    """No further text, rows or codes; the reports are filled."""
    failure: Failure | None = None
    placed: Count = 0
    """Total number of items sent through the ring; set on the message that ends them."""
    sent_ns: Nanoseconds = 0
    """System-wide monotonic clock when the stage gave the message away, nanoseconds."""


class Seal:
    """Signs what one stage sends, so that the next stage can tell it from what a client sends.

    Keyed BLAKE2b: on messages of a usual size it takes a third of HMAC-SHA256's time, and it is as strong.

    Args:
        secret: of this server start.
        sender: the stage; a seal of another stage is none of its.
    """

    def __init__(self, secret: bytes, sender: StageName) -> None:
        # Copied for each message, which is faster than to take the key in anew.
        self._keyed = hashlib.blake2b(digest_size=SEAL_BYTES, key=secret, person=sender.encode())

    def sign(self, content: bytes) -> bytes:
        """The content with its seal."""
        return content + self._digest(content)

    def open(self, sealed: bytes) -> memoryview:
        """The content.

        Raises:
            Unsealed: the stage did not sign it.
        """
        content = memoryview(sealed)[:-SEAL_BYTES]
        if len(sealed) > MAX_META_BYTES or not hmac.compare_digest(self._digest(content), sealed[-SEAL_BYTES:]):
            raise Unsealed("META has no seal of the stage before: its sender is no stage of this server")
        return content

    def _digest(self, content: bytes | memoryview) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(content)
        return keyed.digest()


class Unsealed(InternalError):
    """A message that no stage of this server sent."""


class Unreadable(InternalError):
    """A sealed message whose tensor cannot be read; `key` names its session."""

    def __init__(self, key: SessionKey, message: str) -> None:
        super().__init__(message)
        self.key = key


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
    prefixes: PrefixKeys | None = None
    """With `OPEN`, of a prompt with a salt: rows wait until the talker has written `CACHED`, and begin there."""
    rows_done: bool = False
    """No further rows; calls, which have none, may still follow."""
    report: ThinkerReport | None = None

    def to_tensors(self, hidden_size: int, dtype: torch.dtype, seal: Seal) -> dict[str, Value]:
        """ROWS [N, H] and META; absent rows are a tensor of no rows, since none may be left out."""
        rows = self.rows if self.rows is not None else _no_rows(hidden_size, dtype)
        return {"ROWS": rows, "META": _pack(msgspec.structs.replace(self, rows=None, size=rows.shape[0]), seal)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value], seal: Seal) -> ThinkerMessage:
        """Read a message back; its positions are its own memory. META is read first, and nothing else without its seal.

        Raises:
            Unsealed: the stage before did not send it.
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        message = _unpack(tensors, _THINKER_DECODER, seal)
        rows = _filled(
            tensors, "ROWS", message, "numbers [N, H]", lambda rows: rows.dim() == 2 and rows.is_floating_point()
        )
        return msgspec.structs.replace(message, rows=rows)


class TalkerMessage(_Message, frozen=True, kw_only=True, omit_defaults=True):
    """Talker to token2wav."""

    codes: Tensor | None = None
    """int32 [N] on the talker's device: the next N codec codes, 50 a second."""
    codes_done: bool = False
    """No further codes; text may still follow when the talker stops before the thinker."""
    thinker: ThinkerReport | None = None
    talker: TalkerReport | None = None

    def to_tensors(self, seal: Seal) -> dict[str, Value]:
        """CODES [N] and META."""
        codes = self.codes if self.codes is not None else _NO_CODES
        return {"CODES": codes, "META": _pack(msgspec.structs.replace(self, codes=None, size=codes.shape[0]), seal)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Value], seal: Seal) -> TalkerMessage:
        """Read a message back; as of `ThinkerMessage`.

        Raises:
            Unsealed: the stage before did not send it.
            InternalError: another protocol version, or tensors that are not of this protocol.
        """
        message = _unpack(tensors, _TALKER_DECODER, seal)
        codes = _filled(
            tensors, "CODES", message, "int32 [N]", lambda codes: codes.dim() == 1 and codes.dtype == torch.int32
        )
        return msgspec.structs.replace(message, codes=codes)


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


def _pack(message: ThinkerMessage | TalkerMessage, seal: Seal) -> bytes:
    return seal.sign(_VERSION_BYTE + _ENCODER.encode(message))


def _unpack(tensors: Mapping[str, Value], decoder: msgspec.msgpack.Decoder[MessageT], seal: Seal) -> MessageT:
    meta = tensors.get("META")
    if not isinstance(meta, bytes):
        raise InternalError(f"META: expected bytes, found {type(meta).__name__}")
    content = seal.open(meta)
    if content[:1] != _VERSION_BYTE:
        found = content[0] if content else "unknown"
        raise InternalError(f"message of protocol version {found}, this stage speaks {PROTOCOL_VERSION}")
    try:
        message = decoder.decode(content[1:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InternalError(f"META is not a message of this protocol: {error}") from error
    if (message.kind == Kind.OPEN) != (message.session is not None):
        raise InternalError(f"META is not a message of this protocol: a session in a message of kind {message.kind}")
    return message


def _filled(
    tensors: Mapping[str, Value], name: str, message: _Message, expected: str, fits: Callable[[Tensor], bool]
) -> Tensor | None:
    try:
        value = tensors.get(name)
    except Exception as error:
        raise Unreadable(message.key, f"{name}: cannot be read ({error})") from error
    if not isinstance(value, Tensor):
        raise Unreadable(message.key, f"{name}: expected a tensor, found {type(value).__name__}")
    # A caller of the thinker can send its META on with another tensor; it is the caller's own session.
    if not value.dim() or len(value) != message.size:
        raise Unreadable(message.key, f"{name}: META tells of {message.size}, found a tensor {tuple(value.shape)}")
    if message.size and not fits(value):
        raise Unreadable(message.key, f"{name}: expected {expected}, found {value.dtype} {tuple(value.shape)}")
    return value if message.size else None
