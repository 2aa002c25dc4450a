# SPDX-License-Identifier: Apache-2.0
"""Memory that two stages share: who finds it, where a session's places are, and that it outlives its owner."""

import os
import secrets
import subprocess
import sys

import pytest
import torch

from triton_omni.link.ring import RingError, offer_ring, open_ring
from triton_omni.session import server_folder

CPU = torch.device("cpu")
SHAPE = (3, 4, 2)


@pytest.fixture
def name():
    return f"triton-omni-test-{secrets.token_hex(6)}"


@pytest.fixture
def ring(name):
    ring = offer_ring(name, "talker", 7, shape=SHAPE, dtype=torch.bfloat16, device=CPU)
    yield ring
    ring.close()


def files(name):
    return sorted(path.name for path in server_folder.own_folder(name).iterdir())


def test_what_one_side_writes_the_other_reads(name, ring):
    other = open_ring(name, "talker", 7, CPU)
    assert (other.slots, other.places, other.epoch) == (3, 4, 7)
    assert other.memory.shape == SHAPE
    assert other.memory.dtype == torch.bfloat16
    assert not other.memory.any(), "a ring begins empty"
    other.parts(1, 2, 1)[0].copy_(torch.tensor([[3.0, -0.5]]))
    assert ring.memory[1, 2].tolist() == [3.0, -0.5]
    assert ring.memory.abs().sum() == 3.5, "in no other place"


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 4, [[0, 1, 2, 3]]),
        (1, 2, [[1, 2]]),
        (3, 3, [[3], [0, 1]]),
        (4, 4, [[0, 1, 2, 3]]),
        (9, 4, [[1, 2, 3], [0]]),
        (5, 0, [[]]),
    ],
)
def test_places_go_round_in_order(ring, start, count, expected):
    ring.memory[2].copy_(torch.arange(4).unsqueeze(1).expand(4, 2))
    assert [part[:, 0].tolist() for part in ring.parts(2, start, count)] == expected


def test_only_the_process_and_the_device_that_are_meant_are_found(name, ring):
    assert open_ring(name, "talker", 6, CPU) is None, "of an epoch that is over"
    assert open_ring(name, "token2wav", 7, CPU) is None
    assert open_ring(name, "talker", 7, torch.device("meta")) is None


def test_a_later_process_s_ring_takes_the_place_of_the_one_before(name, ring):
    later = offer_ring(name, "talker", 8, shape=SHAPE, dtype=torch.float32, device=CPU)
    ring.memory.fill_(1)
    assert open_ring(name, "talker", 7, CPU) is None
    assert not open_ring(name, "talker", 8, CPU).memory.any()
    ring.close()
    assert files(name) == ["talker-ring"], "the file is the later one's"
    later.close()
    assert files(name) == []


def test_a_file_that_is_none_is_told(name, ring):
    server_folder.table_path(name).with_name("talker-ring").write_bytes(b"\x02\x00no")
    with pytest.raises(RingError, match="talker-ring offers no ring"):
        open_ring(name, "talker", 7, CPU)


def test_nobody_else_may_read_it(name, ring):
    path = server_folder.table_path(name).with_name("talker-ring")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_file_of_a_server_that_is_gone_is_removed(monkeypatch):
    gone = f"triton-omni-{os.getuid()}-{server_folder.process_namespace()}-{2**22 - 9}-1-0a"
    offer_ring(gone, "talker", 1, shape=SHAPE, dtype=torch.float32, device=CPU)
    assert gone in server_folder.remove_stale()
    assert not server_folder.table_path(gone).parent.exists()


OWNER = """
import sys, pathlib, torch
from triton_omni.session import server_folder
from triton_omni.link.ring import offer_ring
server_folder._SHARED_MEMORY = pathlib.Path(sys.argv[2])
device = torch.device(sys.argv[3])
ring = offer_ring(sys.argv[1], "talker", 1, shape=(3, 4, 2), dtype=torch.float32, device=device)
print(flush=True)
for line in sys.stdin:
    print(ring.memory.sum().item(), flush=True)
"""
GPU_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of a GPU is shared")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=GPU_ONLY)])
def test_memory_is_shared_with_another_process_and_stays_when_that_is_killed(name, device):
    arguments = [sys.executable, "-c", OWNER, name, str(server_folder._SHARED_MEMORY), device]
    owner = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        owner.stdout.readline()
        ring = open_ring(name, "talker", 1, torch.device(device))
        ring.memory.fill_(0.5)
        # Waits for the device as well.
        assert ring.memory.sum() == 12.0
        print(file=owner.stdin, flush=True)
        assert float(owner.stdout.readline()) == 12.0
    finally:
        owner.kill()
        owner.communicate()
    for value in range(100):
        ring.memory.fill_(value)
    assert ring.memory.eq(99).all()
    ring.close()
    assert torch.ones(3, device=device).sum() == 3, "the device is of use as before"
    server_folder.table_path(name).with_name("talker-ring").unlink()
