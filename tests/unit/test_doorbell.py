# SPDX-License-Identifier: Apache-2.0
"""A stage hears that there is news, from whichever process, and nobody minds one that does not listen."""

import secrets
import subprocess
import sys
import threading

import pytest

from triton_omni.link.ring import Doorbell, DoorbellRinger
from triton_omni.session import server_folder
from waiting import IN_TIME_S

RING = """
import pathlib, sys
from triton_omni.session import server_folder
from triton_omni.link.ring import DoorbellRinger
server_folder._SHARED_MEMORY = pathlib.Path(sys.argv[1])
DoorbellRinger(sys.argv[2], "talker").ring()
"""


@pytest.fixture
def name():
    return f"triton-omni-test-{secrets.token_hex(6)}"


def test_who_listens_hears_each_ring_of_another_process(name):
    heard = threading.Semaphore(0)
    bell = Doorbell(name, "talker", heard.release)
    folder = str(server_folder._SHARED_MEMORY)
    for _ in range(2):
        assert not heard.acquire(timeout=0.01)
        subprocess.run([sys.executable, "-c", RING, folder, name], check=True)
        assert heard.acquire(timeout=IN_TIME_S)
    bell.close()


def test_a_bell_that_is_closed_hears_nothing_more_and_rings_into_the_void_are_nothing(name):
    rope, heard = DoorbellRinger(name, "talker"), []
    rope.ring()
    bell = Doorbell(name, "talker", lambda: heard.append(1))
    bell.close()
    heard.clear()
    rope.ring()
    rope.close()
    assert heard == []
    assert not any(thread.name == "omni-talker-bell" for thread in threading.enumerate())


def test_more_rings_than_wait_are_one(name):
    """A stage in a long step hears afterwards, and whoever rings meanwhile waits for nothing."""
    begun, goes_on, heard = threading.Event(), threading.Event(), []

    def hear():
        heard.append(1)
        begun.set()
        goes_on.wait(IN_TIME_S)

    bell, rope = Doorbell(name, "talker", hear), DoorbellRinger(name, "talker")
    rope.ring()
    assert begun.wait(IN_TIME_S)
    for _ in range(10_000):
        rope.ring()
    goes_on.set()
    bell.close()
    rope.close()
    assert 1 <= len(heard) < 10_000


def test_a_later_process_s_bell_takes_the_place_of_the_one_before(name):
    """The file of one that was killed stays, and the rope may be older than the bell."""
    earlier, later = threading.Semaphore(0), threading.Semaphore(0)
    first, rope = Doorbell(name, "talker", earlier.release), DoorbellRinger(name, "talker")
    second = Doorbell(name, "talker", later.release)
    rope.ring()
    assert later.acquire(timeout=IN_TIME_S)
    assert not earlier.acquire(blocking=False)
    first.close()
    rope.ring()
    assert later.acquire(timeout=IN_TIME_S)
    second.close()
    rope.close()
    assert [path.name for path in server_folder.own_folder(name).iterdir()] == ["talker-bell"]


def test_a_ring_that_fails_is_logged_once_and_so_is_its_end(name, monkeypatch, caplog):
    bell, ringer = Doorbell(name, "talker", lambda: None), DoorbellRinger(name, "talker")
    address = ringer._address
    for used in ("x" * 200, address, "x" * 200):
        monkeypatch.setattr(ringer, "_address", used)
        for _ in range(3):
            ringer.ring()
    ringer.close()
    bell.close()
    failed, again = "a doorbell could not be rung: AF_UNIX path too long", "a doorbell could be rung again"
    assert [record.getMessage() for record in caplog.records] == [failed, again, failed]


def test_a_doorbell_whose_socket_breaks_ends_its_thread_and_says_so(name, caplog):
    bell = Doorbell(name, "talker", lambda: None)
    bell._socket.settimeout(0.01)  # recv then raises
    ringer = DoorbellRinger(name, "talker")
    ringer.ring()
    bell._thread.join(IN_TIME_S)
    assert not bell._thread.is_alive()
    assert caplog.text.count("the doorbell is not heard any more") == 1
    bell.close()
    ringer.close()
