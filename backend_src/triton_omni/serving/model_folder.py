# SPDX-License-Identifier: Apache-2.0
"""Turns what `OMNI_MODEL` says into a checkpoint folder: a folder, a Hugging Face id, or nothing (the tiny checkpoint).

It knows nothing of what is in a checkpoint, except that there is a `config.json`.
Command line: `python -m triton_omni.serving.model_folder [SOURCE]` prints the folder.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Weights in safetensors only; spk_dict.pt holds the speakers and has no other form.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "spk_dict.pt"]


class ModelFolderError(ValueError):
    """No checkpoint can be had from the given source; the message names the source."""


def model_folder(source: str | None) -> Path:
    """The checkpoint's folder.

    Args:
        source: a folder, a hub id such as `Qwen/Qwen2.5-Omni-7B` (fetched once, with a progress bar), or None or ''
            for the tiny synthetic checkpoint (made once).

    Raises:
        ModelFolderError: the folder has no `config.json`, or the id cannot be fetched.
    """
    if not source:
        # Imports torch, which a given folder does not need.
        from triton_omni.checkpoint.synthetic import ensure_tiny

        return ensure_tiny()
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelFolderError(f"{folder} is no checkpoint: it has no config.json")
        return folder.resolve()
    if _HUB_ID.fullmatch(source) is None:
        raise ModelFolderError(f"{source!r} is neither a folder nor a Hugging Face id (owner/name)")
    return _fetch(source)


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    # Every failure of the hub (no such id, no access, no network) is one of these two.
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelFolderError(f"{hub_id} cannot be fetched from Hugging Face: {reason}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the folder of the source that is the first argument."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        print(model_folder(given[0] if given else None))
    except ModelFolderError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
