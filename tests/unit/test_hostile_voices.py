# SPDX-License-Identifier: Apache-2.0
"""A file of voices from a stranger: reading it runs nothing, takes little memory and ends no process."""

from __future__ import annotations

import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_omni.checkpoint.config import CheckpointError, OmniConfig, load_config
from triton_omni.checkpoint.speakers import load_speakers
from triton_omni.checkpoint.voice_names import LARGEST_PICKLE_BYTES, voice_names


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return load_config(tiny_checkpoint)


def speaker_file(folder: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(folder / "spk_dict.pt", "w", compression) as archive:
        archive.writestr("spk/data.pkl", pickled)
    return folder


def test_a_dictionary_of_voices_that_unpacks_to_much_is_not_unpacked(tmp_path: Path) -> None:
    bomb = pickle.dumps({"Zoe": bytes(64 << 20)})
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="are taken"):
            voice_names(speaker_file(tmp_path, bomb, zipfile.ZIP_DEFLATED))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_number_in_a_dictionary_of_voices_takes_no_memory(tmp_path: Path) -> None:
    put = b"r" + (1 << 24).to_bytes(4, "little")  # "keep this as value 16,777,216"
    tracemalloc.start()
    try:
        assert voice_names(speaker_file(tmp_path, b"\x80\x02}" + put + b"X\x03\x00\x00\x00ZoeK\x01s.")) == ("Zoe",)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_keys_nested_beyond_the_stack_end_no_process(tmp_path: Path) -> None:
    for depth in (LARGEST_PICKLE_BYTES - 100, 1 << 20):  # a million levels end Python where they are hashed
        with pytest.raises(CheckpointError):
            voice_names(speaker_file(tmp_path, b"\x80\x02})" + b"\x85" * depth + b"K\x01s."))


@pytest.mark.parametrize(
    "name", ["", "a" * 65, "\x1b[31mred", "two\nlines", "Zoe [omni:overloaded]\r", "turned\u202e", 7, ("a",)]
)
def test_a_name_of_a_voice_is_short_and_printable(tmp_path: Path, config: OmniConfig, name: Any) -> None:
    torch.save(
        {name: {"cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 9, 80), "bos_token": 3}},
        tmp_path / "spk_dict.pt",
    )
    for read in (lambda: voice_names(tmp_path), lambda: load_speakers(tmp_path, config)):
        with pytest.raises(CheckpointError, match="is no name of a voice"):
            read()


@pytest.mark.parametrize(
    "ref_mel",
    [
        torch.zeros(1, 1, 80).expand(1, 1 << 40, 80),
        torch.zeros(1, 1 << 16, 80),
        torch.zeros(1, 9, 80).to_sparse(),
        torch.zeros(1, 9, 80, dtype=torch.complex64),
    ],
    ids=["endless", "long", "sparse", "complex"],
)
def test_a_reference_spectrogram_that_is_none_is_refused(tmp_path: Path, config: OmniConfig, ref_mel: Any) -> None:
    torch.save({"Zoe": {"cond": torch.zeros(1, 192), "ref_mel": ref_mel, "bos_token": 3}}, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=r"Zoe\.ref_mel"):
        load_speakers(tmp_path, config)


@pytest.mark.parametrize("pickled", [b"\x80\x02}h\x09.", b"\x80\x02]K\x01K\x02s.", b"\x80\x02.", b"\x80\x02\x85."])
def test_a_damaged_dictionary_of_voices_is_refused_by_file(tmp_path: Path, config: OmniConfig, pickled: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "spk_dict.pt", "w") as archive:
        archive.writestr("spk/data.pkl", pickled)
        archive.writestr("spk/version", "3")
        archive.writestr("spk/byteorder", "little")
    for read in (lambda: voice_names(tmp_path), lambda: load_speakers(tmp_path, config)):
        with pytest.raises(CheckpointError, match=r"spk_dict\.pt: cannot be read"):
            read()
