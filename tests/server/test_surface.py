# SPDX-License-Identifier: Apache-2.0
"""A server's endpoints besides those that ask the model: each by gRPC and by HTTP.

This server lets clients share memory; one as it is shipped does not, see `test_bounds.py`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from processes import family
from server.serving import DIRECT_CALL, REPLY_S, Served, wait_for
from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.model_control import HEADER
from triton_omni.thinker.direct_calls import UNHEARD_FOR_S
from triton_omni_client import Request
from triton_omni_client.protocol import to_grpc

DEADLINE_S = 500.0
"""Deadline of direct calls in seconds: even on a slow machine the thinker has refused them long before."""
LISTENS = "0A"
"""The state of a socket, in /proc/net."""
Stub = service_pb2_grpc.GRPCInferenceServiceStub

GUARDED_CALLS: dict[str, Callable[[Stub], Any]] = {
    "index": lambda stub: stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()),
    "load": lambda stub: stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="talker")),
    "unload": lambda stub: stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="talker")),
    "statistics": lambda stub: stub.ModelStatistics(service_pb2.ModelStatisticsRequest()),
    "trace": lambda stub: stub.TraceSetting(service_pb2.TraceSettingRequest()),
    "log": lambda stub: stub.LogSettings(service_pb2.LogSettingsRequest()),
}
GUARDED_PATHS = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/talker/load"),
    ("POST", "/v2/repository/models/talker/unload"),
    ("GET", "/v2/models/stats"),
    ("GET", "/v2/models/thinker/stats"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/models/thinker/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("POST", "/v2/cudasharedmemory/region/x/register"),
]


@pytest.mark.parametrize("name", GUARDED_CALLS)
def test_what_runs_the_server_wants_its_key_over_grpc(server: Served, name: str) -> None:
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel, pytest.raises(grpc.RpcError) as caught:
        GUARDED_CALLS[name](Stub(channel))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == f"This protocol is restricted, expecting header 'triton-grpc-protocol-{HEADER}'"


@pytest.mark.parametrize(("method", "path"), GUARDED_PATHS)
def test_what_runs_the_server_wants_its_key_over_http(server: Served, method: str, path: str) -> None:
    answer = httpx.request(method, f"http://{server.supervisor.http_url}{path}", content=b"{}" * (method == "POST"))
    assert (answer.status_code, answer.json()["error"]) == (403, f"This API is restricted, expecting header '{HEADER}'")


def test_an_operator_with_the_key_reads_and_changes_settings(server: Served, key: str) -> None:
    base, headers = f"http://{server.supervisor.http_url}/v2", {HEADER: key}
    assert (
        httpx.post(f"{base}/logging", json={"log_verbose_level": 1}, headers=headers).json()["log_verbose_level"] == 1
    )
    assert (
        httpx.post(f"{base}/logging", json={"log_verbose_level": 0}, headers=headers).json()["log_verbose_level"] == 0
    )
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        metadata = [(f"triton-grpc-protocol-{HEADER}", key)]
        found = Stub(channel).ModelStatistics(service_pb2.ModelStatisticsRequest(name="thinker"), metadata=metadata)
    assert [model.name for model in found.model_stats] == ["thinker"]


def test_trace_and_log_files_are_nobody_s_to_choose(server: Served, key: str) -> None:
    base, headers = f"http://{server.supervisor.http_url}/v2", {HEADER: key}
    for path, file in (("logging", {"log_file": "/tmp/x"}), ("trace/setting", {"trace_file": "/tmp/x"})):
        answer = httpx.post(f"{base}/{path}", json=file, headers=headers)
        assert answer.status_code >= 400
        assert "can not be updated through network protocol" in answer.json()["error"]


TURNED_AWAY = (
    "thinker is a stage of the model qwen2_5_omni and cannot be called directly: call qwen2_5_omni "
    "[omni:bad_request;stage=thinker]"
)


def test_a_client_that_calls_the_thinker_itself_is_turned_away_at_once(server: Served) -> None:
    unheard = server.log().count(DIRECT_CALL)
    assert TURNED_AWAY in called_by_grpc(server)
    assert TURNED_AWAY in called_by_http(server)
    assert server.log().count(DIRECT_CALL) == unheard, "for what it asked, and not for what the talker did not hear"
    assert not server.metrics("omni_sessions")['omni_sessions{stage="thinker"}']


def test_one_that_asks_it_for_what_the_ensemble_asks_is_turned_away_in_the_end(server: Served) -> None:
    begin = time.monotonic()
    assert TURNED_AWAY in called_by_grpc(server, "META", "ROWS")
    assert time.monotonic() - begin > UNHEARD_FOR_S
    wait_for(lambda: not server.metrics("omni_sessions")['omni_sessions{stage="thinker"}'], server.held)
    assert server.ask("after direct calls", "x", seed=1).info is not None


def called_by_grpc(server: Served, *outputs: str) -> str:
    """Return the thinker's answer to a request for these outputs, or for all."""
    message = to_grpc(Request(text="hello", seed=1, request_id="called by gRPC", timeout=DEADLINE_S), "thinker")
    for name in outputs:
        message.outputs.add(name=name)
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel:
        answers = [
            answer.error_message for answer in Stub(channel).ModelStreamInfer(iter([message]), timeout=DEADLINE_S)
        ]
    return "".join(answers)


def called_by_http(server: Served) -> str:
    url = f"http://{server.supervisor.http_url}/v2/models/thinker/generate_stream"
    return httpx.post(url, json={"text_input": "hello"}, timeout=REPLY_S).text


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_takes_no_inference_over_http(server: Served, stage: str) -> None:
    status, text = server.post(f"/v2/models/{stage}/infer", '{"inputs": []}')
    assert (status, json.loads(text)["error"]) == (
        501,
        "HTTP end point doesn't support models with decoupled transaction policy",
    )


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
@pytest.mark.parametrize(("stage", "tensor"), [("talker", {"ROWS": [0.5]}), ("token2wav", {"CODES": [1]})])
def test_a_later_stage_gives_nothing_over_http(server: Served, stage: str, tensor: dict[str, Any], call: str) -> None:
    """Over gRPC: see `test_contract.py`."""
    _, text = server.post(f"/v2/models/{stage}/{call}", json.dumps({"META": [1, 2], **tensor}))
    assert re.fullmatch(r'|\{"error":".+"\}', text), text


def test_a_stage_listens_at_no_port(server: Served) -> None:
    """Any local user could connect to it, as often as the stage can open files."""
    port = int(server.supervisor.http_url.rpartition(":")[2])
    listening = {pid: listening_ports(pid) for pid in family(server.supervisor.pid)}
    assert port in listening.pop(server.supervisor.pid)
    assert len(listening) >= len(STAGES)
    assert not any(listening.values()), listening


def listening_ports(pid: int) -> set[int]:
    """TCP ports at which a process listens."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(file.readlink().name.strip("socket:[]"))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in inodes}
