# SPDX-License-Identifier: Apache-2.0
"""The page's own rules, in node: its modules' tests, and that text is heard by the rule of the Python client."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from container_samples import SOUNDS, VIDEOS
from triton_omni_client.containers import is_sound_alone
from triton_omni_client.heard import heard_text

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "gateway" / "triton_omni_gateway" / "page"
NODE = shutil.which("node", path=str(Path(sys.executable).parent)) or shutil.which("node")
TEXTS = [
    "",
    "The sea is a body of salt water that covers most of the Earth.",
    "A word, another — and\n\na new paragraph; it ends here",
    "海は地球の表面の大部分を覆う塩水です。とても深い。",
    "Say 你好 to the sea 🌊🌊 and to 서울 too!",
    "Antidisestablishmentarianism",
]
SPANS = [(seconds / 4, total) for seconds in range(30) for total in (None, 1.0, 4.3, 7.0)]
pytestmark = pytest.mark.skipif(NODE is None, reason="no node: ./build.sh test installs one")


def run_node(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    return subprocess.run(
        [NODE, *arguments], input=given, capture_output=True, text=True, timeout=60, check=False, cwd=HERE
    )


def evaluate(expression: str, given: Any) -> Any:
    """The value of a JavaScript expression over `given`, with the page's `heard.js` at hand."""
    code = f'import {{ readFileSync }} from "node:fs"; import {{ heardText }} from "{PAGE}/heard.js";'
    code += 'const given = JSON.parse(readFileSync(0, "utf8"));'
    done = run_node("--input-type=module", "--eval", f"{code} console.log(JSON.stringify({expression}))",
                    given=json.dumps(given))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.js")), ids=lambda file: file.stem)
def test_a_module_keeps_its_word(file: Path) -> None:
    done = run_node("--test", "--test-reporter=spec", file.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_heard_is_what_the_client_would_keep() -> None:
    cases = [(text, heard, total) for text in TEXTS for heard, total in SPANS]
    found = evaluate("given.map((each) => heardText(...each))", cases)
    assert found == [heard_text(*case) for case in cases]
    assert len(set(found)) > 40


def test_every_character_takes_as_long_as_in_the_client() -> None:
    known = [
        chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")
    ]
    # Two units: a character and a letter, or not even one of three units.
    found = evaluate("given.map((each) => heardText(`${each}a`, 2 / 15) === '')", known)
    wide = [unicodedata.east_asian_width(character) in "WF" for character in known]
    differing = [hex(ord(known[at])) for at in range(len(known)) if found[at] != wide[at]]
    assert differing == []


@pytest.mark.parametrize(("kind", "files"), [("audio", SOUNDS), ("video", VIDEOS)])
def test_a_file_without_pictures_is_a_sound_as_for_the_client(
    tmp_path: Path, kind: str, files: dict[str, bytes]
) -> None:
    for number, data in enumerate(files.values()):
        for part in range(41):
            (tmp_path / f"{number:02}-{part:02}").write_bytes(data[: len(data) * part // 40])
    code = f"""import {{ readdirSync, readFileSync }} from "node:fs"; import {{ kindOf }} from "{PAGE}/media.js";
        const found = {{}};
        for (const name of readdirSync("{tmp_path}")) {{
            found[name] = await kindOf(new Blob([readFileSync("{tmp_path}/" + name)], {{ type: "video/webm" }}));
        }}
        console.log(JSON.stringify(found));"""
    done = run_node("--input-type=module", "--eval", code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for path in tmp_path.iterdir():
        assert found[path.name] == ("audio" if is_sound_alone(path.read_bytes()) else "video"), path.name
    assert {found[f"{number:02}-40"] for number in range(len(files))} == {kind}
