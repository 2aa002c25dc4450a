# SPDX-License-Identifier: Apache-2.0
"""Names of a checkpoint's voices, read without torch: importing that takes seconds and 200 MB, for a few words.

`speakers.py` reads the voices themselves and checks that the file can be used.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from triton_omni.checkpoint.reading import CheckpointError

SPEAKER_FILE = "spk_dict.pt"
LARGEST_PICKLE_BYTES = 1 << 16
"""Maximum of the archive's dictionary without its tensors, which has about 300 bytes a voice. The keys of a larger one
could be nested so deeply that the stack overflows."""
LONGEST_NAME = 64
DEFAULT_VOICE = "Chelsie"
"""HF `generate`'s default speaker; a checkpoint without it defaults to its first voice."""


class _Anything:
    """Takes the place of a tensor and of the functions that rebuild it."""

    def __init__(self, *_arguments: object) -> None: ...

    def __setstate__(self, _state: object) -> None: ...


class _Names(pickle._Unpickler):
    """Builds plain values; imports, calls and reads nothing else.

    It extends Python's own unpickler, since the one in C allocates as many values as a number in the file claims.
    """

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
    return tuple(sorted(map(checked_name, found), key=lambda name: name != DEFAULT_VOICE))


def checked_name(name: object) -> str:
    """Return the name of a voice, checked for use in requests, logs and answers.

    Raises:
        CheckpointError: it is no short printable text.
    """
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        found = f"{name!r:.80}" if isinstance(name, str) else type(name).__name__
        raise CheckpointError(
            f"{SPEAKER_FILE}: {found} is no name of a voice: 1 to {LONGEST_NAME} printable characters are"
        )
    return name


def _pickled(file: Path) -> object:
    with zipfile.ZipFile(file) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if entry.file_size > LARGEST_PICKLE_BYTES:
            raise ValueError(f"{entry.filename} has {entry.file_size} bytes, at most {LARGEST_PICKLE_BYTES} are taken")
        return _Names(io.BytesIO(archive.read(entry))).load()
