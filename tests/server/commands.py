# SPDX-License-Identifier: Apache-2.0
"""A server that is started as its operator does: by the supervisor's command, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from server.serving import NEVER_S, REPLY_S, server_config
from triton_omni_client import NO_RETRY, HttpClient, OmniClient, Request

DRAIN_S = 600


@dataclass(frozen=True)
class Command:
    """The running server command, and clients of its server."""

    process: subprocess.Popen[str]
    client: OmniClient
    http: HttpClient
    url: str

    def is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=NEVER_S).status == 200)
        except urllib.error.HTTPError:
            return False

    def generate_stream(self, request: Request) -> str:
        """The text of a reply over an HTTP stream that came to its end."""
        fields = {"text_input": request.text, "sampling_parameters": json.dumps(request.sampling_parameters())}
        url = f"{self.url}/v2/models/qwen2_5_omni/generate_stream"
        asked = urllib.request.Request(url, json.dumps(fields).encode())
        with urllib.request.urlopen(asked, timeout=REPLY_S) as answer:
            events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line]
        assert "error" not in events[-1]
        assert events[-1]["info"]
        return "".join(event["text_output"] for event in events)


@contextmanager
def command(folder: Path, checkpoint: Path, ports: Mapping[str, int] | None = None) -> Iterator[Command]:
    """The command, once its server is ready.

    Args:
        folder: gets all that it writes.
        checkpoint: the tiny one.
        ports: of `http`, `grpc` and `metrics`; free ones by default.
    """
    config = server_config(folder, checkpoint)
    options = {"--model-repository": config.model_repository, "--model": checkpoint, "--log-file": config.log_path}
    chosen = {f"--{service}-port": (ports or {}).get(service, 0) for service in ("http", "grpc", "metrics")}
    arguments = [str(part) for option in (options | chosen | {"--drain-timeout": DRAIN_S}).items() for part in option]
    process = subprocess.Popen(
        [sys.executable, "-m", "triton_omni.supervisor.serve", *arguments],
        env=os.environ | config.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        urls = dict(re.findall(r"(\w+)=(\S+)", process.stdout.readline()))
        url = f"http://{urls['http']}"
        with OmniClient(urls["grpc"], timeout=REPLY_S, retry=NO_RETRY) as client:
            yield Command(process, client, HttpClient(url, timeout=REPLY_S, retry=NO_RETRY), url)
        process.kill()
