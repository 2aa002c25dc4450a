# SPDX-License-Identifier: Apache-2.0
"""Between Triton and a stage: what a client sent is read, one bad request harms no other, closing loses nothing."""

import contextlib
import json
import secrets

import pytest
import torch

from fake_pb_utils import PbUtils, Request, Tensor, TritonError, text_tensor
from fakes import HIDDEN, FakePreprocessor, FakeTalkerEngine, FakeThinkerEngine, FakeWaveformEngine, thinker_message
from session_rig import record
from triton_omni.core.errors import BadRequest, Overloaded, TooLarge
from triton_omni.core.policy_settings import Token2WavPolicy
from triton_omni.core.settings import MAX_NAME, TalkerSettings, ThinkerSettings
from triton_omni.link.receiver import CANCEL_INTERVAL_NS
from triton_omni.request.parse import RawRequest
from triton_omni.session.engine import Sampling
from triton_omni.session.ledger import SessionLedger
from triton_omni.session.ledger_table import CANCELLED, CLOSED
from triton_omni.session.stage import StageStats, refused_error
from triton_omni.session.wire import SEAL_BYTES, Kind, Seal, Session, TalkerMessage, ThinkerMessage
from triton_omni.stub import request_parameters
from triton_omni.stub.adapter import (
    StageAdapter,
    adapt_talker,
    adapt_thinker,
    adapt_token2wav,
    read_client_request,
)
from triton_omni.stub.tensors import LinkCounter, LinkInputs, write_tensors
from triton_omni.talker.stage import TalkerStage
from triton_omni.thinker.stage import ThinkerStage
from triton_omni.token2wav.stage import Token2WavStage
from waiting import IN_TIME_S

CPU = torch.device("cpu")


class RecordingStage:
    """A stage that answers each request at once and remembers the calls."""

    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def close(self):
        self.calls.append("close")

    def stats(self):
        return StageStats(0, 0, 0, 0, 0, 0)

    def metrics(self):
        return iter(())


def submit(request, sender):
    found = read_client_request(request)
    if found.text_input == b"overloaded":
        raise Overloaded("no session", retry_after_ms=5)
    if found.text_input == b"fault":
        raise KeyError("secret")
    sender.send({"TEXT": found.text_input})
    sender.finish()


class Ledger:
    """Is told to close."""

    def __init__(self, calls):
        self._calls = calls

    def word(self, field, model):
        return 1

    def close(self):
        self._calls.append("ledger closed")


@contextlib.contextmanager
def adapted():
    adapter = StageAdapter(PbUtils(), "thinker", RecordingStage(), submit, counter=LinkCounter(), ledger=Ledger([]))
    try:
        yield adapter
    finally:
        adapter.close()


def answered(request):
    assert request.sender.done.wait(IN_TIME_S), "no final"
    assert request.sender.finals == 1
    assert request.sender.violations == []
    return request.sender


def sent_by(request):
    """The thinker's messages so far, one at least."""
    while not request.sender.outputs():
        assert not request.sender.done.wait(0.002)
    responses = [Request(response.output_tensors()) for response in request.sender.responses]
    return [thinker_message(LinkInputs(response, LinkCounter())) for response in responses]


def ask(text):
    return Request([text_tensor("text_input", text)])


# A client's request.


def test_all_four_inputs_of_a_client_are_read():
    request = Request(
        [
            text_tensor("text_input", "grüße"),
            text_tensor("messages", "[]"),
            text_tensor("media", b"\x00", b""),
            text_tensor("sampling_parameters", "{}"),
        ],
        request_id="r-5",
    )
    assert read_client_request(request) == RawRequest(
        text_input="grüße".encode(),
        messages=b"[]",
        media=(b"\x00", b""),
        sampling_parameters=b"{}",
        request_id="r-5",
    )


def test_inputs_left_out_are_told_as_such():
    assert read_client_request(Request()) == RawRequest(request_id="r1")


def test_an_id_that_is_no_text_is_refused():
    class Undecodable(Request):
        def request_id(self):
            return b"\xff".decode()

    with pytest.raises(BadRequest, match="id: not UTF-8"):
        read_client_request(Undecodable([text_tensor("text_input", "hi")]))


def test_an_id_has_a_longest_length():
    class Named(Request):
        name = ""

        def request_id(self):
            return self.name

    request = Named([text_tensor("text_input", "hi")])
    request.name = "i" * MAX_NAME
    assert read_client_request(request).request_id == request.name
    request.name += "i"
    with pytest.raises(TooLarge, match=f"id: {MAX_NAME + 1} characters, the limit is {MAX_NAME}: send a shorter one"):
        read_client_request(request)


@pytest.mark.parametrize("name", ["text_input", "messages", "sampling_parameters"])
@pytest.mark.parametrize("values", [(), ("a", "b")], ids=["none", "two"])
def test_any_other_number_of_elements_is_refused_by_name(name, values):
    with pytest.raises(BadRequest, match=f"{name}: expected one element, found {len(values)}"):
        read_client_request(Request([text_tensor(name, *values)]))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ('{"num_steps": 4}', "^num_steps: not a field of a request, it belongs into sampling_parameters.token2wav$"),
        ('{"priority": 7}', "^priority: not a field of a request, it belongs into sampling_parameters$"),
        ('{"timeout": 5}', "^timeout: .* it belongs into sampling_parameters$"),
        ('{"message": "[]"}', r"^message: not a field of a request \(did you mean messages\?\)$"),
        ('{"sampling_params": "{}"}', r"^sampling_params: .* \(did you mean sampling_parameters\?\)$"),
        ("nonsense", "^parameters: cannot be read$"),
    ],
)
def test_a_parameter_that_was_meant_as_an_input_is_refused_by_name(parameters, says):
    with pytest.raises(BadRequest, match=says):
        read_client_request(Request([text_tensor("text_input", "hi")], parameters=parameters))


@pytest.mark.parametrize(
    ("parameters", "sampling"),
    [
        ({"temperature": 0.5, "max_tokens": 7}, {"thinker": {"temperature": 0.5, "max_tokens": 7}}),
        (
            {"seed": 7, "audio_format": "wav", "stop": "."},
            {"seed": 7, "audio_format": "wav", "thinker": {"stop": ["."]}},
        ),
        ({"voice": "Ethan", "stream": True, "id": "r1"}, {"voice": "Ethan"}),
    ],
)
def test_sampling_keys_may_be_parameters(parameters, sampling):
    request = Request([text_tensor("text_input", "hi")], parameters=json.dumps(parameters))
    assert json.loads(read_client_request(request).sampling_parameters) == sampling


def test_sampling_keys_are_not_parameters_beside_their_input():
    inputs = [text_tensor("text_input", "hi"), text_tensor("sampling_parameters", "{}")]
    says = "^top_p: a parameter beside sampling_parameters; put it into sampling_parameters.thinker$"
    with pytest.raises(BadRequest, match=says):
        read_client_request(Request(inputs, parameters='{"top_p": 0.5}'))
    assert read_client_request(Request(inputs, parameters='{"stream": true}')).sampling_parameters == b"{}"
    inputs[1] = text_tensor("sampling_parameters", "null")
    sampling = read_client_request(Request(inputs, parameters='{"top_p": 0.5}')).sampling_parameters
    assert json.loads(sampling) == {"thinker": {"top_p": 0.5}}


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({f"p{n}": n for n in range(65)}, "^parameters: 65 are given, the limit is 64$"),
        ({f"p{n}": n for n in range(200_000)}, r"^parameters: \d{7} characters of JSON, the limit is 65536$"),
        ({"x": "a" * 70_000}, "^parameters: 70009 characters of JSON, the limit is 65536$"),
    ],
    ids=["65", "200,000", "long"],
)
def test_many_parameters_are_refused_before_they_are_looked_at(parameters, says, monkeypatch):
    monkeypatch.setattr(request_parameters, "_check_names", lambda names: pytest.fail(f"looked at {len(names)}"))
    with pytest.raises(TooLarge, match=says):
        read_client_request(Request([text_tensor("text_input", "hi")], parameters=json.dumps(parameters)))


def test_a_time_that_is_given_as_triton_s_parameter_is_the_request_s():
    assert read_client_request(Request([text_tensor("text_input", "hi")], timeout=1_500_000)).timeout_us == 1_500_000


def test_parameters_of_triton_of_traces_and_of_proxies_pass():
    given = dict.fromkeys(("sequence_id", "sequence_start", "sequence_end", "binary_data_output"), 1)
    given |= {"id": "r1", "triton_enable_empty_final_response": True, "traceparent": "00-1", "x-tenant": "blue"}
    read_client_request(Request([text_tensor("text_input", "hi")], parameters=json.dumps(given)))


# Requests in, answers out.


def test_one_bad_request_harms_no_other():
    requests = [ask("one"), ask("overloaded"), ask("fault"), Request([text_tensor("text_input", "a", "b")]), ask("two")]
    with adapted() as adapter:
        adapter.execute(requests)
        senders = [answered(request) for request in requests]
    assert [s.error and s.error.code() for s in senders] == [
        None,
        TritonError.UNAVAILABLE,
        TritonError.INTERNAL,
        TritonError.INVALID_ARG,
        None,
    ]
    assert senders[1].error.message() == "no session [omni:overloaded;stage=thinker;retry_after_ms=5]"
    assert senders[2].error.message() == "the request could not be read [omni:internal;stage=thinker]"
    assert senders[3].error.message().endswith("[omni:bad_request;stage=thinker]")
    assert [bytes(s.outputs()[0]["TEXT"].as_numpy()[0]) for s in (senders[0], senders[4])] == [b"one", b"two"]


def test_the_stage_starts_at_once_and_is_closed_first_then_the_sending_then_the_ledger():
    class LateStage(RecordingStage):
        """Answers what it holds only when it is closed, as at a server's shutdown."""

        def close(self):
            super().close()
            sender.finish(then=lambda: self.calls.append("answered"))

    stage, request = LateStage(), ask("one")
    with contextlib.ExitStack() as ending:
        adapter = StageAdapter(
            PbUtils(),
            "thinker",
            stage,
            lambda _, given: senders.append(given),
            counter=LinkCounter(),
            ledger=Ledger(stage.calls),
        )
        ending.callback(adapter.close)
        senders = []
        assert stage.calls == ["start"]
        adapter.execute([request])
        [sender] = senders
    assert stage.calls == ["start", "close", "answered", "ledger closed"]
    assert answered(request).responses == []


def test_an_engine_that_cannot_be_closed_loses_no_answer():
    class BrokenStage(RecordingStage):
        def close(self):
            senders[0].fail(Overloaded("closing"))
            raise RuntimeError("device lost")

    senders, calls, request = [], [], ask("one")
    adapter = StageAdapter(
        PbUtils(),
        "thinker",
        BrokenStage(),
        lambda _, given: senders.append(given),
        counter=LinkCounter(),
        ledger=Ledger(calls),
    )
    adapter.execute([request])
    with pytest.raises(RuntimeError, match="device lost"):
        adapter.close()
    assert answered(request).error.code() == TritonError.UNAVAILABLE
    assert calls == ["ledger closed"]


# The adapter with real stages.


@pytest.fixture
def name():
    return f"triton-omni-test-{secrets.token_hex(8)}"


@pytest.fixture
def thinker_ledger(name):
    ledger = SessionLedger(name, "thinker")
    yield ledger
    ledger.close()


@pytest.fixture
def open_stage(name, thinker_ledger):
    """Adapt a stage with a stand-in engine."""
    del thinker_ledger
    with contextlib.ExitStack() as ending:

        def start(kind):
            adapter = {"thinker": thinker, "talker": talker, "token2wav": token2wav}[kind](name)
            ending.callback(adapter.close)
            return adapter

        yield start


def thinker(name, *, later=False):
    ledger = SessionLedger(name, "thinker")
    stage = ThinkerStage(
        ThinkerSettings(max_sessions=2),
        FakeThinkerEngine(length=3),
        FakePreprocessor(later=later),
        ledger,
        device=torch.device("cpu"),
        hidden_size=HIDDEN,
        dtype=torch.float32,
    )
    return adapt_thinker(PbUtils(), stage, ledger)


def talker(name):
    ledger = SessionLedger(name, "talker")
    stage = TalkerStage(TalkerSettings(), FakeTalkerEngine(), ledger, device=CPU, text_bos_id=lambda voice: 3)
    return adapt_talker(PbUtils(), stage, ledger)


def token2wav(name):
    ledger = SessionLedger(name, "token2wav")
    stage = Token2WavStage(FakeWaveformEngine(), ledger, device=CPU, sample_rate=24000, policy=Token2WavPolicy())
    return adapt_token2wav(PbUtils(), stage, ledger)


def link_tensors(kind, key, ledger, number=1):
    if kind == "talker":
        message = ThinkerMessage(key=key, kind=Kind.HEARTBEAT, number=number)
        return message.to_tensors(HIDDEN, torch.float32, ledger.seal("thinker"))
    return TalkerMessage(key=key, kind=Kind.HEARTBEAT, number=number).to_tensors(ledger.seal("talker"))


@pytest.mark.parametrize(("later", "first"), [(True, Kind.HEARTBEAT), (False, Kind.OPEN)])
def test_a_clients_request_opens_a_session_and_sends_its_messages(name, later, first):
    adapter, talker = thinker(name, later=later), SessionLedger(name, "talker")
    request = ask("hello")
    adapter.execute([request])
    while Kind.OPEN not in (kinds := [message.kind for message in sent_by(request)]):
        assert not request.sender.done.wait(0.002)
    assert kinds[0] == first
    adapter.close()
    talker.close()
    # The talker holds the first message's request, and an error would leak it.
    assert answered(request).error is None


def test_a_refused_request_tells_its_client_why(open_stage):
    request = ask("bad")
    open_stage("thinker").execute([request])
    assert answered(request).error.message() == "text_input: is bad [omni:bad_request;stage=thinker]"
    assert not request.sender.outputs()


def test_a_request_that_is_refused_later_tells_its_client_why(name):
    adapter, talker = thinker(name, later=True), SessionLedger(name, "talker")
    request = ask("bad")
    adapter.execute([request])
    for heartbeat in sent_by(request):
        talker.count_returned(heartbeat.key)
    talker.close()
    assert answered(request).error.message() == "text_input: is bad [omni:bad_request;stage=thinker]"
    adapter.close()


def test_who_asks_the_thinker_for_all_its_outputs_is_refused_before_anything_is_read(open_stage):
    request = Request([text_tensor("text_input", "hello")], outputs=["META", "CALLED_BY_NAME", "ROWS"])
    open_stage("thinker").execute([request])
    assert answered(request).error.message() == (
        "thinker is a stage of the model qwen2_5_omni and cannot be called directly: call qwen2_5_omni "
        "[omni:bad_request;stage=thinker]"
    )
    assert not request.sender.outputs()


@pytest.mark.parametrize("kind", ["talker", "token2wav"])
@pytest.mark.parametrize(
    "breakage",
    [
        {"META": b"{}"},
        {"META": b"\xff"},
        {"META": b""},
        {"META": None},
        {"META": torch.zeros(3)},
        {"ROWS": None, "CODES": None},
    ],
    ids=str,
)
def test_a_message_that_cannot_be_read_is_closed_empty(open_stage, thinker_ledger, kind, breakage):
    """Not with an error: that would leak the ensemble's request while the thinker's sender is open."""
    adapter = open_stage(kind)
    tensors = {**link_tensors(kind, thinker_ledger.publish(0), thinker_ledger), **breakage}
    broken = Request(write_tensors(PbUtils(), {n: v for n, v in tensors.items() if v is not None}))
    adapter.execute([broken])
    assert answered(broken).responses == []


@pytest.mark.parametrize("kind", ["talker", "token2wav"])
@pytest.mark.parametrize("secret_of", ["another server", "another stage", "nobody", "an earlier session"])
def test_a_foreign_message_is_closed_empty_and_changes_nothing(open_stage, thinker_ledger, kind, secret_of):
    adapter = open_stage(kind)
    old, key = thinker_ledger.publish(0), thinker_ledger.publish(0)
    tensors = dict(link_tensors(kind, old if secret_of == "an earlier session" else key, thinker_ledger))
    sender = {"talker": "thinker", "token2wav": "talker"}[kind]
    content = tensors["META"][:-SEAL_BYTES]
    foreign = {"another server": Seal(bytes(32), sender), "another stage": thinker_ledger.seal("token2wav")}
    if secret_of in foreign:
        tensors["META"] = foreign[secret_of].sign(content)
    elif secret_of == "nobody":
        tensors["META"] = content + bytes(SEAL_BYTES)
    forged = Request(write_tensors(PbUtils(), tensors))
    forged.sender.cancelled = True
    before = record(thinker_ledger, key)
    adapter.execute([forged])
    assert answered(forged).responses == []
    assert forged.sender.cancel_queries == 0
    assert record(thinker_ledger, key) == before
    adapter.execute([true := Request(write_tensors(PbUtils(), link_tensors(kind, key, thinker_ledger, number=2)))])
    thinker_ledger.write(key, CLOSED)
    answered(true)
    assert thinker_ledger.returned(key, kind) == 1, "the true one alone"


@pytest.mark.parametrize("kind", ["talker", "token2wav"])
def test_a_cancel_that_a_message_brings_is_written_to_the_ledger(open_stage, thinker_ledger, kind):
    adapter = open_stage(kind)
    key = thinker_ledger.publish(0)
    heartbeat = Request(write_tensors(PbUtils(), link_tensors(kind, key, thinker_ledger)))
    heartbeat.sender.cancelled = True
    adapter.execute([heartbeat])
    answered(heartbeat)
    assert thinker_ledger.has(key, CANCELLED)


@pytest.mark.parametrize("kind", ["talker", "token2wav"])
def test_triton_is_asked_for_a_cancel_once_an_interval_and_session(open_stage, thinker_ledger, kind, monkeypatch):
    now = [10**12]
    monkeypatch.setattr("triton_omni.link.sessions.time.monotonic_ns", lambda: now[0])
    adapter = open_stage(kind)
    keys = [thinker_ledger.publish(slot) for slot in (0, 4)]
    requests = []
    for number, at_ns in enumerate((0, 1, CANCEL_INTERVAL_NS - 1, CANCEL_INTERVAL_NS), start=1):
        now[0] = 10**12 + at_ns
        for key in keys:
            requests.append(Request(write_tensors(PbUtils(), link_tensors(kind, key, thinker_ledger, number))))
            adapter.execute(requests[-1:])
    for key in keys:  # the talker holds the last heartbeat of a session
        thinker_ledger.write(key, CLOSED)
    asked = [answered(request).cancel_queries for request in requests]
    assert asked == [1, 1, 0, 0, 0, 0, 1, 1]


def test_an_input_that_is_no_byte_string_is_an_error_of_ours(open_stage):
    adapter = open_stage("thinker")
    request = Request([Tensor("text_input", None)])
    adapter.execute([request])
    assert answered(request).error.code() == TritonError.INTERNAL


@pytest.mark.parametrize("refused", ["text", "info"])
def test_a_reply_of_which_triton_refuses_a_part_ends_with_an_error(open_stage, name, thinker_ledger, refused):
    key, talker = thinker_ledger.publish(0), SessionLedger(name, "talker")
    session = Session(
        request_id="r1",
        want_audio=False,
        audio_format="f32",
        voice="Chelsie",
        seed=7,
        talker=Sampling(),
        prompt_tokens=1,
        max_rows=2,
        accepted_ns=0,
    )
    messages = [
        TalkerMessage(key=key, kind=Kind.OPEN, number=1, session=session),
        TalkerMessage(key=key, kind=Kind.TEXT, number=2, sequence=1, text="hello" if refused == "text" else ""),
        TalkerMessage(key=key, kind=Kind.TEXT, number=3, sequence=2, codes_done=True, last=True),
    ]
    seal = talker.seal("talker")
    requests = [Request(write_tensors(PbUtils(), message.to_tensors(seal))) for message in messages]
    requests[0].sender.fault = RuntimeError("shared memory is full")
    open_stage("token2wav").execute(requests)
    for request in requests[1:]:
        answered(request)
    assert not requests[0].sender.finals, "the others' requests are open"
    thinker_ledger.write(key, CLOSED)
    talker.write(key, CLOSED, len(messages))
    sender = answered(requests[0])
    assert sender.error.message() == refused_error("token2wav").to_text()
    assert not sender.outputs()
    talker.close()
