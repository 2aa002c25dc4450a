# SPDX-License-Identifier: Apache-2.0
"""`triton-omni models`: what the server serves."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.answer import client_of
from triton_omni_client.catalog import ServedModel
from triton_omni_client.client import READY_TIMEOUT
from triton_omni_client.printable import one_line
from triton_omni_client.terminal import errors, print_json

from .options import AsJson, Timeout, Url, examples

UNTOLD = "this server does not tell"
EXAMPLES = examples("models", "models --url http://localhost:8000 --json")


def models(*, timeout: Timeout = None, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """List the server's models, their checkpoint, sample rate, voices and limits."""
    with errors(url, as_json=as_json):
        found = client_of(url, "").models(READY_TIMEOUT if timeout is None else timeout)
    if as_json:
        for model in found:
            print_json(asdict(model))
    else:
        _print(found)


def _print(found: list[ServedModel]) -> None:
    out = Console(soft_wrap=True)
    out.print(_table(found))
    checkpoints = dict.fromkeys(model.checkpoint for model in found if model.checkpoint is not None)
    rates = dict.fromkeys(f"{model.sample_rate} Hz" for model in found if model.sample_rate is not None)
    voices = dict.fromkeys(voice for model in found for voice in model.voices or ())
    for name, values in {"checkpoint": checkpoints, "sample rate": rates, "voices": voices}.items():
        told = ", ".join(values) or UNTOLD
        out.print(f"{name}: {one_line(told)}", highlight=False, markup=False)
    limits = _limits(found)
    out.print("limits of a request:" if limits else f"limits of a request: {UNTOLD}")
    for name, value in limits.items():
        out.print(one_line(f"  {name:<{max(map(len, limits))}}  {value}"), highlight=False, markup=False)


def _table(found: list[ServedModel]) -> Table:
    """A row a model; versions stand there where the server tells one."""
    versioned = any(model.version for model in found)
    table = Table("model", *(["version"] if versioned else []), "state", "answers", box=None, pad_edge=False)
    for model in found:
        state = "ready" if model.ready else "not ready"
        told = (model.name, *([model.version] if versioned else []), state, _answers(model))
        table.add_row(*(Text(one_line(cell)) for cell in told))
    return table


def _limits(found: list[ServedModel]) -> dict[str, str]:
    """Each limit once, by its name; a model is named where another has another value."""
    told: dict[str, dict[str, list[str]]] = {}
    for model in found:
        for name, value in (model.limits or {}).items():
            told.setdefault(name, {}).setdefault(_readable(name, value), []).append(model.name)
    return {
        name: next(iter(values))
        if len(values) == 1
        else ", ".join(f"{value} ({', '.join(models)})" for value, models in values.items())
        for name, values in told.items()
    }


def _readable(name: str, value: object) -> str:
    """A limit's value with its unit, where its name ends in one."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if not isinstance(value, int | float):
        return str(value)
    figure = int(value) if isinstance(value, float) and value.is_integer() else value
    unit = next((f" {unit}" for unit in ("bytes", "seconds") if name.endswith(f"_{unit}")), "")
    return f"{figure:,}{unit}"


def _answers(model: ServedModel) -> str:
    if not model.ready:
        return ""
    if not model.public:
        return "a stage"
    return "a stream" if model.streams else "at once"
