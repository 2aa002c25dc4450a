# SPDX-License-Identifier: Apache-2.0
"""Conversations with a server whose thinker and talker have prefix caches: scripts, turns, and what must be equal."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml

from server.asking import BATCH_TOLERANCE
from server.parity import Chat, Turn, assistant, image, sound, system, user, video
from server.serving import BACK_WITHIN_S, TINY, Served, Settings, wait_for
from triton_omni.core.errors import StageName
from triton_omni.session.engine import Sampling
from triton_omni.session.ledger_table import EPOCH, PID
from triton_omni.session.ledger_view import StageBoard
from triton_omni.session.server_folder import ledger_name
from triton_omni_client import Reply, Request

BLOCK = 16 if torch.cuda.is_available() else 32
"""Tokens of a block of the caches: vLLM chooses them by the attention that the device has."""
ROW_TOLERANCE = 2e-5
IDLE_AFTER_KILLS_S = 300.0
"""Triton takes about a second to forget each request that a stage had when it was killed."""
TURNS, AT_ONCE = 10, 8
TOKENS, CODES = 6, 12
"""Limits of each reply."""
THINKER = Sampling(max_tokens=TOKENS)
TALKER = Sampling(repetition_penalty=1.05, max_tokens=CODES)
"""HF's for such replies."""
SHORT: dict[str, Any] = {
    "seed": 5,
    "thinker": {"temperature": 0, "max_tokens": TOKENS},
    "talker": {"temperature": 0, "max_tokens": CODES},
    "token2wav": {"mode": "offline"},
}
CACHING: Settings = {
    **TINY,
    "thinker": {
        **TINY["thinker"],
        "prefix_caching": True,
        "engine": {**TINY["thinker"]["engine"], "max_num_seqs": AT_ONCE, "max_model_len": 544, "kv_cache_tokens": 3840},
    },
    "talker": {
        **TINY["talker"],
        "prefix_caching": True,
        "engine": {**TINY["talker"]["engine"], "max_num_seqs": AT_ONCE, "max_model_len": 576, "kv_cache_tokens": 4608},
        "ring": True,
    },
}
"""The caches hold eight conversations of ten turns. Rows of replies go by the ring, as on a GPU. Rows of prompts, which
hits keep back, go by messages in any case."""
FEW = {"thinker": 576, "talker": 800}
"""Tokens of caches for two or three sequences."""


def text_script(number: int) -> list[Turn]:
    """Return a user's texts in ten turns, different for each number."""
    return [user(f"{number}.{turn}?") for turn in range(TURNS)]


def mixed_script(number: int) -> list[Turn]:
    """The same with a photo in the first turn, a sound in the middle, and a video later."""
    script = text_script(number)
    script[0] = user(image(56 + 28 * number, 84), "what is this?")
    script[4] = user("and ", sound(0.8 + 0.1 * number))
    script[7] = user(video(0.3, width=64 + 16 * (number % 3)), "or this?")
    return script


SCRIPTS = {
    f"{kind} {number}": script(number)
    for number in range(AT_ONCE // 2)
    for kind, script in (("text", text_script), ("mixed", mixed_script))
}


@dataclass(frozen=True)
class PlayedTurn:
    """One turn of a conversation: all that was said, as asked, and the reply."""

    chat: Chat
    request: Request
    reply: Reply

    @property
    def voice(self) -> str:
        """Voice of the reply."""
        assert self.request.voice is not None
        return self.request.voice


def converse(server: Served, name: str, script: Sequence[Turn], salt: str | None) -> list[PlayedTurn]:
    """Say all of it, turn by turn, in voices that alternate; the replies are part of later turns."""
    turns, told = [system("Be brief.")], []
    for number, said in enumerate(script):
        turns.append(said)
        voice = ("Chelsie", "Ethan")[number % 2]
        chat = Chat(tuple(turns))
        request = chat.request(request_id=f"{name} {number}", voice=voice, cache_salt=salt, **SHORT)
        told.append(PlayedTurn(chat, request, server.client.stream(request).collect()))
        turns.append(assistant(told[-1].reply.text))
    return told


def assert_same(server: Served, plain: str, salted: str, replies: tuple[Reply, Reply]) -> int:
    """Both are the same reply; returns how many rows the second one's talker had no need of."""
    assert server.records.tokens(salted) == server.records.tokens(plain)
    assert server.records.codes(salted) == server.records.codes(plain)
    np.testing.assert_allclose(replies[1].audio, replies[0].audio, rtol=0, atol=BATCH_TOLERANCE)
    every, sent = server.records.rows(plain), server.records.rows(salted)
    held = len(every) - len(sent)
    np.testing.assert_allclose(sent, every[held:], rtol=0, atol=ROW_TOLERANCE)
    return held


def hits(server: Served, plain: Sequence[PlayedTurn], salted: Sequence[PlayedTurn]) -> list[int]:
    """Both conversations are the same; the rows of each turn that the second one's talker had no need of."""
    return [
        assert_same(server, one.request.request_id, other.request.request_id, (one.reply, other.reply))
        for one, other in zip(plain, salted, strict=True)
    ]


def leave_few_blocks(server: Served) -> None:
    """Give stages that start from now on caches of `FEW` tokens."""
    for stage, tokens in FEW.items():
        path = server.supervisor.config.model_repository / stage / "1" / "stage.yaml"
        settings = yaml.safe_load(path.read_text())
        settings["engine"]["kv_cache_tokens"] = tokens
        path.write_text(yaml.safe_dump(settings))


def kill(server: Served, stage: StageName) -> None:
    """Kill a stage's process, and wait until the server has it again."""
    board = StageBoard(ledger_name(server.supervisor.pid))
    epoch = board.word(EPOCH, stage)
    os.kill(board.word(PID, stage), signal.SIGKILL)
    wait_for(lambda: board.word(EPOCH, stage) == epoch + 1, server.log, BACK_WITHIN_S)
    wait_for(server.client.ready, server.log, BACK_WITHIN_S)
    board.close()
