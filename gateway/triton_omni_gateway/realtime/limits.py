# SPDX-License-Identifier: Apache-2.0
"""The bounds of realtime sessions."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RealtimeLimits:
    """Bounds of the sessions of a gateway; each is told where it refuses."""

    max_sessions: int = 64
    """Open at once; the next one is refused with 429."""
    session_seconds: float = 3600.0
    """After which a session is closed, as at OpenAI."""
    ping_seconds: float = 20.0
    """Between two pings, and in which a client has to answer one; one that does not is gone."""
    max_event_bytes: int = 16 * MIB
    """Length of one event; a longer one closes the session with code 1009 before more of it is read."""
    max_buffer_seconds: float = 300.0
    """Length of sound that is appended and not committed."""
    max_items: int = 1024
    """Items of the conversation; older ones make room, as where it is too long for the model."""
    max_conversation_bytes: int = 64 * MIB
    """Its texts, sounds and pictures, likewise."""
    max_side_responses: int = 4
    """Responses outside of the conversation that are made at once."""
    max_unsent_events: int = 64
    """Made and not taken by the client; further sound is not asked for until it takes some. At twice as many no event
    is read.
    """
    max_unsent_characters: int = MIB
    """The same, of their text; the last one may be as long as an item."""
