# SPDX-License-Identifier: Apache-2.0
"""Transformers reads configurations without writing them out for a log line that is off."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig


def test_a_configuration_that_is_read_is_not_rendered(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[PreTrainedConfig] = []
    monkeypatch.setattr(PreTrainedConfig, "to_json_string", lambda config, *_args, **_options: rendered.append(config))
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    assert not rendered
    assert repr(config) == "Qwen2_5OmniConfig"
    assert repr(config.thinker_config) == "Qwen2_5OmniThinkerConfig"
