# SPDX-License-Identifier: Apache-2.0
"""An utterance is sent while it is spoken: which hints there are, what they hold, and that no reply waits for one."""

from __future__ import annotations

import asyncio
import io
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from client_fakes import (
    INFO,
    FakeHttp,
    FakeTriton,
    chunk,
    event,
    failure,
    final,
    inputs_of,
    parameters_of,
    serve_grpc,
    serve_http,
)
from triton_omni_client import (
    AsyncOmniClient,
    BadRequest,
    Conversation,
    HttpClient,
    Internal,
    Listening,
    Media,
    OmniClient,
    OmniClientError,
    Request,
    TooLarge,
)
from triton_omni_client.listening import REACH, WINDOW
from waiting import IN_TIME_S

SOUND = (np.random.default_rng(7).uniform(-1, 1, 5 * WINDOW) * 32_767).round().astype(np.int16)
PREFILLED = {**INFO, "finish_reason": {"thinker": "prefilled", "talker": "prefilled", "token2wav": None}}
NO_CACHE = "prefill_only: this deployment has no prefix cache [omni:bad_request;stage=thinker]"
Answer = Callable[[], Iterator[Any]]


def prefilled() -> Iterator[Any]:
    yield chunk(info=PREFILLED)
    yield final()


def broken(text: str) -> Answer:
    return lambda: iter([failure(text)])


class Hints:
    """A script that greets, and that gives each hint the next of the answers that a test puts here."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[Answer] = queue.Queue()
        self.left = threading.Event()
        """A hint has ended, also by its client."""

    def __call__(self, request: Any, context: Any) -> Iterator[Any]:
        self.arrived.put(request)
        if parameters_of(request).get("prefill_only"):
            context.add_callback(self._mark_left)
            yield from self.answers.get(timeout=IN_TIME_S)()
        else:
            yield chunk(text="A sea.")
            yield chunk(info=INFO)
            yield final()

    def _mark_left(self) -> None:
        self.left.set()

    def next(self) -> Any:
        return self.arrived.get(timeout=IN_TIME_S)

    def is_over(self) -> bool:
        return self.arrived.empty()


@pytest.fixture
def hints() -> Hints:
    return Hints()


@pytest.fixture
def server(hints: Hints) -> Iterator[FakeTriton]:
    with serve_grpc(FakeTriton(script=hints)) as fake:
        yield fake


@pytest.fixture
def client(server: FakeTriton) -> Iterator[OmniClient]:
    with OmniClient(server.url) as connected:
        yield connected


def heard(request: Any) -> NDArray[np.int16]:
    """The samples of the last medium of a request."""
    samples, rate = soundfile.read(io.BytesIO(inputs_of(request)["media"][-1]), dtype="int16")
    assert rate == 16_000
    found: NDArray[np.int16] = samples
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + IN_TIME_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def windows(count: int) -> NDArray[np.int16]:
    """The sound up to where `count` windows are complete."""
    return SOUND[: count * WINDOW + REACH]


def test_each_complete_window_is_hinted_with_all_that_came_before(hints: Hints, client: OmniClient) -> None:
    chat = Conversation(system="Be brief.", voice="Ethan")
    chat.add("What is it?", [Media("image", b"picture")], "A beach.")
    sent = []
    with chat.listen(client, seed=3) as listening:
        for count in (1, 2, 3):
            first = len(heard(sent[-1])) if sent else 0
            listening.write(SOUND[first : count * WINDOW + REACH - 1])
            assert hints.is_over()
            listening.write(SOUND[count * WINDOW + REACH - 1 : count * WINDOW + REACH])
            sent.append(hints.next())
            hints.answers.put(prefilled)
            wait_until(lambda: not listening._is_hinting)
        assert listening.ask("And this?").collect().text == "A sea."
    whole = hints.next()
    assert [heard(request).tolist() for request in sent] == [windows(count).tolist() for count in (1, 2, 3)]
    assert (heard(whole) == windows(3)).all()
    said = json.loads(inputs_of(whole)["messages"][0])
    assert said[-1] == {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "And this?"}]}
    for request in sent:
        assert json.loads(inputs_of(request)["messages"][0]) == [
            *said[:-1],
            {"role": "user", "content": [{"type": "audio"}]},
        ]
        assert inputs_of(request)["media"][0] == b"picture"
        asked = {**parameters_of(whole), "prefill_only": True, "priority": 1}
        assert parameters_of(request) == asked
    assert parameters_of(whole)["audio_in_pieces"] is True
    assert "priority" not in parameters_of(whole)


def test_one_hint_is_under_way_and_the_newest_length_is_next(hints: Hints, client: OmniClient) -> None:
    listening = Conversation().listen(client)
    listening.write(windows(1))
    assert len(heard(hints.next())) == len(windows(1))
    for count in (2, 3, 4):
        listening.write(windows(count)[len(windows(count - 1)) :])
    assert hints.is_over()
    hints.answers.put(prefilled)
    assert len(heard(hints.next())) == len(windows(4))
    hints.answers.put(prefilled)
    wait_until(lambda: not listening._is_hinting)
    listening.ask().collect()
    assert "prefill_only" not in parameters_of(hints.next())
    assert hints.is_over()


def test_the_reply_does_not_wait_for_a_hint_which_goes_on(hints: Hints, client: OmniClient) -> None:
    with Conversation().listen(client) as listening:
        listening.write(windows(1))
        hints.next()
        listening.write(SOUND[len(windows(1)) : len(windows(2)) + 100])
        assert listening.ask().collect().text == "A sea."
    assert len(heard(hints.next())) == len(windows(2)) + 100
    assert not hints.left.is_set()
    hints.answers.put(prefilled)
    wait_until(lambda: not listening._is_hinting)
    listening.write(SOUND)
    assert hints.is_over()
    assert listening.refusal is None


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (NO_CACHE, BadRequest, "no prefix cache"),
        ("the prompt has 9000 tokens, the limit is 4096 [omni:too_large;stage=thinker]", TooLarge, "9000 tokens"),
        ("the engine has failed [omni:internal;stage=talker]", Internal, "has failed"),
    ],
)
def test_a_refusal_ends_the_hints_and_can_be_read(
    hints: Hints, client: OmniClient, text: str, kind: type[OmniClientError], said: str
) -> None:
    chat = Conversation()
    listening = chat.listen(client)
    listening.write(windows(1))
    hints.next()
    hints.answers.put(broken(text))
    wait_until(lambda: listening.refusal is not None)
    assert type(listening.refusal) is kind
    assert said in listening.refusal.message
    listening.write(SOUND)
    assert listening.ask().collect().text == "A sea."
    assert "prefill_only" not in parameters_of(hints.next())
    assert hints.is_over()
    chat.listen(client).write(windows(1))  # the next utterance tries again
    assert parameters_of(hints.next())["prefill_only"] is True
    hints.answers.put(prefilled)


@pytest.mark.parametrize(
    "text",
    [
        "all 64 sessions are in use [omni:overloaded;stage=thinker;retry_after_ms=1]",
        "the deadline passed [omni:timeout;stage=thinker]",
        None,
    ],
    ids=["overloaded", "timeout", "connection"],
)
def test_a_passing_error_costs_one_hint(hints: Hints, client: OmniClient, text: str | None) -> None:
    listening = Conversation().listen(client)
    listening.write(windows(1))
    hints.next()
    hints.answers.put((lambda: iter(())) if text is None else broken(text))
    wait_until(lambda: not listening._is_hinting)
    assert hints.is_over()  # it is not sent again
    assert listening.refusal is None
    listening.write(SOUND[len(windows(1)) : len(windows(2))])
    assert len(heard(hints.next())) == len(windows(2))
    hints.answers.put(prefilled)


def test_later_turns_send_their_sounds_in_pieces(hints: Hints, client: OmniClient) -> None:
    chat = Conversation()
    chat.ask(client, "", [Media("audio", b"sound")]).collect()
    assert "audio_in_pieces" not in parameters_of(hints.next())
    with chat.listen(client) as listening:
        listening.write(SOUND[:REACH])
        listening.ask().collect()
    hints.next()
    chat.ask(client, "Why?").collect()
    last = hints.next()
    assert parameters_of(last)["audio_in_pieces"] is True
    assert len(inputs_of(last)["media"]) == 2
    assert (heard(last) == SOUND[:REACH]).all()


@pytest.mark.parametrize("place", ["conversation", "listen"])
def test_the_callers_priority_stays(hints: Hints, client: OmniClient, place: str) -> None:
    options = {"priority": -7}
    chat = Conversation(**options if place == "conversation" else {})
    listening = chat.listen(client, **options if place == "listen" else {})
    listening.write(windows(1))
    assert parameters_of(hints.next())["priority"] == -7
    hints.answers.put(prefilled)
    listening.ask().collect()
    assert parameters_of(hints.next())["priority"] == -7


def test_a_closed_utterance_is_cancelled_and_forgotten(hints: Hints, client: OmniClient) -> None:
    with Conversation().listen(client) as listening:
        listening.write(windows(1))
        hints.next()
    assert hints.left.wait(IN_TIME_S)
    hints.answers.put(prefilled)
    wait_until(lambda: not listening._is_hinting)
    with pytest.raises(BadRequest, match="has no sound: write samples before ask"):
        listening.ask()
    assert hints.is_over()


def test_listening_ends_the_reply_that_runs_unless_it_cannot_begin(server: FakeTriton, client: OmniClient) -> None:
    server.script = server.endless
    chat = Conversation()
    reply = chat.ask(client, "Count")
    next(reply)
    with pytest.raises(BadRequest, match="timeout"):
        chat.listen(client, timeout=-1)
    assert (chat.turns, "audio_in_pieces" in chat.options) == ((), False)
    chat.listen(client)
    assert server.cancelled.wait(IN_TIME_S)
    assert [turn.reply for turn in chat.turns] == ["Hello"]


def test_an_utterance_can_be_asked_again_after_an_error(server: FakeTriton, hints: Hints, client: OmniClient) -> None:
    listening = Conversation().listen(client)
    listening.write(SOUND[:1000])
    with pytest.raises(BadRequest, match="timeout"):
        listening.ask(timeout=-1)
    server.script = lambda *_: iter([failure("broken [omni:bad_request]")])
    with pytest.raises(BadRequest, match="broken"):
        listening.ask().collect()
    server.script = hints
    assert listening.ask().collect().text == "A sea."
    assert (heard(hints.next()) == SOUND[:1000]).all()


@pytest.mark.parametrize("block", [160, 1024, WINDOW])
def test_blocks_of_floats_and_of_integers_are_the_same_sound(client: OmniClient, hints: Hints, block: int) -> None:
    found = []
    for kind in (SOUND, SOUND.reshape(-1, 1), SOUND / np.float32(32_767)):
        listening = Conversation().listen(client)
        for at in range(0, WINDOW, block):
            listening.write(kind[at : min(at + block, WINDOW)])
        listening.ask().collect()
        found.append(heard(hints.next()).tolist())
    assert found == 3 * [SOUND[:WINDOW].tolist()]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (np.zeros((4, 2), np.int16), r"shape \[4, 2\] is neither \[S\] nor \[S, 1\]; write one channel"),
        (np.zeros((), np.float32), r"shape \[\] is neither"),
        (np.zeros(4), "float64 is neither float32 nor int16; convert them"),
        (np.zeros(4, np.uint8), "uint8 is neither"),
        (np.array([0, np.nan], np.float32), "not finite"),
    ],
)
def test_other_samples_are_refused_and_change_nothing(client: OmniClient, samples: Any, said: str) -> None:
    listening = Conversation().listen(client)
    with pytest.raises(BadRequest, match=said):
        listening.write(samples)
    with pytest.raises(BadRequest, match="has no sound"):
        listening.ask()


async def test_an_utterance_of_a_task(hints: Hints, server: FakeTriton) -> None:
    chat = Conversation()
    async with AsyncOmniClient(server.url) as client:
        with chat.listen_async(client) as listening:
            listening.write(windows(1))
            assert len(heard(await asyncio.to_thread(hints.next))) == len(windows(1))
            listening.write(windows(3)[len(windows(1)) :])
            hints.answers.put(prefilled)
            assert len(heard(await asyncio.to_thread(hints.next))) == len(windows(3))
            hints.answers.put(broken(NO_CACHE))
            while listening.refusal is None:
                await asyncio.sleep(0.005)
            listening.write(SOUND)
            assert (await listening.ask("Why?").collect()).text == "A sea."
        assert parameters_of(hints.next())["audio_in_pieces"] is True
        with chat.listen_async(client) as listening:
            listening.write(windows(1))
            await asyncio.to_thread(hints.next)
            hints.left.clear()
        assert await asyncio.to_thread(hints.left.wait, IN_TIME_S)
        hints.answers.put(prefilled)
    assert hints.is_over()
    assert len(chat.turns) == 1


def test_an_utterance_over_http() -> None:
    asked: list[dict[str, Any]] = []

    def answer() -> tuple[int, dict[str, str], bytes]:
        asked.append(json.loads(fake.head["sampling_parameters"]))
        return 200, {"Content-Type": "text/event-stream"}, event(text="A sea.", info=INFO)

    with serve_http(FakeHttp(answer)) as fake:
        listening: Listening[Any] = Conversation().listen(HttpClient(fake.url, timeout=IN_TIME_S))
        listening.write(windows(1))
        wait_until(lambda: not listening._is_hinting)
        assert listening.refusal is None
        assert listening.ask().collect().text == "A sea."
    assert [found.get("prefill_only") for found in asked] == [True, None]


def test_a_request_names_both_keys_only_where_they_were_chosen() -> None:
    for name in ("prefill_only", "audio_in_pieces"):
        assert name not in Request(text="hi").sampling_parameters()
        for value in (True, False):
            assert Request(text="hi", **{name: value}).sampling_parameters() == {name: value}
