# SPDX-License-Identifier: Apache-2.0
"""Writes `docs/settings.md` from the settings classes and the commands' options, the only places that describe them.

`.venv/bin/python scripts/settings_document.py` writes the file anew.
A unit test compares the committed file with `document()`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from markdown_table import table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from triton_omni.core.settings import (
    EngineSettings,
    StreamingPlan,
    TalkerEngineSettings,
    TalkerSettings,
    ThinkerSettings,
    Token2WavSettings,
    UnarySettings,
)
from triton_omni.supervisor import options
from triton_omni_gateway import server as gateway

TARGET = Path(__file__).parents[1] / "docs" / "settings.md"
STAGES: dict[str, type[BaseModel]] = {
    "thinker": ThinkerSettings,
    "talker": TalkerSettings,
    "token2wav": Token2WavSettings,
    "qwen2_5_omni_unary": UnarySettings,
}
ENVIRONMENT = {
    "OMNI_MODEL": "the checkpoint: a folder, a Hugging Face id, or random weights such as `random:7b` or "
    "`random:7b-awq`; default: `training/mini`",
    "OMNI_PLATFORM": "`cpu` or `gpu`; by default `gpu` where `build.sh` finds an NVIDIA GPU",
    "OMNI_PROFILE": "the same as `serve --profile`",
    "OMNI_GPUS": "the same as `serve --gpus`",
    "OMNI_MPS": "`1` = the same as `serve --mps`",
    "OMNI_LOG_FORMAT": "`plain` or `json`: the format of the stages' log records",
    "OMNI_LOG_LEVEL": "the lowest level of records that the stages log, for example `DEBUG`; by default `INFO`",
    "OMNI_CONTROL_KEY": "the key for Triton's model control, statistics, trace and log settings: at least 16 "
    "characters; by default drawn at each start",
    "OMNI_API_KEYS": "the gateway's API keys, separated by commas; `--api-keys` reads them from a file",
    "TRITON_OMNI_URL": "the server that the `triton-omni` client commands ask",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "the OpenTelemetry collector; without it the stages make no traces",
    "VLLM_CACHE_ROOT": "the folder of vLLM's compiled kernels and networks",
    "TORCHINDUCTOR_CACHE_DIR": "the folder of torch's compiled kernels; by default `.cache/inductor`",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a server may use; stages count them from 0",
    "TRITON_HOME": "an unpacked tritonserver in place of the pinned one",
    "PYTHON": "the interpreter with which `build.sh` makes `.venv`",
}
HEAD = """\
# Settings

`.venv/bin/python scripts/settings_document.py` writes this file from the settings classes and command options; do not
edit it.

Each model reads `model_repository/<model>/1/stage.yaml` once, at load; the first sections name the models. Every key is
optional. An unknown key or an impossible value stops the load with a message that names file, key, value and limit.
"""


def document() -> str:
    """The whole text of `docs/settings.md`."""
    parts = [HEAD]
    for stage, kind in STAGES.items():
        parts.append(f"## {stage}\n\n{_settings_table(kind)}")
    parts.append(f"## Engine of thinker and talker\n\n{_engines_table()}")
    parts.append(f"### Streaming plans\n\n{_paragraph(StreamingPlan)}\n\n{_plans_table()}")
    parts.append(f"## Server command\n\nOptions of `./build.sh serve`.\n\n{_options_list(options.parser())}")
    parts.append(f"## Gateway command\n\nOptions of `./build.sh gateway`.\n\n{_options_list(gateway.parser())}")
    parts.append(f"## Environment variables\n\n{_list(ENVIRONMENT.items())}")
    return "\n".join(parts)


def leaves(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, str]]:
    """Dotted key, field and docstring of every setting of a class; a nested class is walked into."""
    documented = field_docstrings(kind)
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field, documented.get(name, "")


def field_docstrings(kind: type) -> dict[str, str]:
    """Field name -> the string below it in the source of a class or of its nearest base that has one."""
    found: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if base.__module__ == kind.__module__]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _settings_table(kind: type[BaseModel]) -> str:
    rows = [
        (f"`{key}`", _values(field.annotation, field.metadata), _default(field.default), meaning)
        for key, field, meaning in leaves(kind)
        if not key.startswith("engine.")
    ]
    return _table(("key", "values", "default", "meaning"), rows)


def _engines_table() -> str:
    """The settings that thinker and talker share, with both defaults; the talker's meaning where it is another."""
    rows = []
    for (key, field, meaning), (_, other, others) in zip(
        leaves(EngineSettings), leaves(TalkerEngineSettings), strict=True
    ):
        told = meaning if others == meaning else f"{meaning} Talker: {others.removeprefix(meaning).strip()}"
        defaults = _default(field.default), _default(other.default)
        rows.append((f"`engine.{key}`", _values(field.annotation, field.metadata), *defaults, told))
    return _table(("key", "values", "thinker", "talker", "meaning"), rows)


def _plans_table() -> str:
    plans: dict[str, StreamingPlan] = Token2WavSettings.model_fields["plans"].default
    rows = [
        (
            f"`plans.<name>.{key}`",
            _values(field.annotation, field.metadata),
            *(_default(getattr(plan, key)) for plan in plans.values()),
            meaning,
        )
        for key, field, meaning in leaves(StreamingPlan)
    ]
    return _table(("key", "values", *(f"`{name}`" for name in plans), "meaning"), rows)


def _options_list(parser: argparse.ArgumentParser) -> str:
    return _list(
        (f"{' / '.join(action.option_strings)} {_argument(action)}".rstrip(), action.help or "")
        for action in parser._actions
        if action.dest not in ("help", "version")
    )


def _argument(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"{line}\n" for line in table(head, rows))


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- `{name}`: {meaning}\n" for name, meaning in pairs)


def _paragraph(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _values(annotation: Any, metadata: Sequence[Any]) -> str:
    """The type of a setting and its limits, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], [part for given in arguments[1:] for part in getattr(given, "metadata", [given])])
    if origin is Literal:
        return ", ".join(_default(value) for value in arguments)
    if origin is tuple:
        return f"list of {_values(arguments[0], [])}" + (", not empty" if _limit(metadata, MinLen) else "")
    if origin is dict:
        return "mapping of names to values; see `stage.yaml`"
    if origin is not None:  # a union with None
        return ", ".join(_values(part, metadata) if part is not type(None) else "`null`" for part in arguments)
    names = {bool: "boolean", int: "integer", float: "number", str: "text"}
    return " ".join([names[annotation], *_limits(metadata)])


def _limits(metadata: Sequence[Any]) -> list[str]:
    least, above, most = _limit(metadata, Ge), _limit(metadata, Gt), _limit(metadata, Le)
    low = f"≥{least.ge}" if least else f">{above.gt}" if above else ""
    return [part for part in (low, f"≤{most.le}" if most else "") if part]


def _limit(metadata: Sequence[Any], kind: type) -> Any:
    return next((part for part in metadata if isinstance(part, kind)), None)


def _default(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"`{name}`" for name in value)
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if value is None:
        return "`null`"
    return f"`{str(value).lower() if isinstance(value, bool) else value if value != '' else chr(34) * 2}`"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
