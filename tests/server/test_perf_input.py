# SPDX-License-Identifier: Apache-2.0
"""Input data for perf_analyzer, with media: what the file says, sent as perf_analyzer does, is the client's request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from typer.testing import CliRunner

from media_samples import media_files
from server.serving import Served
from triton_omni_client import cli
from triton_omni_client.bench.workload import Workload
from triton_omni_client.media import load_media
from triton_omni_client.messages import UNARY_MODEL

QUESTION = "what is this?"


@pytest.fixture
def media(tmp_path: Path) -> list[Path]:
    return media_files(tmp_path)


@pytest.fixture
def entry(tmp_path: Path, media: list[Path]) -> dict[str, Any]:
    """The only request of a file that the documented command line writes."""
    (tmp_path / "prompts.txt").write_text(QUESTION)
    picture, sound, film = map(str, media)
    options = ["--prompts", str(tmp_path / "prompts.txt"), "--requests", "1", "--max-tokens", "20", "--seed", "5"]
    shown = ["--image", picture, "--audio", sound, "--video", film]
    written = tmp_path / "in.json"
    result = CliRunner().invoke(cli.app, ["bench", "--write-perf-analyzer-input", str(written), *options, *shown])
    assert result.exit_code == 0, result.output
    (found,) = json.loads(written.read_text())["data"]
    return dict(found)


def inputs_of(entry: dict[str, Any], package: Any) -> list[Any]:
    """The tensors that perf_analyzer makes of an entry: of the given shape, or of one element."""
    made = []
    for name, value in entry.items():
        content, shape = (value["content"], value["shape"]) if isinstance(value, dict) else (value, [1])
        tensor = package.InferInput(name, shape, "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode() for text in content], dtype=np.object_).reshape(shape))
        made.append(tensor)
    return made


@pytest.mark.parametrize("package", [grpcclient, httpclient], ids=["gRPC", "HTTP"])
def test_media_of_the_file_get_the_reply_that_the_client_gets(
    server: Served, media: list[Path], entry: dict[str, Any], package: Any
) -> None:
    workload = Workload((QUESTION,), [load_media(path) for path in media], seed=5, thinker={"max_tokens": 20})
    expected = server.client.stream(workload.request(0)).collect()
    url = server.supervisor.grpc_url if package is grpcclient else server.supervisor.http_url
    client = package.InferenceServerClient(url)
    result = client.infer(UNARY_MODEL, inputs_of(entry, package))
    client.close()
    (text,), (info,) = result.as_numpy("text_output"), result.as_numpy("info")
    assert text.decode() == expected.text
    assert expected.info is not None
    assert json.loads(info)["usage"] == expected.info.raw["usage"]
    assert json.loads(info)["usage"]["prompt_tokens_details"]["video_tokens"] > 0
    np.testing.assert_allclose(result.as_numpy("audio_output"), expected.audio, rtol=0, atol=1e-5)
