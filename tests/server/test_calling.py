# SPDX-License-Identifier: Apache-2.0
"""Each modality by each way to ask: the reply is the same text, speech and usage."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from gateway_fakes import run_gateway
from server.calling import (
    ALL_WAYS,
    COMMAND_LINE,
    GATEWAYS,
    MODALITIES,
    WAYS,
    Said,
    blocking_client,
    command_line,
)
from server.serving import Served

AT_ONCE = 4
SAME = 1e-5 + 1 / 32767
"""Largest difference by another batch, and by the 16 bits that the command line and the gateway write."""

Calls = dict[tuple[str, str], Future[Said]]


@pytest.fixture(scope="module")
def expected(shared_server: Served) -> dict[str, Said]:
    """One reply to each question; those to media like these are HF's, see `test_mixed_media.py`."""
    return {name: blocking_client(shared_server, asked) for name, asked in MODALITIES.items()}


@pytest.fixture(scope="module")
def calls(shared_server: Served) -> Calls:
    """All ways, several at a time; what fails, fails in its own test."""
    with run_gateway(shared_server.supervisor.grpc_url) as running, ThreadPoolExecutor(AT_ONCE) as pool:
        made = {
            (way, name): pool.submit(call, shared_server, asked)
            for way, call in WAYS.items()
            for name, asked in MODALITIES.items()
        }
        made |= {
            (way, name): pool.submit(call, running.base, asked)
            for way, call in GATEWAYS.items()
            for name, asked in MODALITIES.items()
        }
    return made | {
        (COMMAND_LINE, name): _now(lambda asked=asked: command_line(shared_server, asked))
        for name, asked in MODALITIES.items()
    }


def _now(call: Callable[[], Said]) -> Future[Said]:
    done: Future[Said] = Future()
    try:
        done.set_result(call())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is that one test's
        done.set_exception(error)
    return done


@pytest.mark.parametrize("modality", MODALITIES)
@pytest.mark.parametrize("way", ALL_WAYS)
def test_each_modality_by_each_way(calls: Calls, expected: dict[str, Said], way: str, modality: str) -> None:
    said, wanted = calls[way, modality].result(), expected[modality]
    assert said.text == wanted.text
    assert said.usage == wanted.usage
    np.testing.assert_allclose(said.audio, wanted.audio, rtol=0, atol=SAME)


def test_the_modalities_are_what_their_names_say(expected: dict[str, Said]) -> None:
    kinds = {
        name: {kind for kind, count in said.usage["prompt_tokens_details"].items() if count}
        for name, said in expected.items()
    }
    text = "text_tokens"
    assert kinds == {
        "text": {text},
        "image": {text, "image_tokens"},
        "sound": {text, "audio_tokens"},
        "video": {text, "video_tokens"},
        "film": {text, "video_tokens", "audio_tokens"},
        "mixed": {text, "image_tokens", "audio_tokens", "video_tokens"},
        "text-only": {text},
    }
    assert {name for name, said in expected.items() if not len(said.audio)} == {"text-only"}
    assert expected["text-only"].text == expected["text"].text
