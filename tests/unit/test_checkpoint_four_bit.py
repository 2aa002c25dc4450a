# SPDX-License-Identifier: Apache-2.0
"""`quantization_config` of published and other 4-bit checkpoints; synthetic ones as files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open

from triton_omni.checkpoint.config import load_config, read_four_bit
from triton_omni.checkpoint.facts import FourBit
from triton_omni.checkpoint.reading import CheckpointError, Section
from triton_omni.checkpoint.synthetic import default_checkpoint_path, ensure_checkpoint, planned_tensors
from triton_omni.checkpoint.synthetic_config import NAMES, split_name
from triton_omni.checkpoint.synthetic_weights import quantization_config
from triton_omni.checkpoint.weights import weight_map

AWQ, GPTQ = (quantization_config(FourBit(method, 128)) for method in ("awq", "gptq"))


def read(config: Any) -> FourBit | None:
    return read_four_bit(Section("config.json", {"quantization_config": config}))


def test_published_configurations_are_read() -> None:
    assert (read(AWQ), read(GPTQ)) == (FourBit("awq", 128), FourBit("gptq", 128))
    assert read(AWQ | {"modules_to_not_convert": None, "version": "GEMM"}) == FourBit("awq", 128)
    assert read(GPTQ | {"dynamic": {}}) == FourBit("gptq", 128)
    assert read(None) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], r"config\.json\.quantization_config: expected an object"),
        ({"quant_method": "fp8"}, r"quant_method: 'fp8' is not served: awq and gptq are served"),
        (AWQ | {"bits": 8}, r"quantization_config\.bits: 8 is not served: 4 is served"),
        (AWQ | {"group_size": 96}, r"group_size: 96 is not served: 32, 64, 128 are served"),
        (AWQ | {"group_size": -1}, r"group_size: -1 is outside"),
        (AWQ | {"zero_point": False}, r"zero_point: False is not served: true is served"),
        (AWQ | {"version": "gemv"}, r"version: 'gemv' is not served: gemm is served"),
        (AWQ | {"lm_head": True}, r"lm_head: True is not served: false is served"),
        (GPTQ | {"desc_act": True}, r"desc_act: True is not served: vLLM has no kernel for it; take an AWQ checkpoint"),
        (GPTQ | {"sym": False}, r"sym: False is not served: true is served"),
        (GPTQ | {"dynamic": {"-:.*mlp.*": {}}}, r"dynamic: .* all decoder layers must be quantised alike"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_files_have_the_published_form(method: str) -> None:
    """The decoder's matrices alone are packed, all else of thinker and talker is float16 and token2wav float32."""
    folder = ensure_checkpoint(f"tiny-{method}")
    assert load_config(folder).four_bit == FourBit(method, 32)  # type: ignore[arg-type]
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == method
    assert config["thinker_config"]["dtype"] == "float16"
    words = {"qweight", "qzeros"} | ({"g_idx"} if method == "gptq" else set())
    for name, file in weight_map(folder).items():
        with safe_open(folder / file, "pt") as shard:
            dtype = shard.get_tensor(name).dtype
        stem, _, end = name.rpartition(".")
        if end in words | {"scales"}:
            assert stem.startswith("thinker.model.layers.")
            assert stem.endswith("_proj")
        expected = torch.int32 if end in words else torch.float32 if name.startswith("token2wav.") else torch.float16
        assert dtype == expected, name
        assert not (end == "weight" and name.startswith("thinker.model.layers.") and "proj" in name), name


@pytest.mark.parametrize("name", ["tiny", "tiny-awq", "tiny-gptq"])
def test_what_is_planned_is_what_is_written(name: str) -> None:
    folder = ensure_checkpoint(name)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    half = sum(tensor.nbytes for tensor in planned_tensors(name))
    # The plain one is written in float32, token2wav apart.
    twice = sum(tensor.nbytes for tensor in planned_tensors(name) if not tensor.name.startswith("token2wav."))
    assert index["metadata"]["total_size"] == half + (twice if name == "tiny" else 0)


def test_files_of_3b_are_as_large_as_those_of_its_authors() -> None:
    """7.3 to 7.5 GiB, by the listing of AutoAWQ's pull request 759; token2wav is then in float32."""
    assert 7.3 < sum(tensor.nbytes for tensor in planned_tensors("3b-awq")) / 2**30 <= 7.5


def test_names_say_size_and_method() -> None:
    assert [split_name(name) for name in NAMES[:4]] == [
        ("tiny", None),
        ("tiny", FourBit("awq", 32)),
        ("tiny", FourBit("gptq", 32)),
        ("3b", None),
    ]
    assert split_name("7b-gptq") == ("7b", FourBit("gptq", 128))
    with pytest.raises(ValueError, match="'7b-int8' is none of tiny, tiny-awq"):
        split_name("7b-int8")


def test_the_folder_of_one_name_is_no_other_s() -> None:
    assert len({default_checkpoint_path(name) for name in NAMES}) == len(NAMES)
