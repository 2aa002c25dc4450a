# SPDX-License-Identifier: Apache-2.0
"""The model repository for tritonserver: the project's own, changed for this start.

Triton hands a model's configuration to every client that asks, over HTTP and gRPC. Each start writes facts of the
checkpoint and of the stages' settings into a copy of the public models' `config.pbtxt`, as JSON parameters. The copies
of the stages' files name each stage's GPU: by default Triton starts an instance of every Python model on every GPU, but
a stage is one process. A model that a profile changes gets a `stage.yaml` of its own. Everything else in the copy is a
link to the original.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.text_encoding import CEscape  # type: ignore[import-untyped]

from triton_omni.checkpoint.config import OmniConfig, load_config
from triton_omni.checkpoint.reading import CheckpointError
from triton_omni.checkpoint.voice_names import voice_names
from triton_omni.core.profile import NO_PROFILE, Profile
from triton_omni.core.settings import (
    RequestLimits,
    SettingsError,
    SettingsT,
    TalkerSettings,
    ThinkerSettings,
    Token2WavSettings,
    UnarySettings,
    load_settings,
)
from triton_omni.session.ledger_table import STAGES
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.model_folder import checkpoint_name

# --- placement --------------------------------------------------------------------------------------------------------


def parse_placement(text: str) -> dict[str, int]:
    """`thinker=0,token2wav=1` as numbers by stage; a stage that is not named is on GPU 0.

    Raises:
        ValueError: the message names the fault.
    """
    placement: dict[str, int] = dict.fromkeys(STAGES, 0)
    named = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        stage, _, number = part.partition("=")
        if stage not in placement:
            raise ValueError(f"'{part}' is not STAGE=N; the stages are {', '.join(STAGES)}")
        if stage in named:
            raise ValueError(f"{stage} is named twice")
        if not number.isascii() or not number.isdecimal():
            raise ValueError(f"{stage}: '{number}' is no number of a GPU")
        named.add(stage)
        placement[stage] = int(number)
    return placement


def check_placement(placement: Mapping[str, int], gpus: int) -> None:
    """Check that every stage's GPU exists; without any GPU only 0 can be chosen.

    Raises:
        ServerError: the message names the stage, its number and the number of GPUs.
    """
    for stage, number in placement.items():
        if number >= max(gpus, 1):
            seen = f"{gpus} of them, 0 to {gpus - 1}" if gpus else "none"
            raise ServerError(f"{stage} was placed on GPU {number}, but this process sees {seen}")


def instance_group(gpu: int | None) -> str:
    """An entry of a `config.pbtxt`: one instance, on that GPU or on the CPU."""
    where = "kind: KIND_CPU" if gpu is None else f"kind: KIND_GPU gpus: [ {gpu} ]"
    return f"instance_group [ {{ count: 1 {where} }} ]\n"


# --- the repository ---------------------------------------------------------------------------------------------------


STREAMING_MODEL = "qwen2_5_omni"
UNARY_MODEL = "qwen2_5_omni_unary"
CONFIG_FILE = "config.pbtxt"
VERSION = "1"
SETTINGS_FILE = "stage.yaml"
_INSTANCES = re.compile(r"^\s*instance_group\b", re.MULTILINE)


@dataclass(frozen=True)
class StageSettings:
    """Settings of all stages of one repository, and of its unary model if it has one.

    Raises:
        SettingsError: token2wav could not take a reply that the talker may speak.
    """

    thinker: ThinkerSettings
    talker: TalkerSettings
    token2wav: Token2WavSettings
    unary: UnarySettings | None

    def __post_init__(self) -> None:
        spoken, taken = self.talker.max_codes, self.token2wav.max_codes
        if spoken > taken:
            raise SettingsError(
                f"max_codes of the talker: {spoken} must be at most token2wav's max_codes, {taken}: "
                "a longer reply would fail where it is spoken; lower it, or raise token2wav's"
            )


@contextmanager
def served_repository(
    repository: Path,
    checkpoint: Path,
    placement: Mapping[str, int] | None = None,
    profile: Profile = NO_PROFILE,
) -> Iterator[Path]:
    """A model repository like `repository` in a folder of its own, which is removed at the end.

    Its public models' configurations have the parameters `voices`, `limits`, `sample_rate` and `checkpoint`. A
    repository without the public models is given back as it is.

    Args:
        repository: the original.
        checkpoint: the checkpoint's folder.
        placement: number of each stage's GPU; None = there is no GPU. A stage whose settings say `device: cpu` is on
            none, and one whose `config.pbtxt` has an `instance_group` keeps it.
        profile: settings that override those of the stages' files.

    Raises:
        ServerError: a `stage.yaml`, the profile or the checkpoint's configuration cannot be used, two stages' settings
            do not go together, or the folder cannot be written.
    """
    public = [name for name in (STREAMING_MODEL, UNARY_MODEL) if (repository / name / CONFIG_FILE).is_file()]
    if not public and not profile.changes:
        yield repository
        return
    try:
        stages, config = stage_settings(repository, profile), load_config(checkpoint)
        added = {name: _parameters(served_facts(stages, config, checkpoint, name)) for name in public}
        for name, group in _instances(repository, stages, placement or {}).items():
            added[name] = added.get(name, "") + group
    except (SettingsError, CheckpointError) as error:
        raise ServerError(str(error)) from error
    with temporary_folder() as folder:
        _compose(repository.resolve(), Path(folder), added, profile)
        yield Path(folder)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder for one server; raise `ServerError` if none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="triton_omni_")
    except OSError as error:
        where = os.environ.get("TMPDIR", "/tmp")
        raise ServerError(
            f"the model repository cannot be laid out in {where} ({error.strerror}); see TMPDIR"
        ) from error


def stage_settings(repository: Path, profile: Profile = NO_PROFILE) -> StageSettings:
    """The settings of all models of a repository under a profile.

    Raises:
        SettingsError: a `stage.yaml` or the profile cannot be used, or two models' settings do not go together.
    """
    for model in profile.changes:
        if not (repository / model).is_dir():
            raise SettingsError(f"{profile.source}: {model}: {repository} has no such model")

    def of(model: str, kind: type[SettingsT]) -> SettingsT:
        return profile.settings(model, _settings_file(repository, model), kind)

    return StageSettings(
        of("thinker", ThinkerSettings),
        of("talker", TalkerSettings),
        of("token2wav", Token2WavSettings),
        of(UNARY_MODEL, UnarySettings) if (repository / UNARY_MODEL).is_dir() else None,
    )


def thinker_limits(repository: Path) -> RequestLimits:
    """Return the request limits of a repository's thinker; the defaults if there is no thinker.

    Raises:
        ServerError: the thinker's `stage.yaml` cannot be used.
    """
    if not (repository / "thinker").is_dir():
        return RequestLimits()
    try:
        return load_settings(_settings_file(repository, "thinker"), ThinkerSettings).limits
    except SettingsError as error:
        raise ServerError(str(error)) from error


def served_facts(stages: StageSettings, config: OmniConfig, checkpoint: Path, model: str) -> dict[str, Any]:
    """Return a public model's configuration parameters by name. `config` is that of `checkpoint`."""
    limits = effective_limits(stages, config)
    if model == UNARY_MODEL and stages.unary is not None:
        limits["max_sessions"] = min(limits["max_sessions"], stages.unary.max_requests)
    facts = {"limits": limits, "sample_rate": config.codec.sample_rate, "checkpoint": checkpoint_name(checkpoint)}
    try:
        return {"voices": list(voice_names(checkpoint)), **facts}
    except CheckpointError:
        # The stages report what is wrong with the file, since they need more of it than its names.
        return facts


def effective_limits(stages: StageSettings, config: OmniConfig) -> dict[str, Any]:
    """Return the limits of a request, by the names of the settings: the lowest if several stages limit it.

    Besides those of `RequestLimits`: `max_prompt_tokens` (media included), `max_reply_tokens`, `max_codes` (of speech,
    50 a second) and `max_sessions` (requests at once). A reply may use the part of `engine.max_model_len` that its
    prompt leaves, so prompt and reply never reach their maxima together. If the talker bounds the prompt, a silent
    reply may have a longer one.
    """
    thinker, talker, token2wav = stages.thinker, stages.talker, stages.token2wav
    tokens = thinker.engine.max_model_len - 1
    limits = thinker.limits.model_dump(mode="json")
    limits["max_audio_seconds"] = min(thinker.limits.max_audio_seconds, config.max_audio_seconds)
    return limits | {
        # The talker's sequence has two rows after the prompt's, and a code.
        "max_prompt_tokens": min(tokens, talker.engine.max_model_len - 3),
        "max_reply_tokens": min(thinker.max_new_tokens, tokens),
        "max_codes": min(talker.max_codes, config.talker.sampling.max_new_tokens),
        "max_sessions": min(thinker.max_sessions, talker.max_sessions, token2wav.max_streams),
    }


def _settings_file(repository: Path, model: str) -> Path:
    return repository / model / VERSION / SETTINGS_FILE


def _instances(repository: Path, stages: StageSettings, placement: Mapping[str, int]) -> dict[str, str]:
    """Return the instance settings of each Python model whose original has none."""
    devices = {
        "thinker": stages.thinker.device,
        "talker": stages.talker.device,
        "token2wav": stages.token2wav.device,
        UNARY_MODEL: "cpu",
    }
    return {
        model: instance_group(None if device == "cpu" else placement.get(model))
        for model, device in devices.items()
        if (repository / model / CONFIG_FILE).is_file() and not _INSTANCES.search(_config(repository / model))
    }


def _config(model: Path) -> str:
    return (model / CONFIG_FILE).read_text(encoding="utf-8")


def _compose(repository: Path, target: Path, added: Mapping[str, str], profile: Profile) -> None:
    try:
        for source in repository.iterdir():
            model = target / source.name
            if source.name in added or source.name in profile.changes:
                _link_all(source, model, but=CONFIG_FILE)
                text = f"{_config(source)}\n{added.get(source.name, '')}"
                (model / CONFIG_FILE).write_text(text, encoding="utf-8")
            else:
                model.symlink_to(source)
            if source.name in profile.changes:
                _change(source, model / VERSION, profile)
    except OSError as error:
        raise ServerError(f"the model repository cannot be laid out in {target}: {error.strerror}") from error


def _change(source: Path, version: Path, profile: Profile) -> None:
    """Replace the link to a model's version by a folder whose `stage.yaml` has the profile's values."""
    version.unlink()
    _link_all(source / VERSION, version, but=SETTINGS_FILE)
    text = yaml.safe_dump(profile.merge(source.name, source / VERSION / SETTINGS_FILE))
    (version / SETTINGS_FILE).write_text(text, encoding="utf-8")


def _link_all(source: Path, target: Path, *, but: str) -> None:
    target.mkdir()
    for part in source.iterdir():
        if part.name != but:
            (target / part.name).symlink_to(part)


def _parameters(facts: Mapping[str, Any]) -> str:
    """Write parameters as entries of a `config.pbtxt`."""
    escaped = {name: CEscape(json.dumps(value), as_utf8=False) for name, value in facts.items()}
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}\n' for name, text in escaped.items()
    )
