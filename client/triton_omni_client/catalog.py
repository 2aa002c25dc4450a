# SPDX-License-Identifier: Apache-2.0
"""Models that a server serves, from its repository index and its models' configurations.

Pure: reads the JSON form of Triton's answers, which gRPC and HTTP share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]

from .errors import Internal
from .messages import INPUTS, MODEL, OUTPUTS, UNARY_MODEL
from .parsing import parsed

MAX_MODELS = 100
"""Most models of a server that are looked at; it has six of its own."""
KNOWN: tuple[Mapping[str, Any], ...] = tuple({"name": name, "state": "READY"} for name in (MODEL, UNARY_MODEL))
"""The repository index of a server that keeps its own to itself."""


@dataclass(frozen=True)
class ServedModel:
    """One model of the server's repository."""

    name: str
    version: str
    ready: bool
    public: bool
    """Has the inputs and outputs of the public contract; the others are its stages."""
    streams: bool
    """Answers piece by piece; otherwise once."""
    parts: tuple[str, ...]
    """The models an ensemble is made of."""
    voices: tuple[str, ...] | None
    """Speakers, the default one first; None where the server does not tell them, as all that follows."""
    limits: Mapping[str, Any] | None
    """Limits of a request, by the names of the settings."""
    sample_rate: int | None
    """Sample rate of the speech in hertz."""
    checkpoint: str | None
    """Name of the checkpoint: its folder's, or its Hugging Face id."""


def served_model(entry: Mapping[str, Any], config: Mapping[str, Any] | None) -> ServedModel:
    """A model from its entry in the repository index and its configuration (None: it has none while not loaded).

    Raises:
        Internal: they are outside of Triton's protocol.
    """
    try:
        return _served_model(entry, config or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Internal(f"the server's account of its models is outside of Triton's protocol: {error!r:.200}") from error


def _served_model(entry: Mapping[str, Any], known: Mapping[str, Any]) -> ServedModel:
    policy = known.get("model_transaction_policy") or {}
    steps = (known.get("ensemble_scheduling") or {}).get("step") or []
    voices, limits = _parameter(known, "voices"), _parameter(known, "limits")
    sample_rate = _parameter(known, "sample_rate")
    return ServedModel(
        name=str(entry.get("name", "")),
        version=str(entry.get("version", "")),
        ready=entry.get("state") == "READY",
        public=set(INPUTS) <= _names(known, "input") and set(OUTPUTS) <= _names(known, "output"),
        streams=bool(steps) or bool(policy.get("decoupled")),
        parts=tuple(str(step["model_name"]) for step in steps),
        voices=tuple(map(str, voices)) if isinstance(voices, list) else None,
        limits=limits if isinstance(limits, dict) else None,
        sample_rate=sample_rate if isinstance(sample_rate, int) else None,
        checkpoint=checkpoint_of(known),
    )


def checkpoint_of(config: Mapping[str, Any]) -> str | None:
    """The checkpoint that a model's configuration names."""
    found = _parameter(config, "checkpoint")
    return found if isinstance(found, str) else None


def index_of(answer: Any) -> list[Mapping[str, Any]]:
    """The entries of a `RepositoryIndexResponse`; raises as `entries_of` does."""
    return entries_of(_plain(answer).get("models", []))


def entries_of(index: object) -> list[Mapping[str, Any]]:
    """The entries of a repository index.

    Raises:
        Internal: it is outside of Triton's protocol, or has too many: each model's configuration is a question more.
    """
    if not isinstance(index, list) or not all(isinstance(e, dict) and isinstance(e.get("name"), str) for e in index):
        raise Internal("the server's index of models is outside of Triton's protocol")
    if len(index) > MAX_MODELS:
        raise Internal(f"the server names {len(index)} models, more than {MAX_MODELS}")
    return index


def config_of(answer: Any) -> Mapping[str, Any]:
    """The configuration in a `ModelConfigResponse`."""
    found: Mapping[str, Any] = _plain(answer).get("config", {})
    return found


def _plain(message: Any) -> dict[str, Any]:
    return dict(MessageToDict(message, preserving_proto_field_name=True))


def _names(config: Mapping[str, Any], side: str) -> set[str]:
    return {str(tensor["name"]) for tensor in config.get(side) or []}


def _parameter(config: Mapping[str, Any], name: str) -> object:
    """A parameter of the configuration, whose text is JSON; None where there is none that can be read."""
    try:
        return parsed(config["parameters"][name]["string_value"])
    except (KeyError, TypeError, ValueError):
        return None
