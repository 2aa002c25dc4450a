# SPDX-License-Identifier: Apache-2.0
"""Test doubles: engines without models, and an ensemble without Triton that connects the three stages.

`FakeEnsemble` does what Triton's ensemble does: one downstream request an upstream response, in order; a cancel seen
only by requests made after it; no further downstream requests after an error. So tests of the session protocol have
real stages and threads and no server.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from triton_omni.core.errors import BadRequest, OmniError
from triton_omni.core.metrics import Metric
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import (
    AudioOutput,
    EngineStats,
    PrefixKeys,
    Sampling,
    StreamOptions,
    TalkerOutput,
    TalkerPrompt,
    ThinkerOutput,
    ThinkerPlaced,
)
from triton_omni.session.wire import SEAL_BYTES, Seal, Session, TalkerMessage, ThinkerMessage, Value
from triton_omni.thinker.preprocessed import Preprocessed

HIDDEN = 8
USUAL_TIMEOUT_S = 600.0
"""A session's deadline, where a test does not say: later than any test waits for its end."""


class _AnySeal(Seal):
    """Opens whatever any stage has sealed: a test looks on."""

    def __init__(self) -> None:
        super().__init__(bytes(32), "thinker")

    def open(self, sealed: bytes) -> memoryview:
        return memoryview(sealed)[:-SEAL_BYTES]


ANY_SEAL = _AnySeal()


def thinker_message(tensors: Mapping[str, Value]) -> ThinkerMessage:
    """Return the message that the thinker has sent."""
    return ThinkerMessage.from_tensors(tensors, ANY_SEAL)


def talker_message(tensors: Mapping[str, Value]) -> TalkerMessage:
    """Return the message that the talker has sent."""
    return TalkerMessage.from_tensors(tensors, ANY_SEAL)


@dataclass
class Reply:
    """A client's responses to one request."""

    responses: list[dict[str, Value]] = field(default_factory=list)
    error: OmniError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        return "".join(bytes(r["text_output"]).decode() for r in self.responses)

    @property
    def samples(self) -> torch.Tensor:
        return torch.cat([torch.empty(0), *(torch.as_tensor(r["audio_output"]) for r in self.responses)])

    @property
    def info(self) -> str:
        return bytes(self.responses[-1]["info"]).decode() if self.responses else ""


class Refused(Exception):
    """Triton does not take a response."""


class LinkResponseSender:
    """An response sender whose responses become requests of the next stage, as in the ensemble."""

    def __init__(self, ensemble: FakeEnsemble, deliver: Callable[[Mapping[str, Value]], None]) -> None:
        self._ensemble = ensemble
        self._run = ensemble.sending_thread(deliver.__name__)
        self._deliver = deliver
        self._cancelled_at_birth = ensemble.cancelled
        self._whole = True
        self.finals = 0
        ensemble.senders.append(self)

    def bind(self, slot):
        pass

    def send(self, tensors, ready=None, lost=None):
        del ready
        self._run(self._send, tensors, lost)

    def conclude(self, tensors, then, lost):
        self._run(self._conclude, tensors, then, lost)

    def finish(self, ready=None, then=None):
        del ready
        self._run(self._finish, then)

    def fail(self, error, then=None):
        self._run(self._fail, error, then)

    def if_cancelled(self, then):
        self._run(self._tell_cancel, then)

    def _send(self, tensors, lost):
        assert self.finals == 0, "a response after the final"
        try:
            self._deliver(tensors)
        except Refused:
            self._whole = False
            if lost is not None:
                lost()

    def _conclude(self, tensors, then, lost):
        if self._whole:
            self._send(tensors, None)
        if self._whole:
            self._finish(then)
        else:
            assert lost(), "nobody will end the request"

    def _finish(self, then):
        if self.finals:
            return
        self.finals += 1
        if then is not None:
            then()
        self._ensemble.check_done()

    def _fail(self, error, then):
        assert self.finals == 0, "an error after the final"
        self.finals += 1
        self._ensemble.fail(error, self)
        if then is not None:
            then()
        self._ensemble.check_done()

    def _tell_cancel(self, then):
        if self._cancelled_at_birth and not self.finals:
            then()


class FakeEnsemble:
    """One client request on its way through the three stages; each link delivers on a thread of its own.

    `transit_s` is how long a message is on its way. Triton refuses responses to the stage, or "client", named by
    `refuses`. `sends_after_s` is how long after the call each stage's sending thread sends; None = in the call.
    """

    def __init__(
        self,
        thinker,
        talker,
        token2wav,
        transit_s: float = 0.0,
        refuses: Callable[[str, Mapping[str, Value]], bool] = lambda to, tensors: False,
        *,
        sends_after_s: float | None = None,
    ) -> None:
        self._refuses = refuses
        self._sends_after_s = sends_after_s
        self._sending: dict[str, ThreadPoolExecutor] = {}
        self._transit_s = transit_s
        self._thinker, self._talker, self._token2wav = thinker, talker, token2wav
        self._links = {stage: ThreadPoolExecutor(1) for stage in (talker, token2wav)}
        self._lock = threading.Lock()
        self._on_the_way = 0
        self.cancelled = False
        self.senders: list[LinkResponseSender] = []
        self.leaked = False
        self.to_talker: list[Mapping[str, Value]] = []
        self.to_token2wav: list[Mapping[str, Value]] = []
        self.reply = Reply()

    def submit(self, raw: RawRequest) -> Reply:
        self._thinker.submit(raw, LinkResponseSender(self, self.forward_to_talker))
        return self.reply

    def sending_thread(self, name: str) -> Callable[..., object]:
        """Runs what it is called with: here, or later and in order on the thread of this name."""
        if self._sends_after_s is None:
            return lambda job, *given: job(*given)
        thread = self._sending.setdefault(name, ThreadPoolExecutor(1))

        def run_later(job, *given):
            time.sleep(self._sends_after_s)
            job(*given)

        return functools.partial(thread.submit, run_later)

    def fail(self, error: OmniError, sender: LinkResponseSender) -> None:
        # Triton leaks the request when any other request of it is open, or on its way, at an error response.
        with self._lock:
            others = [other for other in self.senders if other is not sender and not other.finals]
            self.leaked = self.leaked or bool(self._on_the_way or others)
        self.reply.error = error

    def check_done(self) -> None:
        with self._lock:
            if not self._on_the_way and all(sender.finals for sender in self.senders):
                self.reply.done.set()

    def forward_to_talker(self, tensors) -> None:
        self._accept("talker", tensors)
        self.to_talker.append(tensors)
        self._forward(self._talker, tensors, self._forward_to_token2wav)

    def _forward_to_token2wav(self, tensors) -> None:
        self._accept("token2wav", tensors)
        self.to_token2wav.append(tensors)
        self._forward(self._token2wav, tensors, self._answer)

    def _answer(self, tensors) -> None:
        self._accept("client", tensors)
        self.reply.responses.append(tensors)

    def _accept(self, to, tensors) -> None:
        if self._refuses(to, tensors):
            raise Refused

    def _forward(self, stage, tensors, deliver) -> None:
        with self._lock:
            self._on_the_way += 1
        self._links[stage].submit(self._deliver, stage, tensors, deliver)

    def _deliver(self, stage, tensors, deliver) -> None:
        time.sleep(self._transit_s)
        if self.reply.error is None:
            sender = LinkResponseSender(self, deliver)
            with self._lock:
                self._on_the_way -= 1
            stage.submit(tensors, sender)
        else:
            with self._lock:
                self._on_the_way -= 1
        self.check_done()


class FakePreprocessor:
    """A prompt is `text_input`; `bad` is refused; P is its length. A slow prompt, or one in `later`, is for the pool.
    There one that is `held` keeps each request until `goes_on` is set, or it is closed.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        *,
        later: bool = False,
        held: bool = False,
        prefixes: PrefixKeys | None = None,
        **session,
    ) -> None:
        self._delay_s, self._later, self._prefixes = delay_s, later or held, prefixes
        self._session = session
        self.goes_on = threading.Event()
        if not held:
            self.goes_on.set()

    def preprocess_at_once(
        self, raw: RawRequest, accepted_ns: int, take_timeout: Callable[[float], None]
    ) -> Preprocessed | None:
        return None if self._later or self._delay_s else self.preprocess(raw, accepted_ns, take_timeout)

    def preprocess(
        self,
        raw: RawRequest,
        accepted_ns: int,
        take_timeout: Callable[[float], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Preprocessed:
        take_timeout(self._session.get("timeout_s", USUAL_TIMEOUT_S))
        time.sleep(self._delay_s)
        self.goes_on.wait()
        text = (raw.text_input or b"").decode()
        if text == "bad":
            raise BadRequest("text_input: is bad")
        ids = tuple(range(len(text)))
        session = Session(
            **{
                "request_id": raw.request_id,
                "want_audio": True,
                "audio_format": "f32",
                "voice": "Chelsie",
                "seed": 7,
                "talker": Sampling(),
                "prompt_tokens": len(ids),
                "max_rows": len(ids) + 64,
                "accepted_ns": accepted_ns,
                **self._session.get("session", {}),
            }
        )
        placed = ThinkerPlaced(ids, torch.arange(len(ids)).expand(3, -1), text, self._prefixes)
        return Preprocessed(placed, Sampling(), session)

    def metrics(self) -> tuple[Metric, ...]:
        return ()

    def close(self) -> None:
        self.goes_on.set()


class _FakeEngine:
    """Base of the fake engines: open keys, injected faults, a pause a step."""

    def __init__(self) -> None:
        self.open_keys: dict[str, object] = {}
        self.broken: Exception | None = None
        self.fail_key: str | None = None
        self.priorities: list[int] = []
        self.step_s = 0.0
        self.paused = False
        self.confined = False
        self.steps_under_way = 0
        self.steps = 0
        self.closed = False

    def _begin_step(self) -> None:
        self.steps += 1
        time.sleep(self.step_s)
        if self.broken is not None:
            raise self.broken

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def confine(self, confined: bool) -> None:
        self.confined = confined

    def abort(self, key: str) -> None:
        self.open_keys.pop(key, None)

    def stats(self) -> EngineStats:
        return EngineStats(len(self.open_keys), 0, len(self.open_keys), 0)

    def close(self) -> None:
        self.closed = True


@dataclass
class _Writing:
    prompt: int
    want_rows: bool
    position: int = 0


class FakeThinkerEngine(_FakeEngine):
    """Writes `length` tokens "w0 w1 ...", one a step; the row of position p is filled with p."""

    def __init__(self, length: int = 10, stop_string: str | None = None) -> None:
        super().__init__()
        self.length = length
        self.stop_string = stop_string
        self.cached_tokens = 0

    def add_sequence(self, key, placed, sampling, *, want_rows, priority=0):
        del sampling
        self.priorities.append(priority)
        self.open_keys[key] = _Writing(len(placed.prompt_token_ids), want_rows)

    def has_work(self):
        return bool(self.open_keys) and not self.paused

    def step(self):
        self._begin_step()
        return [self._advance(key, state) for key, state in list(self.open_keys.items())]

    def _advance(self, key, state):
        if self.fail_key is not None:
            del self.open_keys[key]
            return ThinkerOutput(key, error="non-finite row", is_refused=self.fail_key == "refused")
        token, state.position = state.position, state.position + 1
        finished = state.position == self.length
        if finished:
            del self.open_keys[key]
        start, count = (0, state.prompt) if token == 0 else (state.prompt + token - 1, 1)
        rows = torch.arange(start, start + count).float()[:, None].expand(-1, HIDDEN) if state.want_rows else None
        text, ending = f"w{token} ", {"finish_reason": "stop", "stop_string": self.stop_string} if finished else {}
        return ThinkerOutput(key, text, (token,), self.cached_tokens, rows, start, **ending)


@dataclass
class _Speaking:
    prompt: TalkerPrompt
    rows: list[float] = field(default_factory=list)
    ended: bool = False
    spoken: int = 0


class FakeTalkerEngine(_FakeEngine):
    """One code a reply row, its value; finishes when rows have ended and all are spoken."""

    def __init__(self, stop_after: int | None = None, cached: int = 0) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.cached = cached
        self.fed: list[float] = []
        """Values of all rows fed, whatever the sequence."""

    def open(self, key, prompt, sampling, *, priority=0):
        del sampling
        self.priorities.append(priority)
        held = self.cached if prompt.prefixes is not None else 0
        self.open_keys[key] = _Speaking(prompt, [0.0] * held)
        return held

    def feed(self, key, rows):
        state = self.open_keys.get(key)
        if state is not None:
            state.rows.extend(rows[:, 0].tolist())
            self.fed.extend(rows[:, 0].tolist())

    def settle(self):
        """Its copies are made at once."""

    def end(self, key):
        if key in self.open_keys:
            self.open_keys[key].ended = True

    def waits(self, key):
        state = self.open_keys.get(key)
        return state is None or not (state.ended or len(state.rows) - state.prompt.prompt_rows > state.spoken)

    def has_work(self):
        return not self.paused and not all(map(self.waits, self.open_keys))

    def step(self):
        self._begin_step()
        return [output for key in list(self.open_keys) if (output := self._advance(key)) is not None]

    def _advance(self, key):
        state = self.open_keys[key]
        if self.fail_key is not None:
            del self.open_keys[key]
            return TalkerOutput(key, error="non-finite logits")
        reply = state.rows[state.prompt.prompt_rows :]
        if state.spoken < len(reply) and state.spoken != self.stop_after:
            state.spoken += 1
            return TalkerOutput(key, torch.tensor([int(reply[state.spoken - 1])], dtype=torch.int32))
        if state.ended or state.spoken == self.stop_after:
            del self.open_keys[key]
            return TalkerOutput(key, finish_reason="stop")
        return None


@dataclass
class _Sounding:
    options: StreamOptions
    codes: list[float] = field(default_factory=list)
    received: int = 0
    ended: bool = False


class FakeWaveformEngine(_FakeEngine):
    """Two samples a code, both code / 1000; of use to it are `window` codes at a time, and a step takes `at_once`."""

    wants_claim = False
    has_windows = False
    window = 1
    at_once = sys.maxsize

    def open(self, key, voice, seed, options):
        del voice, seed
        self.open_keys[key] = _Sounding(options)

    def feed(self, key, codes):
        if key in self.open_keys:
            self.open_keys[key].codes.extend(codes.tolist())
            self.open_keys[key].received += len(codes)

    def wanted(self, key):
        state = self.open_keys.get(key)
        return (state.received // self.window + 1) * self.window if state else 0

    def settle(self):
        """Its copies are made at once."""

    def end(self, key):
        if key in self.open_keys:
            self.open_keys[key].ended = True

    def has_work(self):
        return any(s.codes or s.ended for s in self.open_keys.values())

    def step(self):
        self._begin_step()
        outputs = []
        for key, state in list(self.open_keys.items()):
            if self.fail_key is not None:
                del self.open_keys[key]
                outputs.append(AudioOutput(key, torch.empty(0), error="non-finite waveform"))
            elif state.codes or state.ended:
                samples = torch.tensor(state.codes[: self.at_once]).repeat_interleave(2) / 1000
                del state.codes[: self.at_once]
                final = state.ended and not state.codes
                outputs.append(AudioOutput(key, samples, final=final))
                if final:
                    del self.open_keys[key]
        return outputs
