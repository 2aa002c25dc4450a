# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands: one-line refusals with the value and the allowed range, and lines on standard error."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from typing import NoReturn

USAGE = 2
"""Exit code of a wrong command line."""


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuse in one line, as all other refusals; `--help` lists the options."""
        self.exit(USAGE, f"error: {message}\n")


def seconds(text: str) -> float:
    """Seconds from 0 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    with contextlib.suppress(ValueError):
        if 0 <= (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text} is no number of seconds from 0 on")


def whole_number(text: str) -> int:
    """A whole number from 0 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    with contextlib.suppress(ValueError):
        if (found := int(text)) >= 0:
            return found
    raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 on")


def port(text: str) -> int:
    """A port; 0 is a free one.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not in 0..65535")
    return int(text)


def say(line: str) -> None:
    """Write a line to standard error, for whoever runs the command; at once, also where that is a file.

    A line that cannot be written, as on a full disk, is lost: the command goes on, for it may guard a server.
    """
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
