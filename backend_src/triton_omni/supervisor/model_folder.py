# SPDX-License-Identifier: Apache-2.0
"""Turns `OMNI_MODEL` into a checkpoint folder: a folder, a Hugging Face id, or random weights of a size.

The default is the trained checkpoint of this repository.
It knows the names of a checkpoint's files, and reads no weight.
Command line: `python -m triton_omni.supervisor.model_folder [SOURCE]` prints the folder.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.reading import SINGLE_FILE, CheckpointError, check_file, check_weights, read_index
from triton_omni.core.arguments import say

RANDOM = "random:"
MINI = Path(__file__).resolve().parents[3] / "training" / "mini"
"""The trained checkpoint of the repository, which is the default; an install without the repository has none."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FOLDER = "models--"
"""Prefix of a fetched model's folder, whose snapshots are named by a hash: `models--OWNER--NAME/snapshots/HASH`."""
# Weights in safetensors only; spk_dict.pt holds the speakers and has no other form.
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "spk_dict.pt"]
_OTHER_FILES = ("preprocessor_config.json", "spk_dict.pt", "tokenizer.json")
_LISTED = 5
"""Names that an error message shows of a longer list."""


class ModelFolderError(ValueError):
    """The given source has no usable checkpoint; the message names the source."""


def model_folder(source: str | None) -> Path:
    """Return the checkpoint's folder.

    Args:
        source: a folder, a hub id such as `Qwen/Qwen2.5-Omni-7B` (fetched once, with a progress bar), `random:tiny`,
            `random:3b` or `random:7b` (random weights of that size, made once; with `-awq` or `-gptq` after it the
            thinker's decoder has 4 bits), or None or '' for `MINI`.

    Raises:
        ModelFolderError: there is no such folder or size, it has no `config.json`, the id cannot be fetched, or
            nothing is named and there is no `MINI`.
    """
    if not source:
        return _mini()
    if source.startswith(RANDOM):
        return _random(source.removeprefix(RANDOM))
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelFolderError(f"{folder} is no checkpoint: it has no config.json")
        return folder.resolve()
    if folder.exists():
        raise ModelFolderError(f"{folder} is no folder; a checkpoint is a folder with config.json and *.safetensors")
    if source.startswith((".", "/", "~")) or _HUB_ID.fullmatch(source) is None:
        raise ModelFolderError(f"{source!r} is neither a folder nor a Hugging Face id (owner/name)")
    return _fetch(source)


def _mini() -> Path:
    if not (MINI / "config.json").is_file():
        raise ModelFolderError(
            f"OMNI_MODEL names no checkpoint, and the default one, {MINI}, is not there: it comes with the repository. "
            f"Set OMNI_MODEL to a folder, to a Hugging Face id, or to {RANDOM}tiny"
        )
    return MINI


def _random(name: str) -> Path:
    # Imports torch, which a given folder does not need.
    from triton_omni.checkpoint.synthetic import ensure_checkpoint
    from triton_omni.checkpoint.synthetic_config import NAMES, SIZES

    if name not in NAMES:
        raise ModelFolderError(
            f"{RANDOM}{name}: there are random weights of the sizes {', '.join(SIZES)}, each also with -awq or -gptq "
            "after it"
        )
    try:
        return ensure_checkpoint(name, progress=say)
    except OSError as error:
        raise ModelFolderError(f"{RANDOM}{name} cannot be made: {error}") from error


def checkpoint_name(folder: Path) -> str:
    """Return the name of a checkpoint's folder without its path; the hub id of a downloaded one."""
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith(_HUB_FOLDER):
        return folder.parents[1].name.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
    return folder.name


def check_files(folder: Path) -> None:
    """Check that all files of a checkpoint are there and whole, and that its `config.json` is usable; read no weight.

    Raises:
        ModelFolderError: a file is missing, empty or cut off, a tensor of the index is not in its file, or the
            configuration is of another model or cannot be used.
    """
    try:
        load_config(folder)
        weights = read_index(folder)
        shards = sorted(set(weights.values())) if weights else [SINGLE_FILE]
        missing = [name for name in [*_OTHER_FILES, *shards] if not _has_content(folder / name)]
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise ModelFolderError(f"{folder} is no whole checkpoint: it lacks {', '.join(missing[:_LISTED])}{more}")
        if weights:
            check_weights(folder, weights)
        else:
            check_file(folder / SINGLE_FILE)
    except CheckpointError as error:
        raise ModelFolderError(f"{folder} is no checkpoint that can be served: {error}") from error


def _has_content(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0


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
        folder = model_folder(given[0] if given else None)
        check_files(folder)
    except ModelFolderError as error:
        say(str(error))
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    # Ctrl-C ends this silently: nothing needs cleanup, and a later fetch resumes.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
