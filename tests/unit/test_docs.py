# SPDX-License-Identifier: Apache-2.0
"""The documents agree with the repository: links, paths, settings, contract, error codes, request keys, sizes."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from server.calling import ALL_WAYS
from triton_omni.core import errors, settings
from triton_omni.request import parse
from triton_omni.supervisor import options
from triton_omni_gateway import errors as gateway_errors
from triton_omni_gateway import server as gateway_server
from triton_omni_gateway.schemas import ChatRequest, SpeechRequest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "client" / "README.md",
    ROOT / "gateway" / "README.md",
]
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "settings_document.py"))
FOLDERS = [
    "backend_src",
    "client",
    "deploy",
    "docs",
    "examples",
    "gateway",
    "model_repository",
    "requirements",
    "scripts",
    "tests",
]
FILES = [*ROOT.glob("*"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
MODELS = ["qwen2_5_omni", "qwen2_5_omni_unary"]


def section(title: str) -> str:
    """The text of a section of docs/using.md or docs/architecture.md, its subsections included."""
    documents = [ROOT / "docs" / name for name in ("using.md", "architecture.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents)
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/using.md and docs/architecture.md have no section {title!r}"
    return found[2]


def table(text: str, header: str) -> dict[str, list[str]]:
    """Rows of the table whose first header cell is `header`: first cell without backquotes -> other cells."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {header} |"):
            break
    else:
        raise AssertionError(f"no table headed {header!r}")
    assert set(next(lines)) <= set("|- ")
    rows = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        rows[cells[0].strip("`")] = cells[1:]
    return rows


def anchors(document: Path) -> set[str]:
    """Return the names by which links lead to the headings of a document."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_something(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(file), f"no heading for {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for name in set(re.findall(r"[\w./*]*\w+\.(?:py|sh|in|lock|pbtxt|toml)\b", text)):
        end = name.removeprefix("./").removeprefix("../")
        assert any(path.match(end) for path in FILES), f"{name} is not in the repository"


def test_settings_document_is_what_the_settings_classes_give() -> None:
    committed = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert committed == GENERATOR["document"](), "run .venv/bin/python scripts/settings_document.py"


@pytest.mark.parametrize("kind", [*GENERATOR["STAGES"].values(), settings.StreamingPlan])
def test_every_setting_says_what_it_means(kind: type[BaseModel]) -> None:
    assert [key for key, _field, meaning in GENERATOR["leaves"](kind) if not meaning] == []


@pytest.mark.parametrize("parser", [options.parser, gateway_server.parser])
def test_every_option_says_what_it_means(parser: Callable[[], argparse.ArgumentParser]) -> None:
    assert [action.dest for action in parser()._actions if not action.help] == []


def test_settings_document_names_every_environment_variable() -> None:
    sources = [file for folder in ("backend_src", "gateway", "client") for file in (ROOT / folder).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in [*sources, ROOT / "build.sh"])
    internal = {"OMNI_SCRATCH"}
    used = set(re.findall(r"\b(?:TRITON_)?OMNI_[A-Z]+(?:_[A-Z]+)*\b", text)) - internal
    assert used <= GENERATOR["ENVIRONMENT"].keys()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", ["input", "output"])
def test_contract_table_is_the_model_configuration(model: str, side: str) -> None:
    config = (ROOT / "model_repository" / model / "config.pbtxt").read_text(encoding="utf-8")
    block = re.search(rf"^{side} \[(.*?)^\]", config, re.MULTILINE | re.DOTALL)
    assert block
    tensors = re.findall(r'name: "(\w+)"\s+data_type: TYPE_(\w+)\s+dims: \[ (-?\d+) \]', block[1])
    configured = {name: f"{kind.replace('STRING', 'BYTES')} [{dims}]" for name, kind, dims in tensors}
    documented = {name: cells[0] for name, cells in table(section("The public contract"), side).items()}
    assert documented == configured


def test_parameter_table_names_every_key_a_request_may_have() -> None:
    documented = table(section("The public contract"), "`sampling_parameters` key")
    accepted = set(parse._Parameters.model_fields)
    assert documented.keys() == accepted
    for stage, kind in (
        ("thinker", parse.ThinkerOptions),
        ("talker", parse.TalkerOptions),
        ("token2wav", parse.Token2WavOptions),
    ):
        said = dict(re.findall(r"`(\w+)`(?: (-?[\d.]+\d|\d))?", documented[stage][1]))
        assert kind.model_fields.keys() <= said.keys(), stage
        for name, field in kind.model_fields.items():
            assert not said[name] or float(said[name]) == field.default, f"{stage}.{name}"


@pytest.mark.parametrize(("header", "schema"), [("chat key", ChatRequest), ("speech key", SpeechRequest)])
def test_gateway_tables_name_every_key_a_request_may_have(header: str, schema: type[BaseModel]) -> None:
    rows = table((ROOT / "gateway" / "README.md").read_text(encoding="utf-8"), header)
    documented = [name.strip("` ") for row in rows for name in row.split(",")]
    assert sorted(documented) == sorted(schema.model_fields)


def test_gateway_table_names_every_status() -> None:
    rows = table((ROOT / "gateway" / "README.md").read_text(encoding="utf-8"), "status")
    documented = {int(status) for row in rows for status in row.split(",")}
    raised = {status for status, _kind, _headers in gateway_errors._MEANINGS.values()}
    assert raised <= documented


def test_error_table_names_every_code() -> None:
    assert list(table(section("The public contract"), "code")) == list(get_args(errors.ErrorCode))


def test_contributing_names_every_private_method_relied_on() -> None:
    compat = ast.parse((ROOT / "backend_src/triton_omni/vllm_hooks/shared/compat.py").read_text(encoding="utf-8"))
    values = {
        target.id: node.value
        for node in compat.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    methods = ast.literal_eval(values["_RUNNER_METHODS"])
    note = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    assert [name for name in methods if not re.search(rf"`(GPUModelRunner\.)?{name}`", note)] == []


def test_using_names_every_way_to_ask() -> None:
    assert list(table(section("Ways to ask"), "way")) == list(ALL_WAYS)


def test_documents_speak_of_the_block_the_code_uses() -> None:
    assert f"a *block* is {settings.FRAMES_PER_BLOCK} frames" in section("Vocabulary")


def test_documents_stay_short() -> None:
    documents = [README, *(ROOT / "docs").glob("*.md")]
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in documents}
    assert words["architecture.md"] <= 4_000
    assert sum(words.values()) <= 25_000
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_every_chapter_of_the_architecture_has_a_drawing() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    chapters = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [chapter.splitlines()[0] for chapter in chapters if "\n```" not in chapter] == []


@pytest.mark.parametrize(
    ("title", "last", "most"),
    [("Where a reply row is", "talker/engine.py", 8), ("Where a code and its audio are", "token2wav/engine.py", 7)],
)
def test_walks_count_the_files_from_engine_to_engine(title: str, last: str, most: int) -> None:
    text = section(title)
    cells = [re.sub(r"\(with .*?\)", "", files) for _place, files in table(text, "moment").values()]
    passed = [file for cell in cells for file in re.findall(r"`([\w/]+\.py)`", cell)]
    (end,) = [number for number, file in enumerate(passed, start=1) if file.endswith(last)]
    (told,) = re.findall(r"passes (\d+) files from engine to engine", text)
    assert int(told) == end <= most


def test_first_lines_of_the_readme_tell_the_memory_of_a_gpu() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    totals = [cell.strip("* ") for cell in table("\n".join(lines), "GiB")["**together**"]]
    (told,) = [line for line in lines[:40] if line.startswith("[GPU memory]")]
    assert re.findall(r"\d+\.\d", told) == totals
