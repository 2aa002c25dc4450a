# SPDX-License-Identifier: Apache-2.0
"""A talker's step costs the same at the end of a minute of speech as at its start."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import pytest
from rig import Spoken, make_engine

from triton_omni.session.engine import Sampling

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.reduce_op.*:FutureWarning")

MINUTE = 3000
"""Codes of 60 s of speech."""
TWO_SECONDS = 100
GROWTH_ALLOWED = 5.0
"""Largest growth of the thread's own time for a step, by medians of 100. An idle machine takes 4.6 ms in the first and
4.3 in the last twelfth of the codes, a busy one up to twice as much. Work over all codes takes twenty times as long
there."""
MINUTE_LONG = Sampling(repetition_penalty=1.05, max_tokens=MINUTE, min_tokens=MINUTE)


def watch_steps(engine):
    """The tokens of each step that is scheduled from now on, whichever way it is."""
    scheduler, shares = engine._core.scheduler, []
    schedule, further = scheduler.schedule, scheduler.schedule_further

    def note(step):
        if step is not None and step.num_scheduled_tokens:
            shares.append(sum(step.num_scheduled_tokens.values()))
        return step

    scheduler.schedule = lambda *arguments: note(schedule(*arguments))
    scheduler.schedule_further = lambda: note(further())
    return shares


def test_a_step_does_not_grow_with_the_reply(tiny_checkpoint, cases):
    engine = make_engine(tiny_checkpoint, ahead=True, max_codes=MINUTE, max_model_len=MINUTE + 100)
    case, shares, spoken, held, took = cases[2], watch_steps(engine), Spoken(), [], []
    engine.open("a", case.prompt, MINUTE_LONG)
    engine.feed("a", case.rows)
    engine.end("a")
    while engine.has_work():
        began = time.thread_time()
        spoken.step(engine)
        took.append(time.thread_time() - began)
        held.append(engine.stats())
    codes, finish = spoken.of("a")
    engine.close()
    assert (len(codes), finish) == (MINUTE, "length")
    # The prompt once, then a token a step: no earlier position is computed again.
    assert shares == [case.prompt_rows + 2, *[1] * (MINUTE - 1)]
    open_stats = held[:-1]
    assert {stats.rows_used for stats in open_stats} == {held[0].rows_used}
    given = [after.kv_blocks_used - before.kv_blocks_used for before, after in pairwise(open_stats)]
    assert set(given) == {0, 1}
    assert median(took[-TWO_SECONDS:]) < GROWTH_ALLOWED * median(took[TWO_SECONDS : 2 * TWO_SECONDS])
