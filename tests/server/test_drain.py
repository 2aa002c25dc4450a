# SPDX-License-Identifier: Apache-2.0
"""A server that is told to stop finishes what it has begun, takes nothing new, and says so; told twice, it stops."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from server.asking import BATCH_TOLERANCE
from server.probes import SLOW_THINKER
from server.serving import server_config, wait_for
from triton_omni_client import NO_RETRY, HttpClient, OmniClient, Overloaded, Reply, Request

STOP_S = 10.0
LATER_S = 1.2
"""After this a second signal is no echo of the first."""
WHOLE = Request(text="hello", seed=7, talker={"temperature": 0}, thinker={"min_tokens": 60, "max_tokens": 60})
ENDLESS = Request(text="hello", seed=SLOW_THINKER, thinker={"min_tokens": 250, "max_tokens": 250})
"""Ten seconds of text alone, and a slower thinker for all."""


@dataclass(frozen=True)
class Command:
    """The running server command, and clients of its server."""

    process: subprocess.Popen[str]
    client: OmniClient
    http: HttpClient
    url: str

    def is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=5).status == 200)
        except urllib.error.HTTPError:
            return False

    def generate_stream(self, request: Request) -> str:
        """The text of a reply over an HTTP stream that came to its end."""
        fields = {"text_input": request.text, "sampling_parameters": json.dumps(request.sampling_parameters())}
        url = f"{self.url}/v2/models/qwen2_5_omni/generate_stream"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode()), timeout=60) as answer:
            events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line]
        assert "error" not in events[-1]
        assert events[-1]["info"]
        return "".join(event["text_output"] for event in events)


@contextmanager
def command(folder: Path, checkpoint: Path) -> Iterator[Command]:
    config = server_config(folder, checkpoint)
    options = {"--model-repository": config.model_repository, "--model": checkpoint, "--log-file": config.log_path}
    ports = {"--http-port": 0, "--grpc-port": 0, "--metrics-port": 0, "--drain-timeout": 60}
    arguments = [str(part) for option in (options | ports).items() for part in option]
    process = subprocess.Popen(
        [sys.executable, "-m", "triton_omni.serving.supervisor", *arguments],
        env=os.environ | config.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        urls = dict(re.findall(r"(\w+)=(\S+)", process.stdout.readline()))
        url = f"http://{urls['http']}"
        with OmniClient(urls["grpc"], timeout=60, retry=NO_RETRY) as client:
            yield Command(process, client, HttpClient(url, timeout=60, retry=NO_RETRY), url)
        process.kill()


def test_replies_run_through_a_stop_to_their_end_and_new_requests_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with command(tmp_path, tiny_checkpoint) as server, ThreadPoolExecutor(4) as pool:
        before = server.client.stream(WHOLE).collect()
        endless = server.client.stream(ENDLESS)
        next(endless)
        streamed = pool.submit(server.client.stream(WHOLE).collect)
        by_http, unary = pool.submit(server.generate_stream, WHOLE), pool.submit(server.http.unary, WHOLE)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        wait_for(lambda: not server.is_ready(), lambda: "still ready", 2)
        for ask in (server.client.stream(WHOLE).collect, lambda: server.http.unary(WHOLE)):
            with pytest.raises(Overloaded, match="the server is shutting down") as refusal:
                ask()
            assert refusal.value.retry_after_ms
        assert not any(reply.done() for reply in (streamed, by_http, unary)), "the stop came too late for this test"
        for reply in (streamed.result(), unary.result()):
            assert_same(reply, before)
        assert by_http.result() == before.text
        assert time.monotonic() > told_at + LATER_S
        assert not server.is_ready()
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(Overloaded, match="the server is shutting down"):
            endless.collect()
        assert server.process.wait(STOP_S) == 128 + signal.SIGTERM
        assert "4 replies are under way and get 60 s at most, the whole stop 98 s" in server.process.stderr.read()


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.text == expected.text
    assert len(reply.audio) > 0
    np.testing.assert_allclose(reply.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)
