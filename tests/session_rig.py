# SPDX-License-Identifier: Apache-2.0
"""Three real stages with their threads and a ledger in one process, engines and the ensemble replaced by doubles."""

import contextlib
import secrets
import threading
from dataclasses import dataclass

import torch

from fakes import HIDDEN, FakeEnsemble, FakePreprocessor, FakeTalkerEngine, FakeThinkerEngine, FakeWaveformEngine
from triton_omni.core.policy_settings import Token2WavPolicy
from triton_omni.core.settings import TalkerSettings, ThinkerSettings
from triton_omni.core.tracing import NO_TRACER
from triton_omni.link.ring import offer_ring
from triton_omni.request.parse import RawRequest
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.ledger_table import EPOCH, FIELDS
from triton_omni.talker.stage import TalkerStage
from triton_omni.thinker.stage import ThinkerStage
from triton_omni.token2wav.stage import Token2WavStage
from waiting import FOREVER_S, IN_TIME_S, wait_for

CPU = torch.device("cpu")
NO_TRACERS = (NO_TRACER,) * 3
DEADLINE_PASSED = "timeout: 0 s have passed [omni:timeout;stage=thinker]"
"""The client's error after a deadline that `pass_deadlines` has set."""
ROW_PLACES, CODE_PLACES = 4, 6
"""Few, so that they go round."""
BY_RING = False
"""True if rows and codes go by rings in tests that do not choose."""


@dataclass
class Pipeline:
    """Three stages in one process."""

    thinker: ThinkerStage
    talker: TalkerStage
    token2wav: Token2WavStage
    engines: tuple
    ledgers: tuple

    def ask(self, text="a prompt", transit_s=0.0, refuses=lambda to, tensors: False, sends_after_s=None, **raw):
        stages = (self.thinker, self.talker, self.token2wav)
        ensemble = FakeEnsemble(*stages, transit_s, refuses, sends_after_s=sends_after_s)
        ensemble.submit(RawRequest(text_input=text.encode(), request_id="r1", **raw))
        return ensemble

    def is_empty(self):
        stages = (self.thinker, self.talker, self.token2wav)
        return all(s.stats().sessions == 0 for s in stages) and not any(e.open_keys for e in self.engines)

    def wait_until_empty(self):
        wait_for(self.is_empty, "something was left behind")


@contextlib.contextmanager
def pipeline(
    *,
    preprocessor=None,
    thinker=None,
    talker=None,
    waveform=None,
    settings=None,
    talker_settings=None,
    tracers=NO_TRACERS,
    rings=None,
):
    name = f"triton-omni-test-{secrets.token_hex(6)}"
    ledgers = tuple(SessionLedger(name, stage, StageFacts(1)) for stage in ("thinker", "talker", "token2wav"))
    thinker, talker, waveform = (
        thinker or FakeThinkerEngine(),
        talker or FakeTalkerEngine(),
        waveform or FakeWaveformEngine(),
    )
    settings = settings or ThinkerSettings(max_sessions=8)
    slots, dtypes = 2 * settings.max_sessions, (torch.float32, torch.int32)
    shapes = ((slots, ROW_PLACES, HIDDEN), (slots, CODE_PLACES))
    offered = [None, None]
    if BY_RING if rings is None else rings:
        offered = [
            offer_ring(name, ledger.stage, ledger.word(EPOCH, ledger.stage), shape=shape, dtype=dtype, device=CPU)
            for ledger, shape, dtype in zip(ledgers[1:], shapes, dtypes, strict=True)
        ]
    stages = (
        ThinkerStage(
            settings,
            thinker,
            preprocessor or FakePreprocessor(),
            ledgers[0],
            device=CPU,
            hidden_size=HIDDEN,
            dtype=torch.float32,
            tracer=tracers[0],
        ),
        TalkerStage(
            talker_settings or TalkerSettings(),
            talker,
            ledgers[1],
            device=CPU,
            text_bos_id=lambda voice: 3,
            tracer=tracers[1],
            ring=offered[0],
        ),
        Token2WavStage(
            waveform,
            ledgers[2],
            device=CPU,
            sample_rate=24000,
            policy=Token2WavPolicy(),
            tracer=tracers[2],
            ring=offered[1],
        ),
    )
    for stage in stages:
        stage.start()
    try:
        yield Pipeline(*stages, (thinker, talker, waveform), ledgers)
    finally:
        for stage in stages:
            stage.close()
        for ledger in ledgers:
            ledger.close()


def finished(ensemble):
    assert ensemble.reply.done.wait(IN_TIME_S), "the request did not end"
    assert not ensemble.leaked, "an error was answered while another request of the ensemble was open or on its way"
    assert all(sender.finals == 1 for sender in ensemble.senders)
    return ensemble.reply


def stand_still(p, stage):
    """The stage's loop turns no more, until what is returned is set."""
    goes_on, stands = threading.Event(), threading.Event()
    getattr(p, stage)._loop.post(lambda: stands.set() or goes_on.wait(FOREVER_S))
    assert stands.wait(IN_TIME_S)
    return goes_on


def pass_deadlines(p):
    """The deadline of each session that is open was when it was accepted."""
    for session in list(p.thinker._open.values()):
        p.thinker._take_timeout(session, 0.0)


def let_stages_wait(patch, seconds=FOREVER_S):
    """Set how long a stage waits for another one that owes something; by default no slow stage is given up."""
    patch.setattr("triton_omni.thinker.open_session.FORGET_AFTER_S", seconds)
    patch.setattr("triton_omni.talker.stage.ORPHANED_S", seconds)
    patch.setattr("triton_omni.token2wav.stage.UPSTREAM_STOP_S", seconds)
    patch.setattr("triton_omni.token2wav.stage.LONGEST_STEP_S", FOREVER_S)


def record(ledger, key):
    """Every word of a session's record, by its field and model."""
    fields = [(field, model) for field in FIELDS if field.per_session for model in field.at]
    return {(field.name, model): ledger.word(field, model, key.slot) for field, model in fields}
