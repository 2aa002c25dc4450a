# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a stranger: nothing in it is run, fills the memory or ends a process; a refusal names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from triton_omni.checkpoint import reading
from triton_omni.checkpoint.config import CheckpointError, load_config
from triton_omni.checkpoint.reading import check_file, read_index, read_json
from triton_omni.supervisor.model_folder import ModelFolderError, check_files

DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [DEEP, '{"a": ' * 50_000, '{"n_samples": ' + "9" * 5000 + "}"])
def test_json_that_no_reader_can_take_is_refused_by_file(
    tmp_path: Path, tiny_checkpoint: Path, name: str, content: str
) -> None:
    for file in tiny_checkpoint.glob("*config.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelFolderError, match=f"{name}: cannot be read"):
        check_files(tmp_path)


def test_a_json_file_is_read_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LARGEST_JSON_BYTES", 1000)
    for name, read in (
        ("config.json", lambda: read_json(tmp_path / "config.json")),
        ("generation_config.json", lambda: read_json(tmp_path / "generation_config.json", optional=True)),
        (reading.INDEX_FILE, lambda: read_index(tmp_path)),
    ):
        (tmp_path / name).write_text("{}" + " " * 999)
        with pytest.raises(CheckpointError, match=f"{name}: cannot be read: 1001 bytes are more than 1000"):
            read()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("thinker_config.text_config.num_hidden_layers", 10**9),
        ("talker_config.num_hidden_layers", 1025),
        ("thinker_config.text_config.hidden_size", 2**31),
        pytest.param("thinker_config.text_config.vocab_size", 10**400, id="long"),
        pytest.param("thinker_config.text_config.rope_parameters.rope_theta", 10**400, id="long number"),
        ("thinker_config.text_config.rope_parameters.rope_theta", float("nan")),
        ("thinker_config.text_config.rope_parameters.mrope_section", [2**40] * 3),
        ("token2wav_config.bigvgan_config.upsample_rates", [1] * 5000),
        ("token2wav_config.bigvgan_config.upsample_rates", [2**30] * 6),
        ("token2wav_config.bigvgan_config.resblock_dilation_sizes", [[1]] * 5000),
        ("token2wav_config.dit_config.look_ahead_layers", list(range(5000))),
    ],
)
def test_a_size_beyond_all_networks_is_refused_by_key(
    tmp_path: Path, tiny_checkpoint: Path, path: str, value: Any
) -> None:
    raw = json.loads((tiny_checkpoint / "config.json").read_text())
    *sections, key = path.split(".")
    section = raw
    for name in sections:
        section = section[name]
    assert key in section
    section[key] = value
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=key):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        DEEP,
        '{"a": {"data_offsets": [0, 1e999]}}',
        '{"a": {"data_offsets": [-8, 0]}}',
        '{"a": {"data_offsets": [8, 0]}}',
        '{"a": {"data_offsets": [0, ' + "9" * 4300 + "]}}",
        '{"a": {"data_offsets": ["0", "8"]}}',
        '{"a": {"data_offsets": [0]}}',
        "[]",
    ],
)
def test_a_header_of_weights_that_lies_is_refused_by_file(tmp_path: Path, header: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its header cannot be read"):
        check_file(file)


@pytest.mark.parametrize("place", ["/etc/hostname", "../model.safetensors", "a/../../b", ".", "..", ""])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, place: str) -> None:
    (tmp_path / reading.INDEX_FILE).write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(CheckpointError, match="expected the name of a file here"):
        read_index(tmp_path)
