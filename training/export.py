# SPDX-License-Identifier: Apache-2.0
"""Puts the trained parts together as a checkpoint in HF's format, weights in fp16.

`python -m training.export FOLDER` takes the states of the scratch folder.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import state
from training.parts import PREFIXES, part
from training.settings import Settings, add_arguments, from_arguments
from training.sizes import PICTURE_PIXELS, VOCAB, VOICES, omni_config
from triton_omni.checkpoint.synthetic_text import CHAT_TEMPLATE, preprocessor_config, tokenizer_config, write_json

TOKENIZER = Path(__file__).with_name("tokenizer.json")
SOLVER_POINTS = 4
"""Points of token2wav's time grid: with so few it is fast enough on two CPU cores."""
_SOUND_SECONDS = 30
WEIGHTS, _CODEBOOK = "model.safetensors", "codebook.pt"
"""The codebook is what only the training reads: the codes' centres, and how many steps each part has learnt."""
_CENTER_STEPS = 16
"""Steps of one unit of a centre in the checkpoint: a byte each, far finer than the centres' distances."""


def export(settings: Settings, folder: Path, tokenizer: Path = TOKENIZER) -> list[str]:
    """Write the checkpoint into `folder`, which is emptied first.

    Returns:
        Names of parts without a state, whose weights are random.

    Raises:
        ValueError: a weight is not finite in fp16.
        RuntimeError: a state was trained with other sizes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write_config(settings, folder)
    missing = _write_weights(settings, folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    write_json(folder / "tokenizer_config.json", tokenizer_config(VOCAB))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(folder / "preprocessor_config.json", preprocessor_config(_SOUND_SECONDS, PICTURE_PIXELS))
    write_json(folder / "generation_config.json", {"_from_model_config": True, "token2wav_num_steps": SOLVER_POINTS})
    _write_codebook(settings, folder)
    speakers = state.load(settings, "speakers")
    if speakers is None:
        return [*missing, "speakers"]
    torch.save(speaker_dict(speakers), folder / "spk_dict.pt")
    return missing


def take(settings: Settings, folder: Path) -> list[str]:
    """Take the states of a checkpoint that `export` wrote; those that are there already stay.

    Discriminators, and heads that help the thinker to learn, begin anew: a checkpoint has no place for them.

    Returns:
        Names of the states that were taken.

    Raises:
        FileNotFoundError: the checkpoint has no codebook, without which its codes mean nothing.
    """
    from safetensors.torch import load_file

    codebook, weights = state.read(folder / _CODEBOOK), load_file(folder / WEIGHTS)
    speakers = torch.load(folder / "spk_dict.pt", weights_only=True)
    keys = [(voice, key) for voice in VOICES for key in ("cond", "ref_mel")]
    found = {
        "codebook": {"centers": codebook.tensors["centers"].float() / _CENTER_STEPS},
        "speakers": {f"{voice.flite}.{key}": speakers[voice.name][key][0] for voice, key in keys},
    }
    for name, prefix in PREFIXES.items():
        if name in codebook.facts["steps"]:
            found[name] = {key.removeprefix(prefix): weights[key] for key in weights if key.startswith(prefix)}
    if "thinker" in found:
        found = {"thinker_text": found["thinker"], **found}  # the talker waits for this one
    taken = [kept for kept in found if state.load(settings, kept) is None]
    for kept in taken:
        state.save(settings, kept, found[kept], steps=codebook.facts["steps"].get(kept.removesuffix("_text"), 0))
    return sorted(taken)


def speaker_dict(speakers: state.State) -> dict[str, dict[str, Any]]:
    """Content of `spk_dict.pt`: by voice `cond` [1, 192], `ref_mel` [1, frames, 80] and `bos_token`."""
    return {
        voice.name: {
            "cond": speakers.tensors[f"{voice.flite}.cond"].unsqueeze(0),
            "ref_mel": speakers.tensors[f"{voice.flite}.ref_mel"].unsqueeze(0),
            "bos_token": voice.bos,
        }
        for voice in VOICES
    }


def _write_config(settings: Settings, folder: Path) -> None:
    config: Any = omni_config(settings.sizes)
    thinker, token2wav = config.thinker_config, config.token2wav_config
    sections = (
        config,
        thinker,
        thinker.text_config,
        thinker.audio_config,
        thinker.vision_config,
        config.talker_config,
        token2wav,
        token2wav.dit_config,
        token2wav.bigvgan_config,
    )
    for section in sections:
        # Readers of fp16 weights compute in fp32 unless they are told otherwise.
        section.dtype = torch.float32
    config.save_pretrained(folder)


def _write_weights(settings: Settings, folder: Path) -> list[str]:
    from safetensors.torch import save_file

    missing: list[str] = []
    weights: dict[str, Tensor] = {}
    for name, prefix in PREFIXES.items():
        module = part(name, settings.sizes)
        if state.load_into(settings, name, module) is None:
            missing.append(name)
        weights |= {prefix + key: _half(key, value) for key, value in module.state_dict().items()}
    path = folder / WEIGHTS
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors writes for the owner alone
    return missing


def _write_codebook(settings: Settings, folder: Path) -> None:
    found = state.load(settings, "codebook")
    if found is not None:
        steps = {name: kept.steps for name in PREFIXES if (kept := state.load(settings, name))}
        centers = (found.tensors["centers"] * _CENTER_STEPS).round().clamp(-128, 127).to(torch.int8)
        state.write(folder / _CODEBOOK, {"centers": centers}, torch.float16, {"steps": steps})


def _half(name: str, value: Tensor) -> Tensor:
    half = value.half().contiguous() if value.is_floating_point() else value
    if not torch.isfinite(half).all():
        raise ValueError(f"{name}: not finite in fp16")
    return half


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("folder", type=Path)
    add_arguments(parser)
    given = parser.parse_args()
    missing = export(from_arguments(given), given.folder)
    size = sum(file.stat().st_size for file in given.folder.iterdir())
    print(f"{given.folder}: {size / 1e6:.1f} MB" + (f"; still random: {', '.join(missing)}" if missing else ""))


if __name__ == "__main__":
    main()
