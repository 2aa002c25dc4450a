# SPDX-License-Identifier: Apache-2.0
"""The second stage: hidden rows in, codec codes out, the thinker's text passed through at once.

Its request for a session's `OPEN` message is the one sender of all it answers; every later message's request is
closed as soon as its rows were copied. It knows nothing of Triton or vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from triton_omni.engine import EngineStats, Sampling, TalkerEngine, TalkerOutput, TalkerPrompt
from triton_omni.errors import InternalError, OmniError, TooLarge
from triton_omni.ledger import SessionLedger
from triton_omni.loop import IDLE_POLL_S, StageLoop
from triton_omni.settings import TalkerSettings
from triton_omni.stage import SOON_S, Outbox, Outlet, Parcel, StageStats, as_omni_error, record_event
from triton_omni.wire import (
    Failure,
    Kind,
    Session,
    SessionKey,
    TalkerMessage,
    TalkerReport,
    ThinkerMessage,
    ThinkerReport,
    Value,
)

logger = logging.getLogger(__name__)


@dataclass
class _Open:
    """State of one session; touched by the loop's thread only."""

    key: SessionKey
    outlet: Outlet
    session: Session
    outbox: Outbox
    opened_ns: int
    expected: int = 1
    consumed: int = 0
    sequence: int = 1
    codes: int = 0
    first_code_ns: int = 0
    thinker: ThinkerReport | None = None
    report: TalkerReport | None = None


class TalkerStage:
    """Owns the talker's engine.

    Args:
        engine: stepped by this stage's loop alone.
        text_bos_id: the text id that begins a voice's speech, by voice name. Raises `BadRequest` if unknown.
    """

    def __init__(
        self,
        settings: TalkerSettings,
        engine: TalkerEngine,
        ledger: SessionLedger,
        *,
        device: torch.device,
        text_bos_id: Callable[[str], int],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._ledger = ledger
        self._device = device
        self._text_bos_id = text_bos_id
        self._open: dict[str, _Open] = {}
        self._loop = StageLoop("omni-talker", self)
        self._engine_stats = EngineStats(0, 0, 0, 0)
        self._broken: str | None = None

    # Called from any thread.

    def start(self) -> None:
        """Begin to serve."""
        self._loop.start()

    def submit(self, tensors: Mapping[str, Value], outlet: Outlet) -> None:
        """Take one message; its outlet is finished when it was copied, or at the session's end if it is `OPEN`.

        Raises:
            InternalError: it is no message of this protocol; the outlet is still open.
        """
        message = ThinkerMessage.from_tensors(tensors)
        if outlet.is_cancelled() and self._ledger.is_current(message.key):
            self._ledger.mark_cancelled(message.key)
        self._loop.post(functools.partial(self._receive, message, outlet))

    def close(self) -> None:
        """End every session with an error, then stop the engine."""
        self._loop.post(lambda: self._fail_all(InternalError("the server is shutting down", stage="talker")))
        if self._loop.stop():
            self._engine.close()

    def stats(self) -> StageStats:
        """Figures of the last poll."""
        engine = self._engine_stats
        held = sum(session.outbox.held for session in list(self._open.values()))
        return StageStats(
            len(self._open), engine.running, engine.waiting, engine.kv_blocks_used, engine.rows_used, held
        )

    @property
    def healthy(self) -> bool:
        """Whether the engine still runs."""
        return self._broken is None and self._loop.alive

    # On the loop's thread.

    def has_work(self) -> bool:
        """Whether the engine could advance now."""
        return self._broken is None and self._engine.has_work()

    def step(self) -> None:
        """One engine step over every session whose next row is there."""
        for output in self._engine.step():
            session = self._open.get(output.key)
            if session is not None:
                self._take(session, output)

    def poll(self) -> float:
        """Look after every session; see `loop.Driven`."""
        self._ledger.beat()
        if self._broken is None:
            self._engine_stats = self._engine.stats()
        return min((self._look_after(session) for session in list(self._open.values())), default=IDLE_POLL_S)

    def fail(self, error: Exception) -> None:
        """The engine raised: every session ends with an error, later ones fail when they open."""
        self._broken = f"the talker's engine failed: {type(error).__name__}"
        self._fail_all(InternalError(self._broken, stage="talker"))

    def _receive(self, message: ThinkerMessage, outlet: Outlet) -> None:
        session = self._open.get(message.key.name)
        if not self._ledger.is_current(message.key):
            outlet.finish()
        elif message.kind == Kind.OPEN and session is None and message.session is not None:
            self._begin(message, message.session, outlet)
        elif session is None or message.kind in (Kind.HEARTBEAT, Kind.OPEN):
            outlet.finish()
        else:
            try:
                self._consume(session, message, outlet)
            except Exception as error:  # noqa: BLE001 - one bad message must not end the stage
                outlet.finish()
                self._fail(session, as_omni_error(error, session.session.request_id))

    def _begin(self, message: ThinkerMessage, request: Session, outlet: Outlet) -> None:
        outbox = Outbox(self._settings.max_codes, self._settings.codes_per_message)
        session = _Open(message.key, outlet, request, outbox, time.monotonic_ns())
        self._open[message.key.name] = session
        # Relayed first: from here on token2wav holds the sender through which an error can reach the client.
        outlet.send(TalkerMessage(key=message.key, kind=Kind.OPEN, session=request).to_tensors())
        if self._broken is not None:
            self._fail(session, InternalError(self._broken, stage="talker"))
        elif request.want_audio:
            self._open_sequence(session, message)
        else:
            outbox.finish_tensors()

    def _open_sequence(self, session: _Open, message: ThinkerMessage) -> None:
        request = session.session
        try:
            self._engine.open(session.key.name, self._prompt(request, message), self._within_limits(request))
        except Exception as error:  # noqa: BLE001 - what the engine cannot take must not end the stage
            self._fail(session, as_omni_error(error, request.request_id))

    def _prompt(self, request: Session, message: ThinkerMessage) -> TalkerPrompt:
        if message.positions is None:
            raise InternalError("OPEN without positions")
        # A copy: the engine keeps them, and what came from Triton must be given back with its message.
        positions = message.positions.clone()
        return TalkerPrompt(request.prompt_tokens, positions, self._text_bos_id(request.voice), request.max_rows)

    def _within_limits(self, request: Session) -> Sampling:
        room = self._settings.engine.max_model_len - request.prompt_tokens - 2
        limit = min(request.talker.max_tokens, self._settings.max_codes, room)
        if limit < 1:
            raise TooLarge(
                f"a prompt of {request.prompt_tokens} tokens leaves the talker no room in its max_model_len of "
                f"{self._settings.engine.max_model_len}"
            )
        return dataclasses.replace(request.talker, max_tokens=limit)

    def _consume(self, session: _Open, message: ThinkerMessage, outlet: Outlet) -> None:
        if message.sequence != session.expected:
            outlet.finish()
            wrong = f"message {message.sequence} came where {session.expected} was due"
            self._fail(session, InternalError(wrong, stage="talker"))
            return
        session.expected += 1
        if message.failure is not None:
            outlet.finish()
            self._relay_failure(session, message.failure)
            return
        self._consume_rows(session, message, outlet)
        session.outbox.put_text(message.text)
        if message.last:
            self._finish_input(session, message)
        self._flush(session)

    def _consume_rows(self, session: _Open, message: ThinkerMessage, outlet: Outlet) -> None:
        if message.rows is None:
            outlet.finish()
            return
        session.consumed += 1
        if session.report is None and session.session.want_audio:
            self._engine.feed(session.key.name, message.rows)
        # The credit goes back once the copy is done and Triton may reuse the tensor's memory.
        credit = functools.partial(self._ledger.count_consumed, session.key, session.consumed)
        outlet.finish(record_event(self._device), credit)

    def _finish_input(self, session: _Open, message: ThinkerMessage) -> None:
        session.thinker = message.report
        session.outbox.finish_text()
        if session.report is None and session.session.want_audio:
            self._engine.end(session.key.name)

    def _take(self, session: _Open, output: TalkerOutput) -> None:
        if output.error is not None:
            self._fail(session, InternalError(output.error, stage="talker"))
            return
        if output.codes is not None and len(output.codes):
            session.codes += len(output.codes)
            session.first_code_ns = session.first_code_ns or time.monotonic_ns()
            session.outbox.put(output.codes, output.codes_ready)
        if output.finish_reason is not None:
            self._finish_codes(session, output.finish_reason)
        self._flush(session)

    def _finish_codes(self, session: _Open, reason: str) -> None:
        session.outbox.finish_tensors()
        accepted_ns = session.session.accepted_ns
        session.report = TalkerReport(
            finish_reason=reason,
            codes=session.codes,
            first_code_ns=session.first_code_ns - accepted_ns if session.first_code_ns else 0,
            finished_ns=time.monotonic_ns() - accepted_ns,
        )

    def _flush(self, session: _Open) -> None:
        while (parcel := session.outbox.take(self._ledger.consumed(session.key, "token2wav"))) is not None:
            session.outlet.send(_to_message(session, parcel).to_tensors(), parcel.ready)
            session.sequence += 1
            if parcel.last:
                self._close(session)

    def _look_after(self, session: _Open) -> float:
        key = session.key
        if not self._ledger.is_current(key) or self._ledger.cancelled(key) or self._ledger.failed(key):
            self._close(session)
            return IDLE_POLL_S
        self._flush(session)
        return SOON_S if session.outbox.waiting else IDLE_POLL_S

    def _fail(self, session: _Open, error: OmniError) -> None:
        logger.info("request %s: failed in the talker: %s", session.session.request_id, error.code)
        self._relay_failure(session, Failure.of(error, "talker"))
        self._ledger.mark_failed(session.key)

    def _relay_failure(self, session: _Open, failure: Failure) -> None:
        message = TalkerMessage(key=session.key, kind=Kind.ERROR, sequence=session.sequence, failure=failure)
        session.outlet.send(message.to_tensors())
        self._close(session)

    def _close(self, session: _Open) -> None:
        if self._open.pop(session.key.name, None) is None:
            return
        if self._broken is None:
            self._engine.abort(session.key.name)
        session.outlet.finish(then=functools.partial(self._ledger.mark_closed, session.key))

    def _fail_all(self, error: OmniError) -> None:
        for session in list(self._open.values()):
            self._fail(session, error)


def _to_message(session: _Open, parcel: Parcel) -> TalkerMessage:
    return TalkerMessage(
        key=session.key,
        kind=Kind.DATA if parcel.tensor is not None else Kind.TEXT,
        sequence=session.sequence,
        text=parcel.text,
        codes=parcel.tensor,
        codes_done=parcel.tensors_done,
        last=parcel.last,
        thinker=session.thinker if parcel.last else None,
        talker=session.report if parcel.last else None,
    )
