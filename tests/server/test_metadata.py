# SPDX-License-Identifier: Apache-2.0
"""A running server tells its voices, limits, rate and checkpoint before any request."""

from __future__ import annotations

import pytest

from gateway_fakes import run_gateway
from server.serving import TINY, Served
from triton_omni_client import OmniClient, ServedModel, TooLarge
from triton_omni_client.messages import MODEL, UNARY_MODEL


@pytest.fixture
def told(server: Served) -> dict[str, ServedModel]:
    """The server's models by name."""
    return {model.name: model for model in server.client.models()}


def test_http_and_grpc_tell_what_is_served(server: Served, told: dict[str, ServedModel]) -> None:
    with OmniClient(server.supervisor.grpc_url, model=UNARY_MODEL) as client:
        assert client.models() == server.http.models() == list(told.values())
    assert {name for name, model in told.items() if model.voices is not None} == {MODEL, UNARY_MODEL}
    for model in (told[MODEL], told[UNARY_MODEL]):
        assert model.voices == ("Chelsie", "Ethan")
        assert model.checkpoint == server.checkpoint.name
        assert model.sample_rate == 24000


def test_the_gateway_tells_the_voices(server: Served) -> None:
    with run_gateway(server.supervisor.grpc_url) as gateway:
        assert gateway.openai.models.retrieve(MODEL).model_extra == {"voices": ["Chelsie", "Ethan"]}


def test_limits_told_are_those_kept_to(server: Served, told: dict[str, ServedModel]) -> None:
    limits = told[MODEL].limits
    assert limits is not None
    assert limits == told[UNARY_MODEL].limits
    assert {name: limits[name] for name in TINY["thinker"]["limits"]} == TINY["thinker"]["limits"]
    assert (limits["max_sessions"], limits["max_codes"]) == (8, 600)
    most = int(limits["max_reply_tokens"])
    with pytest.raises(TooLarge, match=rf"max_tokens: {most + 1} is over this deployment's limit of {most}"):
        server.ask("metadata: too long", "hello", thinker={"max_tokens": most + 1})
    words = int(limits["max_prompt_tokens"])
    with pytest.raises(TooLarge, match=rf"limit is {words + 1} \(max_model_len\)"):
        server.ask("metadata: too much", "a b " * words, modalities=["text"])
    for voice in told[MODEL].voices or ():
        assert server.ask(f"metadata: {voice}", "hello", voice=voice, seed=7, talker={"temperature": 0}).audio.size
