# SPDX-License-Identifier: Apache-2.0
"""Device and dtype by the settings, on machines with and without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from triton_omni.core import device
from triton_omni.core.device import gpu_count, resolve_device, resolve_dtype_name
from triton_omni.core.settings import SettingsError


class Driver:
    """libcuda that shows `gpus`, or refuses."""

    def __init__(self, gpus=0, init=0, count=0):
        self._gpus, self._init, self._count = gpus, init, count

    def cuInit(self, flags):  # noqa: N802 - the driver's name
        assert flags == 0
        return self._init

    def cuDeviceGetCount(self, pointer):  # noqa: N802 - the driver's name
        pointer._obj.value = self._gpus
        return self._count


@pytest.fixture
def driver(monkeypatch):
    def show(driver):
        def load(name):
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("no such file")
            return driver

        monkeypatch.setattr(device.ctypes, "CDLL", load)

    return show


@pytest.mark.parametrize(
    ("shown", "gpus"),
    [(None, 0), (Driver(2), 2), (Driver(0), 0), (Driver(2, init=100), 0), (Driver(2, count=3), 0)],
    ids=["no driver", "two", "none", "driver fails", "count fails"],
)
def test_gpus_are_counted_by_the_driver(driver, shown, gpus):
    driver(shown)
    assert gpu_count() == gpus


@pytest.mark.parametrize(
    ("setting", "gpus", "found"),
    [("auto", 0, "cpu"), ("auto", 1, "cuda"), ("cpu", 1, "cpu"), ("cpu", 0, "cpu"), ("cuda", 2, "cuda")],
)
def test_auto_is_the_gpu_where_there_is_one(driver, setting, gpus, found):
    driver(Driver(gpus))
    assert resolve_device(setting) == found


def test_a_gpu_asked_for_by_name_must_be_there(driver):
    driver(None)
    with pytest.raises(SettingsError, match="device: cuda, but the driver shows no GPU"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("setting", "where", "found"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("float16", "cpu", "float16"),
        ("float32", "cuda", "float32"),
    ],
)
def test_auto_dtype_follows_the_device(setting, where, found):
    assert resolve_dtype_name(setting, where) == found


def test_finding_the_device_needs_no_torch():
    """A model's configuration is completed before load, where importing torch would cost seconds a model."""
    code = "import sys, triton_omni.core.device, triton_omni.stub.launch; sys.exit('torch' in sys.modules)"
    source = Path(device.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(source)}, check=True)
