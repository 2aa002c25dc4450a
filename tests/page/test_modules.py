# SPDX-License-Identifier: Apache-2.0
"""The page's own rules: its modules' tests in node, and that the library it carries is the pinned one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from browser import TOOLS
from waiting import IN_TIME_S

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "gateway" / "triton_omni_gateway" / "page"
NODE = shutil.which("node", path=str(Path(sys.executable).parent)) or shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node: ./build.sh test installs one")


@pytest.mark.parametrize("file", sorted(HERE.glob("*.test.js")), ids=lambda file: file.stem)
def test_a_module_keeps_its_word(file: Path) -> None:
    assert NODE is not None
    command = [NODE, "--test", "--test-reporter=spec", file.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME_S, check=False, cwd=HERE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_s_markdown_is_the_pinned_one() -> None:
    package = TOOLS / "node_modules" / "markdown-it"
    if not package.exists():
        pytest.skip("no tools of the page: ./build.sh test fetches them")
    minified = package / "dist" / "browser" / "markdown-it.umd.min.js"
    assert (PAGE / "markdown-it.min.js").read_bytes() == minified.read_bytes()
    assert (PAGE / "markdown-it.license.txt").read_bytes() == (package / "LICENSE").read_bytes()
