# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the talker's tests: every test of `engine` runs step by step and scheduled ahead.

HF's codes and the engines are those of all modules of this folder, which one worker runs.
"""

from __future__ import annotations

import pytest

from reference.talker.rig import GREEDY, HfTalker, assert_nothing_held, make_engine
from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers


@pytest.fixture(scope="session")
def talker(hf):
    return HfTalker(hf.model)


@pytest.fixture(scope="session")
def voices(tiny_checkpoint):
    speakers = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint))
    return [speakers.get(name).text_bos_id for name in speakers.names]


@pytest.fixture(scope="session", params=[False, True], ids=["step by step", "scheduled ahead"])
def shared_engine(request, tiny_checkpoint):
    engine = make_engine(tiny_checkpoint, ahead=request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    left = list(shared_engine._open)
    for key in left:
        shared_engine.abort(key)
    assert left == []
    assert not shared_engine.has_work()
    assert_nothing_held(shared_engine)


@pytest.fixture(scope="session")
def cases(talker, voices):
    shapes = [(5, 1), (12, 3), (20, 30), (33, 9), (7, 60), (40, 2), (16, 12), (28, 20)]
    return [
        talker.case(seed, prompt, reply, voices[seed % 2], image=seed in (3, 7))
        for seed, (prompt, reply) in enumerate(shapes)
    ]


@pytest.fixture(scope="session")
def expected(talker, cases):
    return [talker.codes(case, GREEDY) for case in cases]
