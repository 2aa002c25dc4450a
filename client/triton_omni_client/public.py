# SPDX-License-Identifier: Apache-2.0
"""All that `triton_omni_client` has for its users."""

from .aio import AsyncOmniClient, AsyncStream
from .audio import SAMPLE_RATE
from .catalog import ServedModel
from .client import OmniClient, Stream
from .conversation import AsyncSpokenTurn, Conversation, SpokenTurn, Turn
from .errors import (
    BadRequest,
    Cancelled,
    ConnectionFailed,
    Internal,
    OmniClientError,
    Overloaded,
    Timeout,
    TooLarge,
)
from .heard import heard_text
from .http import HttpClient
from .listening import AsyncListening, Listening
from .media import load_media, media_kind
from .messages import AudioDelta, Delta, Info, Media, Request, TextDelta
from .player import NoSoundDevice, Player
from .reply import Reply, Timings
from .retry import DEFAULT_RETRY, NO_RETRY, Retry
from .sampling import MediaOptions, TalkerOptions, ThinkerOptions, Token2WavOptions
from .tool_calls import ToolCall, ToolCallDelta

__all__ = [
    "DEFAULT_RETRY",
    "NO_RETRY",
    "SAMPLE_RATE",
    "AsyncListening",
    "AsyncOmniClient",
    "AsyncSpokenTurn",
    "AsyncStream",
    "AudioDelta",
    "BadRequest",
    "Cancelled",
    "ConnectionFailed",
    "Conversation",
    "Delta",
    "HttpClient",
    "Info",
    "Internal",
    "Listening",
    "Media",
    "MediaOptions",
    "NoSoundDevice",
    "OmniClient",
    "OmniClientError",
    "Overloaded",
    "Player",
    "Reply",
    "Request",
    "Retry",
    "ServedModel",
    "SpokenTurn",
    "Stream",
    "TalkerOptions",
    "TextDelta",
    "ThinkerOptions",
    "Timeout",
    "Timings",
    "Token2WavOptions",
    "TooLarge",
    "ToolCall",
    "ToolCallDelta",
    "Turn",
    "heard_text",
    "load_media",
    "media_kind",
]
