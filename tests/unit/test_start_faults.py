# SPDX-License-Identifier: Apache-2.0
"""Faults at a start: one sentence names the fault and its object, before anything is started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from triton_omni.checkpoint.reading import INDEX_FILE, CheckpointError, check_file
from triton_omni.supervisor import start
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor, main
from triton_omni.supervisor.served_repository import served_repository
from triton_omni.supervisor.server_log import ServerLog
from triton_omni.supervisor.start import MPS_SHARE, check_caches, check_gpu_share, check_shared_memory
from triton_omni.vllm_hooks.shared.named_weights import load_named

ROOT = Path(__file__).parents[2]
TENSOR = "talker.model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint whose file of `TENSOR` a test may damage; the others are links."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in tiny_checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    shard = file_of(folder, TENSOR)
    shard.unlink()
    shard.write_bytes((tiny_checkpoint / shard.name).read_bytes())
    return folder


def file_of(checkpoint: Path, tensor: str) -> Path:
    return checkpoint / json.loads((checkpoint / INDEX_FILE).read_text())["weight_map"][tensor]


def refusal(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command's only line about a checkpoint."""
    assert main(["--model-repository", str(ROOT / "model_repository"), "--model", str(checkpoint)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_a_tensor_that_is_missing_is_named_with_its_file(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = file_of(checkpoint, TENSOR)
    with safe_open(shard, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name != TENSOR}  # noqa: SIM118
    save_file(kept, shard)
    assert refusal(checkpoint, capsys) == (
        f"error: {checkpoint} is no checkpoint that can be served: "
        f"{shard}: {TENSOR} is listed in {INDEX_FILE} but not in the file"
    )


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_file_that_is_cut_off_is_named_with_the_first_tensor_that_it_lacks(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    shard = file_of(checkpoint, TENSOR)
    whole = shard.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    end = len(whole) - 8 - int.from_bytes(whole[:8], "little") - cut
    first = min(
        (t["data_offsets"], name) for name, t in header.items() if "data_offsets" in t and t["data_offsets"][1] > end
    )
    shard.write_bytes(whole[:-cut])
    expected = (
        f"{shard}: has {len(whole) - cut} bytes, its header says {len(whole)}: it ends too early, within {first[1]}"
    )
    assert refusal(checkpoint, capsys).endswith(expected)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "lacks"),
        (b"short", "is no safetensors file, or is cut off within its header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is no safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "its header cannot be read"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "its header cannot be read"),
        ((2).to_bytes(8, "little") + b"{}more", "has 14 bytes, its header says 10: it ends too late"),
    ],
)
def test_a_file_that_holds_something_else_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], content: bytes, reason: str
) -> None:
    shard = file_of(checkpoint, TENSOR)
    shard.write_bytes(content)
    line = refusal(checkpoint, capsys)
    assert reason in line
    assert shard.name in line


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.safetensors: cannot be read: No such file or directory"):
        check_file(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("start (0) + length (64) exceeds dimension size (63).\nmore")]
)
def test_a_tensor_of_another_shape_is_named_where_vllm_tells_of_numbers_alone(
    checkpoint: Path, error: Exception
) -> None:
    def load(weights: Any) -> set[str]:
        for name, _ in weights:
            if name == TENSOR:
                raise error
        return set()

    weights = [("another", torch.zeros(1)), (TENSOR, torch.zeros(3, 5)), ("behind", torch.zeros(1))]
    with pytest.raises(CheckpointError) as caught:
        load_named(load, weights, checkpoint)
    begin = f"{file_of(checkpoint, TENSOR)}: {TENSOR} has shape [3, 5], which does not fit the network: "
    assert str(caught.value).startswith(begin)
    assert "\n" not in str(caught.value)


def test_an_error_before_the_first_tensor_stays_as_it_is(checkpoint: Path) -> None:
    def load(_weights: Any) -> set[str]:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        load_named(load, [], checkpoint)


def test_shared_memory_without_room_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _folder: SimpleNamespace(f_bavail=1024, f_frsize=4096))
    with pytest.raises(ServerError, match=r"/dev/shm has 4 MiB free, the stages need at least 32 .*--shm-size 1g"):
        check_shared_memory()


def test_a_machine_without_shared_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"nowhere, which the stages share, cannot be used \(No such file"):
        check_shared_memory(tmp_path / "nowhere")


def full(*_args: object, **_options: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("variable", start.CACHES)
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    with pytest.raises(ServerError) as caught:
        check_caches({variable: str(folder)})
    assert str(caught.value) == f"{variable}: {folder} cannot be written (Not a directory)"


def test_a_cache_without_rights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: object, **_options: object) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(ServerError, match=r"TRITON_CACHE_DIR: .* cannot be written \(Permission denied\)"):
        check_caches({"TRITON_CACHE_DIR": str(tmp_path)})


def test_a_cache_that_can_be_written_is_left_empty(tmp_path: Path) -> None:
    check_caches({"VLLM_CACHE_ROOT": str(tmp_path / "new" / "cache"), "TRITON_CACHE_DIR": ""})
    assert list((tmp_path / "new" / "cache").iterdir()) == []


LIMITED = """
import resource, sys
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.start import check_caches
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    check_caches({"VLLM_CACHE_ROOT": sys.argv[1]})
except ServerError as error:
    print(error)
"""


def test_a_file_system_that_takes_not_a_byte_more_is_noticed_by_writing(tmp_path: Path) -> None:
    """A full disk lets a file be made and refuses its contents."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"VLLM_CACHE_ROOT: {tmp_path} cannot be written (File too large)\n"


def test_a_full_disk_under_the_model_repository_is_told(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    monkeypatch.setenv("TMPDIR", "/somewhere")
    with (
        pytest.raises(ServerError, match=r"cannot be laid out in /somewhere \(No space left on device\); see TMPDIR"),
        served_repository(ROOT / "model_repository", tiny_checkpoint),
    ):
        pass


def test_a_full_disk_while_the_model_repository_is_written_is_told(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(ServerError, match=r"cannot be laid out in .*: No space left on device"),
        served_repository(ROOT / "model_repository", tiny_checkpoint),
    ):
        pass


def test_a_log_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match=r"the log .*/file/server\.log cannot be written \((Not a dir|File exists)"):
        ServerLog(tmp_path / "file" / "server.log").open()


def test_a_folder_of_the_log_that_is_not_there_is_told_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"/no/logs/server\.log cannot be written: its folder does not exist"):
        ServerLog(tmp_path / "no" / "logs" / "server.log").open()
    assert list(tmp_path.iterdir()) == []


TALKATIVE = "for number in range(20000): print(number, 'x' * 60)"


def test_a_full_disk_under_the_log_costs_lines_and_not_the_server(capfd: pytest.CaptureFixture[str]) -> None:
    """/dev/full refuses every byte. A server whose output nobody takes would stop at its next line."""
    log = ServerLog(Path("/dev/full"))
    with subprocess.Popen([sys.executable, "-c", TALKATIVE], stdout=subprocess.PIPE) as server:
        log.follow(server)
        assert server.wait(120) == 0
        log.close()
    told = "the log /dev/full cannot be written (No space left on device): lines are lost, the server goes on\n"
    assert capfd.readouterr().err == told
    assert log.reason().startswith("19999 ")


UNHEARD = f"""
import subprocess, sys
from triton_omni.supervisor.server_log import ServerLog
log = ServerLog(None)
with subprocess.Popen([sys.executable, "-c", {TALKATIVE!r}], stdout=subprocess.PIPE) as server:
    log.follow(server)
    print(server.wait(), flush=True)
    log.close()
print(log.reason().split()[0])
"""


def test_a_full_disk_under_standard_error_costs_lines_and_not_the_server() -> None:
    """Nobody can be told of it, as the report goes to standard error too."""
    with Path("/dev/full").open("w") as full_disk:
        done = subprocess.run(
            [sys.executable, "-c", UNHEARD], stdout=subprocess.PIPE, stderr=full_disk, text=True, check=True
        )
    assert done.stdout == "0\n19999\n"


@pytest.mark.parametrize("share", ["65", "30", "99.5", "0"])
def test_a_part_of_a_gpu_is_refused(share: str) -> None:
    with pytest.raises(ServerError, match=f"{MPS_SHARE} is {share}, .* unset it, or set it to 100"):
        check_gpu_share({MPS_SHARE: share})


@pytest.mark.parametrize("environment", [{}, {MPS_SHARE: ""}, {MPS_SHARE: "100"}])
def test_a_whole_gpu_is_accepted(environment: dict[str, str]) -> None:
    check_gpu_share(environment)


def test_the_server_is_not_started_on_a_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    monkeypatch.setenv(MPS_SHARE, "65")
    server = Supervisor(ServerConfig(tmp_path, model=str(tiny_checkpoint)))
    with pytest.raises(ServerError, match=MPS_SHARE):
        server.start()
