# SPDX-License-Identifier: Apache-2.0
"""Variants of a comparison: the shipped model repository with some settings changed, on one server or several, under
loads.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from triton_omni.core.settings import (
    TalkerSettings,
    ThinkerSettings,
    Token2WavSettings,
    describe_validation,
    load_settings,
)
from triton_omni.supervisor.placement import parse_placement

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_KINDS: Final[Mapping[str, type[Any]]] = {
    "thinker": ThinkerSettings,
    "talker": TalkerSettings,
    "token2wav": Token2WavSettings,
}


class _Changes(BaseModel):
    """The JSON after a variant's name."""

    model_config = ConfigDict(extra="forbid")

    thinker: dict[str, Any] = {}
    talker: dict[str, Any] = {}
    token2wav: dict[str, Any] = {}
    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    gpus: Annotated[dict[str, int], BeforeValidator(parse_placement)] = {}
    bench: Annotated[tuple[str, ...], BeforeValidator(shlex.split)] = ()


@dataclass(frozen=True)
class Variant:
    """One thing to measure."""

    name: str
    """Also of its folder in the output."""
    settings: Mapping[str, Mapping[str, Any]]
    """By stage, what differs from its `stage.yaml`."""
    replicas: int = 1
    """Servers, each on a GPU of its own."""
    placement: Mapping[str, int] = field(default_factory=dict)
    """GPU of each stage of a single server; empty = the first that is free."""
    options: tuple[str, ...] = ()
    """Options of each load, after those that all variants have."""


@dataclass(frozen=True)
class Load:
    """One run of `triton-omni bench`."""

    name: str
    """Also of its report."""
    options: tuple[str, ...] = ()

    def beside(self, before: Iterable[str], behind: Iterable[str]) -> Load:
        """The same with more options; the last of two equal ones counts."""
        return Load(self.name, (*before, *self.options, *behind))


def parse_load(text: str) -> Load:
    """`NAME=OPTIONS`, as in `listeners=--concurrency 32 --listen`.

    Raises:
        ValueError: naming what is wrong.
    """
    name, _, options = text.partition("=")
    return Load(_checked(name), _split(name, options))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of letters, digits, '.', '_' and '-'")
    return name


def _split(name: str, options: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(options))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def parse_variant(text: str) -> Variant:
    """`NAME`, or `NAME={"thinker": {...}, "talker": {...}, "token2wav": {...}, "replicas": N, "gpus": "token2wav=1",
    "bench": "--rate 2"}`.

    Raises:
        ValueError: naming what is wrong.
    """
    name, equals, changes = text.partition("=")
    _checked(name)
    try:
        found = _Changes.model_validate_json(changes) if equals else _Changes()
    except ValidationError as error:
        raise ValueError(f"{name}: {describe_validation(error, _Changes)}") from error
    settings = found.model_dump(include=set(_KINDS), exclude_defaults=True)
    if found.gpus and found.replicas > 1:
        raise ValueError(f"{name}: gpus: each of several replicas is on a GPU of its own; leave one of the two out")
    return Variant(name, settings, found.replicas, found.gpus, found.bench)


def write_repository(source: Path, target: Path, variant: Variant) -> None:
    """Copy a model repository, with the variant's settings in it.

    Raises:
        SettingsError: a stage cannot run with them.
    """
    shutil.copytree(source, target)
    for stage, changed in variant.settings.items():
        path = target / stage / "1" / "stage.yaml"
        path.write_text(yaml.safe_dump(_merged(yaml.safe_load(path.read_text()), changed)))
        load_settings(path, _KINDS[stage])


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        merged[key] = _merged(merged.get(key) or {}, value) if isinstance(value, Mapping) else value
    return merged
