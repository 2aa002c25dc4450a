# SPDX-License-Identifier: Apache-2.0
"""A server's start: the checks before it, the size of Triton's pool of device memory, and the report of progress."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from triton_omni.core.arguments import say
from triton_omni.core.errors import StageName
from triton_omni.core.settings import Dtype, SettingsError, TalkerSettings, ThinkerSettings, load_settings
from triton_omni.session.ledger_table import STAGES
from triton_omni.session.ledger_view import read_ledger
from triton_omni.session.server_folder import LedgerError, ledger_name, table_path
from triton_omni.supervisor.machine import ServerError

CACHES: Final = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name folders in which libraries keep what they compile."""
SHARED_MEMORY: Final = Path("/dev/shm")
LEAST_SHARED_MIB: Final = 32
"""MiB of shared memory that the ledger and Triton's regions need at the start, before any request."""
MPS_SHARE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Variable by which CUDA MPS gives a process a part of a GPU's multiprocessors."""
_TRIED_BYTES: Final = 4096


def check_shared_memory(folder: Path = SHARED_MEMORY) -> None:
    """Check that there is room for the stages' shared memory.

    Raises:
        ServerError: there is less than `LEAST_SHARED_MIB`, or no such folder.
    """
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise ServerError(f"{folder}, which the stages share, cannot be used ({error.strerror})") from error
    free = found.f_bavail * found.f_frsize // (1 << 20)
    if free < LEAST_SHARED_MIB:
        raise ServerError(
            f"{folder} has {free} MiB free, the stages need at least {LEAST_SHARED_MIB} "
            "(in a container: --shm-size 1g, or an emptyDir of medium Memory)"
        )


def check_caches(environment: Mapping[str, str]) -> None:
    """Check that the caches of the environment can be written to, by writing a file.

    Raises:
        ServerError: a cache cannot be written to; the message names variable, folder and reason.
    """
    for variable in CACHES:
        if not (folder := environment.get(variable)):
            continue
        try:
            write_something(Path(folder))
        except OSError as error:
            raise ServerError(f"{variable}: {folder} cannot be written ({error.strerror})") from error


def check_gpu_share(environment: Mapping[str, str]) -> None:
    """Check that the stages would not get only a part of a GPU's multiprocessors.

    vLLM's own decode steps would then give non-finite hidden states. Seen with 30 and 65 % of an H100, and without any
    kernel of this project.

    Raises:
        ServerError: they would get only a part.
    """
    if (share := environment.get(MPS_SHARE, "")) not in {"", "100"}:
        raise ServerError(
            f"{MPS_SHARE} is {share}, but vLLM's hidden states are not finite on a part of a GPU: "
            "unset it, or set it to 100"
        )


def write_something(folder: Path) -> None:
    """Write a file that is removed at once; raise OSError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIED_BYTES))
        file.flush()
        os.fsync(file.fileno())


# --- the report of a start --------------------------------------------------------------------------------------------


_LOOKS_APART_S = 0.5
_FIRST_REMINDER_S = 60.0
"""Seconds before the first reminder; each further one comes after twice the time."""


def loaded_stages(pid: int) -> list[StageName]:
    """Stages that the tritonserver of this process id has loaded, at least once."""
    try:
        ledger = read_ledger(table_path(ledger_name(pid)))
    except (OSError, LedgerError):  # no stage has made it yet, or the server ended this moment
        return []
    return [stage for stage in STAGES if ledger.stages[stage].epoch]


def stages_of(repository: Path) -> list[StageName]:
    """The stages that a model repository has."""
    return [stage for stage in STAGES if (repository / stage).is_dir()]


class StartReport:
    """Reports one start, from the process to the first reply.

    Args:
        pid: of tritonserver.
        log: its log; None = standard error.
        stages: stages that it will load.
        loaded: returns the stages that it has loaded by now.
    """

    def __init__(
        self,
        pid: int,
        log: Path | None,
        stages: Sequence[StageName],
        loaded: Callable[[int], Sequence[StageName]] = loaded_stages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._loaded, self._clock = pid, loaded, clock
        self._left = list(stages)
        self._begin = self._looked = clock()
        self._reminder_s = _FIRST_REMINDER_S
        say(f"starting: tritonserver is process {pid}, its log {'is here' if log is None else log}")
        if stages:
            say(f"starting: {_joined(self._left)} load; the first start on a machine compiles, which can take minutes")

    def look(self) -> None:
        """Report stages loaded since the last call; call this repeatedly."""
        now = self._clock()
        if not self._left or now - self._looked < _LOOKS_APART_S:
            return
        self._looked, seconds = now, now - self._begin
        for stage in set(self._left).intersection(self._loaded(self._pid)):
            self._left.remove(stage)
            say(f"starting: {stage} is loaded after {seconds:.0f} s")
        if self._left and seconds >= self._reminder_s:
            self._reminder_s *= 2
            say(f"starting: {_joined(self._left)} still load{'s' * (len(self._left) == 1)} after {seconds:.0f} s")

    @staticmethod
    def warms_up() -> None:
        """All models are loaded, and the server's own first reply is asked for."""
        what = "a first reply is spoken, so that callers need not wait for what it prepares"
        say(f"starting: all models are loaded; {what}")


def _joined(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


# --- Triton's pool ----------------------------------------------------------------------------------------------------


# At most two unconsumed messages a session (credits), on each of the two links.
_UNCONSUMED = 2
# Triton's own small allocations and the pool's rounding of every block.
_MARGIN_BYTES = 64 << 20
_INT32_BYTES = 4
_DTYPE_BYTES: dict[Dtype, int] = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}


def pool_bytes(thinker: ThinkerSettings, talker: TalkerSettings, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of Triton's CUDA memory pool that no load can exhaust.

    Sessions x unconsumed messages x (largest message of hidden rows + largest message of codec codes) + a margin.

    Args:
        thinker: gives `max_sessions` and `rows_per_message`, the rows of the largest message.
        talker: gives `max_codes`; waiting codes go out together, so one message may hold a whole reply.
        hidden_size: H of a row.
        dtype_bytes: bytes of one element of a row.
    """
    rows = thinker.rows_per_message * hidden_size * dtype_bytes
    codes = talker.max_codes * _INT32_BYTES
    return thinker.max_sessions * _UNCONSUMED * (rows + codes) + _MARGIN_BYTES


def memory_pool_bytes(repository: Path, model: Path) -> int:
    """`pool_bytes` of a model repository's settings and a checkpoint's hidden size, for a GPU.

    Raises:
        ServerError: a `stage.yaml` cannot be used, or the checkpoint's config has no hidden size.
    """
    try:
        thinker = load_settings(repository / "thinker" / "1" / "stage.yaml", ThinkerSettings)
        talker = load_settings(repository / "talker" / "1" / "stage.yaml", TalkerSettings)
    except SettingsError as error:
        raise ServerError(str(error)) from error
    return pool_bytes(thinker, talker, _hidden_size(model / "config.json"), _DTYPE_BYTES[thinker.dtype])


def _hidden_size(path: Path) -> int:
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        return int(config["thinker_config"]["text_config"]["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{path}: thinker_config.text_config.hidden_size cannot be read: {error!r}") from error
