# SPDX-License-Identifier: Apache-2.0
"""Another user of the machine: what he makes first is refused, what is ours he cannot open, name or guess."""

import _posixshmem
import contextlib
import errno
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from triton_omni.link.ring import Doorbell, offer_ring, open_ring
from triton_omni.link.sender import RingWriter
from triton_omni.session import server_folder
from triton_omni.session.ledger import SessionLedger, StageFacts
from triton_omni.session.ledger_table import DRAINING, LEAVING, Table, create_table, wait_while_held
from triton_omni.session.ledger_view import StageBoard, read_ledger
from triton_omni.session.server_folder import (
    LedgerError,
    ledger_name,
    own_folder,
    own_folders,
    remove_stale,
    table_path,
)
from triton_omni.supervisor import leftovers
from triton_omni.supervisor.machine import ServerError
from triton_omni.supervisor.server_log import ServerLog

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")

CPU = torch.device("cpu")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([RingWriter.__module__, SessionLedger.__module__, StageBoard.__module__, "pytest"])
NOBODY = 65534
WAIT_S = 300.0


@pytest.fixture
def shared(monkeypatch):
    """A folder like /dev/shm, in which everybody may make files."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def name(shared):
    return f"triton-omni-{os.getuid()}-{server_folder.process_namespace()}-4194304-1-0a"


def make_first(made, path):
    MADE_FIRST[made](path)


def by_nobody(act, *given):
    """Run `act` in a process of another user; return its result, or the number of the system's error."""
    results = SERVER.SimpleQueue()
    process = SERVER.Process(target=_as_nobody, args=(results, server_folder._SHARED_MEMORY, act, given))
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0
    return results.get()


def _as_nobody(results, shared, act, given):
    server_folder._SHARED_MEMORY = shared
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        results.put(act(*given))
    except OSError as error:
        results.put(error.errno)


def make_folder(path, mode):
    os.umask(0)
    path.mkdir(mode=mode)


def make_whole_ledger(path):
    """One that says that the server leaves."""
    create_table(path.name)
    Table(path / "ledger").set_word(LEAVING, DRAINING)


MADE_FIRST = {
    "a folder for all": lambda path: make_folder(path, 0o777),
    "a folder for himself": lambda path: make_folder(path, 0o700),
    "a file": Path.touch,
    "a link to a folder of ours": lambda path: path.symlink_to("/root"),
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a whole ledger": make_whole_ledger,
}
USES = {
    "a stage": lambda name: SessionLedger(name, "thinker", StageFacts(1)),
    "a bell": lambda name: Doorbell(name, "talker", lambda: None),
    "a ring": lambda name: offer_ring(name, "talker", 1, shape=(1, 1), dtype=torch.int32, device=CPU),
    "who looks for a ring": lambda name: open_ring(name, "talker", 1, CPU),
    "the supervisor": StageBoard,
    "the doctor": lambda name: read_ledger(table_path(name)),
    "a stage that waits": lambda name: wait_while_held(name, "thinker", WAIT_S),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", MADE_FIRST)
def test_what_another_user_made_first_is_refused_by_a_sentence(shared, name, made, use):
    by_nobody(make_first, made, shared / name)
    with pytest.raises(LedgerError) as refused:
        USES[use](name)
    told = rf"{shared / name} belongs to user {NOBODY} and has mode .{{10}}; this server needs one that belongs to its "
    told += "user, 0, and that nobody else may open: remove it, then start the server again"
    assert re.fullmatch(told, str(refused.value))


@pytest.mark.parametrize("use", [use for use in USES if use.startswith(("the", "who", "a stage that"))])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o602])
def test_a_file_that_others_may_open_is_refused(name, use, mode):
    SessionLedger(name, "talker")
    offer_ring(name, "talker", 1, shape=(1, 1), dtype=torch.int32, device=CPU)
    for file in own_folder(name).iterdir():
        file.chmod(mode)
    with pytest.raises(LedgerError, match="that nobody else may open: remove it"):
        USES[use](name)


def bind(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(path))
    path.chmod(0o600)


NO_FILES = {"a pipe": lambda path: os.mkfifo(path, 0o600), "a folder": lambda path: path.mkdir(0o700), "a socket": bind}


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("use", [use for use in USES if use.startswith(("the", "who", "a stage that"))])
@pytest.mark.parametrize("put", NO_FILES)
def test_what_is_no_file_is_refused_and_not_waited_for(name, use, put):
    """The server's own user put it there: an error, and no stage that waits for ever."""
    for file in ("ledger", "talker-ring"):
        NO_FILES[put](own_folder(name) / file)
    with pytest.raises(LedgerError, match=r"is no file \(.rw?.*\): stop the server, then remove it"):
        USES[use](name)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_may_open_is_refused(name, mode):
    own_folder(name).chmod(mode)
    with pytest.raises(LedgerError, match=f"{name} belongs to user 0 and has mode"):
        SessionLedger(name, "thinker")


def test_rows_go_by_messages_where_the_ring_is_another_user_s(name, caplog):
    ledger = SessionLedger(name, "thinker", StageFacts(1))
    ring_writer = RingWriter(ledger, "talker", CPU)
    offered = table_path(name).with_name("talker-ring")
    offered.touch()
    os.chown(offered, NOBODY, NOBODY)
    ring_writer.find_ring(10**12)
    assert "slower: " in caplog.text
    assert f"belongs to user {NOBODY}" in caplog.text
    ring_writer.close()
    ledger.close()


@contextlib.contextmanager
def server(name):
    ledger = SessionLedger(name, "talker", StageFacts(1))
    offer_ring(name, "talker", 1, shape=(1, 1), dtype=torch.int32, device=CPU)
    heard = []
    bell = Doorbell(name, "talker", lambda: heard.append(1))
    yield heard
    bell.close()
    ledger.close()


def ring(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.sendto(b"", str(path))


def test_another_user_opens_nothing_of_ours(name):
    with server(name) as heard:
        folder = table_path(name).parent
        assert sorted(path.name for path in folder.iterdir()) == ["ledger", "talker-bell", "talker-ring"]
        for file in ("ledger", "talker-ring"):
            assert by_nobody(os.open, folder / file, os.O_RDONLY) == errno.EACCES
        assert by_nobody(os.listdir, folder) == errno.EACCES
        assert by_nobody(ring, folder / "talker-bell") == errno.EACCES
        assert by_nobody(os.rename, folder, folder.with_name("x")) in (errno.EPERM, errno.EACCES)
        assert not heard


def test_another_user_cannot_compute_the_name():
    assert by_nobody(ledger_name, os.getpid()) == errno.EACCES
    assert by_nobody(server_folder.process_id, server_folder.server_name(os.getpid())) == os.getpid(), (
        "the rest of it he can"
    )


def test_no_two_servers_have_the_same_random_part():
    parts = set()
    for _ in range(3):
        program = "print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()  # the kernel has put it in its place by now
            found = ledger_name(process.pid)
            assert found == ledger_name(process.pid)
            assert found.startswith(f"{server_folder.server_name(process.pid)}-")
            parts.add(found.rpartition("-")[2])
            process.communicate(b"\n")
    assert len(parts) == 3


def test_what_another_user_named_like_ours_is_left_alone(shared, name):
    by_nobody(make_whole_ledger, shared / name)
    own_folder(f"{name}b")
    assert [path.name for path in own_folders()] == [f"{name}b"]
    assert remove_stale() == [f"{name}b"]
    assert (shared / name / "ledger").exists()


def make_link(path):
    path.symlink_to("/nowhere")


FOREIGN_REGIONS = {
    "a folder": Path.mkdir,
    "a file": Path.touch,
    "a pipe": os.mkfifo,
    "a link": make_link,
}


def make_region(kind, path):
    FOREIGN_REGIONS[kind](path)


@pytest.mark.parametrize("kind", FOREIGN_REGIONS)
@pytest.mark.parametrize("remove", ["at the next start", "at the stop"])
def test_what_another_user_named_like_a_region_stops_no_start_and_no_stop(shared, monkeypatch, kind, remove):
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", shared)
    prefix = f"triton_omni_{os.getuid()}-{server_folder.process_namespace()}-4194304-1_0a_"
    foreign, own = shared / f"{prefix}1", shared / f"{prefix}2"
    by_nobody(make_region, kind, foreign)
    own.touch()
    if remove == "at the stop":
        leftovers.remove_shared_memory(prefix)
    else:
        assert leftovers.remove_stale_regions() == [own.name]
    assert list(shared.iterdir()) == [foreign]


def make_log_file(path):
    path.touch()
    path.chmod(0o666)


FOREIGN_LOGS = {
    "a file": make_log_file,
    "a pipe": lambda path: os.mkfifo(path, 0o666),
    "a link to a file of ours": lambda path: path.symlink_to(path.with_name("ours")),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("new")),
    "a folder": Path.mkdir,
}


def make_log(kind, path):
    os.umask(0)
    FOREIGN_LOGS[kind](path)


@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("kind", [*FOREIGN_LOGS, "a second name of a file of ours"])
def test_what_another_user_put_in_the_place_of_the_log_is_not_written(shared, kind):
    log, ours = shared / "server.log", shared / "ours"
    ours.write_text("kept")
    if kind in FOREIGN_LOGS:
        by_nobody(make_log, kind, log)
    else:
        log.hardlink_to(ours)  # which most systems allow an owner alone
    with pytest.raises(ServerError, match=rf"the log {log} (belongs to user|cannot be written)"):
        ServerLog(log).open()
    assert ours.read_text() == "kept"
    assert not (shared / "new").exists()


def test_a_log_may_be_a_link_of_the_server_s_own_user(shared):
    log = shared / "server.log"
    log.symlink_to(shared / "ours")
    opened = ServerLog(log)
    opened.open()
    opened.close()
    assert (shared / "ours").exists()


def test_no_name_of_shared_memory_reaches_the_ledger(monkeypatch):
    """By such a name a client has Triton map a file of /dev/shm."""
    monkeypatch.setattr(server_folder, "_SHARED_MEMORY", Path("/dev/shm"))
    name = f"triton-omni-test-{os.getpid()}"
    ledger = SessionLedger(name, "thinker", StageFacts(1))
    try:
        for key in (f"/{name}/ledger", f"{name}/ledger", f"//{name}/./ledger", f"/{name}"):
            with pytest.raises(OSError, match="Invalid argument"):
                _posixshmem.shm_open(key, os.O_RDWR, mode=0)
    finally:
        ledger.close()
