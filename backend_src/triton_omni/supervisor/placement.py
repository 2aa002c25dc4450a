# SPDX-License-Identifier: Apache-2.0
"""On which GPU each stage runs.

Left alone, Triton starts an instance of every Python model on every GPU that it sees; a stage is one process.
"""

from __future__ import annotations

from collections.abc import Mapping

from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.machine import ServerError


def parse_placement(text: str) -> dict[str, int]:
    """`thinker=0,token2wav=1` as numbers by stage; a stage that is not named is on GPU 0.

    Raises:
        ValueError: naming what is wrong.
    """
    placement: dict[str, int] = dict.fromkeys(STAGES, 0)
    named = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        stage, _, number = part.partition("=")
        if stage not in placement:
            raise ValueError(f"'{part}' is not STAGE=N; the stages are {', '.join(STAGES)}")
        if stage in named:
            raise ValueError(f"{stage} is named twice")
        if not number.isascii() or not number.isdecimal():
            raise ValueError(f"{stage}: '{number}' is no number of a GPU")
        named.add(stage)
        placement[stage] = int(number)
    return placement


def check_placement(placement: Mapping[str, int], gpus: int) -> None:
    """See whether every stage's GPU is there; without any GPU nothing is to be chosen but 0.

    Raises:
        ServerError: naming the stage, its number and how many GPUs there are.
    """
    for stage, number in placement.items():
        if number >= max(gpus, 1):
            seen = f"{gpus} of them, 0 to {gpus - 1}" if gpus else "none"
            raise ServerError(f"{stage} was placed on GPU {number}, but this process sees {seen}")


def instance_group(gpu: int | None) -> str:
    """An entry of a `config.pbtxt`: one instance, on that GPU or on the CPU."""
    where = "kind: KIND_CPU" if gpu is None else f"kind: KIND_GPU gpus: [ {gpu} ]"
    return f"instance_group [ {{ count: 1 {where} }} ]\n"
