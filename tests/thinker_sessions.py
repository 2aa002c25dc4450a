# SPDX-License-Identifier: Apache-2.0
"""Sessions as the thinker keeps them, and what it reads of them in the ledger, for when it rests or lets steps wait."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from triton_omni.link.send_queue import SendQueue
from triton_omni.session.engine import Sampling
from triton_omni.session.ledger_table import WANTED
from triton_omni.session.wire import Session, SessionKey
from triton_omni.thinker.open_session import OpenSession

PROMPT = 5


class FakeLedger:
    """Codes that token2wav wants of each session, by slot."""

    def __init__(self):
        self.shared, self.wants = True, {}

    def shares_device_with(self, stage):
        assert stage == "token2wav"
        return self.shared

    def read(self, key, field, stage):
        assert (field, stage) == (WANTED, "token2wav")
        return self.wants.get(key.slot)


def session(slot=0, rows=0, **request):
    """A session of which so many rows of the reply have left."""
    send_queue = SendQueue(512)
    send_queue.put(torch.zeros(PROMPT + rows, 2))
    send_queue.pop_batch(0)
    told = {"want_audio": True, "prompt_tokens": PROMPT, "max_rows": 100, **request}
    return OpenSession(
        SessionKey(slot, 1),
        SimpleNamespace(),
        "a",
        0,
        0,
        send_queue,
        session=Session(
            request_id="a",
            audio_format="f32",
            voice="Ethan",
            seed=1,
            talker=Sampling(),
            accepted_ns=0,
            **told,
        ),
    )
