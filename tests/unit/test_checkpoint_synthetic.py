# SPDX-License-Identifier: Apache-2.0
"""The synthetic checkpoint as files: deterministic, complete, made once, with the published tokenizer's ids."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from processes import UNMEASURED
from triton_omni.checkpoint import synthetic
from triton_omni.checkpoint.synthetic import ensure_checkpoint, make_checkpoint
from triton_omni.checkpoint.synthetic_config import omni_config, vocabulary
from triton_omni.checkpoint.synthetic_text import build_tokenizer
from triton_omni.checkpoint.synthetic_weights import CONSTANT, WeightRules
from triton_omni.checkpoint.weights import weight_map


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_checkpoint(tmp_path / "again", "tiny")
    assert digests(tmp_path / "again") == digests(tiny_checkpoint)


def test_another_seed_changes_weights_and_speakers_alone(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_checkpoint(tmp_path / "other", "tiny", seed=1)
    first, other = digests(tiny_checkpoint), digests(tmp_path / "other")
    assert first.keys() == other.keys()
    differing = {name for name in first if first[name] != other[name]}
    assert differing == {name for name in first if name.endswith(".safetensors")} | {"spk_dict.pt"}


def test_dtype_is_that_of_thinker_and_talker(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "tiny", dtype=torch.bfloat16)
    weights = weight_map(tmp_path)
    tensors = {file: load_file(tmp_path / file) for file in set(weights.values())}
    for name, file in weights.items():
        expected = torch.float32 if name.startswith("token2wav.") else torch.bfloat16
        assert tensors[file][name].dtype == expected, name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["talker_config"]["dtype"] == "bfloat16"
    assert config["token2wav_config"]["dit_config"]["dtype"] == "float32"


def test_shards_hold_what_the_index_says(tiny_checkpoint: Path) -> None:
    index = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())
    total = 0
    for file in set(index["weight_map"].values()):
        shard = load_file(tiny_checkpoint / file)
        assert set(shard) == {name for name, there in index["weight_map"].items() if there == file}
        total += sum(tensor.nbytes for tensor in shard.values())
    assert total == index["metadata"]["total_size"]


def test_a_tensor_does_not_depend_on_the_order_in_which_it_is_drawn() -> None:
    rules = WeightRules(omni_config("tiny"), vocabulary("tiny"), seed=0, replies=(24, 120))
    cpu = torch.device("cpu")
    first = rules.draw("talker.codec_head.weight", (256, 96), cpu)
    rules.draw("thinker.lm_head.weight", (320, 64), cpu)
    assert torch.equal(first, rules.draw("talker.codec_head.weight", (256, 96), cpu))


def test_forbidden_rows_read_the_constant_channel_alone() -> None:
    vocab = vocabulary("tiny")
    rules = WeightRules(omni_config("tiny"), vocab, seed=0, replies=(24, 120))
    head = rules.draw("talker.codec_head.weight", (vocab.codec_size, 96), torch.device("cpu"))
    stops = {vocab.codec_pad, vocab.codec_eos}
    for code in set(range(vocab.codec_embeds + 1, vocab.codec_size)) - stops:
        row = head[code].clone()
        assert row[CONSTANT] < -50
        row[CONSTANT] = 0
        assert not row.any(), code


def test_an_unknown_kind_of_tensor_is_refused() -> None:
    rules = WeightRules(omni_config("tiny"), vocabulary("tiny"), seed=0, replies=(24, 120))
    with pytest.raises(LookupError, match="no initialisation rule for thinker"):
        rules.draw("thinker.unheard_of", (2,), torch.device("cpu"))


def test_published_sizes_have_the_published_token_ids() -> None:
    tokenizer = build_tokenizer(vocabulary("7b"))
    published = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|AUDIO|>": 151646}
    published |= {"<|audio_bos|>": 151647, "<|audio_eos|>": 151648, "<|vision_bos|>": 151652, "<|IMAGE|>": 151655}
    published |= {"<|vision_eos|>": 151653, "<|VIDEO|>": 151656}
    assert {token: tokenizer.token_to_id(token) for token in published} == published
    assert tokenizer.get_vocab_size() == 151657


@pytest.mark.parametrize("text", ["Hello there, how are you?", "naïve Übermut 你好 🎧\n\ttabs", "<|im_start|>user\nhi"])
def test_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer(vocabulary("tiny"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_processes_that_ask_at_once_get_one_whole_checkpoint(
    tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache" / "tiny"
    for name, value in UNMEASURED.items():
        monkeypatch.setenv(name, value)
    # A new interpreter imports for both: a fork of this one could inherit a lock of torch's thread pool.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([synthetic.__name__, "reference.hf"])
    workers = [context.Process(target=ensure_checkpoint, kwargs={"path": path}) for _ in range(2)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(300)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    assert digests(path) == digests(tiny_checkpoint)
    assert list(path.parent.iterdir()) == [path]


def test_an_existing_checkpoint_is_left_alone(tmp_path: Path) -> None:
    assert ensure_checkpoint(path=tmp_path) == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(synthetic, "make_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_checkpoint(path=tmp_path / "cache" / "tiny")
    assert not list((tmp_path / "cache").iterdir())


def test_command_line_writes_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic.main(["--size", "tiny", "--out", str(tmp_path / "made"), "--seed", "3", "--device", "cpu"])
    output = capsys.readouterr()
    assert output.out.strip() == str(tmp_path / "made")
    assert "model-00001-of-" in output.err
    assert (tmp_path / "made" / "config.json").is_file()


def test_command_line_without_a_folder_makes_the_cached_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(synthetic, "default_checkpoint_path", lambda size: tmp_path / f"cache-{size}")
    monkeypatch.setattr(synthetic, "make_checkpoint", lambda folder, size, **_: (folder / size).touch())
    synthetic.main(["--size", "7b"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "cache-7b")
    assert (tmp_path / "cache-7b" / "7b").exists()
