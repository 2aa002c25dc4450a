# SPDX-License-Identifier: Apache-2.0
"""The last stage: codec codes in, waveform chunks out. It alone answers the client of an open session.

Text is passed through at once. An error of any stage becomes the client's error here, after every other request of the
ensemble has ended. An error response while one is open or on its way would leak the client's request for ever. It is
independent of Triton.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triton_omni.core.errors import InternalError, OmniError
from triton_omni.core.metrics import SECONDS, Histogram, Metric
from triton_omni.core.pcm import to_base64, to_pcm16, wav_header, whole_groups
from triton_omni.core.policy_settings import NS_PER_MS, Token2WavPolicy
from triton_omni.core.tracing import NO_TRACER, Tracer
from triton_omni.link.link_stage import LinkSession, LinkStage
from triton_omni.link.ring import Ring
from triton_omni.policy.claim import Claim
from triton_omni.session.answer import Answer
from triton_omni.session.engine import AudioOutput, WaveformEngine
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CLAIMED, CLOSED, FAILED, REACHED, WANTED
from triton_omni.session.loop import IDLE_POLL_S
from triton_omni.session.outcome import RequestOutcome
from triton_omni.session.stage import SOON_S, ResponseSender, refused_error
from triton_omni.session.wire import Kind, Session, SessionKey, TalkerMessage, Value
from triton_omni.token2wav.text_relay import TextRelay

UPSTREAM_STOP_S = 2.0
"""Seconds that an error waits for thinker and talker to send their finals."""
LONGEST_STEP_S = 30.0
"""The same in seconds while one of them is in an engine step: a session can end only between steps."""


@dataclass
class _Open(LinkSession):
    """State of one session; touched by the loop's thread only, but for `relay`."""

    relay: TextRelay = dataclasses.field(kw_only=True)
    samples: int = 0
    chunks: int = 0
    encoded_rest: bytes = b""
    """Bytes of `pcm16` and `wav` that wait for the next chunk; see `whole_groups`."""
    first_audio_ns: int = 0
    """Nanoseconds after the request was accepted; likewise `last_audio_ns`."""
    last_audio_ns: int = 0
    clamped_codes: int = 0
    audio_done: bool = False
    ending: TalkerMessage | None = None
    error: OmniError | None = None
    error_ns: int = 0
    upstream_busy_ns: int = 0
    """Monotonic time when an earlier stage was last seen in a long step, nanoseconds."""


class Token2WavStage(LinkStage[TalkerMessage, _Open]):
    """Owns the waveform engine and every client's answer.

    Args:
        engine: stepped by this stage's loop alone.
        sample_rate: of the waveform, in hertz.
        policy: the limit of claims.
        ring: shared ring through which codes arrive.
    """

    def __init__(
        self,
        engine: WaveformEngine,
        ledger: SessionLedger,
        *,
        device: torch.device,
        sample_rate: int,
        policy: Token2WavPolicy,
        tracer: Tracer = NO_TRACER,
        ring: Ring | None = None,
    ) -> None:
        super().__init__("token2wav", engine, ledger, device=device, tracer=tracer, ring=ring)
        self._engine = engine
        self._sample_rate = sample_rate
        self._claim = Claim(policy.claim_ms * NS_PER_MS)
        # By the whole key: a message with only a session's name must not end its relay.
        self._relays: dict[SessionKey, TextRelay] = {}
        self._samples = 0
        self._times = {
            name: Histogram(SECONDS)
            for name in (
                "omni_first_text_seconds",
                "omni_first_audio_seconds",
                "omni_chunk_gap_seconds",
                "omni_reply_seconds",
            )
        }

    def _look_around(self) -> None:
        """Claim the device if a stream waits for sound, before the step that launches it."""
        waiting = self._health.failure is None and self._engine.wants_claim
        self._ledger.set_word(CLAIMED, self._claim.until_ns(waiting, time.monotonic_ns()), "token2wav")

    def step(self) -> None:
        """Run one engine step; answer with its samples."""
        outputs = self._engine.step()
        if outputs:
            self._batches.observe(len(outputs))
        for output in outputs:
            session = self._open.get(output.key)
            if session is not None and session.error is None:
                self._take(session, output)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics, see `stage.Stage`."""
        yield from super().metrics()
        yield Metric("omni_audio_seconds_total", self._samples / self._sample_rate)
        for name, times in self._times.items():
            yield from times.metrics(name)

    def _parse(self, tensors: Mapping[str, Value]) -> TalkerMessage:
        return TalkerMessage.from_tensors(tensors, self._seal)

    def _relay(self, message: TalkerMessage, sender: ResponseSender) -> None:
        if message.kind == Kind.OPEN:
            self._relays.setdefault(message.key, TextRelay(sender, self._when_lost(message.key)))
        elif message.kind != Kind.HEARTBEAT and (relay := self._relays.get(message.key)) is not None:
            relay.forward(message)

    def _receive(self, message: TalkerMessage, sender: ResponseSender, arrived_ns: int) -> None:
        super()._receive(message, sender, arrived_ns)
        if message.kind == Kind.OPEN and message.key.name not in self._open:
            self._relays.pop(message.key, None)

    def _end_all(self) -> None:
        for session in list(self._open.values()):
            self._answer_held_error(session)

    def _begin(self, message: TalkerMessage, request: Session, sender: ResponseSender) -> _Open:
        self._ledger.write(message.key, REACHED)
        relay = self._relays.setdefault(message.key, TextRelay(sender, self._when_lost(message.key)))
        return _Open(message.key, sender, request, relay=relay, audio_done=not request.want_audio)

    def _open_sequence(self, session: _Open, message: TalkerMessage) -> None:
        del message
        request = session.session
        if request.want_audio:
            self._engine.open(session.key.name, request.voice, request.seed, request.token2wav)
            self._tell_wanted(session.key)

    def _tell_wanted(self, key: SessionKey) -> None:
        """Tell the talker how many codes make the next window due."""
        self._ledger.write(key, WANTED, self._engine.wanted(key.name))

    def _take_message(self, session: _Open, message: TalkerMessage, sender: ResponseSender) -> None:
        if message.failure is not None or session.error is not None:
            self._inbox.give_back(message.key, sender)
            if message.failure is not None:
                self._hold_error(session, message.failure.to_error())
            return
        self._take_codes(session, message, sender)
        if message.last:
            session.ending = message
        self._finish_if_done(session)

    def _take_codes(self, session: _Open, message: TalkerMessage, sender: ResponseSender) -> None:
        if message.codes is None:
            self._inbox.give_back(message.key, sender)
        else:
            self._engine.feed(session.key.name, message.codes)
            self._tell_wanted(session.key)
            self._inbox.give_back_consumed(session, message, message.codes, sender)
        if message.codes_done:
            self._await_placed(session, message.placed)

    def _take_placed(self, session: _Open, tensor: Tensor) -> None:
        if session.error is None:
            self._engine.feed(session.key.name, tensor)
            self._tell_wanted(session.key)

    def _end_input(self, session: _Open) -> None:
        if session.session.want_audio and not session.audio_done and session.error is None:
            self._engine.end(session.key.name)

    def _take(self, session: _Open, output: AudioOutput) -> None:
        if output.error is not None:
            self._fail(session, InternalError(output.error, stage="token2wav"))
            return
        if len(output.samples):
            lost = self._when_lost(session.key)
            # Sent first: a log record takes as long as the sending.
            session.sender.send(self._encode(session, output).to_tensors(), lost=lost)
            self._observe_chunk(session)
            session.samples += len(output.samples)
            self._samples += len(output.samples)
            session.chunks += 1
        elif output.final and (answer := self._encode(session, output)).audio_base64:
            session.sender.send(answer.to_tensors())
        session.clamped_codes = output.clamped_codes
        session.audio_done = output.final
        self._finish_if_done(session)

    def _observe_chunk(self, session: _Open) -> None:
        age_ns = self._age(session)
        if session.first_audio_ns:
            self._times["omni_chunk_gap_seconds"].observe((age_ns - session.last_audio_ns) / 1e9)
        else:
            session.first_audio_ns = age_ns
            self._times["omni_first_audio_seconds"].observe(age_ns / 1e9)
            self._log(session, "first_audio")
            session.span.event("first_audio")
        session.last_audio_ns = age_ns

    def _encode(self, session: _Open, output: AudioOutput) -> Answer:
        if session.session.audio_format == "f32":
            return Answer(audio=output.samples)
        header = wav_header(self._sample_rate) if session.session.audio_format == "wav" and not session.chunks else b""
        data = session.encoded_rest + header + to_pcm16(output.samples)
        if not output.final:
            data, session.encoded_rest = whole_groups(data)
        return Answer(audio_base64=to_base64(data))

    def _finish_if_done(self, session: _Open) -> None:
        if not session.audio_done or session.ending is None:
            return
        info = Answer(info=json.dumps(self._info(session, session.ending)))
        self._times["omni_reply_seconds"].observe(self._age(session) / 1e9)
        self._drop(session)
        # Before the last response is sent: its client may send the next request as soon as it has it.
        self._ledger.say_outcome(session.key, RequestOutcome())
        lost = functools.partial(self._loop.post, functools.partial(self._take_back, session))
        session.sender.conclude(info.to_tensors(), functools.partial(self._end_whole, session), lost)

    def _end_whole(self, session: _Open) -> None:
        """Log and close a session after all of its reply was sent; on the sending thread."""
        self._log_end(session, RequestOutcome())
        self._inbox.mark_closed(session.key)

    def _when_lost(self, key: SessionKey) -> Callable[[], object]:
        """Return the callback for a response of the session that cannot be sent."""
        return functools.partial(self._loop.post, functools.partial(self._end_refused, key))

    def _end_refused(self, key: SessionKey) -> None:
        if (session := self._open.get(key.name)) is not None:
            self._fail(session, refused_error("token2wav"))

    def _take_back(self, session: _Open) -> None:
        """Fail a session that was dropped as complete before all of its reply could be sent."""
        error = refused_error("token2wav")
        self._open[session.key.name] = session
        # The first text was counted when the session was dropped.
        session.relay.first_ns = 0
        # Before the other stages see the failure and its cause.
        self._ledger.say_outcome(session.key, RequestOutcome.of(error, "token2wav"))
        self._fail(session, error)

    def _info(self, session: _Open, ending: TalkerMessage) -> dict[str, Any]:
        thinker, talker, audio = ending.thinker, ending.talker, session.session.want_audio
        first_text_ns = session.relay.first_ns - session.session.accepted_ns if session.relay.first_ns else 0
        stages = {
            "thinker": {"first": thinker.first_token_ns, "done": thinker.finished_ns} if thinker else {},
            "talker": {"first": talker.first_code_ns, "done": talker.finished_ns} if talker else {},
            "token2wav": {"first": session.first_audio_ns, "done": self._age(session)},
        }
        return {
            "request_id": session.session.request_id,
            "finish_reason": {
                "thinker": thinker.finish_reason if thinker else None,
                "talker": talker.finish_reason if talker else None,
                "token2wav": "stop" if audio else None,
            },
            "stop_string": thinker.stop_string if thinker else None,
            "usage": {
                **_prompt_usage(session.session),
                "reply_tokens": thinker.reply_tokens if thinker else 0,
                "codes": talker.codes if talker else 0,
                "samples": session.samples,
                "clamped_codes": session.clamped_codes,
            },
            "sample_rate": self._sample_rate,
            "seed": session.session.seed,
            "time_to_first_text_ms": _milliseconds(first_text_ns),
            "time_to_first_audio_ms": _milliseconds(session.first_audio_ns),
            "stage_ms": {stage: {k: _milliseconds(v) for k, v in ns.items()} for stage, ns in stages.items()},
        }

    def _look_after(self, session: _Open) -> float:
        if session.error is not None:
            return self._try_answer_error(session)
        if not self._ledger.holds(session.key) or self._ledger.has(session.key, CANCELLED):
            self._drop(session)
            self._log_end(session, RequestOutcome("cancelled"))
            session.sender.finish(then=functools.partial(self._inbox.mark_closed, session.key))
        elif self._ledger.has(session.key, CLOSED, "thinker"):
            self._await_failure(session)
        return IDLE_POLL_S

    def _await_failure(self, session: _Open) -> None:
        """Wait for the error with which the thinker ended; it is on its way here or was lost."""
        session.orphaned_ns = session.orphaned_ns or time.monotonic_ns()
        if self._others_ended(session.key) or self._waited_enough(session, session.orphaned_ns):
            self._fail(session, InternalError("the stages before ended the session without an answer"))

    def _fail(self, session: _Open, error: OmniError) -> None:
        if session.error is not None:
            return
        error.stage = error.stage or "token2wav"
        self._ledger.write(session.key, FAILED)
        self._hold_error(session, error)

    def _hold_error(self, session: _Open, error: OmniError) -> None:
        if session.error is None:
            session.error, session.error_ns = error, time.monotonic_ns()
            session.relay.close()
            self._health.abort(session.key.name)

    def _try_answer_error(self, session: _Open) -> float:
        if self._others_ended(session.key) or self._waited_enough(session, session.error_ns):
            self._answer_held_error(session)
        return SOON_S

    def _waited_enough(self, session: _Open, since_ns: int) -> bool:
        now = time.monotonic_ns()
        if any(self._ledger.silent_for(stage) > UPSTREAM_STOP_S / 2 for stage in ("thinker", "talker")):
            session.upstream_busy_ns = now
        idle_since_ns = max(since_ns, session.upstream_busy_ns)
        return now - idle_since_ns > UPSTREAM_STOP_S * 1e9 or now - since_ns > LONGEST_STEP_S * 1e9

    def _others_ended(self, key: SessionKey) -> bool:
        """Return True if no stage holds a request of this session except its `OPEN` here."""
        to_talker = self._ledger.in_transit(key, "thinker", "talker")
        to_here = self._ledger.in_transit(key, "talker", "token2wav")
        return to_talker == 0 and to_here == 1

    def _answer_held_error(self, session: _Open) -> None:
        unexplained = InternalError("the session ended without an answer", stage="token2wav")
        self._answer_error(session, session.error or unexplained)

    def _answer_error(self, session: _Open, error: OmniError) -> None:
        self._drop(session)
        ending = RequestOutcome.of(error, "token2wav")
        self._ledger.say_outcome(session.key, ending)
        self._log_end(session, ending)
        session.sender.fail(error, functools.partial(self._inbox.mark_closed, session.key))

    def _log_end(self, session: _Open, ending: RequestOutcome) -> None:
        made_s = session.samples / self._sample_rate
        self._tell_end(session, ending.code, by=ending.by, audio_s=made_s, chunks=session.chunks)

    def _drop(self, session: _Open) -> None:
        held = self._open.pop(session.key.name, None)
        self._relays.pop(session.key, None)
        session.relay.close()
        if held is not None and session.relay.first_ns:
            waited_ns = session.relay.first_ns - session.session.accepted_ns
            self._times["omni_first_text_seconds"].observe(waited_ns / 1e9)
        self._health.abort(session.key.name)

    @staticmethod
    def _age(session: _Open) -> int:
        return time.monotonic_ns() - session.session.accepted_ns


def _prompt_usage(request: Session) -> dict[str, Any]:
    media = request.media_tokens
    details = {
        "text_tokens": request.prompt_tokens - media.audio - media.image - media.video,
        "audio_tokens": media.audio,
        "image_tokens": media.image,
        "video_tokens": media.video,
    }
    return {"prompt_tokens": request.prompt_tokens, "prompt_tokens_details": details}


def _milliseconds(nanoseconds: int) -> float | None:
    return round(nanoseconds / 1e6, 3) if nanoseconds else None
