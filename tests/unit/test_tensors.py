# SPDX-License-Identifier: Apache-2.0
"""Tensors into and out of Triton: the same memory, the right bytes, and a count of what crossed by device."""

import contextlib
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from fake_pb_utils import PbUtils, Request, Tensor, text_tensor
from triton_omni.core.errors import TooLarge
from triton_omni.core.settings import MOST_MEDIA_ITEMS
from triton_omni.session.wire import Kind, Seal, SessionKey, TalkerMessage, ThinkerMessage
from triton_omni.stub.tensors import (
    LinkCounter,
    LinkInputs,
    bound_strings,
    read_bytes,
    read_strings,
    read_tensor,
    write_tensor,
    write_tensors,
)

KEY = SessionKey(1, 2)
SEAL = Seal(bytes(32), "thinker")
PB_UTILS = PbUtils()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64])
def test_a_tensor_crosses_both_ways_without_a_copy(dtype):
    tensor = torch.ones(3, 4, dtype=dtype)
    given = write_tensor(PB_UTILS, "ROWS", tensor)
    assert given.name() == "ROWS"
    assert given.torch.data_ptr() == tensor.data_ptr()
    found = read_tensor(given)
    assert found.data_ptr() == tensor.data_ptr()
    assert (found.dtype, found.shape) == (dtype, (3, 4))


def test_a_tensor_with_gaps_is_made_contiguous():
    tensor = torch.arange(12).reshape(3, 4)[:, ::2]
    assert torch.equal(write_tensor(PB_UTILS, "X", tensor).torch, tensor)
    assert write_tensor(PB_UTILS, "X", tensor).torch.is_contiguous()


class OnAnotherDevice(torch.Tensor):
    """A tensor that says it is on the second GPU, and is given only while that is the thread's current one."""

    current = 0
    is_cuda = True
    device = torch.device("cuda", 1)

    def __dlpack__(self, **options):
        if OnAnotherDevice.current != 1:
            raise BufferError("not the current device")
        return "capsule"


def test_a_tensor_is_given_by_a_thread_that_chose_no_device(monkeypatch):
    """torch refuses to export what is not on the thread's current device."""

    @contextlib.contextmanager
    def device(chosen):
        before, OnAnotherDevice.current = OnAnotherDevice.current, chosen.index
        yield
        OnAnotherDevice.current = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Tensor, "from_dlpack", staticmethod(lambda name, tensor: (name, tensor.__dlpack__())))
    name, _ = write_tensor(PB_UTILS, "ROWS", torch.ones(3).as_subclass(OnAnotherDevice))
    assert (name, OnAnotherDevice.current) == ("ROWS", 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a second GPU is written from")
def test_a_tensor_of_the_second_gpu_is_given_by_a_thread_that_chose_none():
    rows = torch.ones(3, device="cuda:1")
    with ThreadPoolExecutor(1) as pool:
        given = pool.submit(write_tensor, PB_UTILS, "ROWS", rows).result()
    assert given.torch.device == rows.device


def test_a_tensor_without_elements_keeps_its_shape():
    """Triton's DLPack gives no memory to such a tensor."""
    found = read_tensor(write_tensor(PB_UTILS, "ROWS", torch.empty(0, 3)))
    assert found.shape == (0, 3)


@pytest.mark.parametrize("value", [b"", "grüße 👋".encode(), b"\x00\xff", b"x" * 100_000])
def test_bytes_of_a_link_cross_both_ways(value):
    given = write_tensor(PB_UTILS, "META", value)
    assert given.as_numpy().dtype == np.uint8
    assert read_tensor(given) == value


def test_bytes_for_a_client_are_a_string_of_triton():
    given = write_tensor(PB_UTILS, "text_output", "grüße".encode())
    assert (given.as_numpy().dtype, given.as_numpy().tolist()) == (np.object_, ["grüße".encode()])


def test_whole_messages_cross():
    rows = torch.arange(8.0).reshape(2, 4)
    message = ThinkerMessage(key=KEY, kind=Kind.DATA, sequence=3, text="é", rows=rows)
    request = Request(write_tensors(PB_UTILS, message.to_tensors(4, torch.float32, SEAL)))
    found = ThinkerMessage.from_tensors(LinkInputs(request, LinkCounter()), SEAL)
    assert found.rows.data_ptr() == rows.data_ptr()
    assert (found.text, found.sequence, found.positions) == ("é", 3, None)
    heartbeat = TalkerMessage(key=KEY, kind=Kind.HEARTBEAT)
    request = Request(write_tensors(PB_UTILS, heartbeat.to_tensors(SEAL)))
    found = TalkerMessage.from_tensors(LinkInputs(request, LinkCounter()), SEAL)
    assert found == heartbeat


def test_received_tensors_are_counted_by_name_and_device():
    counter = LinkCounter()
    for _ in range(2):
        tensors = {"ROWS": torch.ones(2, 4, dtype=torch.bfloat16), "CODES": torch.ones(3, dtype=torch.int32)}
        dict(LinkInputs(Request(write_tensors(PB_UTILS, {**tensors, "META": b"12345"})), counter))
    counter.count("ROWS", torch.empty(5, 4, dtype=torch.float32, device="meta"))
    assert counter.snapshot() == {("ROWS", "cpu"): 32, ("CODES", "cpu"): 24, ("ROWS", "meta"): 80}


def test_what_nobody_asks_for_is_not_read():
    """On a GPU each tensor that is read is copied: what a stranger sends is not."""
    counter = LinkCounter()
    inputs = LinkInputs(Request(write_tensors(PB_UTILS, {"META": b"12345", "ROWS": torch.ones(2, 4)})), counter)
    assert set(inputs) == {"META", "ROWS"}
    assert inputs["META"] == b"12345"
    assert counter.snapshot() == {}
    assert inputs["ROWS"] is inputs["ROWS"]
    assert counter.snapshot() == {("ROWS", "cpu"): 32}


def test_a_snapshot_does_not_change():
    counter = LinkCounter()
    before = counter.snapshot()
    counter.count("ROWS", torch.ones(1))
    assert before == {}


def test_byte_inputs_are_read_as_lists_and_absent_ones_told():
    request = Request([text_tensor("media", b"\x00\x01", b""), text_tensor("text_input", "hi"), text_tensor("other")])
    assert read_bytes(request, ("text_input", "media", "messages")) == {
        "text_input": [b"hi"],
        "media": [b"\x00\x01", b""],
        "messages": None,
    }


def test_byte_inputs_of_any_shape_are_read_flat():
    tensor = Tensor("media", np.array([[b"a"], [b"b"]], dtype=np.object_))
    assert read_bytes(Request([tensor]), ("media",)) == {"media": [b"a", b"b"]}


MANY = 15_000_000
TOO_MANY = {
    "empty": lambda: bytes(4 * MANY),
    "of a byte": lambda: struct.pack("<I", 1) + b"x" + bytes(4 * MANY),
    "one too many": lambda: bytes(4 * (MOST_MEDIA_ITEMS + 1)),
    "after a long one": lambda: struct.pack("<I", 1 << 20) + bytes(1 << 20) + bytes(4 * MANY),
}


def unpacked(encoded, shape):
    """A tensor as Triton's backend makes it: the function of its module, and then the shape that the client gave."""
    pb_utils = PbUtils()
    bound_strings(pb_utils)
    return Tensor("media", pb_utils.deserialize_bytes_tensor(np.frombuffer(encoded, np.uint8)).reshape(list(shape)))


@pytest.mark.parametrize("items", [[], [b""], [b"a", b"", b"\x00\xff" * 300], [b""] * MOST_MEDIA_ITEMS], ids=len)
def test_elements_are_unpacked_as_they_were_sent(items):
    encoded = b"".join(struct.pack("<I", len(item)) + item for item in items)
    found = unpacked(encoded, (len(items),))
    assert (found.as_numpy().dtype, found.shape()) == (np.object_, [len(items)])
    assert read_bytes(Request([found]), ("media",)) == {"media": items}


def test_elements_keep_the_shape_that_the_client_gave():
    encoded = b"".join(struct.pack("<I", 1) + item for item in (b"a", b"b"))
    assert unpacked(encoded, (2, 1)).shape() == [2, 1]


@pytest.mark.parametrize("name", TOO_MANY)
def test_millions_of_elements_are_refused_before_they_are_made(name):
    encoded = TOO_MANY[name]()
    tracemalloc.start()
    try:
        tensor = unpacked(encoded, (MANY,))
        with pytest.raises(TooLarge, match=f"^media: {MANY} elements, the limit of any deployment is 4096$"):
            read_bytes(Request([tensor]), ("media",))
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_shape_of_any_rank_is_counted():
    with pytest.raises(TooLarge, match="media: 15000000 elements"):
        read_strings(unpacked(TOO_MANY["empty"](), (3, 5, 1_000_000)))


class Uncounted(Tensor):
    """A tensor whose elements nobody may look at."""

    def shape(self):
        return [MOST_MEDIA_ITEMS + 1]

    def as_numpy(self):
        pytest.fail("listed before it was counted")


@pytest.mark.parametrize("name", ["text_input", "messages", "media", "sampling_parameters"])
def test_every_input_is_counted_before_it_is_listed(name):
    with pytest.raises(TooLarge, match=f"{name}: 4097 elements"):
        read_bytes(Request([Uncounted(name, None)]), (name,))
