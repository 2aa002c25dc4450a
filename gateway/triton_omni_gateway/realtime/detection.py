# SPDX-License-Identifier: Apache-2.0
"""How a session's configuration makes a detector of turns, where what that needs is installed."""

from __future__ import annotations

from typing import Final

from triton_omni_gateway.errors import bad_request

from .config import Json, SemanticVad, ServerVad
from .silero import CURE, SileroVoice, is_installed
from .turns import TurnDetector

_LONGEST_PAUSE_MS: Final = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}
"""By eagerness: OpenAI's longest waits for a user whose sentence seems unfinished."""
_PAUSE_MS = 200
"""After which Smart Turn is asked."""
_THRESHOLD, _PADDING_MS = 0.5, 300
"""Values for `semantic_vad`, which has no keys for them: OpenAI's of `server_vad`."""
_PARAM = "session.audio.input.turn_detection"


def default_detection() -> Json | None:
    """The turn detection of a session that says nothing: OpenAI's, where it is installed."""
    return {"type": "server_vad"} if is_installed() else None


def check_detection(asked: ServerVad | SemanticVad | None, max_buffer_seconds: float) -> None:
    """Refuse what is not installed, and what leaves no room for speech in the input audio buffer.

    Raises:
        GatewayError: 400, with the cure.
    """
    if asked is not None and not is_installed():
        param = f"{_PARAM}.type"
        said = f"Invalid value for '{param}': '{asked.type}' needs {CURE} at the gateway; or use null, and commit"
        raise bad_request(f"{said} by input_audio_buffer.commit.", param=param, code="turn_detection_unavailable")
    longest = int(max_buffer_seconds * 1000) // 2
    if isinstance(asked, ServerVad) and asked.prefix_padding_ms > longest:
        param = f"{_PARAM}.prefix_padding_ms"
        said = f"Invalid value for '{param}': {asked.prefix_padding_ms} is over {longest}, half of what the input audio"
        raise bad_request(f"{said} buffer holds; the other half is for speech.", param=param, code="invalid_value")


def detector_of(asked: ServerVad | SemanticVad | None) -> TurnDetector | None:
    """A detector of turns; None = the client commits."""
    match asked:
        case ServerVad():
            return TurnDetector(
                SileroVoice(),
                threshold=asked.threshold,
                padding_ms=asked.prefix_padding_ms,
                silence_ms=asked.silence_duration_ms,
            )
        case SemanticVad():
            return TurnDetector(
                SileroVoice(),
                threshold=_THRESHOLD,
                padding_ms=_PADDING_MS,
                silence_ms=_LONGEST_PAUSE_MS[asked.eagerness],
                pause_ms=_PAUSE_MS,
            )
    return None
