# SPDX-License-Identifier: Apache-2.0
"""Archives of a run, few and of bounded size, from which a later run elsewhere goes on."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from training import state
from training.settings import Settings

LARGEST = 15 << 20
"""Bytes of one archive."""


def pack(settings: Settings, out: Path) -> list[Path]:
    """Write the run's states (fp16), curves and samples into archives in `out`, and its logs into one file.

    Returns:
        The files.
    """
    out.mkdir(parents=True, exist_ok=True)
    halves = list(_half_states(settings))
    curves = sorted((settings.work / "curves").glob("*.jsonl"))
    samples = sorted((settings.work / "samples").glob("*"))
    files = [
        *archive(out, "state", [*halves, *curves], settings.work),
        *archive(out, "samples", samples, settings.work, most=2),
    ]
    log = out / "log.txt"
    logs = sorted((settings.work / "logs").glob("*.log"))
    log.write_text("\n".join(f"===== {path.stem}\n{path.read_text(errors='replace')}" for path in logs))
    return [*files, log]


def archive(out: Path, name: str, files: Sequence[Path], root: Path, most: int | None = None) -> list[Path]:
    """Write `NAME-0.tar` and so on, none of over `LARGEST` bytes; what the first `most` cannot hold is left out."""
    written = []
    for number, group in enumerate(_groups(files)):
        if number == most:
            break
        path = out / f"{name}-{number}.tar"
        with tarfile.open(path, "w") as tar:
            for file in group:
                tar.add(file, str(file.relative_to(root)))
        written.append(path)
    return written


def unpack(settings: Settings, source: Path) -> list[str]:
    """Take the states of an earlier run from its archives; those that are there already stay.

    Returns:
        Names of the states that were taken.

    Raises:
        FileNotFoundError: `source` has no archive of states.
    """
    archives = sorted(source.glob("state-*.tar"))
    if not archives:
        raise FileNotFoundError(f"{source}: no state-*.tar of an earlier run")
    unpacked = settings.work / "unpacked"
    for path in archives:
        with tarfile.open(path) as tar:
            tar.extractall(unpacked, filter="data")
    missing = [path for path in (unpacked / "half").glob("*.pt") if not (state.folder(settings) / path.name).exists()]
    found = sorted(((path.stem, state.read(path)) for path in missing), key=lambda pair: pair[1].steps)
    for name, kept in found:  # in the order of their making, so that a file's time still tells which thinker is newer
        state.save(settings, name, kept.tensors, **kept.facts)
    for path in sorted((unpacked / "curves").glob("*.jsonl")):
        target = settings.work / "curves" / path.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    return sorted(name for name, _kept in found)


def _half_states(settings: Settings) -> Iterator[Path]:
    for path in sorted(state.folder(settings).glob("*.pt")):
        found, half = state.read(path), settings.work / "half" / path.name
        state.write(half, found.tensors, torch.float16, found.facts)
        yield half


def _groups(files: Iterable[Path]) -> Iterator[list[Path]]:
    """Consecutive files that fit into one archive."""
    group: list[Path] = []
    used = 0
    for file in files:
        size = file.stat().st_size + 2048  # the archive's own blocks
        if group and used + size > LARGEST - (1 << 16):
            yield group
            group, used = [], 0
        group.append(file)
        used += size
    if group:
        yield group
