# SPDX-License-Identifier: Apache-2.0
"""Voices: what a request may name, and what a broken speaker file is refused for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_omni.checkpoint.config import CheckpointError, OmniConfig, load_config
from triton_omni.checkpoint.speakers import Speakers, load_speakers
from triton_omni.checkpoint.voice_names import voice_names
from triton_omni.core.errors import BadRequest


@pytest.fixture(scope="module")
def config(tiny_checkpoint: Path) -> OmniConfig:
    return load_config(tiny_checkpoint)


@pytest.fixture(scope="module")
def speakers(tiny_checkpoint: Path, config: OmniConfig) -> Speakers:
    return load_speakers(tiny_checkpoint, config)


def entry(**changes: Any) -> dict[str, Any]:
    return {"cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 9, 80), "bos_token": 309} | changes


def save(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "spk_dict.pt")
    return folder


def test_both_voices_are_there_and_differ(speakers: Speakers) -> None:
    chelsie, ethan = speakers.get("Chelsie"), speakers.get("Ethan")
    assert set(speakers.names) == {"Chelsie", "Ethan"}
    assert chelsie.text_bos_id != ethan.text_bos_id
    assert chelsie.cond.shape == ethan.cond.shape == (1, 192)
    assert chelsie.ref_mel.shape[1] != ethan.ref_mel.shape[1]
    assert not torch.equal(chelsie.cond, ethan.cond)


def test_no_name_means_hfs_default_speaker(speakers: Speakers) -> None:
    assert speakers.get(None).name == speakers.default.name == "Chelsie"


def test_first_voice_is_the_default_without_chelsie(tmp_path: Path, config: OmniConfig) -> None:
    found = load_speakers(save(tmp_path, {"Zoe": entry(), "Adam": entry()}), config)
    assert found.get(None).name == "Zoe"


@pytest.mark.parametrize("name", ["chelsie", "", "Chelsie "])
def test_an_unknown_voice_is_refused_with_the_list(speakers: Speakers, name: str) -> None:
    with pytest.raises(BadRequest, match=r"unknown, available: Ethan, Chelsie"):
        speakers.get(name)


def test_shapes_without_the_leading_one_are_accepted(tmp_path: Path, config: OmniConfig) -> None:
    flat = entry(cond=torch.ones(192), ref_mel=torch.ones(9, 80).double(), bos_token=torch.tensor(7))
    speaker = load_speakers(save(tmp_path, {"A": flat}), config).get("A")
    assert speaker.cond.shape == (1, 192)
    assert speaker.ref_mel.shape == (1, 9, 80)
    assert speaker.ref_mel.dtype == torch.float32
    assert speaker.text_bos_id == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "expected a dictionary of speakers"),
        ([1], "expected a dictionary of speakers"),
        ({"A": 1}, "A: expected a dictionary, found int"),
        ({"A": entry(cond=None)}, r"A\.cond: expected a tensor"),
        ({"A": entry(cond=torch.zeros(1, 190))}, r"A\.cond: expected shape \[1, 192\], found \[1, 190\]"),
        ({"A": entry(ref_mel=torch.zeros(2, 9, 80))}, r"A\.ref_mel: expected shape \[1, frames, 80\]"),
        ({"A": entry(ref_mel=torch.zeros(1, 0, 80))}, r"A\.ref_mel: expected shape"),
        ({"A": entry(cond=torch.full((1, 192), float("nan")))}, r"A\.cond: holds values that are not finite"),
        ({"A": entry(bos_token="x")}, r"A\.bos_token: expected an id in \[0, 320\), found 'x'"),
        ({"A": entry(bos_token=320)}, r"A\.bos_token: expected an id in \[0, 320\), found 320"),
        ({"A": entry(bos_token=True)}, r"A\.bos_token: expected an id"),
    ],
)
def test_a_broken_speaker_is_refused_by_name(tmp_path: Path, config: OmniConfig, value: Any, message: str) -> None:
    folder = save(tmp_path, value)
    with pytest.raises(CheckpointError, match=message):
        load_speakers(folder, config)


@pytest.mark.parametrize("content", [None, b"", b"not a pickle"])
def test_an_unreadable_file_is_refused_by_name(tmp_path: Path, config: OmniConfig, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "spk_dict.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: cannot be read"):
        load_speakers(tmp_path, config)


class _Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("planted"),)


def test_code_in_the_file_is_not_run(tmp_path: Path, config: OmniConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, {"A": _Planted()})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_speakers(tmp_path, config)
    assert not Path("planted").exists()


@pytest.mark.parametrize("names", [["Zoe", "Adam"], ["Zoe", "Chelsie", "Adam"]])
def test_names_read_without_torch_are_the_speakers_with_the_default_first(
    tmp_path: Path, config: OmniConfig, names: list[str]
) -> None:
    found = load_speakers(save(tmp_path, {name: entry() for name in names}), config)
    assert voice_names(tmp_path)[0] == found.default.name
    assert sorted(voice_names(tmp_path)) == sorted(found.names)


@pytest.mark.parametrize("value", [{}, [entry()], torch.zeros(1)])
def test_names_of_what_is_no_dictionary_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: expected a dictionary of speakers"):
        voice_names(save(tmp_path, value))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04"])
def test_names_of_what_is_no_archive_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spk_dict.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt: cannot be read"):
        voice_names(tmp_path)


class Harmful:
    """Would make a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_reading_names_calls_nothing_of_the_file(tmp_path: Path) -> None:
    save(tmp_path, {"Zoe": Harmful(tmp_path / "harm")})
    assert voice_names(tmp_path) == ("Zoe",)
    assert not (tmp_path / "harm").exists()
