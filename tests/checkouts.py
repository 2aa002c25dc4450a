# SPDX-License-Identifier: Apache-2.0
"""A folder that `scripts/compare` takes for another checkout, with an environment of its own."""

from __future__ import annotations

import venv
from pathlib import Path


def make_checkout(root: Path, program: str = "") -> Path:
    """The folder; `program` is the source of its server program, `triton_omni.old`."""
    code = root / "backend_src" / "triton_omni"
    code.mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project.scripts]\ntriton-omni-serve = "triton_omni.old:main"\n')
    (code / "__init__.py").touch()
    (code / "old.py").write_text(program)
    venv.create(root / ".venv", symlinks=True)
    (packages,) = root.glob(".venv/lib/python3*/site-packages")
    (packages / "code.pth").write_text(str(code.parent))
    return root
