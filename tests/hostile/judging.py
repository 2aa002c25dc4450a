# SPDX-License-Identifier: Apache-2.0
"""Every hostile input must give a result, or a refusal that names the field, soon and in little memory.

Time is the processor's, so that other work on the machine changes nothing. Memory is what the process had resident at
most, C libraries included (Linux).
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from triton_omni.core.errors import BadRequest, OmniError, TooLarge

MAX_MESSAGE = 3000
"""32 keys of a path, each of 80 characters at most, and what is said of the last."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Bounds:
    """Limits of one input's cost."""

    seconds: float
    mebibytes: float


def judge(call: Callable[[], ResultT], bounds: Bounds, *, named: str, secret: str = "") -> ResultT | OmniError:
    """The result of `call`, or how it was refused.

    Args:
        call: takes the input.
        bounds: of this call.
        named: regular expression of how a refusal must begin.
        secret: must not be in a refusal, where it is not empty.
    """
    result, seconds, mebibytes = measured(call)
    assert seconds < bounds.seconds, f"took {seconds:.2f} s: {result!r:.300}"
    assert mebibytes < bounds.mebibytes, f"took {mebibytes:.0f} MiB: {result!r:.300}"
    if isinstance(result, OmniError):
        check_refusal(result, named, secret)
    return result


def check_refusal(error: OmniError, named: str, secret: str = "") -> None:
    """A refusal names the field, in few printable characters, and tells nothing of us or of a medium."""
    message = error.message
    assert isinstance(error, BadRequest | TooLarge), f"{type(error).__name__}: {message}"
    assert re.match(named, message), message
    assert message.isprintable(), ascii(message)
    assert len(message) <= MAX_MESSAGE, message
    assert not re.search(r"0x[0-9a-f]{6}|Traceback|triton_omni|site-packages", message), message
    assert not secret or secret not in message, message


def measured(call: Callable[[], ResultT]) -> tuple[ResultT | OmniError, float, float]:
    """Return the result of `call`, its processor seconds, and its peak of additional memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    begin = time.process_time()
    result: ResultT | OmniError
    gc.disable()  # what it would look through is Hypothesis' memory of a hundred thousand cases
    try:
        result = call()
    except OmniError as error:
        result = error
    finally:
        gc.enable()
    return result, time.process_time() - begin, _resident("VmHWM") - before


def _resident(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024
