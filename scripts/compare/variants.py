# SPDX-License-Identifier: Apache-2.0
"""Variants of a comparison: a checkout's model repository under a profile, on one server or several, under loads."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, ValidationError

from triton_omni.core.profile import NO_PROFILE, Changes, Profile, load_profile, merged
from triton_omni.core.settings import SettingsError, describe_validation
from triton_omni.supervisor.served_repository import parse_placement

from .server import HERE, Checkout, parse_checkout

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class _Variant(Changes):
    """The JSON after a variant's name."""

    profile: str | None = None
    """What goes before is this variant's own."""
    checkout: Annotated[Checkout, BeforeValidator(parse_checkout)] = HERE
    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    gpus: Annotated[dict[str, int], BeforeValidator(parse_placement)] = Field(default_factory=dict)
    balancer: bool = False
    bench: Annotated[tuple[str, ...], BeforeValidator(shlex.split)] = ()


@dataclass(frozen=True)
class Variant:
    """One thing to measure."""

    name: str
    """Also of its folder in the output."""
    profile: Profile = NO_PROFILE
    """What differs from the models' `stage.yaml`."""
    checkout: Checkout = HERE
    """Whose code and models are served."""
    replicas: int = 1
    """Servers, each on a GPU of its own."""
    placement: Mapping[str, int] = field(default_factory=dict)
    """GPU of each stage of a single server; empty = the first that is free."""
    balancer: bool = False
    """Envoy goes before a single server, too."""
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
    """`NAME`, or `NAME={"profile": "small", "thinker": {...}, "talker": {...}, "token2wav": {...}, "replicas": N,
    "gpus": "token2wav=1", "checkout": "../before", "balancer": true,
    "bench": "--rate 2"}`.

    Raises:
        ValueError: naming what is wrong.
    """
    name, equals, changes = text.partition("=")
    _checked(name)
    try:
        found = _Variant.model_validate_json(changes) if equals else _Variant()
    except ValidationError as error:
        raise ValueError(f"{name}: {describe_validation(error, _Variant)}") from error
    if found.gpus and found.replicas > 1:
        raise ValueError(f"{name}: gpus: each of several replicas is on a GPU of its own; leave one of the two out")
    shape = (found.checkout, found.replicas, found.gpus, found.balancer)
    return Variant(name, _profile(name, found), *shape, found.bench)


def _profile(name: str, found: _Variant) -> Profile:
    try:
        base = load_profile(found.profile) if found.profile else NO_PROFILE
    except SettingsError as error:
        raise ValueError(f"{name}: profile: {error}") from error
    own = found.model_dump(include=set(Changes.model_fields), exclude_defaults=True)
    return Profile(name, merged(base.changes, own))
