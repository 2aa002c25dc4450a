# SPDX-License-Identifier: Apache-2.0
"""Holds back memory of this machine's GPUs, so that a server finds no more than a smaller GPU has.

MPS can limit the memory of a client (`CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`), but a server is several clients. Memory that
another process holds limits them together, with their CUDA contexts, Triton's pool and the MPS server.

    python scripts/compare/memory.py GIB      leaves so much free on each GPU until its standard input ends
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from triton_omni_client.bench.nvml import Nvml, NvmlError

_HELD = "held"
_HOLDER = (sys.executable, __file__)
_GIB = 2**30


class MemoryNotHeld(RuntimeError):
    """The memory cannot be held back; the message says why."""


@contextmanager
def free_memory(gib: float, holder: Sequence[str] = _HOLDER) -> Iterator[None]:
    """Leave `gib` GiB free on each GPU that this process sees.

    Args:
        gib: what stays free.
        holder: program that is given this number, says "held" and holds the rest until its standard input ends.

    Raises:
        MemoryNotHeld: there is no GPU, or one has less.
    """
    command = [*holder, f"{gib:g}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != _HELD.encode():
            _, said = process.communicate()
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            raise MemoryNotHeld(f"no GPU memory could be held back: {last}")
        try:
            yield
        finally:
            process.communicate()


def used_memory() -> Mapping[str, float]:
    """MiB in use of each of the machine's GPUs, named as in a report of bench.

    Raises:
        MemoryNotHeld: no GPU can be asked.
    """
    try:
        with Nvml() as nvml:
            return {name: value for name, value in nvml.sample().items() if name.startswith("gpu/")}
    except NvmlError as error:
        raise MemoryNotHeld(str(error)) from error


def hold(gib: float) -> None:
    """Hold all but `gib` GiB of each GPU until standard input ends; end with a sentence where one has less."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("no NVIDIA GPU is seen")
    held = []
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        held.append(torch.zeros(1, device=device))  # makes the context, which is not to count as the server's
        free, _ = torch.cuda.mem_get_info(device)
        if free < gib * _GIB:
            sys.exit(f"GPU {number} has {free / _GIB:.1f} GiB free, less than {gib:g}")
        held.append(torch.empty(free - int(gib * _GIB), dtype=torch.uint8, device=device))
    print(_HELD, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold(float(sys.argv[1]))
