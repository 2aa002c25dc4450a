# SPDX-License-Identifier: Apache-2.0
"""The folder of files that the project makes once and reads often."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder of the repository, or of the user where the code is installed without one; it may not exist."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file():
        return root / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triton-omni"
