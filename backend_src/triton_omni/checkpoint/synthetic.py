# SPDX-License-Identifier: Apache-2.0
"""Makes a whole random Qwen2.5-Omni checkpoint in HF's format: tiny for tests, 3B and 7B for measurements.

Each can also have the thinker's decoder in 4 bits, as `synthetic_weights.py` describes.

It writes all that HF's `from_pretrained` loads: configuration, sharded safetensors, tokenizer, processor, speakers. It
knows nothing of serving. Command line: `python -m triton_omni.checkpoint.synthetic --size tiny-awq --out FOLDER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from triton_omni.checkpoint import synthetic_config, synthetic_text, synthetic_weights
from triton_omni.checkpoint.facts import FourBit
from triton_omni.checkpoint.synthetic_config import NAMES, Size, omni_config, split_name, vocabulary
from triton_omni.checkpoint.synthetic_text import write_speakers, write_text_files
from triton_omni.checkpoint.synthetic_weights import WeightRules, is_four_bit, pack, quantization_config
from triton_omni.core.arguments import say
from triton_omni.core.cache_folder import cache_folder

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig

Progress = Callable[[str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Tokens after which a reply's stop ids become likely: (thinker, talker).
_REPLIES: dict[Size, tuple[int, int]] = {"tiny": (24, 120), "3b": (150, 1000), "7b": (150, 1000)}
_SHARD_BYTES: dict[Size, int] = {"tiny": 1 << 19, "3b": 4 << 30, "7b": 4 << 30}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the checkpoint before it is drawn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    four_bit: FourBit | None = None
    """Rounding and packing of the tensor, into several tensors of the file; None = stored as it is."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(tensor.nbytes for tensor in self.stored(torch.empty(self.shape, device="meta")).values())

    def stored(self, values: Tensor) -> dict[str, Tensor]:
        """The file's tensors by name, of values float32 [shape]."""
        if self.four_bit is None:
            return {self.name: values.to(self.dtype)}
        stem = self.name.removesuffix("weight")
        return {stem + end: tensor for end, tensor in pack(values, self.four_bit).items()}


def make_checkpoint(
    folder: Path,
    size: Size,
    seed: int = 0,
    *,
    four_bit: FourBit | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a random checkpoint; equal arguments on equal devices give equal bytes.

    Args:
        folder: made if missing; files of the same names are overwritten.
        size: 'tiny', '3b' or '7b'.
        seed: of all weights and speakers.
        four_bit: quantisation of the thinker's decoder; None = none.
        dtype: of thinker and talker, by default float16 with `four_bit`, else float32 for 'tiny', else bfloat16;
            token2wav is float32 as published.
        device: where the weights are drawn, by default the CPU. At most one shard is in memory at a time.
        progress: called with a line for every file.
    """
    tell = progress or (lambda _line: None)
    dtype = dtype or _usual_dtype(size, four_bit)
    folder.mkdir(parents=True, exist_ok=True)
    config, vocab = omni_config(size), vocabulary(size)
    _set_dtype(config, dtype)
    if four_bit is not None:
        config.quantization_config = quantization_config(four_bit)
    config.save_pretrained(folder)
    write_text_files(folder, size, vocab)
    token2wav: Any = config.token2wav_config
    dit = token2wav.dit_config
    frames = 48 if size == "tiny" else 400
    write_speakers(folder / "spk_dict.pt", vocab, cond=dit.enc_emb_dim, mel=dit.mel_dim, frames=frames, seed=seed)
    tell(f"{folder}: configuration, tokenizer and speakers")
    rules = WeightRules(config, vocab, seed=seed, replies=_REPLIES[size])
    shards = list(_split(_plan(config, dtype, four_bit), _SHARD_BYTES[size]))
    _write_shards(folder, shards, rules, torch.device(device or "cpu"), tell)


def planned_tensors(name: str) -> list[PlannedTensor]:
    """Every tensor of one of `NAMES` with thinker and talker in half precision; nothing is drawn or written."""
    size, four_bit = split_name(name)
    return _plan(omni_config(size), torch.bfloat16, four_bit)


def default_checkpoint_path(name: str = "tiny") -> Path:
    """Return the folder of a checkpoint of `NAMES`, for this version of the code."""
    return cache_folder() / "checkpoints" / f"{name}-{_source_hash()}"


def ensure_checkpoint(name: str = "tiny", path: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Make the checkpoint of one of `NAMES` unless it is there; safe when several processes ask at once.

    The tiny one's weights are drawn on the CPU, so that they are the same everywhere; of larger ones on a GPU if there
    is one.

    Returns:
        Its folder, `default_checkpoint_path(name)` unless another is given.

    Raises:
        ValueError: there is no such name.
    """
    size, four_bit = split_name(name)
    path = path or default_checkpoint_path(name)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        device = "cuda" if size != "tiny" and torch.cuda.is_available() else "cpu"
        make_checkpoint(building, size, four_bit=four_bit, device=device, progress=progress)
        building.chmod(0o755)
        building.rename(path)
    except OSError:
        # Another process was first if the folder is there now; a rename never replaces a folder that has files.
        if not path.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return path


def _source_hash() -> str:
    """Changes with the code that makes the checkpoint."""
    digest = hashlib.sha256()
    parts = (synthetic_config, synthetic_text, synthetic_weights)
    for module in (*parts, sys.modules[__name__]):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def _usual_dtype(size: Size, four_bit: FourBit | None) -> torch.dtype:
    if four_bit is not None:
        return torch.float16
    return torch.float32 if size == "tiny" else torch.bfloat16


def _set_dtype(config: Qwen2_5OmniConfig, dtype: torch.dtype) -> None:
    thinker: Any = config.thinker_config
    talker: Any = config.talker_config
    token2wav: Any = config.token2wav_config
    low = (config, thinker, thinker.text_config, thinker.audio_config, thinker.vision_config, talker)
    for part in low:
        part.dtype = dtype
    for part in (token2wav, token2wav.dit_config, token2wav.bigvgan_config):
        part.dtype = torch.float32


def _plan(config: Qwen2_5OmniConfig, dtype: torch.dtype, four_bit: FourBit | None) -> list[PlannedTensor]:
    """Names and shapes as HF's own modules have them; no memory is spent on values."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(config)  # type: ignore[no-untyped-call]
    return [
        PlannedTensor(
            name,
            tuple(value.shape),
            torch.float32 if name.startswith("token2wav.") else dtype,
            four_bit if is_four_bit(name) else None,
        )
        for name, value in model.state_dict().items()
    ]


def _split(plan: list[PlannedTensor], limit: int) -> Iterator[list[PlannedTensor]]:
    """Consecutive tensors of at most `limit` bytes together, at least one each."""
    shard: list[PlannedTensor] = []
    used = 0
    for tensor in plan:
        if shard and used + tensor.nbytes > limit:
            yield shard
            shard, used = [], 0
        shard.append(tensor)
        used += tensor.nbytes
    yield shard


def _write_shards(
    folder: Path, shards: list[list[PlannedTensor]], rules: WeightRules, device: torch.device, tell: Progress
) -> None:
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor for planned in shard for name, tensor in _draw(planned, rules, device).items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for the owner alone; a server may run as another user
        weight_map.update(dict.fromkeys(tensors, file))
        tell(f"{file}: {len(tensors)} tensors, {sum(planned.nbytes for planned in shard) / 2**20:.1f} MiB")
    index = {
        "metadata": {"total_size": sum(planned.nbytes for shard in shards for planned in shard)},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _draw(planned: PlannedTensor, rules: WeightRules, device: torch.device) -> dict[str, Tensor]:
    drawn = planned.stored(rules.draw(planned.name, planned.shape, device))
    return {name: tensor.cpu() for name, tensor in drawn.items()}


def main(arguments: list[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m triton_omni.checkpoint.synthetic", description=__doc__)
    parser.add_argument("--size", choices=NAMES, default="tiny", help="and how the thinker's decoder is quantised")
    parser.add_argument("--out", type=Path, help="folder to write; by default one in .cache, if it is not there yet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of thinker and talker")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.out is None:
        sys.stdout.write(f"{ensure_checkpoint(given.size, progress=say)}{os.linesep}")
        return
    dtype = _DTYPES[given.dtype] if given.dtype else None
    size, four_bit = split_name(given.size)
    make_checkpoint(
        given.out,
        size,
        given.seed,
        four_bit=four_bit,
        dtype=dtype,
        device=given.device,
        progress=say,
    )
    sys.stdout.write(f"{given.out}{os.linesep}")


if __name__ == "__main__":
    main()
