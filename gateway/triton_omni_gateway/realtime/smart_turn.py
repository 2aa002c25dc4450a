# SPDX-License-Identifier: Apache-2.0
"""Smart Turn, a network that hears whether a sentence is finished, by Pipecat's package (the extra `realtime`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from triton_omni_client.listening import HEARD_RATE

if TYPE_CHECKING:
    from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3


class SmartTurn:
    """The network of one gateway, loaded when it is first asked; it answers one question after another."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._analyzer: LocalSmartTurnAnalyzerV3 | None = None

    async def is_over(self, pcm: bytes) -> bool:
        """True if the turn that is this sound, PCM16 at 16 kHz, seems to be finished; takes 30 ms in a thread."""
        async with self._one:
            if self._analyzer is None:
                self._analyzer = await asyncio.to_thread(_loaded)
            from pipecat.audio.turn.base_turn_analyzer import EndOfTurnState

            try:
                self._analyzer.append_audio(pcm, True)
                state, _ = await self._analyzer.analyze_end_of_turn()
            finally:
                self._analyzer.clear()  # type: ignore[no-untyped-call]
        return state == EndOfTurnState.COMPLETE


def _loaded() -> LocalSmartTurnAnalyzerV3:
    from loguru import logger

    logger.disable("pipecat")  # it would write lines of another form into the gateway's log
    from pipecat.audio.turn.smart_turn.local_smart_turn_v3 import LocalSmartTurnAnalyzerV3

    analyzer = LocalSmartTurnAnalyzerV3(sample_rate=HEARD_RATE)
    analyzer.set_sample_rate(HEARD_RATE)
    return analyzer
