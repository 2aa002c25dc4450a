# SPDX-License-Identifier: Apache-2.0
"""Strict loading: every way in which a checkpoint and a module can disagree is an error that names the tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from triton_omni.checkpoint.config import CheckpointError
from triton_omni.checkpoint.weights import INDEX_FILE, load_module, weight_map

PREFIX = "token2wav.small."


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2, bias=False)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def tensors() -> dict[str, Tensor]:
    return {
        "first.weight": torch.arange(12.0).reshape(4, 3),
        "first.bias": torch.ones(4),
        "second.weight": torch.full((2, 4), 0.5),
        "count": torch.tensor([7]),
    }


def save(folder: Path, values: dict[str, Tensor], *, extra: dict[str, str] | None = None) -> Path:
    """Two shards and an index; a third shard that no test may open holds somebody else's tensor."""
    named = {PREFIX + name: value for name, value in values.items()}
    names = sorted(named)
    shards = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    index = {name: file for file, members in shards.items() for name in members}
    for file, members in shards.items():
        save_file({name: named[name] for name in members}, folder / file)
    (folder / "c.safetensors").write_bytes(b"broken")
    index |= {"talker.weight": "c.safetensors"} | (extra or {})
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return folder


def test_every_tensor_arrives_and_other_shards_stay_closed(tmp_path: Path) -> None:
    module = Small().train()
    load_module(module, save(tmp_path, tensors()), PREFIX)
    for name, value in tensors().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_a_module_on_the_meta_device_is_filled_in_the_asked_dtype(tmp_path: Path) -> None:
    module = Small()
    module.first.to("meta")
    load_module(module, save(tmp_path, tensors()), PREFIX, dtype=torch.bfloat16)
    assert module.first.weight.device.type == "cpu"
    assert module.first.weight.dtype == torch.bfloat16
    assert module.get_buffer("count").dtype == torch.int64
    assert torch.equal(module.get_buffer("table"), torch.arange(5.0))


def test_names_may_be_changed_or_left_out(tmp_path: Path) -> None:
    values = tensors()
    values["one.weight"] = values.pop("first.weight")
    values["inverse_frequency"] = torch.ones(2)

    def rename(name: str) -> str | None:
        return None if name == "inverse_frequency" else name.replace("one.", "first.")

    module = Small()
    load_module(module, save(tmp_path, values), PREFIX, rename=rename)
    assert torch.equal(module.first.weight, tensors()["first.weight"])


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({PREFIX + name: value for name, value in tensors().items()}, tmp_path / "model.safetensors")
    module = Small()
    load_module(module, tmp_path, PREFIX)
    assert torch.equal(module.second.weight, tensors()["second.weight"])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    values = tensors()
    del values["first.bias"]
    with pytest.raises(CheckpointError, match=r"missing below 'token2wav\.small\.': first\.bias"):
        load_module(Small(), save(tmp_path, values), PREFIX)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unexpected tensors below .*: third\.weight"):
        load_module(Small(), save(tmp_path, tensors() | {"third.weight": torch.ones(1)}), PREFIX)


def test_a_wrong_shape_names_tensor_file_and_both_shapes(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors() | {"second.weight": torch.ones(4, 2)})
    with pytest.raises(
        CheckpointError, match=r"b\.safetensors: .*second\.weight has shape \[4, 2\], expected \[2, 4\]"
    ):
        load_module(Small(), folder, PREFIX)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors())
    with pytest.raises(CheckpointError, match="are both named first"):
        load_module(Small(), folder, PREFIX, rename=lambda _name: "first")


@pytest.mark.parametrize("keep", [0, 4, 60, -4])
def test_a_truncated_shard_is_named(tmp_path: Path, keep: int) -> None:
    folder = save(tmp_path, tensors())
    shard = folder / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"b\.safetensors: cannot be read"):
        load_module(Small(), folder, PREFIX)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors())
    (folder / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read"):
        load_module(Small(), folder, PREFIX)


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, tensors())
    shard = load_file(folder / "b.safetensors")
    shard.pop(PREFIX + "second.weight")
    save_file(shard, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"second\.weight is listed in .* but not in the file"):
        load_module(Small(), folder, PREFIX)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path, tensors(), extra={PREFIX + "second.weight": file})
    with pytest.raises(CheckpointError, match="expected the name of a file here"):
        load_module(Small(), folder, PREFIX)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_module(Small(), tmp_path, PREFIX)


def test_a_failed_load_leaves_the_module_as_it_was(tmp_path: Path, tiny_checkpoint: Path) -> None:
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    folder = save(tmp_path, tensors() | {"second.weight": torch.ones(4, 2)})
    with pytest.raises(CheckpointError):
        load_module(module, folder, PREFIX)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_the_synthetic_index_covers_all_three_models(tiny_checkpoint: Path) -> None:
    parts = {name.split(".")[0] for name in weight_map(tiny_checkpoint)}
    assert parts == {"thinker", "talker", "token2wav"}
    assert len(set(weight_map(tiny_checkpoint).values())) > 2
