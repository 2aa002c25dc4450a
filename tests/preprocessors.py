# SPDX-License-Identifier: Apache-2.0
"""Preprocessors of the tiny checkpoint, each with an engine that a test made up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from triton_omni.checkpoint.config import OmniConfig, load_config
from triton_omni.checkpoint.speakers import Speakers, load_speakers
from triton_omni.core.settings import RequestLimits, ThinkerSettings
from triton_omni.request.media.decoders import Decoders
from triton_omni.thinker import preprocessing
from triton_omni.thinker.preprocessing import Preprocessor


@functools.cache
def facts_of(checkpoint: Path) -> tuple[Path, OmniConfig, Speakers]:
    config = load_config(checkpoint)
    return checkpoint, config, load_speakers(checkpoint, config)


@contextmanager
def preprocessors(checkpoint: Path, engine: Callable[[], Any]) -> Iterator[Callable[..., tuple[Preprocessor, Any]]]:
    """Makes preprocessors by settings, each with an engine.

    Preprocessors of equal limits share the processes that decode: their start takes longer than most tests.
    """
    with ExitStack() as open_ones:

        @functools.cache
        def decoders(limits: RequestLimits) -> Decoders:
            return open_ones.enter_context(closing(Decoders(limits)))

        def make(**settings: Any) -> tuple[Preprocessor, Any]:
            made = engine()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(preprocessing, "Decoders", decoders)
                return Preprocessor(*facts_of(checkpoint), ThinkerSettings(**settings), made), made

        yield make
