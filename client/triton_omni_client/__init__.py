# SPDX-License-Identifier: Apache-2.0
"""Client of triton-omni: streamed text and speech from Qwen2.5-Omni on NVIDIA Triton.

`OmniClient` blocks, `AsyncOmniClient` awaits, `HttpClient` asks once without a stream.
"""

from .aio import AsyncOmniClient, AsyncStream
from .audio import SAMPLE_RATE
from .client import OmniClient, Stream
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
from .http import HttpClient
from .messages import AudioDelta, Delta, Info, Media, Request, TextDelta
from .reply import Reply, Timings
from .retry import DEFAULT_RETRY, NO_RETRY, Retry

__all__ = [
    "DEFAULT_RETRY",
    "NO_RETRY",
    "SAMPLE_RATE",
    "AsyncOmniClient",
    "AsyncStream",
    "AudioDelta",
    "BadRequest",
    "Cancelled",
    "ConnectionFailed",
    "Delta",
    "HttpClient",
    "Info",
    "Internal",
    "Media",
    "OmniClient",
    "OmniClientError",
    "Overloaded",
    "Reply",
    "Request",
    "Retry",
    "Stream",
    "TextDelta",
    "Timeout",
    "Timings",
    "TooLarge",
]
