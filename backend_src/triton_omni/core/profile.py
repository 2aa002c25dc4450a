# SPDX-License-Identifier: Apache-2.0
"""Profiles: a deployment's changes to the settings of all models, in one file.

A profile is a file, or the name of one in `profiles/`. It has, by model, keys and values that override those of the
model's `stage.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from triton_omni.core.settings import SettingsError, SettingsT, check_settings, describe_validation, read_settings

FOLDER: Final = Path(__file__).parents[1] / "profiles"
"""Profiles that have a name."""


class Changes(BaseModel):
    """Keys and values of each model's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    thinker: dict[str, Any] = {}
    talker: dict[str, Any] = {}
    token2wav: dict[str, Any] = {}
    qwen2_5_omni_unary: dict[str, Any] = {}


@dataclass(frozen=True)
class Profile:
    """Settings that override those of each `stage.yaml`; by default none."""

    source: str = ""
    """Name or file, for messages."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By model; no model without a change."""

    def merge(self, model: str, path: Path) -> dict[str, Any]:
        """A model's `stage.yaml` with this profile's values in it, unchecked.

        Raises:
            SettingsError: the file cannot be read.
        """
        return merged(read_settings(path), self.changes.get(model, {}))

    def settings(self, model: str, path: Path, kind: type[SettingsT]) -> SettingsT:
        """The settings of a model.

        Args:
            model: a key of `changes`, or any other model.
            path: its `stage.yaml`.
            kind: of its settings.

        Raises:
            SettingsError: the file cannot be read, or both together hold an unknown key or an impossible value.
        """
        source = f"{self.source} over {path}" if model in self.changes else str(path)
        return check_settings(self.merge(model, path), kind, source)


NO_PROFILE: Final = Profile()


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old` with the values of `new`, key by key where `new` has a mapping."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        inner = before if isinstance(before, Mapping) else {}
        result[key] = merged(inner, value) if isinstance(value, Mapping) else value
    return result


def named_profiles() -> list[str]:
    """Names of the profiles in `FOLDER`."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_profile(source: str) -> Profile:
    """Read a profile.

    Args:
        source: one of `named_profiles`, or a file.

    Raises:
        SettingsError: it is neither, or names an unknown model. Keys of a model are checked with its `stage.yaml`.
    """
    names = named_profiles()
    path = FOLDER / f"{source}.yaml" if source in names else Path(source)
    if not path.is_file():
        raise SettingsError(f"{source!r} is neither a profile ({', '.join(names)}) nor a file")
    try:
        changes = Changes.model_validate(read_settings(path))
    except ValidationError as error:
        raise SettingsError(f"{source}: {describe_validation(error, Changes)}") from error
    return Profile(source, changes.model_dump(exclude_defaults=True))
