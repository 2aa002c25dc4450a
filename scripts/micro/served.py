# SPDX-License-Identifier: Apache-2.0
"""Whole replies by a server of its own, the same that `pipeline` has of the stages without Triton, and their hops."""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from compare.running import serving
from compare.variants import Variant

from triton_omni_client import Info, OmniClient, Reply, Request
from triton_omni_client.bench.hops import Hops, growth, read_stages

from .figures import OURS, READY, milliseconds
from .plan import Plan, repeated
from .replies import ONE_TOKEN, chat, chat_of, parameters, reply_figures


class NoAccountError(RuntimeError):
    """A reply came without the server's account of it, or the server's metrics without its hops."""


def served(plan: Plan, _at: torch.device) -> Iterator[Mapping[str, Any]]:
    """Start a server, without MPS as the stages of `pipeline` run, and time replies of it."""
    with (
        tempfile.TemporaryDirectory(prefix="micro-served-") as folder,
        serving(Variant("served"), Path(plan.model), Path(folder), mps=False) as server,
        OmniClient(server.grpc_url) as client,
    ):
        yield READY
        yield from replies_and_hops(client, server.metrics_url, plan)


def replies_and_hops(client: OmniClient, metrics_url: str, plan: Plan) -> Iterator[Mapping[str, Any]]:
    """Replies of fixed lengths over gRPC, one after another: times to first text, first audio and the end. Link
    latencies are the mean of a reply's messages.

    Raises:
        NoAccountError: the server does not tell the lengths, or no hops.
        OmniClientError: it refused or failed a request.
    """
    request = Request(messages=_chat_of(client, plan.prompt_tokens), **parameters(plan))
    replies: list[Reply] = []
    readings = [_hops(metrics_url)]

    def one() -> float:
        replies.append(client.stream(request).collect())
        readings.append(_hops(metrics_url))
        return replies[-1].timings.total

    whole = repeated(plan, one)
    account = _account(replies[-1])
    lengths = {
        "prompt_tokens": account.prompt_tokens,
        "reply_tokens": account.reply_tokens,
        "codes": account.codes,
    }
    timed = [reply.timings for reply in replies[-len(whole) :]]
    yield from reply_figures(
        OURS, [(times.first_text or 0.0, times.first_audio or 0.0, times.total) for times in timed], lengths
    )
    for (stage, until), means in _hop_means(readings[-len(whole) - 1 :]).items():
        yield milliseconds("hop", OURS, means, {"to": stage, "until": until})


def _chat_of(client: OmniClient, tokens: int) -> list[dict[str, str]]:
    async def count(text: str) -> int | None:
        return _account(client.stream(Request(messages=chat(text), **ONE_TOKEN)).collect()).prompt_tokens

    return chat_of(tokens, count)


def _account(reply: Reply) -> Info:
    if reply.info is None:
        raise NoAccountError("a reply ended without the server's account of it")
    return reply.info


def _hops(metrics_url: str) -> Hops:
    found = asyncio.run(read_stages(metrics_url))
    if not (found and found.hops):
        raise NoAccountError(f"{metrics_url} has no hops")
    return found.hops


def _hop_means(readings: list[Hops]) -> Mapping[tuple[str, str], list[float]]:
    """Seconds by stage and by what the hop ends with, of each reply between two readings."""
    means: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for before, after in pairwise(readings):
        for stage, ends in growth(before, after).items():
            for until, times in ends.items():
                means[stage, until].append(times.mean_s or 0.0)
    return means
