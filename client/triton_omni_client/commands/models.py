# SPDX-License-Identifier: Apache-2.0
"""`triton-omni models`: what the server serves."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.answer import client_of
from triton_omni_client.catalog import ServedModel
from triton_omni_client.client import READY_TIMEOUT
from triton_omni_client.terminal import errors, print_json

from .options import AsJson, Timeout, Url, examples

EXAMPLES = examples("models", "models --url http://localhost:8000 --json")


def models(*, timeout: Timeout = None, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """List what the server serves: models, and where it tells them checkpoint, sample rate, voices and limits."""
    with errors(url, as_json=as_json):
        found = client_of(url, "").models(READY_TIMEOUT if timeout is None else timeout)
    if as_json:
        for model in found:
            print_json(asdict(model))
    else:
        _print(found)


def _print(found: list[ServedModel]) -> None:
    out = Console()
    table = Table("model", "version", "state", "answers", box=None, pad_edge=False)
    for model in found:
        table.add_row(model.name, model.version, "ready" if model.ready else "not ready", _answers(model))
    out.print(table)
    checkpoints = dict.fromkeys(model.checkpoint for model in found if model.checkpoint is not None)
    rates = dict.fromkeys(f"{model.sample_rate} Hz" for model in found if model.sample_rate is not None)
    voices = dict.fromkeys(voice for model in found for voice in model.voices or ())
    for name, values in {"checkpoint": checkpoints, "sample rate": rates, "voices": voices}.items():
        told = ", ".join(values) or "this server does not tell"
        out.print(f"{name}: {told}", highlight=False, markup=False)
    limits = {f"{model.name}.{name}": value for model in found for name, value in (model.limits or {}).items()}
    out.print("limits:" if limits else "limits: this server does not tell")
    for name, value in limits.items():
        out.print(f"  {name} {value}", highlight=False)


def _answers(model: ServedModel) -> str:
    if not model.ready:
        return ""
    if not model.public:
        return "a stage"
    return "a stream" if model.streams else "at once"
