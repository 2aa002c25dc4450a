# SPDX-License-Identifier: Apache-2.0
"""Helpers of the command line's tests."""

from __future__ import annotations


def unframed(text: str) -> str:
    """A text without white space and without typer's frame around usage errors, which breaks long words."""
    return "".join(text.replace("│", "").split())
