# SPDX-License-Identifier: Apache-2.0
"""Client of triton-omni: streamed text and speech from Qwen2.5-Omni on NVIDIA Triton.

`OmniClient` blocks, `AsyncOmniClient` awaits, `HttpClient` blocks and needs nothing but HTTP.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        # Only when it is asked for: importing it all takes half a second, and the command answers Ctrl-C before.
        return getattr(import_module(f"{__name__}.public"), name)

    def __dir__() -> list[str]:
        return __getattr__("__all__")
