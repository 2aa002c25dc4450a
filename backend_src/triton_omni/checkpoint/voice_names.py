# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's voices, read without torch: importing that takes seconds and 200 MB, for a few words.

`speakers.py` reads the voices themselves and checks that the file can be used.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

from triton_omni.checkpoint.reading import CheckpointError

SPEAKER_FILE = "spk_dict.pt"
DEFAULT_VOICE = "Chelsie"
"""HF `generate`'s default speaker; a checkpoint without it defaults to its first voice."""


class _Anything:
    """Stands for a tensor and whatever it is rebuilt with."""

    def __init__(self, *_arguments: object) -> None: ...

    def __setstate__(self, _state: object) -> None: ...


class _Names(pickle.Unpickler):
    """Builds plain values; of all else nothing is imported, called or read."""

    def find_class(self, module: str, name: str, /) -> Any:
        del module, name
        return _Anything

    def persistent_load(self, pid: Any, /) -> Any:
        del pid
        return _Anything()


def voice_names(checkpoint: Path) -> tuple[str, ...]:
    """Names of the voices of the checkpoint in this folder, the default one first, then in the file's order.

    Raises:
        CheckpointError: the file is no archive of `torch.save` that holds a dictionary of speakers.
    """
    file = checkpoint / SPEAKER_FILE
    try:
        found = _pickled(file)
    # A damaged pickle may raise almost anything.
    except Exception as error:
        raise CheckpointError(f"{file}: cannot be read: {error!r:.200}") from error
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{file}: expected a dictionary of speakers, found {type(found).__name__}")
    return tuple(sorted(map(str, found), key=lambda name: name != DEFAULT_VOICE))


def _pickled(file: Path) -> object:
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as pickled:
            return _Names(pickled).load()
