# SPDX-License-Identifier: Apache-2.0
"""Process groups of one process: they open no port, which any local user could connect to."""

from __future__ import annotations

import subprocess
import sys

import pytest

_MAKES_GROUPS = """
import sys
from pathlib import Path
import torch.distributed
from triton_omni.vllm_hooks.shared.platform import lone_groups

begin, new_group = torch.distributed.init_process_group, torch.distributed.new_group
with lone_groups(int(sys.argv[1])):
    torch.distributed.init_process_group({begin}, store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = torch.distributed.new_group([0], backend={new})
assert torch.distributed.init_process_group is begin and torch.distributed.new_group is new_group
given = torch.ones(2)
torch.distributed.all_reduce(given, group=group)
assert given.tolist() == [1, 1]
inodes = {{file.readlink().name for file in Path("/proc/self/fd").glob("*") if file.is_symlink()}}
rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{{kind}}").read_text().splitlines()]
print(sum(row[3] == "0A" and f"socket:[{{row[9]}}]" in inodes for row in rows))
"""


def ports(processes: int, begin: str, new: str) -> int:
    """At how many ports a process listens that has made such groups."""
    program = _MAKES_GROUPS.format(begin=begin, new=new)
    command = [sys.executable, "-c", program, str(processes)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(("begin", "new"), [('"gloo"', '"gloo"'), ('backend="gloo"', '"fake"'), ('"fake"', '"gloo"')])
def test_groups_of_a_lone_process_open_no_port(begin: str, new: str) -> None:
    assert ports(1, begin, new) == 0


def test_the_test_sees_gloos_ports() -> None:
    assert ports(2, '"gloo"', '"gloo"') == 2
