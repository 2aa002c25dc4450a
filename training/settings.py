# SPDX-License-Identifier: Apache-2.0
"""Settings of a stage of the training: its folder, seed and size."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from training.sizes import FULL, TOY, Sizes


def cores() -> int:
    """CPU cores that this process may use; `taskset` takes some away."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Settings:
    """The same for all stages of one run."""

    work: Path
    """Scratch folder: data, states, logs. A later run goes on from its states."""
    seed: int = 0
    toy: bool = False
    """Sizes, data and batches that a test trains in seconds on a CPU."""
    plain: bool = False
    """Without CUDA graphs and compiled kernels: slower, for the second try of a stage that failed."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the networks."""
        return TOY if self.toy else FULL

    @property
    def device(self) -> torch.device:
        """The GPU of this process if it has one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def data(self) -> Path:
        """Folder of speech, codes and spoken prompts."""
        return self.work / "data"

    def arguments(self) -> list[str]:
        """The command line that `from_arguments` reads."""
        return [
            "--work",
            str(self.work),
            "--seed",
            str(self.seed),
            *(["--toy"] if self.toy else []),
            *(["--plain"] if self.plain else []),
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `from_arguments` reads."""
    parser.add_argument("--work", type=Path, default=Path(".cache/training"), help="scratch folder (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without CUDA graphs and compiled kernels")
    parser.add_argument("--toy", action="store_true", help="sizes of the rehearsal: some seconds on a CPU")


def from_arguments(given: argparse.Namespace) -> Settings:
    """Settings of a parsed command line."""
    return Settings(given.work.absolute(), given.seed, given.toy, given.plain)
