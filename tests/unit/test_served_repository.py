# SPDX-License-Identifier: Apache-2.0
"""The public models' configurations describe checkpoint and settings; the repository that holds them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_omni.checkpoint.config import load_config
from triton_omni.core.profile import Profile
from triton_omni.core.settings import RequestLimits, TalkerSettings, ThinkerSettings, load_settings
from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.model_folder import checkpoint_name
from triton_omni.supervisor.served_repository import (
    STREAMING_MODEL,
    UNARY_MODEL,
    served_facts,
    served_repository,
    stage_settings,
)
from triton_omni.supervisor.start import memory_pool_bytes

PROJECT = Path(__file__).parents[2] / "model_repository"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the project's model repository."""
    return Path(shutil.copytree(PROJECT, tmp_path / "repository"))


def change(repository: Path, model: str, settings: Mapping[str, Any]) -> None:
    """Add settings at the top of a model's `stage.yaml`."""
    path = repository / model / "1" / "stage.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | dict(settings)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def config_of(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def facts_of(repository: Path, checkpoint: Path, model: str) -> dict[str, Any]:
    return served_facts(stage_settings(repository), load_config(checkpoint), checkpoint, model)


def test_public_models_tell_and_all_else_is_the_original(repository: Path, tiny_checkpoint: Path) -> None:
    change(repository, UNARY_MODEL, {"max_requests": 7})
    with served_repository(repository, tiny_checkpoint) as served:
        assert names(served) == names(repository)
        for stage in STAGES:
            assert (served / stage / "1").resolve() == repository / stage / "1"
            (group,) = config_of(served / stage).instance_group
            assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)
        for model in (STREAMING_MODEL, UNARY_MODEL):
            assert (served / model / "1").resolve() == repository / model / "1"
            config, original = config_of(served / model), config_of(repository / model)
            told = {name: json.loads(value.string_value) for name, value in config.parameters.items()}
            assert told == facts_of(repository, tiny_checkpoint, model)
            assert told["voices"] == ["Chelsie", "Ethan"]
            assert told["sample_rate"] == 24000
            assert told["checkpoint"] == tiny_checkpoint.name
            assert told["limits"]["max_sessions"] == (7 if model == UNARY_MODEL else 64)
            config.parameters.clear()
            config.ClearField("instance_group")
            assert config == original
    assert not served.exists()
    assert repository.exists()


def test_limits_are_the_lowest_of_all_that_have_a_say(repository: Path, tiny_checkpoint: Path) -> None:
    def limits() -> dict[str, Any]:
        return dict(facts_of(repository, tiny_checkpoint, STREAMING_MODEL)["limits"])

    shipped = limits()
    # The checkpoint's feature extractor takes no more than this.
    assert shipped["max_audio_seconds"] == 30 < RequestLimits().max_audio_seconds
    assert set(RequestLimits.model_fields) < set(shipped)
    assert {key: shipped[key] for key in ("max_prompt_tokens", "max_reply_tokens", "max_codes", "max_sessions")} == {
        "max_prompt_tokens": 32765,
        "max_reply_tokens": 1024,
        "max_codes": 4096,
        "max_sessions": 64,
    }
    change(repository, "thinker", {"limits": {"max_audio_seconds": 2}, "max_new_tokens": 40000, "max_sessions": 9})
    change(repository, "talker", {"engine": {"max_model_len": 2000}, "max_codes": 800, "max_sessions": 8})
    assert limits()["max_audio_seconds"] == 2
    assert limits()["max_prompt_tokens"] == 1997
    assert limits()["max_reply_tokens"] == 32767
    assert (limits()["max_codes"], limits()["max_sessions"]) == (800, 8)
    change(repository, "token2wav", {"max_codes": 800, "max_streams": 7})
    assert (limits()["max_codes"], limits()["max_sessions"]) == (800, 7)


def test_a_repository_of_other_models_is_served_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with served_repository(tmp_path, tmp_path / "nowhere") as served:
        assert served == tmp_path


def test_settings_that_cannot_be_used_are_told_by_name(repository: Path, tiny_checkpoint: Path) -> None:
    change(repository, "talker", {"max_code": 5})
    with (
        pytest.raises(ServerError, match=r"talker/1/stage\.yaml: max_code: unknown key"),
        served_repository(repository, tiny_checkpoint),
    ):
        pass


def test_speech_that_token2wav_cannot_take_is_refused_at_the_start(repository: Path, tiny_checkpoint: Path) -> None:
    change(repository, "token2wav", {"max_codes": 700})
    change(repository, "talker", {"max_codes": 701})
    with (
        pytest.raises(ServerError, match=r"^max_codes of the talker: 701 must be at most token2wav's .*, 700"),
        served_repository(repository, tiny_checkpoint),
    ):
        pass
    change(repository, "talker", {"max_codes": 700})
    with served_repository(repository, tiny_checkpoint):
        pass


def test_a_checkpoint_that_cannot_be_used_is_told_by_name(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"config\.json"), served_repository(repository, tmp_path):
        pass


def test_voices_that_cannot_be_read_are_not_told(repository: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(
        shutil.copytree(tiny_checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors", "*.pt"))
    )
    assert set(facts_of(repository, checkpoint, STREAMING_MODEL)) == {"limits", "sample_rate", "checkpoint"}


def test_a_folder_that_cannot_be_written_is_told(
    repository: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", full)
    with (
        pytest.raises(ServerError, match=r"cannot be laid out in .*: No space left on device"),
        served_repository(repository, tiny_checkpoint),
    ):
        pass


def test_a_profile_goes_before_the_files_of_the_models_that_it_names(repository: Path, tiny_checkpoint: Path) -> None:
    change(repository, "thinker", {"max_sessions": 9, "max_new_tokens": 33})
    profile = Profile("mine", {"thinker": {"max_sessions": 3, "engine": {"max_num_seqs": 2}}})
    with served_repository(repository, tiny_checkpoint, {"thinker": 1}, profile) as served:
        assert names(served) == names(repository)
        files = [names(folder / "thinker" / "1") for folder in (served, repository)]
        assert files[0] == files[1]
        found = load_settings(served / "thinker" / "1" / "stage.yaml", ThinkerSettings)
        assert (found.max_sessions, found.max_new_tokens, found.engine.max_num_seqs) == (3, 33, 2)
        assert found.engine.max_model_len == ThinkerSettings().engine.max_model_len
        assert (served / "thinker" / "1" / "model.py").resolve() == repository / "thinker" / "1" / "model.py"
        assert (served / "talker" / "1").resolve() == repository / "talker" / "1"
        assert [list(group.gpus) for group in config_of(served / "thinker").instance_group] == [[1]]
        (limits,) = (
            json.loads(parameter.string_value)
            for name, parameter in config_of(served / STREAMING_MODEL).parameters.items()
            if name == "limits"
        )
        assert limits["max_sessions"] == 3
        assert memory_pool_bytes(served, tiny_checkpoint) < memory_pool_bytes(repository, tiny_checkpoint)
    assert not served.exists()
    assert load_settings(repository / "thinker" / "1" / "stage.yaml", ThinkerSettings).max_sessions == 9


def test_a_profile_changes_models_without_those_that_are_public(repository: Path, tiny_checkpoint: Path) -> None:
    for model in (STREAMING_MODEL, UNARY_MODEL):
        shutil.rmtree(repository / model)
    profile = Profile("mine", {"talker": {"max_sessions": 3}})
    with served_repository(repository, tiny_checkpoint, None, profile) as served:
        assert load_settings(served / "talker" / "1" / "stage.yaml", TalkerSettings).max_sessions == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"talker": {"max_session": 3}}, r"^mine over .*talker/1/stage\.yaml: max_session: unknown key \(did you mean"),
        ({"talker": {"max_sessions": 0}}, r"^mine over .*talker/1/stage\.yaml: max_sessions: 0 must be greater than 0"),
        (
            {"talker": {"max_codes": 9}, "token2wav": {"max_codes": 8}},
            r"^max_codes of the talker: 9 must be at most .* 8",
        ),
        ({UNARY_MODEL: {"max_requests": 3}}, rf"^mine: {UNARY_MODEL}: .*repository has no such model$"),
    ],
)
def test_a_profile_that_cannot_be_used_is_told_by_file_and_key(
    repository: Path, tiny_checkpoint: Path, changes: Mapping[str, Any], sentence: str
) -> None:
    shutil.rmtree(repository / UNARY_MODEL)
    profile = Profile("mine", changes)
    with pytest.raises(ServerError, match=sentence), served_repository(repository, tiny_checkpoint, None, profile):
        pass


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/models/Qwen2.5-Omni-7B", "Qwen2.5-Omni-7B"),
        ("/hub/models--Qwen--Qwen2.5-Omni-3B/snapshots/0a1b", "Qwen/Qwen2.5-Omni-3B"),
        ("/work/snapshots/0a1b", "0a1b"),
    ],
)
def test_a_checkpoint_is_told_by_its_name_and_not_by_its_path(folder: str, name: str) -> None:
    assert checkpoint_name(Path(folder)) == name


def test_telling_costs_no_import_of_torch() -> None:
    code = "import sys, triton_omni.supervisor.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_stage_is_one_instance_on_its_own_gpu(repository: Path, tiny_checkpoint: Path) -> None:
    change(repository, "talker", {"device": "cpu"})
    kinds = model_config_pb2.ModelInstanceGroup
    with served_repository(repository, tiny_checkpoint, {"thinker": 0, "talker": 1, "token2wav": 2}) as served:
        groups = {
            model: [(group.count, group.kind, list(group.gpus)) for group in config_of(served / model).instance_group]
            for model in (*STAGES, UNARY_MODEL, STREAMING_MODEL)
        }
    assert groups == {
        "thinker": [(1, kinds.KIND_GPU, [0])],
        "talker": [(1, kinds.KIND_CPU, [])],
        "token2wav": [(1, kinds.KIND_GPU, [2])],
        UNARY_MODEL: [(1, kinds.KIND_CPU, [])],
        STREAMING_MODEL: [],
    }


def test_instances_that_an_operator_has_chosen_stay(repository: Path, tiny_checkpoint: Path) -> None:
    config = repository / "token2wav" / "config.pbtxt"
    config.write_text(config.read_text() + "\ninstance_group [ { kind: KIND_GPU gpus: [ 3 ] } ]\n")
    with served_repository(repository, tiny_checkpoint, dict.fromkeys(STAGES, 0)) as served:
        (group,) = config_of(served / "token2wav").instance_group
    assert list(group.gpus) == [3]
