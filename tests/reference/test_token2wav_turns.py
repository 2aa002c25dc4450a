# SPDX-License-Identifier: Apache-2.0
"""A large batch is launched by and by: who hears nothing yet goes between, and the sound is what it would be alone."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hf_token2wav import DEVICE, lent, next_outputs
from torch import Tensor

from triton_omni.core.errors import Overloaded
from triton_omni.core.settings import DiffusionSettings, StreamingPlan, Token2WavSettings
from triton_omni.session.engine import AudioOutput, EngineStats, StreamOptions
from triton_omni.token2wav import batch_launch
from triton_omni.token2wav.batch_launch import Due, Spliced
from triton_omni.token2wav.engine import (
    STEPS_AHEAD,
    Token2WavEngine,
)
from triton_omni.token2wav.networks import Vocoder
from triton_omni.token2wav.window_cache import LayerKVCache
from triton_omni.token2wav.window_times import WindowTimes

STREAMS, FIRST, SECOND = 5, 24, 24
"""Streams of the large batch, and codes of which the first and second chunk come."""
SETTINGS = Token2WavSettings(
    dtype="float32",
    plans={"balanced": StreamingPlan(chunk_blocks=(1, 2))},
    diffusion=DiffusionSettings(solver="euler", num_steps=5),
    max_codes=400,
    max_streams=STREAMS + 1,
)
VOICE = "Ethan"


@pytest.fixture(scope="module")
def shared_engine(tiny_checkpoint: Path) -> Token2WavEngine:
    return Token2WavEngine(tiny_checkpoint, SETTINGS, DEVICE)


@pytest.fixture
def engine(shared_engine: Token2WavEngine) -> Iterator[Token2WavEngine]:
    yield from lent(shared_engine)


def codes_of(key: str) -> Tensor:
    return torch.randint(190, (FIRST + SECOND,), generator=torch.Generator().manual_seed(ord(key)), dtype=torch.int32)


def begin(engine: Token2WavEngine, key: str) -> None:
    engine.open(key, VOICE, 1, StreamOptions())
    engine.feed(key, codes_of(key)[:FIRST])


def go_on(engine: Token2WavEngine, key: str) -> None:
    engine.feed(key, codes_of(key)[FIRST:])
    engine.end(key)


def drain(engine: Token2WavEngine) -> list[AudioOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def sound_of(outputs: list[AudioOutput], key: str) -> Tensor:
    return torch.cat([output.samples for output in outputs if output.key == key])


@pytest.fixture(scope="module")
def alone(shared_engine: Token2WavEngine) -> dict[str, Tensor]:
    """The sound of each stream by itself."""
    sounds = {}
    for key in "abcdefg":
        begin(shared_engine, key)
        go_on(shared_engine, key)
        sounds[key] = sound_of(drain(shared_engine), key)
    return sounds


@pytest.fixture
def batches(engine: Token2WavEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of each batch that was begun."""
    found: list[str] = []

    def launching(
        batch: Sequence[Due], launching: Callable[[Sequence[Due]], batch_launch.BatchLaunch] = engine._launching
    ) -> batch_launch.BatchLaunch:
        found.append("".join(sorted(due.stream.key for due in batch)))
        return launching(batch)

    monkeypatch.setattr(engine, "_launching", launching)
    return found


def test_first_windows_that_are_launched_claim_the_gpu_beside_as_many_without_codes(engine: Token2WavEngine) -> None:
    for key in "abc":
        begin(engine, key)
    assert engine.step() == []
    assert len(engine._launchings) == 1
    for key in "def":
        engine.open(key, VOICE, 1, StreamOptions())
    assert engine.wants_claim


MINUTE_NS = 60_000_000_000


def launching(engine: Token2WavEngine) -> list[AudioOutput]:
    """Begin to launch the second windows of five streams; what the first gave."""
    for key in "abcde":
        begin(engine, key)
    outputs: list[AudioOutput] = []
    while len(outputs) < STREAMS:
        outputs += next_outputs(engine)
    for key in "abcde":
        # They have sound for a while, on a slow machine too.
        engine._streams[key].sound_until_ns = time.monotonic_ns() + MINUTE_NS
        go_on(engine, key)
    assert engine.step() == []
    assert len(engine._launchings) == 1
    return outputs


@pytest.fixture
def climbing(engine: Token2WavEngine, alone: dict[str, Tensor]) -> list[AudioOutput]:
    """Five streams whose second windows are being launched; what they gave before."""
    del alone
    return launching(engine)


def test_who_has_enough_sound_comes_along_with_who_goes_between(
    tiny_checkpoint: Path, alone: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each batch is through in no time, as it seems, so that who hears nothing can wait for one.
    monkeypatch.setattr("triton_omni.policy.rules.WINDOW_NS", -2 * MINUTE_NS)
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"max_streams": STREAMS + 2}), DEVICE)
    outputs = launching(engine)
    begin(engine, "f")
    begin(engine, "g")
    engine._streams["g"].sound_until_ns = time.monotonic_ns() + 2 * MINUTE_NS
    outputs += (between := next_outputs(engine))
    assert [output.key for output in between] == ["f", "g"]
    assert len(engine._launchings) == 1
    for key in "fg":
        go_on(engine, key)
    assert_sound_is_that_alone(outputs + drain(engine), alone, "abcdefg")


def test_a_listener_who_hears_nothing_goes_between(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor]
) -> None:
    begin(engine, "f")
    outputs = next_outputs(engine)
    assert [output.key for output in outputs] == ["f"]
    assert len(engine._launchings) == 1
    go_on(engine, "f")
    outputs = climbing + outputs + drain(engine)
    assert_sound_is_that_alone(outputs, alone, "abcdef")


@pytest.mark.usefixtures("token2wav_clock")
def test_a_listener_goes_between_a_whole_reply(engine: Token2WavEngine, alone: dict[str, Tensor]) -> None:
    engine.open("whole", VOICE, 1, StreamOptions(mode="offline"))
    codes = torch.cat([codes_of(key) for key in "abc"])
    engine.feed("whole", codes)
    engine.end("whole")
    assert engine.step() == []
    begin(engine, "f")
    outputs = next_outputs(engine)
    assert [output.key for output in outputs] == ["f"]
    go_on(engine, "f")
    outputs += drain(engine)
    torch.testing.assert_close(sound_of(outputs, "f"), alone["f"], atol=1e-5, rtol=0)
    assert len(sound_of(outputs, "whole")) == len(codes) * 480


class Reached:
    """An event of a device that has not come so far yet."""

    reached = False

    def query(self) -> bool:
        return self.reached


def test_no_more_steps_are_launched_than_the_device_has_to_do(
    engine: Token2WavEngine, climbing: list[AudioOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    del climbing
    events: list[Reached] = []

    def mark(*_: object, **__: object) -> Reached:
        events.append(Reached())
        return events[-1]

    monkeypatch.setattr(batch_launch, "record_event", mark)
    for _ in range(10):
        assert engine.step() == []
    assert len(events) == STEPS_AHEAD
    events[0].reached = True
    outputs = engine.step()
    # One more, the last of the batch's four, and after it the batch's own event.
    assert len(events) == STEPS_AHEAD + 2
    monkeypatch.undo()
    for event in events:
        event.reached = True
    assert sorted(output.key for output in outputs or next_outputs(engine)) == list("abcde")


def test_who_has_more_sound_left_does_not_go_between(engine: Token2WavEngine, climbing: list[AudioOutput]) -> None:
    del climbing
    begin(engine, "f")
    engine._streams["f"].sound_until_ns = 1 << 62
    outputs = next_outputs(engine)
    assert sorted(output.key for output in outputs) == list("abcde")


def test_pages_into_which_a_batch_still_writes_are_not_taken_while_there_are_others(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor]
) -> None:
    page = engine._streams["b"].page
    engine.abort("b")
    begin(engine, "f")
    assert engine._streams["f"].page != page
    go_on(engine, "f")
    outputs = climbing + drain(engine)
    for key in "acdef":
        torch.testing.assert_close(sound_of(outputs, key), alone[key], atol=1e-5, rtol=0)
    assert len(sound_of(outputs, "b")) < len(alone["b"])


def test_a_newcomer_has_the_pages_of_who_was_dropped_on_the_way_behind_the_batch_that_writes_there(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor]
) -> None:
    begin(engine, "f")
    pages = engine._streams["b"].pages
    engine.abort("b")
    begin(engine, "g")
    assert engine._streams["g"].pages == pages
    with pytest.raises(Overloaded):
        begin(engine, "h")
    # Nobody else waits.
    assert [output.key for output in next_outputs(engine)] == ["f"]
    assert len(engine._launchings) == 1
    engine.abort("f")
    go_on(engine, "g")
    outputs = climbing + drain(engine)
    for key in "acdeg":
        torch.testing.assert_close(sound_of(outputs, key), alone[key], atol=1e-5, rtol=0)


def test_pages_go_from_one_who_was_dropped_to_the_next_while_the_batch_writes_there(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor]
) -> None:
    begin(engine, "f")
    engine.abort("b")
    begin(engine, "g")
    engine.abort("g")
    begin(engine, "g")
    with pytest.MonkeyPatch.context() as patched:
        # The batch restores its pages no later than the newcomer writes its own.
        in_the_vocoder(engine, lambda keys: len(keys) > 2, patched)
        go_on(engine, "f")
        go_on(engine, "g")
        outputs = climbing + drain(engine)
    for key in "acdefg":
        torch.testing.assert_close(sound_of(outputs, key), alone[key], atol=1e-5, rtol=0)


def test_a_batch_of_which_nobody_is_left_is_given_up(engine: Token2WavEngine, climbing: list[AudioOutput]) -> None:
    del climbing
    for key in "abcde":
        engine.abort(key)
    assert engine.has_work()
    assert engine.step() == []
    assert not engine.has_work()
    assert engine.stats() == EngineStats(0, 0, 0, 0)


Lacking = Callable[[set[str]], bool]
"""True if there is no memory for the windows of these streams together."""


def in_the_solver(engine: Token2WavEngine, lacking: Lacking, patched: pytest.MonkeyPatch) -> None:
    """Memory runs out when a layer has just written what the next windows read."""
    write = LayerKVCache.write

    def full(self: LayerKVCache, key: Tensor, value: Tensor) -> None:
        write(self, key, value)
        left = self.left.tolist()
        if self.number > 1 and lacking({name for name, stream in engine._streams.items() if stream.page in left}):
            raise torch.OutOfMemoryError("tried to allocate too much")

    patched.setattr(LayerKVCache, "write", full)


def in_the_vocoder(engine: Token2WavEngine, lacking: Lacking, patched: pytest.MonkeyPatch) -> None:
    """Memory runs out after the solver, when everything for the next windows has been written."""
    del engine
    sound = batch_launch._sound

    def full(spliced: Spliced, vocoder: Vocoder) -> tuple[Tensor, tuple[int, ...]]:
        made = sound(spliced, vocoder)
        if lacking({due.stream.key for due in spliced.batch if not due.chunk.final}):
            raise torch.OutOfMemoryError("tried to allocate too much")
        return made

    patched.setattr(batch_launch, "_sound", full)


RunOut = Callable[[Token2WavEngine, Lacking, pytest.MonkeyPatch], None]
OUT_OF_MEMORY = pytest.mark.parametrize("run_out", [in_the_solver, in_the_vocoder])


@OUT_OF_MEMORY
@pytest.mark.parametrize("most", [4, 1])
def test_windows_for_which_there_is_no_memory_together_go_again_in_smaller_batches(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor], run_out: RunOut, most: int
) -> None:
    tried: list[int] = []

    def lacking(keys: set[str]) -> bool:
        tried.append(len(keys))
        return len(keys) > most

    with pytest.MonkeyPatch.context() as patched:
        run_out(engine, lacking, patched)
        outputs = climbing + drain(engine)
    assert max(tried) == STREAMS
    assert_sound_is_that_alone(outputs, alone, "abcde")


def test_what_an_attempt_held_is_given_back_before_the_next(
    engine: Token2WavEngine, climbing: list[AudioOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    del climbing
    sound, held = batch_launch._sound, list[weakref.ref[Tensor]]()

    def full(spliced: Spliced, vocoder: Vocoder) -> tuple[Tensor, tuple[int, ...]]:
        assert all(frames() is None for frames in held)
        held.append(weakref.ref(spliced.frames))
        if len(spliced.batch) > 1:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return sound(spliced, vocoder)

    monkeypatch.setattr(batch_launch, "_sound", full)
    assert sorted(output.key for output in drain(engine) if output.final and not output.error) == list("abcde")
    assert len(held) > 2 * STREAMS


@OUT_OF_MEMORY
def test_a_window_for_which_there_is_no_memory_alone_ends_its_stream_alone(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor], run_out: RunOut
) -> None:
    begin(engine, "f")
    with pytest.MonkeyPatch.context() as patched:
        run_out(engine, lambda keys: "c" in keys, patched)
        outputs = climbing + drain(engine)
    failed = [(output.key, output.error) for output in outputs if output.error]
    assert failed == [("c", "the device has no memory for this window")]
    go_on(engine, "f")
    assert_sound_is_that_alone(outputs + drain(engine), alone, "abdef")


def test_a_window_alone_waits_for_the_memory_of_a_batch_under_way(
    engine: Token2WavEngine, climbing: list[AudioOutput], alone: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(engine, "f")
    in_the_solver(engine, lambda keys: "f" in keys and len(engine._launchings) > 1, monkeypatch)
    outputs = climbing + drain(engine)
    # It has waited.
    assert [output.key for output in outputs[STREAMS:]].index("f") > 0
    go_on(engine, "f")
    assert_sound_is_that_alone(outputs + drain(engine), alone, "abcdef")


def assert_sound_is_that_alone(outputs: list[AudioOutput], alone: dict[str, Tensor], keys: str) -> None:
    """These streams, and no others, came to their ends, with the sound of each by itself."""
    assert sorted(output.key for output in outputs if output.final and not output.error) == list(keys)
    for key in keys:
        torch.testing.assert_close(sound_of(outputs, key), alone[key], atol=1e-5, rtol=0)


def test_each_phase_of_a_stream_s_windows_is_counted(engine: Token2WavEngine) -> None:
    before = dict(engine.stats().window_phases)
    begin(engine, "a")
    go_on(engine, "a")
    drain(engine)
    grown = {key: seconds - before[key] for key, seconds in engine.stats().window_phases.items()}
    assert {key for key, seconds in grown.items() if seconds} >= {
        (kind, phase) for kind in ("first", "final") for phase in ("wait", "device")
    }
    assert all(0 <= seconds < 60 for seconds in grown.values())


def test_windows_have_the_time_with_work_and_none_between(
    engine: Token2WavEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [MINUTE_NS]
    monkeypatch.setattr(engine, "_times", WindowTimes(lambda: now[0]))
    begin(engine, "b")
    engine.step()
    engine.abort("b")
    assert drain(engine) == []
    windows = 0
    for _ in range(2):
        now[0] += MINUTE_NS
        begin(engine, "a")
        go_on(engine, "a")
        engine.step()
        now[0] += 2_000_000_000
        windows += len(drain(engine))
    found = engine.stats().windows
    assert sum(seconds.count for seconds in found.values()) == windows
    assert {kind: seconds.total for kind, seconds in found.items() if seconds.total} == {"first": 4.0}
