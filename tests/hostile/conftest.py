# SPDX-License-Identifier: Apache-2.0
"""The two sizes of a run: a few thousand seeded cases, and with `--hypothesis-profile=hostile-long` over 100,000."""

from __future__ import annotations

import faulthandler
import sys

import pytest
from hypothesis import settings

from hostile.sizes import LONG, LONG_SECONDS

settings.register_profile(LONG)
# Decoders are C: where one of them dies, the stack says in which test.
faulthandler.enable(sys.__stderr__)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hypothesis-profile") == LONG:
        for item in items:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
