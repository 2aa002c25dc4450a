# SPDX-License-Identifier: Apache-2.0
"""Realtime sessions are opened with a key, are bounded, and leave nothing; other callers are told why they get none."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import openai
import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from client_fakes import FakeTriton, chunk, final, serve_grpc
from gateway_fakes import MODEL, TIMEOUT_S, RunningGateway, run_gateway
from realtime_client import MANUAL, greeting, noise, talk
from triton_omni_gateway.errors import GatewayError
from triton_omni_gateway.keys import ApiKeys
from triton_omni_gateway.realtime.limits import RealtimeLimits
from triton_omni_gateway.realtime.secrets import LONGEST, ClientSecrets, Secret

SESSIONS = "omni_gateway_realtime_sessions"


@pytest.fixture
def locked(triton: FakeTriton) -> Iterator[RunningGateway]:
    with run_gateway(triton.url, keys=ApiKeys(["first"])) as running:
        yield running


def url_of(gateway: RunningGateway, path: str = "/v1/realtime") -> str:
    return gateway.base.replace("http", "ws") + path


async def refusal(url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a connection that is refused."""
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, **options)
    response = refused.value.response
    return response.status_code, json.loads(response.body or b"")["error"]


async def event_of(socket: Any, kind: str) -> dict[str, Any]:
    """The next event of this type."""
    while True:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), TIMEOUT_S))
        if event["type"] == kind:
            return event


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_key_opens_a_session(locked: RunningGateway) -> None:
    async with talk(locked.base, key="first") as session:
        assert session.seen[0].type == "session.created"
    assert (await refusal(url_of(locked)))[1]["code"] == "invalid_api_key"
    status, error = await refusal(url_of(locked), additional_headers={"Authorization": "Bearer second"})
    assert (status, error["message"]) == (401, "Incorrect API key provided.")


async def test_a_page_sends_its_key_as_a_subprotocol(locked: RunningGateway) -> None:
    async with connect(url_of(locked), subprotocols=subprotocols("first"), origin=origin()) as socket:
        assert socket.subprotocol == "realtime"
        await event_of(socket, "session.created")
    assert (await refusal(url_of(locked), subprotocols=subprotocols("second")))[0] == 401


def subprotocols(key: str) -> list[Any]:
    return ["realtime", f"openai-insecure-api-key.{key}"]


def origin() -> Any:
    return "https://app.example"


async def test_a_client_secret_opens_configured_sessions_and_nothing_else(locked: RunningGateway) -> None:
    client, before = locked.openai.with_options(api_key="first"), int(time.time())
    asked: Any = {"type": "realtime", "instructions": "Be brief.", **MANUAL}
    made = client.realtime.client_secrets.create(session=asked, expires_after={"anchor": "created_at", "seconds": 60})
    assert made.value.startswith("ek_")
    assert before + 60 <= made.expires_at <= time.time() + 60
    assert made.session.instructions == "Be brief."  # type: ignore[union-attr]
    async with talk(locked.base, key=made.value) as session:
        assert session.seen[0].session.instructions == "Be brief."
        assert session.seen[0].session.audio.input.turn_detection is None
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=made.value).models.list()
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=made.value).realtime.client_secrets.create()
    with pytest.raises(openai.BadRequestError, match=r"expires_after\.seconds"):
        client.realtime.client_secrets.create(expires_after={"anchor": "created_at", "seconds": 5})


async def test_a_secret_of_one_gateway_opens_sessions_at_another_of_its_key(
    triton: FakeTriton, locked: RunningGateway
) -> None:
    """As behind one address, which a page asks twice."""
    asked: Any = {"type": "realtime", "instructions": "Be brief.", **MANUAL}
    made = locked.openai.with_options(api_key="first").realtime.client_secrets.create(session=asked)
    with run_gateway(triton.url, keys=ApiKeys(["another", "first alice"])) as second:
        for _ in range(2):
            async with talk(second.base, key=made.value) as session:
                assert session.seen[0].session.instructions == "Be brief."
                assert session.seen[0].session.audio.input.turn_detection is None
    with run_gateway(triton.url, keys=ApiKeys(["another"])) as changed:
        status, error = await refusal(url_of(changed), subprotocols=subprotocols(made.value))
        assert (status, error["code"], "its API key is gone" in error["message"]) == (401, "invalid_api_key", True)


async def test_a_secret_that_another_gateway_cannot_serve_opens_nothing(
    triton: FakeTriton, locked: RunningGateway
) -> None:
    with run_gateway(triton.url, keys=ApiKeys(["first"]), models=("new", MODEL)) as newer:
        create = newer.openai.with_options(api_key="first").realtime.client_secrets.create
        made = create(session={"type": "realtime", "model": "new"})
    status, error = await refusal(url_of(locked), subprotocols=subprotocols(made.value))
    assert (status, error["code"]) == (404, "model_not_found")


def test_secrets_expire() -> None:
    now = [100.5]
    keys = ApiKeys(["first", "second"])
    secrets = ClientSecrets(keys, lambda: now[0])
    values = {caller: secrets.make(caller, {"instructions": "x"}, 60)[0] for caller in keys.callers}
    assert len(set(values.values())) == 2
    for caller, value in values.items():
        assert secrets.read(f"Bearer {value}") == Secret(caller, {"instructions": "x"}, 160)
    now[0] = 160
    with pytest.raises(GatewayError, match="has expired: take a new one by POST") as refused:
        secrets.read(f"Bearer {value}")
    assert refused.value.status == 401


@pytest.mark.parametrize("keys", [("first",), ()], ids=["with a key", "without keys"])
async def test_a_secret_that_was_changed_opens_nothing(triton: FakeTriton, keys: tuple[str, ...]) -> None:
    caller = ApiKeys(keys).callers[0]
    value, _ = ClientSecrets(ApiKeys(keys)).make(caller, {"instructions": "Be brief."}, 60)
    middle = len(value) // 2
    changed = [
        "ek_",
        value[:-4],
        f"ek_{'A' * len(value)}",
        *(f"{value[:at]}{'B' if value[at] == 'A' else 'A'}{value[at + 1 :]}" for at in (3, middle, len(value) - 2)),
    ]
    with run_gateway(triton.url, keys=ApiKeys(keys)) as gateway:
        for wrong in changed:
            status, error = await refusal(url_of(gateway), subprotocols=subprotocols(wrong))
            assert (status, error["code"]) == (401, "invalid_api_key"), wrong
        async with talk(gateway.base, key=value) as session:
            assert session.seen[0].session.instructions == "Be brief."


FORGED = {
    "no packed text": (b"nothing", 401),
    "more than a secret carries": (
        zlib.compress(b'{"expires_at": 99999999999, "session": {"instructions": "%s"}}' % (b"a" * 70_000)),
        400,
    ),
    "another object": (zlib.compress(b"{}"), 400),
    "an unknown key": (zlib.compress(b'{"expires_at": 99999999999, "session": {"voic": "x"}}'), 400),
    "another kind than the address": (
        zlib.compress(b'{"expires_at": 99999999999, "session": {"instructions": "x", "model": "x"}}'),
        404,
    ),
    "a number that JSON has not": (
        zlib.compress(
            b'{"expires_at": 99999999999, "session": {"audio": {"input": {"noise_reduction": {"strength": 1e999}}}}}'
        ),
        400,
    ),
    "another's model": (zlib.compress(b'{"expires_at": 99999999999, "session": {"model": "x"}}'), 404),
}


@pytest.mark.parametrize("name", FORGED)
async def test_without_keys_a_secret_that_anybody_made_is_read_with_care(gateway: RunningGateway, name: str) -> None:
    packed, expected = FORGED[name]
    query = "?intent=transcription" if name == "another kind than the address" else ""
    seal = hmac.digest(b"", b"triton-omni client secret" + hashlib.sha256(packed).digest(), "sha256")
    value = "ek_" + base64.urlsafe_b64encode(seal + packed).rstrip(b"=").decode()
    status, error = await refusal(url_of(gateway) + query, subprotocols=subprotocols(value))
    assert (status, "client secret" in error["message"]) == (expected, expected != 404)
    value, _ = ClientSecrets(ApiKeys()).make("", {}, 60)
    foreign = await refusal(url_of(gateway), subprotocols=subprotocols(value), origin=origin())
    assert foreign[1]["code"] == "forbidden_origin"


async def test_the_longest_secret_travels_in_both_headers_and_a_longer_one_is_refused(locked: RunningGateway) -> None:
    create: Any = locked.openai.with_options(api_key="first").realtime.client_secrets.create

    def secret(length: int) -> str:
        """A secret whose instructions no packing shortens."""
        told = base64.b85encode(np.random.default_rng(7).bytes(length)).decode()
        return str(create(session={"type": "realtime", "instructions": told}).value)

    least, most = 1000, LONGEST
    while most - least > 1:
        length = (least + most) // 2
        try:
            value, least = secret(length), length
        except openai.APIStatusError as error:
            refused, most = error, length
    assert 0 <= LONGEST - len(value) < 8
    beta = [*subprotocols(value), "openai-beta.realtime-v1"]
    spaced = {"Authorization": f"Bearer  {value}"}
    async with (
        talk(locked.base, key=value),
        connect(url_of(locked), subprotocols=beta),
        connect(url_of(locked), additional_headers=spaced),
    ):
        pass
    assert (refused.status_code, refused.code, refused.param) == (413, "too_large", "session")
    assert f" in {LONGEST}, since it travels in a header" in refused.message
    assert "send them by `session.update`" in refused.message
    with pytest.raises(openai.APIStatusError, match="may carry 65536 in"):
        create(session={"type": "realtime", "instructions": "a" * 70_000})


async def test_a_head_with_a_line_that_is_too_long_is_refused(gateway: RunningGateway) -> None:
    status, error = await refusal(url_of(gateway), additional_headers={"X-Long": "x" * 8192})
    assert (status, "over 8192 bytes" in error["message"]) == (431, True)
    for header in ({"Content-Length": "5"}, {"Transfer-Encoding": "chunked"}):
        status, error = await refusal(url_of(gateway), additional_headers=header)
        assert (status, "has no body" in error["message"]) == (400, True)


async def test_foreign_pages_open_nothing_where_there_are_no_keys(gateway: RunningGateway) -> None:
    assert (await refusal(url_of(gateway), origin=origin()))[1]["code"] == "forbidden_origin"
    port = int(gateway.base.rpartition(":")[2])
    status, error = await refusal("ws://evil.example/v1/realtime", host="127.0.0.1", port=port)
    assert (status, error["code"]) == (403, "forbidden_origin")


async def test_what_is_no_session_is_told_what_is(gateway: RunningGateway) -> None:
    answer = gateway.http.get("/v1/realtime")
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
    assert "ws://HOST:PORT/v1/realtime?model=qwen2_5_omni" in answer.json()["error"]["message"]
    status, error = await refusal(url_of(gateway, "/v1/realtimes"))
    assert (status, "WebSockets are served at /v1/realtime" in error["message"]) == (404, True)
    status, error = await refusal(url_of(gateway, "/v1/realtime?model=other"))
    assert (status, error["code"]) == (404, "model_not_found")
    assert "WebSocket /v1/realtime" in gateway.http.get("/v1/nothing").json()["error"]["message"]


async def test_sessions_are_counted_and_one_too_many_is_refused(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(max_sessions=1)) as gateway:
        async with talk(gateway.base):
            assert gateway.metric(SESSIONS) == 1
            status, error = await refusal(url_of(gateway))
            assert (status, error["code"]) == (429, "overloaded")
        await until(lambda: gateway.metric(SESSIONS) == 0)
        for _ in range(10):
            async with connect(url_of(gateway)):
                pass
            await until(lambda: gateway.metric(SESSIONS) == 0)


async def test_connections_of_sessions_are_connections_of_their_peer(triton: FakeTriton) -> None:
    with run_gateway(triton.url, max_peer_connections=2) as gateway:
        gateway.http.close()
        async with connect(url_of(gateway)) as one, connect(url_of(gateway)) as two:
            with pytest.raises((ConnectionClosed, OSError, EOFError, websockets.InvalidMessage)):
                await connect(url_of(gateway))
            for socket in (one, two):
                await event_of(socket, "session.created")


async def test_a_lost_connection_cancels_all_it_asked_for(triton: FakeTriton, gateway: RunningGateway) -> None:
    triton.script = triton.endless
    async with talk(gateway.base, audio=MANUAL["audio"]) as session:
        await session.say("Tell me a story.")
        await session.send("response.create")
        await session.until("response.output_audio.delta")
        session.connection._connection.transport.abort()
    assert await asyncio.to_thread(triton.cancelled.wait, TIMEOUT_S)
    await until(lambda: gateway.metric(SESSIONS) == 0)


async def test_a_slow_reader_is_waited_for_and_then_given_up(triton: FakeTriton) -> None:
    sent = []

    def loud(_request: Any, _context: Any) -> Iterator[Any]:
        for number in range(10_000):
            sent.append(number)
            yield chunk(text="word", audio=np.zeros(24_000, np.float32))
        yield final()

    triton.script = loud
    with run_gateway(triton.url, send_timeout_s=0.5) as gateway:
        async with connect(url_of(gateway), max_queue=1, close_timeout=0.1) as socket:
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
            await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await socket.send(json.dumps({"type": "response.create"}))
            await until(lambda: gateway.metric(SESSIONS) == 0)
            assert await asyncio.to_thread(triton.cancelled.wait, TIMEOUT_S)
    assert len(sent) < 5000


async def test_a_client_that_answers_no_ping_is_gone(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(ping_seconds=0.1)) as gateway:
        host, port = gateway.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        with closing(writer):
            writer.write(f"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\n{upgrade}{'A' * 22}==\r\n\r\n".encode())
            # Its session is counted by now; the first ping may be over before that has told of itself.
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 101 Switching Protocols\r\n"
            await until(lambda: gateway.metric(SESSIONS) == 0)


class Silent(FakeTriton):
    """Tells nothing of its models until it may."""

    def __init__(self) -> None:
        super().__init__(greeting)
        self.may_tell = threading.Event()

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.may_tell.wait(TIMEOUT_S)
        return super().RepositoryIndex(request, context)


async def test_a_session_is_heard_and_ends_while_triton_tells_nothing() -> None:
    """A response asks for the server's limits; until then no session waits for them."""
    triton, limits = Silent(), RealtimeLimits(max_sessions=2)
    with serve_grpc(triton), run_gateway(triton.url, realtime=limits) as gateway:
        async with talk(gateway.base, audio=MANUAL["audio"]) as other:
            for _ in range(3):
                async with talk(gateway.base, audio=MANUAL["audio"]) as session:
                    await session.say("Here.")
                    await session.asked("response.create", "response.created")
                await until(lambda: gateway.metric(SESSIONS) == 1)
            triton.may_tell.set()
            await other.say("Still here.")
            assert (await other.asked("response.create", "response.done")).response.status == "completed"


async def test_an_event_that_is_too_long_ends_its_session_alone(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(max_event_bytes=10_000)) as gateway:
        async with talk(gateway.base, audio=MANUAL["audio"]) as other:
            async with connect(url_of(gateway)) as socket:
                await event_of(socket, "session.created")
                await socket.send("x" * 100_000)
                with pytest.raises(ConnectionClosed) as closed:
                    await event_of(socket, "error")
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
            await other.say("Still here.")


async def test_a_full_buffer_is_refused_and_is_not_lost(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(max_buffer_seconds=1)) as gateway:
        async with talk(gateway.base, audio=MANUAL["audio"]) as session:
            await session.append(noise(0.8))
            sound = base64.b64encode(noise(0.8).tobytes()).decode()
            assert (await session.refused("input_audio_buffer.append", audio=sound)).code == "input_audio_buffer_full"
            await session.asked("input_audio_buffer.commit", "conversation.item.done")


async def test_a_conversation_of_too_many_items_loses_the_oldest(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(max_items=3)) as gateway:
        async with talk(gateway.base, audio=MANUAL["audio"]) as session:
            said = [(await session.say(f"Number {number}.")).id for number in range(5)]
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "First."}], "id": "x"}
            await session.asked(
                "conversation.item.create", "conversation.item.done", item=item, previous_item_id="root"
            )
            await session.until("conversation.item.deleted", item_id="x")
            gone = [event.item_id for event in session.seen if event.type == "conversation.item.deleted"]
    assert gone == [*said[:2], "x"]


async def test_a_flood_of_wrong_events_is_answered_in_order(gateway: RunningGateway) -> None:
    async def flood(socket: Any) -> None:
        for number in range(1000):
            await socket.send(json.dumps({"type": "nonsense", "event_id": str(number)}))
        await socket.send(b"\x00\xff")
        await socket.send("[" * 1000)

    async with connect(url_of(gateway)) as socket, talk(gateway.base) as other:
        sending = asyncio.create_task(flood(socket))
        named = [(await event_of(socket, "error"))["error"]["event_id"] for _ in range(1002)]
        await sending
        await other.say("Still here.")
    assert named == [*map(str, range(1000)), None, None]


async def test_a_session_ends_after_its_time(triton: FakeTriton) -> None:
    with run_gateway(triton.url, realtime=RealtimeLimits(session_seconds=0.2)) as gateway:
        async with connect(url_of(gateway)) as socket:
            assert (await event_of(socket, "error"))["error"]["code"] == "session_expired"
            await socket.wait_closed()
        assert (socket.close_code, socket.close_reason) == (1001, "session_expired")


async def test_a_gateway_that_stops_tells_its_sessions(gateway: RunningGateway) -> None:
    async with connect(url_of(gateway)) as socket:
        await event_of(socket, "session.created")
        gateway.stop()
        error = (await event_of(socket, "error"))["error"]
        await socket.wait_closed()
    assert (error["code"], error["message"]) == ("stopping", "The gateway is stopping; send the request again.")
    assert socket.close_code == 1012


async def test_a_model_that_is_not_named_is_the_first(gateway: RunningGateway) -> None:
    async with connect(url_of(gateway)) as socket:
        assert (await event_of(socket, "session.created"))["session"]["model"] == MODEL


async def test_openai_s_names_mean_the_served_model_which_sessions_tell(gateway: RunningGateway) -> None:
    async with talk(gateway.base, model="gpt-realtime") as session:
        assert session.seen[0].session.model == MODEL
        update = {"type": "realtime", "model": "gpt-realtime-2.1"}
        assert (await session.asked("session.update", "session.updated", session=update)).session.model == MODEL
    made = gateway.openai.realtime.client_secrets.create(session={"type": "realtime", "model": "gpt-realtime"})
    assert made.session.model == MODEL  # type: ignore[union-attr]
    async with talk(gateway.base, key=made.value) as session:
        assert session.seen[0].session.model == MODEL
