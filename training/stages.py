# SPDX-License-Identifier: Apache-2.0
"""The stages of the training by name; `python -m training.stages NAME` runs one in this process."""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import dataclass

import torch

from training.settings import Settings, add_arguments, from_arguments


@dataclass(frozen=True)
class Stage:
    """A module with `train(settings, seconds)`, and what must be there before it starts."""

    module: str
    needs: tuple[str, ...] = ()
    """Files below the scratch folder."""
    gpu: bool = True


STAGES = {
    "speech": Stage("training.speech"),
    "prompts": Stage("training.prompts", gpu=False),
    "thinker": Stage("training.thinker"),
    "vocoder": Stage("training.vocoder", ("data/bank.pt",)),
    "dit": Stage("training.dit", ("data/bank.pt",)),
    "more": Stage("training.more", ("data/bank.pt",), gpu=False),
    "talker": Stage("training.talker", ("data/bank.pt", "state/thinker_text.pt")),
}
"""In the order in which they get a GPU."""


def train(name: str, settings: Settings, seconds: float) -> None:
    """Run a stage for some seconds from what it left; KeyError if there is none of that name."""
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(4 if settings.device.type == "cuda" else 1)
    importlib.import_module(STAGES[name].module).train(settings, seconds)


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m training.stages", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--seconds", type=float, required=True)
    add_arguments(parser)
    given = parser.parse_args()
    train(given.stage, from_arguments(given), given.seconds)
    # Workers of a loader may hang on to the end.
    os._exit(0)


if __name__ == "__main__":
    main()
