# SPDX-License-Identifier: Apache-2.0
"""The benchmark's figures of the server's machine, and its message if it sees none."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from triton_omni_client.bench import resources, triton_metrics
from triton_omni_client.bench.nvml import OTHER, Nvml, NvmlError, stage_of
from triton_omni_client.bench.resources import Monitor, Usage, default_metrics_url, find_monitor, is_local
from waiting import IN_TIME_S

PAGE = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25
nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 1048576.000000
nv_inference_count{model="talker",version="1"} 12
omni_sessions{stage="talker"} 3
omni_link_bytes_total{stage="talker",tensor="rows",device="cpu"} 9
omni_waiting{stage="thinker"} 0
process_start 1
"""


class FakeNvml:
    """GPUs with two stages each, as the module `pynvml` shows them."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, unsupported: tuple[str, ...] = (), count: int = 1) -> None:
        self.unsupported, self.count = unsupported, count
        self.asked_since: list[int] = []
        self.shut_down = False

    def __getattr__(self, name: str) -> Any:
        if name in self.unsupported:
            return self._refuse
        return getattr(self, f"fake_{name}")

    def _refuse(self, *_: object) -> None:
        raise self.NVMLError("Not Supported")

    def fake_nvmlInit(self) -> None:  # noqa: N802
        pass

    def fake_nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down = True

    def fake_nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def fake_nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"device {index}"

    def fake_nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return f"device {uuid}"

    def fake_nvmlDeviceGetName(self, device: str) -> bytes:  # noqa: N802
        return {"device 0": b"NVIDIA H200"}.get(device, device.encode())

    def fake_nvmlDeviceGetMemoryInfo(self, _device: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=100 * 2**20)

    def fake_nvmlDeviceGetUtilizationRates(self, _device: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=80)

    def fake_nvmlDeviceGetComputeRunningProcesses(self, _device: str) -> list[Any]:  # noqa: N802
        sizes = {1: 60 * 2**20, 2: 30 * 2**20, 3: None}
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()]

    def fake_nvmlDeviceGetProcessUtilization(self, _device: str, since: int) -> list[Any]:  # noqa: N802
        self.asked_since.append(since)
        found = [(1, 1_000, 10), (1, 2_000, 50), (2, 1_500, 20)]
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=busy) for pid, at, busy in found]


def stage(pid: int) -> str:
    return {1: "talker", 2: "token2wav"}.get(pid, OTHER)


def test_metrics_of_stages_and_gpus_are_read() -> None:
    assert triton_metrics.read(PAGE) == {
        "gpu/GPU-1/utilization": 0.25,
        "gpu/GPU-1/memory_mib": 1.0,
        "stage/talker/sessions": 3.0,
        "stage/thinker/waiting": 0.0,
    }


def test_memory_and_utilisation_are_told_apart_by_stage() -> None:
    library = FakeNvml()
    with Nvml(library, stage) as nvml:
        assert nvml.gpus() == ["NVIDIA H200"]
        assert nvml.sample() == {
            "gpu/0/memory_mib": 100.0,
            "gpu/0/utilization": 0.8,
            "stage/talker/memory_mib": 60.0,
            "stage/token2wav/memory_mib": 30.0,
            "stage/other/memory_mib": 0.0,
            "stage/talker/utilization": 0.5,
            "stage/token2wav/utilization": 0.2,
        }
        nvml.sample()
    assert library.asked_since == [0, 2_000]
    assert library.shut_down


def test_figures_that_a_driver_does_not_give_are_left_out() -> None:
    unsupported = ("nvmlDeviceGetProcessUtilization", "nvmlDeviceGetUtilizationRates")
    found = Nvml(FakeNvml(unsupported=unsupported), stage).sample()
    assert found.keys() == {
        "gpu/0/memory_mib",
        *(f"stage/{name}/memory_mib" for name in ("talker", "token2wav", "other")),
    }


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ["NVIDIA H200", "device 1", "device 2"]),
        ("2, 0", ["device 2", "NVIDIA H200"]),
        ("GPU-7f", ["device GPU-7f"]),
        ("1,-1,0", ["device 1"]),
        ("", []),
    ],
)
def test_a_gpu_that_this_process_does_not_see_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(FakeNvml(count=3), stage)
    assert nvml.gpus() == gpus
    assert {name for name in nvml.sample() if name.startswith("gpu/")} == {
        f"gpu/{place}/{figure}" for place in range(len(gpus)) for figure in ("memory_mib", "utilization")
    }


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(NvmlError, match="Not Supported"):
        Nvml(FakeNvml(unsupported=("nvmlInit",)))


@pytest.mark.parametrize(("module", "package"), [("pynvml", "nvidia-ml-py"), ("psutil", "psutil")])
def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(NvmlError, match=rf"^{package} is not installed \(pip install nvidia-ml-py psutil\)$"):
        Nvml()


def test_the_library_has_what_is_asked_of_it() -> None:
    library = pytest.importorskip("pynvml")
    asked = [name.removeprefix("fake_") for name in vars(FakeNvml) if name.startswith("fake_")]
    assert len(asked) == 10
    assert [name for name in [*asked, "NVMLError"] if not hasattr(library, name)] == []
    assert {"pid", "timeStamp", "smUtil"} <= {name for name, _ in library.c_nvmlProcessUtilizationSample_t._fields_}


def test_a_process_belongs_to_the_stage_that_its_command_line_names() -> None:
    command = ["cat", "/models/token2wav/1/model.py", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as stub:
        assert stub.stdin is not None
        assert stub.stdout is not None
        stub.stdin.write(b"x")
        assert stub.stdout.read(1) == b"x"  # it runs: a new process has no command line at first
        assert (stage_of(stub.pid), stage_of(os.getpid())) == ("token2wav", OTHER)
    assert stage_of(stub.pid) == OTHER


def test_a_monitor_gives_mean_and_peak_since_the_last_time() -> None:
    values = iter([1.0, 3.0])
    taken = threading.Event()

    def probe() -> dict[str, float]:
        found = next(values, None)
        if found is None:
            taken.set()
            return {}
        return {"gpu/0/utilization": found}

    with Monitor({"probe": probe}, interval_s=0.001) as monitor:
        assert taken.wait(IN_TIME_S)
        assert monitor.take() == {"gpu/0/utilization": Usage(2.0, 3.0)}
        assert monitor.take() == {}
    assert monitor.notes == []


def test_a_probe_that_fails_is_dropped_with_a_note() -> None:
    asked: list[int] = []

    def probe() -> dict[str, float]:
        asked.append(1)
        raise OSError("gone")

    with Monitor({"Triton's metrics": probe}, interval_s=0.001) as monitor:
        deadline = time.monotonic() + IN_TIME_S
        while not monitor.notes and time.monotonic() < deadline:
            time.sleep(0.001)
    assert monitor.notes == ["Triton's metrics stopped answering: gone"]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("url", "local", "metrics"),
    [
        ("localhost:8001", True, "http://localhost:8002/metrics"),
        ("127.0.0.1:9", True, "http://127.0.0.1:8002/metrics"),
        ("[::1]:8001", True, "http://[::1]:8002/metrics"),
        ("gpu-host:8001", False, "http://gpu-host:8002/metrics"),
    ],
)
def test_the_metrics_are_looked_for_beside_the_server(url: str, local: bool, metrics: str) -> None:
    assert is_local(url) is local
    assert default_metrics_url(url) == metrics


def test_where_nothing_can_be_asked_the_notes_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_nvml() -> Nvml:
        raise NvmlError("no driver")

    monkeypatch.setattr(resources, "Nvml", no_nvml)
    with ExitStack() as stack:
        monitor, gpus = find_monitor("localhost:1", "http://127.0.0.1:1/metrics", stack)
    assert (monitor.probes, gpus) == ({}, [])
    assert len(monitor.notes) == 2
    assert "no driver" in monitor.notes[0]
    assert "--metrics-url" in monitor.notes[1]


@pytest.mark.parametrize(
    "body", ["<html>Not found</html>", '{"error": "no metrics"}', 'omni_waiting{stage="talker"} much']
)
def test_a_page_of_something_else_is_noted_at_the_start_and_during_a_run(
    monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(triton_metrics, "fetch", lambda _url: body)
    with ExitStack() as stack:
        monitor, _ = find_monitor("gpu-host:8001", "http://gpu-host:8002/metrics", stack)
    assert monitor.probes == {}
    assert "--metrics-url" in monitor.notes[-1]

    running = Monitor({"metrics": lambda: triton_metrics.read(body)}, interval_s=0.001)
    with running:
        while not running.notes:
            time.sleep(0.001)
    assert running.probes == {}
    assert running.notes[0].startswith("metrics stopped answering: ")


def test_gpus_of_a_local_server_are_asked_of_the_driver_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "Nvml", lambda: Nvml(FakeNvml(), stage))
    monkeypatch.setattr(triton_metrics, "fetch", lambda _url: PAGE)
    with ExitStack() as stack:
        monitor, gpus = find_monitor("localhost:1", "http://x/metrics", stack)
        asked = [probe() for probe in monitor.probes.values()]
    assert gpus == ["NVIDIA H200"]
    assert [sorted({name.split("/")[0] for name in found}) for found in asked] == [["gpu", "stage"], ["stage"]]


def test_gpus_of_a_distant_server_are_those_that_triton_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_metrics, "fetch", lambda _url: PAGE)
    with ExitStack() as stack:
        monitor, _ = find_monitor("gpu-host:8001", "http://gpu-host:8002/metrics", stack)
    (probe,) = monitor.probes.values()
    assert "gpu/GPU-1/utilization" in probe()
    assert "another machine" in monitor.notes[0]
