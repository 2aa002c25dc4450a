# SPDX-License-Identifier: Apache-2.0
"""Profiles: what a file may hold, how it goes before the settings of the models, and that `small` is one of all."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from triton_omni.core.profile import FOLDER, NO_PROFILE, Profile, load_profile, merged, named_profiles
from triton_omni.core.settings import SettingsError, TalkerSettings, ThinkerSettings
from triton_omni.supervisor.served_repository import stage_settings

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "model_repository"


@pytest.mark.parametrize(
    ("old", "new", "both"),
    [
        ({"a": 1, "b": 2}, {"b": 3}, {"a": 1, "b": 3}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": None}, {"a": {"y": 3}}, {"a": {"y": 3}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"x": 1}}, {"a": None}, {"a": None}),
        ({}, {"a": {"x": {"z": 1}}}, {"a": {"x": {"z": 1}}}),
    ],
)
def test_values_go_before_others_key_by_key(
    old: Mapping[str, Any], new: Mapping[str, Any], both: Mapping[str, Any]
) -> None:
    before = repr(old)
    assert merged(old, new) == both
    assert repr(old) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tinker: {}", "tinker: unknown key (did you mean thinker?)"),
        ("talker: 3", "talker: expected a mapping, found 3"),
        ("talker:", "talker: expected a mapping, found None"),
        ("talker: {1: 2}", "talker.1.[key]: expected a string, found 1"),
        ("- talker", "expected a mapping of settings, found list"),
        ("talker: {a: 1, a: 2}", "cannot be read: 'a' is given twice (line 1, column 16)"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load_profile(str(file))
    assert str(refused.value) == f"{file}: {sentence}"


@pytest.mark.parametrize("text", ["", "talker: {}", "# nothing"])
def test_a_file_may_change_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    assert load_profile(str(file)) == Profile(str(file))
    assert stage_settings(REPOSITORY, load_profile(str(file))) == stage_settings(REPOSITORY, NO_PROFILE)


@pytest.mark.parametrize("source", ["smal", "small.yaml", "../small", ""])
def test_a_name_of_no_profile_is_refused(source: str) -> None:
    with pytest.raises(SettingsError, match=r"is neither a profile \(small\) nor a file$"):
        load_profile(source)


@pytest.mark.parametrize("name", named_profiles())
def test_every_profile_is_valid_for_all_models_and_changes_all_that_it_names(name: str) -> None:
    profile = load_profile(name)
    stages, plain = stage_settings(REPOSITORY, profile), stage_settings(REPOSITORY)
    for model, changes in profile.changes.items():
        found, shipped = (getattr(each, model).model_dump(mode="json") for each in (stages, plain))
        assert merged(shipped, changes) == found
        assert unchanged(changes, shipped) == []


def unchanged(changes: Mapping[str, Any], shipped: Mapping[str, Any], prefix: str = "") -> list[str]:
    same = []
    for key, value in changes.items():
        if isinstance(value, Mapping):
            same += unchanged(value, shipped[key], f"{prefix}{key}.")
        elif value == shipped[key]:
            same.append(prefix + key)
    return same


def test_small_has_eight_sessions_everywhere() -> None:
    stages = stage_settings(REPOSITORY, load_profile("small"))
    places = [stages.thinker.max_sessions, stages.talker.max_sessions, stages.token2wav.max_streams]
    places += [stages.thinker.engine.max_num_seqs, stages.talker.engine.max_num_seqs]
    assert places == [8] * 5


def test_small_takes_media_of_the_lengths_that_its_limits_allow() -> None:
    """A prompt holds the longest sound, and the largest video with its sound, each with 100 tokens of text."""
    stages = stage_settings(REPOSITORY, load_profile("small"))
    limits, prompt = stages.thinker.limits, stages.thinker.engine.max_model_len - 100
    assert 25 * limits.max_audio_seconds <= prompt
    # Two frames of 28 x 28 pixels are a token, and no frame is scaled under 128 tokens' pixels.
    assert limits.max_video_pixels / limits.max_video_frames >= 1.05 * 128 * 28 * 28
    assert limits.max_video_pixels / (2 * 28 * 28) + 25 * limits.max_video_seconds <= prompt


def test_small_speaks_the_longest_prompt() -> None:
    stages = stage_settings(REPOSITORY, load_profile("small"))
    assert isinstance(stages.thinker, ThinkerSettings)
    assert isinstance(stages.talker, TalkerSettings)
    prompt = stages.thinker.engine.max_model_len - 1
    assert stages.talker.engine.max_model_len - prompt - 2 >= 4000


def test_the_profiles_are_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["setuptools"]["package-data"]["triton_omni"]
    package = ROOT / "backend_src" / "triton_omni"
    assert {*FOLDER.iterdir()} == {path for pattern in packaged for path in package.glob(pattern)} & {*FOLDER.iterdir()}
