# SPDX-License-Identifier: Apache-2.0
"""Which detectors of turns there are here, and how a session's configuration makes one."""

from __future__ import annotations

from collections.abc import Callable

from triton_omni_gateway.errors import GatewayError, bad_request

from .config import Json, SemanticVad, ServerVad
from .silero import CURE, SileroVoice, is_installed
from .turns import TurnDetector


def default_detection() -> Json | None:
    """The turn detection of a session that says nothing: OpenAI's, where it is installed."""
    return {"type": "server_vad"} if is_installed() else None


def check_detection(asked: ServerVad | SemanticVad | None) -> None:
    """Refuse what is not installed.

    Raises:
        GatewayError: 400, with the cure.
    """
    if isinstance(asked, SemanticVad):
        raise _refused("'semantic_vad' is not served; use 'server_vad', or null and commit by yourself")
    if asked is not None and not is_installed():
        raise _refused(f"'{asked.type}' needs {CURE} at the gateway; use null and commit by yourself")


def _refused(why: str) -> GatewayError:
    param = "session.audio.input.turn_detection.type"
    return bad_request(f"Invalid value for '{param}': {why}.", param=param, code="turn_detection_unavailable")


def detector_of(asked: ServerVad | SemanticVad | None, _sound: Callable[[int], bytes]) -> TurnDetector | None:
    """A detector of turns; None = the client commits."""
    if not isinstance(asked, ServerVad):
        return None
    return TurnDetector(
        SileroVoice(),
        threshold=asked.threshold,
        padding_ms=asked.prefix_padding_ms,
        silence_ms=asked.silence_duration_ms,
    )
