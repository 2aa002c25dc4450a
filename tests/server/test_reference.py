# SPDX-License-Identifier: Apache-2.0
"""Replies to text, in both voices, are those of HF's `generate`; replies to media are in `test_mixed_media.py`."""

from __future__ import annotations

import pytest

from reference.hf import HfReference
from server.parity import GREEDY, SYSTEM, assert_equals_hf, hf_reply
from server.serving import Served
from triton_omni_client import Request

TEXTS = {
    "one letter": "x",
    "one word": "hello",
    "a question": "what is the weather like in Paris today?",
    "many scripts": "naïve café 漢字 emoji 😀",
    "no space": "a" * 100,
    "over several prefill chunks": "Tell me a story about a ship. " * 12,
}


@pytest.mark.parametrize("voice", ["Chelsie", "Ethan"])
@pytest.mark.parametrize("name", TEXTS)
def test_text_gets_hf_tokens_rows_codes_and_waveform(server: Served, hf: HfReference, name: str, voice: str) -> None:
    request = Request(text=TEXTS[name], voice=voice, seed=7, request_id=f"hf {name} {voice}", **GREEDY)
    expected = hf_reply(hf, hf.prepare([SYSTEM, {"role": "user", "content": TEXTS[name]}]), voice)
    assert_equals_hf(server, hf, request, expected)
    assert len(expected.reply.thinker.token_ids) > 20
    assert len(expected.reply.talker.codes) > 2
