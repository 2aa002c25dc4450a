# SPDX-License-Identifier: Apache-2.0
"""Media decoded in processes of their own: the same results and errors, and an end to what costs too much."""

from __future__ import annotations

import functools
import io
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import soundfile

import media_samples as samples
from hostile import files
from processes import is_running
from triton_omni.core.errors import BadRequest, InternalError, OmniError, TooLarge
from triton_omni.core.settings import RequestLimits
from triton_omni.request.chat import MediaKind, MediaPart
from triton_omni.request.media import decode
from triton_omni.request.media.decode import decode_media
from triton_omni.request.media.decoders import Decoders
from triton_omni.request.media.files import after_tags
from triton_omni.request.media.killable import Crashed, ForkServer, KillableProcess, OutOfMemory, OutOfTime, Unwanted
from triton_omni.request.media.types import Audio, Image, Video, VisionSizes
from waiting import wait_for

LIMITS = RequestLimits()
LONG_S = 100.0
MEBIBYTE = 1 << 20


def always() -> bool:
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(decode.__name__)
    yield made
    made.close()


@pytest.fixture
def process(server: ForkServer) -> Iterator[KillableProcess]:
    made = server.process(256 * MEBIBYTE)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def hurried() -> Iterator[Decoders]:
    """With a second for all media of a request."""
    made = Decoders(LIMITS.model_copy(update={"max_decode_seconds": 1.0}))
    yield made
    made.close()


PARTS = [
    MediaPart("image", samples.image_file("jpeg", 640, 480)),
    MediaPart("audio", samples.audio_file("mp3", seconds=2.0, rate=44100)),
    MediaPart("video", samples.video_file("mp4", seconds=2.0, audio=True)),
    MediaPart("video", samples.video_file("webm", seconds=1.0)),
]


def test_media_are_what_they_are_when_decoded_here(decoders: Decoders) -> None:
    here = decode_media(PARTS, LIMITS, with_audio=True)
    there = decoders.decode(PARTS, with_audio=True, is_wanted=always)
    assert [type(medium) for medium in there] == [Image, Audio, Video, Video]
    image, audio, film, silent = zip(here, there, strict=True)
    assert image[0].pixels.tobytes() == image[1].pixels.tobytes()
    np.testing.assert_array_equal(*(each.samples for each in audio))
    for pair in (film, silent):
        np.testing.assert_array_equal(*(each.frames for each in pair))
        assert pair[0].fps == pair[1].fps
    np.testing.assert_array_equal(*(each.audio.samples for each in film))
    assert there[1].samples.flags.writeable


@pytest.mark.parametrize(
    ("part", "error", "says"),
    [
        (MediaPart("image", b"GIF89a"), BadRequest, r"medium 1 \(image\): must be one of png, jpeg, webp; found an"),
        (MediaPart("audio", b"fLaC" * 9), BadRequest, r"medium 1 \(audio\): unreadable audio"),
        (MediaPart("image", files.png_of_size(6000, 6000)), TooLarge, r"medium 1 \(image\): 6000 x 6000 pixels"),
    ],
)
def test_errors_keep_their_code_and_message(
    decoders: Decoders, part: MediaPart, error: type[OmniError], says: str
) -> None:
    with pytest.raises(error, match=says) as refused:
        decoders.decode([PARTS[0], part], with_audio=False, is_wanted=always)
    with pytest.raises(error) as here:
        decode_media([PARTS[0], part], LIMITS, with_audio=False)
    assert refused.value.to_text() == here.value.to_text()


def silence(seconds: int) -> bytes:
    """Return the most costly sound to decode, in 2 KB a second."""
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 192_000, 8, "PCM_16", format="FLAC") as file:
        for _ in range(seconds):
            file.write(np.zeros((192_000, 8), np.int16))
    return out.getvalue()


def test_a_request_that_decodes_for_too_long_is_refused_and_the_next_one_is_not(hurried: Decoders) -> None:
    says = r"medium [1-4] \(audio\): .* more than 1 seconds of CPU time, .*max_decode_seconds"
    with pytest.raises(TooLarge, match=says):  # the first of them on most machines
        hurried.decode([PARTS[0], *[MediaPart("audio", silence(290))] * 4], with_audio=False, is_wanted=always)
    assert len(hurried.decode(PARTS[:2], with_audio=False, is_wanted=always)) == 2


TAGGED: tuple[tuple[MediaKind, Callable[[int], bytes]], ...] = (
    ("audio", files.flac_of_tags),
    ("audio", files.wav_of_tags),
    ("video", files.mp4_of_tags),
    ("video", files.webm_of_tags),
)


def test_a_megabyte_of_tags_is_refused_and_a_hundred_tags_are_not() -> None:
    """FFmpeg needs time by the square of their number: here half a minute, ten minutes for a few MB."""
    limited = Decoders(LIMITS.model_copy(update={"max_decode_seconds": 16.0}))
    for kind, of_tags in TAGGED:
        says = rf"medium 0 \({kind}\): reading its header takes more than 1 seconds of CPU time"
        with pytest.raises(TooLarge, match=says):
            limited.decode([MediaPart(kind, of_tags(60_000))], with_audio=True, is_wanted=always)
        assert limited.decode([MediaPart(kind, of_tags(100))], with_audio=False, is_wanted=always)
    limited.close()


@pytest.mark.parametrize("count", [6_000_000, 101])
def test_no_more_id3_tags_are_passed_over_than_an_encoder_writes(count: int) -> None:
    sound = b"ID3\4\0\0\0\0\0\0" * count + samples.audio_file("mp3")
    assert after_tags(sound) == 1000


def test_the_seconds_are_those_of_all_media_of_a_request(hurried: Decoders) -> None:
    part = MediaPart("audio", silence(8))
    assert hurried.decode([part], with_audio=False, is_wanted=always)
    with pytest.raises(TooLarge, match=r"medium [1-9]\d* \(audio\): .*send shorter, smaller or fewer files"):
        hurried.decode([part] * 150, with_audio=False, is_wanted=always)


def test_a_medium_that_takes_too_much_memory_is_refused_and_the_next_one_is_not() -> None:
    limited = Decoders(LIMITS.model_copy(update={"max_decode_bytes": 48 * MEBIBYTE}))
    large = samples.image_file("png", 4096, 4000)
    with pytest.raises(
        TooLarge, match=r"medium 0 \(image\): .* more than 50331648 bytes of memory, .*max_decode_bytes"
    ):
        limited.decode([MediaPart("image", large)], with_audio=False, is_wanted=always)
    assert len(limited.decode(PARTS[:2], with_audio=False, is_wanted=always)) == 2
    limited.close()


def _jpeg_with(segments: bytes) -> bytes:
    whole = samples.image_file("jpeg", 40, 30)
    return whole[:2] + segments + whole[2:]


def _exif_segments(count: int) -> bytes:
    return (b"\xff\xe1" + struct.pack(">H", 65535) + b"Exif\0\0" + bytes(65527)) * count


def _mp4_of_tracks(count: int) -> bytes:
    """The one track of an mp4 again and again."""
    data = samples.video_file("mp4")
    place = data.index(b"trak") - 4
    track = data[place : place + int.from_bytes(data[place : place + 4])]
    header = data.index(b"moov") - 4
    size = int.from_bytes(data[header : header + 4]) + (count - 1) * len(track)
    return (
        data[:header] + struct.pack(">I", size) + data[header + 4 : place] + track * count + data[place + len(track) :]
    )


HOSTILE: dict[str, tuple[MediaKind, Callable[[], bytes]]] = {
    "mp4 of 800 tracks": ("video", lambda: _mp4_of_tracks(800)),
    "jpeg of many segments": ("image", lambda: _jpeg_with(_exif_segments(400))),
    "jpeg of fill bytes": ("image", lambda: _jpeg_with(b"\xff" * (4 * MEBIBYTE))),
    "png of many chunks": ("image", lambda: files.png_with(files.png_chunk(b"prVt", b""), 1_000_000)),
    "huge silence": ("audio", lambda: silence(200)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_stays_within_its_budget_beside_another_request(hurried: Decoders, name: str) -> None:
    kind, make = HOSTILE[name]
    part, found = MediaPart(kind, make()), list[object]()

    def decode() -> None:
        try:
            found.extend(hurried.decode([part], with_audio=True, is_wanted=always))
        except OmniError as error:
            found.append(error)

    before = resource.getrusage(resource.RUSAGE_SELF)
    thread = threading.Thread(target=decode)
    thread.start()
    assert len(hurried.decode(PARTS[:1], with_audio=False, is_wanted=always)) == 1
    thread.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert isinstance(found[0], BadRequest | TooLarge | Image | Video | Audio), found
    assert after.ru_maxrss - before.ru_maxrss < (3 * len(part.data) >> 10) + (64 << 10)
    assert after.ru_utime - before.ru_utime < 1.5


class TestProcess:
    """The end of a call, and its leftovers."""

    def test_it_runs_call_after_call(self, process: KillableProcess) -> None:
        for number in range(3):
            found, used = process.run(functools.partial(divmod, number, 2), LONG_S, always)
            assert found == divmod(number, 2)
            assert 0 <= used < LONG_S

    def test_what_a_call_raises_is_raised(self, process: KillableProcess) -> None:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            process.run(functools.partial(divmod, 1, 0), LONG_S, always)
        assert process.run(os.getpid, LONG_S, always)[0] == process.pid

    @pytest.mark.parametrize("way", ["computing", "sleeping"])
    def test_a_call_that_nobody_wants_any_more_ends(self, process: KillableProcess, way: str) -> None:
        call = _spin if way == "computing" else functools.partial(time.sleep, 600)
        asked = iter([True, True, False])
        with pytest.raises(Unwanted):
            process.run(call, LONG_S, lambda: next(asked))
        process.kill()
        assert not is_running(process.pid)

    def test_a_call_beyond_its_cpu_time_ends(self, process: KillableProcess) -> None:
        with pytest.raises(OutOfTime):
            process.run(_spin, 1.0, always)
        wait_for(lambda: not is_running(process.pid))

    def test_time_without_work_does_not_count(self, process: KillableProcess) -> None:
        assert process.run(functools.partial(time.sleep, 2.5), 1.0, always)[1] < 1

    def test_a_call_beyond_its_memory_ends(self, process: KillableProcess) -> None:
        assert process.run(functools.partial(_sized, 128 * MEBIBYTE), LONG_S, always)[0] == 128 * MEBIBYTE
        with pytest.raises(OutOfMemory):
            process.run(functools.partial(_sized, 512 * MEBIBYTE), LONG_S, always)

    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE])
    def test_a_crash_is_told_by_its_signal(self, process: KillableProcess, number: signal.Signals) -> None:
        with pytest.raises(Crashed, match=number.name):
            process.run(functools.partial(_end_by, number), LONG_S, always)

    def test_what_the_kernel_kills_lacked_memory(self, process: KillableProcess) -> None:
        with pytest.raises(OutOfMemory):
            process.run(functools.partial(_end_by, signal.SIGKILL), LONG_S, always)

    def test_a_stop_that_begins_with_a_signal_to_all_does_not_end_it(self, process: KillableProcess) -> None:
        os.kill(process.pid, signal.SIGTERM)
        assert process.run(os.getpid, LONG_S, always)[0] == process.pid

    def test_a_fork_server_that_was_killed_is_started_again(self) -> None:
        server = ForkServer("json")
        before = server.process(256 * MEBIBYTE)
        os.kill(server.pid, signal.SIGTERM)
        assert before.run(os.getpid, LONG_S, always)[0] == before.pid
        os.kill(server.pid, signal.SIGKILL)
        after = server.process(256 * MEBIBYTE)
        for process in (before, after):
            assert process.run(os.getpid, LONG_S, always)[0] == process.pid
            process.kill()
        server.close()
        wait_for(lambda: not any(map(is_running, [before.pid, after.pid, server.pid])))

    def test_a_long_video_needs_no_memory_for_each_frame(self, process: KillableProcess) -> None:
        part = MediaPart("video", samples.video_file("mp4", seconds=30.0))
        call = functools.partial(decode.decode_medium, part, 0, LIMITS, VisionSizes(), with_audio=False)
        assert len(process.run(call, LONG_S, always)[0].frames) == 60


def _spin() -> None:
    while True:
        pass


def _sized(size: int) -> int:
    return len(bytes(size))


def _end_by(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_crash_refuses_one_medium_alone(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = functools.partial(_crash_on, PARTS[1].data)
    monkeypatch.setattr("triton_omni.request.media.decode.decode_medium", crash)
    with pytest.raises(BadRequest, match=r"medium 1 \(audio\): its decoder crashed \(SIGSEGV\); the file is damaged"):
        decoders.decode(PARTS[:2], with_audio=False, is_wanted=always)
    monkeypatch.undo()
    assert len(decoders.decode(PARTS[:2], with_audio=False, is_wanted=always)) == 2


def _crash_on(data: bytes, part: MediaPart, *args: object, **options: object) -> Audio:
    if part.data == data:
        _end_by(signal.SIGSEGV)
    return Audio(np.zeros(1, np.float32))


def test_a_request_that_ends_is_refused_and_its_process_gone(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton_omni.request.media.decode.decode_medium", _never_end)
    asked = iter([True] * 3 + [False])
    with pytest.raises(InternalError, match="nobody waits for medium 0 any more"):
        decoders.decode(PARTS[:1], with_audio=False, is_wanted=lambda: next(asked))
    monkeypatch.undo()
    assert len(decoders.decode(PARTS[:1], with_audio=False, is_wanted=always)) == 1


def _never_end(*args: object, **options: object) -> None:
    _spin()


OWNER = """
import functools, threading, time
from triton_omni.request.media.killable import ForkServer
server = ForkServer("json")
idle, busy = server.process(1 << 28), server.process(1 << 28)
idle.run(time.time, 9.0, lambda: True)
threading.Thread(target=busy.run, args=(functools.partial(time.sleep, 600), 9.0, lambda: True), daemon=True).start()
print(idle.pid, busy.pid, server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_process_that_began_it(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        owner.send_signal(number)
    wait_for(lambda: not any(map(is_running, pids)))


class Foreign:
    """An object that no decoder returns: unpickling it would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


def foreign() -> Foreign:
    return Foreign()


def test_an_answer_that_holds_anything_but_media_is_not_built(process: KillableProcess) -> None:
    with pytest.raises(Crashed, match=r"it answered posix\.system"):
        process.run(foreign, LONG_S, always)
