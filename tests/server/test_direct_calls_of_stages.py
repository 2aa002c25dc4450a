# SPDX-License-Identifier: Apache-2.0
"""A client that calls `thinker`, `talker` and `token2wav` by itself does all that it can.

Replies to others stay the same, and nothing of it outlives its deadline. For each stage's part in this see
`tests/unit/test_direct_calls_of_stages.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from server.asking import BATCH_TOLERANCE, ask
from server.serving import TINY, Served, wait_for
from triton_omni.session.wire import PROTOCOL_VERSION, SEAL_BYTES, Seal
from triton_omni_client import Reply, Request
from triton_omni_client.protocol import to_grpc

DEADLINE_S = 2.0
LIMIT_S = 100.0
ALL = int(TINY["thinker"]["max_sessions"])
NEXT = {"thinker": "talker", "talker": "token2wav"}
SENT = {"thinker": ("META", "ROWS"), "talker": ("META", "CODES")}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""By name: type, shape, and bytes."""


class Line:
    """One stream of gRPC to a stage, and what came by it, by the ids of the requests."""

    def __init__(self, stub: Any, stage: str) -> None:
        self._stage = stage
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.given: list[tuple[str, Tensors]] = []
        self.errors: list[str] = []
        self.ended: set[str] = set()
        answers = stub.ModelStreamInfer(iter(self._asked.get, None), timeout=LIMIT_S)
        self._thread = threading.Thread(target=self._read, args=(answers,))
        self._thread.start()

    def ask(self, message: Any) -> None:
        for name in SENT.get(self._stage, ()):
            message.outputs.add(name=name)
        self._asked.put(message)

    def hand(self, tensors: Tensors, request_id: str) -> None:
        message = service_pb2.ModelInferRequest(model_name=self._stage, id=request_id)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, (datatype, shape, data) in tensors.items():
            message.inputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_input_contents.append(data)
        self.ask(message)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _read(self, answers: Any) -> None:
        for answer in answers:
            found = answer.infer_response
            if answer.error_message:
                self.errors.append(answer.error_message)
            if found.outputs:
                parts = zip(found.outputs, found.raw_output_contents, strict=True)
                tensors = {part.name: (part.datatype, tuple(part.shape), data) for part, data in parts}
                self.given.append((found.id, tensors))
            if answer.error_message or found.parameters["triton_final_response"].bool_param:
                self.ended.add(found.id)


def keep_nothing(stage: str, tensors: Tensors) -> bool:
    return False


@dataclass
class DirectCaller:
    """Passes on what it likes of a session that it began at the thinker."""

    lines: dict[str, Line]
    handed: dict[str, list[Tensors]] = field(default_factory=lambda: {"talker": [], "token2wav": []})
    read: dict[str, int] = field(default_factory=lambda: {"thinker": 0, "talker": 0})
    count: int = 0

    def hand(self, stage: str, tensors: Tensors) -> None:
        self.count += 1
        self.lines[stage].hand(tensors, f"{stage} {self.count}")

    def pass_on(self, keeps: Callable[[str, Tensors], bool] = keep_nothing) -> None:
        """Pass on, as the ensemble would, the messages that have come since, except those that `keeps` chooses."""
        for stage, to in NEXT.items():
            given = self.lines[stage].given
            while self.read[stage] < len(given):
                _, tensors = given[self.read[stage]]
                self.read[stage] += 1
                if not keeps(to, tensors):
                    self.handed[to].append(tensors)
                    self.hand(to, tensors)

    @property
    def is_over(self) -> bool:
        """True if the thinker has ended the session, and every message that was passed on is given back."""
        ended = sum(len(self.lines[stage].ended) for stage in NEXT.values())
        return bool(self.lines["thinker"].ended) and ended == self.count

    def go_on(self, keeps: Callable[[str, Tensors], bool] = keep_nothing) -> None:
        def advance() -> bool:
            self.pass_on(keeps)
            return self.is_over

        wait_for(advance, lambda: (self.count, {name: len(line.ended) for name, line in self.lines.items()}))

    def text(self) -> str:
        answers = [tensors["text_output"][2] for _, tensors in self.lines["token2wav"].given]
        return b"".join(answer[4:] for answer in answers).decode()

    def first(self) -> Tensors:
        wait_for(lambda: bool(self.lines["thinker"].given), lambda: self.lines["thinker"].errors)
        return self.lines["thinker"].given[0][1]


@contextmanager
def direct_caller(server: Served, name: str, **options: Any) -> Iterator[DirectCaller]:
    """A session that a client begins at the thinker, asking for exactly what the ensemble asks for."""
    with grpc.insecure_channel(server.supervisor.grpc_url) as channel, ExitStack() as stack:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        lines = {stage: Line(stub, stage) for stage in ("thinker", "talker", "token2wav")}
        for line in lines.values():
            stack.callback(line.close)
        lines["thinker"].ask(to_grpc(Request(text="hello", seed=1, request_id=name, **options), "thinker"))
        yield DirectCaller(lines)


def meta_of(tensors: Tensors) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(tensors["META"][2][1:-SEAL_BYTES])
    return found


def with_meta(tensors: Tensors, meta: bytes) -> Tensors:
    return {**tensors, "META": ("UINT8", (len(meta),), meta)}


def empty(stage: str, meta: bytes, hidden: int) -> Tensors:
    """A message without rows or codes."""
    tensor: Tensors = {"ROWS": ("FP32", (0, hidden), b"")} if stage == "talker" else {"CODES": ("INT32", (0,), b"")}
    return with_meta(tensor, meta)


def said(server: Served, name: str) -> Reply:
    return ask(server, name, text="hello", seed=1)


@pytest.fixture(scope="module")
def expected(shared_server: Served) -> Reply:
    return said(shared_server, "before direct_callers")


def check_same(found: Reply, expected: Reply) -> None:
    assert found.text == expected.text
    np.testing.assert_allclose(found.audio, expected.audio, rtol=0, atol=BATCH_TOLERANCE)


def wait_until_nothing_is_held(server: Served) -> None:
    wait_for(lambda: not server.held(), server.held)


def test_who_does_as_the_ensemble_has_one_reply_and_what_he_repeats_changes_nothing(
    server: Served, expected: Reply
) -> None:
    with direct_caller(server, "as the ensemble") as found:
        found.go_on()
        assert found.text() == expected.text
        given = len(found.lines["token2wav"].given)
        for stage, messages in found.handed.items():
            for tensors in messages:
                found.hand(stage, tensors)
        check_same(said(server, "beside what is repeated"), expected)
        found.go_on()
        assert len(found.lines["token2wav"].given) == given
        assert not any(line.errors for line in found.lines.values())
    wait_until_nothing_is_held(server)


def test_what_is_repeated_while_a_session_is_open_changes_nothing(server: Served, expected: Reply) -> None:
    with direct_caller(server, "twice") as found:

        def advance() -> bool:
            known = {stage: len(messages) for stage, messages in found.handed.items()}
            found.pass_on()
            for stage, messages in found.handed.items():
                for tensors in messages[known[stage] :] + messages[:1]:
                    found.hand(stage, tensors)
            return bool(found.lines["thinker"].ended)

        wait_for(advance, lambda: found.count)
        found.go_on()
        assert found.text() == expected.text
    wait_until_nothing_is_held(server)


FORGED: dict[str, dict[str, Any]] = {
    "heartbeat": {"kind": "heartbeat"},
    "open": {"kind": "open"},
    "end": {"kind": "text", "sequence": 1, "last": True, "codes_done": True, "text": "forged"},
    "error": {"kind": "error", "sequence": 1, "failure": {"stage": "talker", "code": "internal", "message": "forged"}},
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_for_every_session_that_may_be_open_changes_nothing(
    server: Served, expected: Reply, name: str
) -> None:
    with direct_caller(server, "forging") as found:
        meta, hidden = meta_of(found.first()), found.first()["ROWS"][1][1]
        opening = meta if meta["kind"] == "open" else meta_of(found.lines["thinker"].given[1][1])
        fields = {**FORGED[name], **({"session": opening["session"]} if name == "open" else {})}
        replies: list[Reply] = []
        other = threading.Thread(target=lambda: replies.append(said(server, "beside what is forged")))
        other.start()
        keys = [{"slot": slot, "generation": of} for slot in range(2 * ALL) for of in range(1, 40, 3)] + [meta["key"]]
        for stage, sender in (("talker", "thinker"), ("token2wav", "talker")):
            for key in keys[:: 1 + (name != "end")]:
                forged = bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode({"key": key, "number": 10**6, **fields})
                found.hand(stage, empty(stage, Seal(bytes(32), sender).sign(forged), hidden))
            # The thinker's own seal beside other words, and its message for token2wav.
            true = found.first()["META"][2]
            found.hand(stage, empty(stage, forged + true[-SEAL_BYTES:], hidden))
        found.hand("token2wav", empty("token2wav", true, hidden))
        other.join()
        check_same(replies[0], expected)
        found.go_on()
        assert found.text() == expected.text
    wait_until_nothing_is_held(server)
    check_same(said(server, "after what was forged"), expected)


KEPT: dict[str, Callable[[str, Tensors], bool]] = {
    "all": lambda to, tensors: True,
    "all but the thinker's open": lambda to, tensors: to == "token2wav" or meta_of(tensors)["kind"] != "open",
    "all but both opens": lambda to, tensors: meta_of(tensors)["kind"] != "open",
    "the talker's end": lambda to, tensors: to == "token2wav" and bool(meta_of(tensors).get("last")),
}


@pytest.mark.parametrize("name", KEPT)
def test_as_many_sessions_as_there_may_be_are_over_after_their_deadline(
    server: Served, expected: Reply, name: str
) -> None:
    """Their caller keeps messages to himself; then all places are free, and the next reply is whole."""
    direct_callers = [direct_caller(server, f"keeping {number}", timeout=DEADLINE_S) for number in range(ALL)]
    threads = [threading.Thread(target=_keep, args=(one, KEPT[name])) for one in direct_callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until_nothing_is_held(server)
    check_same(said(server, f"after {name} was kept"), expected)


def _keep(one: Any, keeps: Callable[[str, Tensors], bool]) -> None:
    with one as found:
        found.go_on(keeps)


@pytest.mark.parametrize("change", ["fewer", "more", "wider", "not finite"])
def test_other_rows_beside_a_true_meta_end_his_own_session_alone(server: Served, expected: Reply, change: str) -> None:
    with direct_caller(server, "changing", timeout=DEADLINE_S) as found:

        def changed(stage: str, tensors: Tensors) -> bool:
            if stage != "talker" or not tensors["ROWS"][2]:
                return False
            datatype, (count, width), data = tensors["ROWS"]
            made: tuple[tuple[int, int], bytes] = {
                "fewer": ((count - 1, width), data[: 4 * width * (count - 1)]),
                "more": ((2 * count, width), 2 * data),
                "wider": ((count, 2 * width), 2 * data),
                "not finite": ((count, width), np.full(count * width, np.nan, np.float32).tobytes()),
            }[change]
            found.hand(stage, {**tensors, "ROWS": (datatype, *made)})
            return True

        replies: list[Reply] = []
        other = threading.Thread(target=lambda: replies.append(said(server, "beside what is changed")))
        other.start()
        found.go_on(changed)
        other.join()
        check_same(replies[0], expected)
    wait_until_nothing_is_held(server)
    check_same(said(server, "after what was changed"), expected)
