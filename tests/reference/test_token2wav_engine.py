# SPDX-License-Identifier: Apache-2.0
"""The engine's promises besides the waveform: errors stay with their stream, cost is flat, nothing is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hf_token2wav import DEVICE, next_outputs
from torch import Tensor

from triton_omni.checkpoint.config import CheckpointError, load_config
from triton_omni.checkpoint.speakers import Speakers, load_speakers
from triton_omni.core.errors import BadRequest, Overloaded, TooLarge
from triton_omni.core.settings import DiffusionSettings, SettingsError, StreamingPlan, Token2WavSettings
from triton_omni.policy.rules import WINDOW_NS
from triton_omni.session.engine import AudioOutput, EngineStats, StreamOptions
from triton_omni.token2wav.attention import AttentionKind, block_attention
from triton_omni.token2wav.batch_launch import InFlightBatch
from triton_omni.token2wav.bigvgan import BigVGAN
from triton_omni.token2wav.dit import DiT, Voice
from triton_omni.token2wav.engine import Token2WavEngine
from triton_omni.token2wav.networks import load_networks
from triton_omni.token2wav.sampler import FlowOptions, Sampler, Window

CPU = torch.device("cpu")
META = torch.device("meta")
VOICE = "Ethan"
LARGEST_CODE = 193
SETTINGS = Token2WavSettings(
    dtype="float32",
    plans={"balanced": StreamingPlan(chunk_blocks=(1, 2, 3))},
    diffusion=DiffusionSettings(solver="euler", num_steps=2),
    max_codes=400,
)
DTYPES = ["float32"] if DEVICE.type == "cpu" else ["float32", "float16"]
"""Precisions of the shared engine: the plain path's, and on a GPU the served one."""
MINUTE = 3000
"""Codes of 60 s of speech."""
DEFAULTS = StreamOptions()
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {"host": torch.clone, "device": lambda codes: codes.to(DEVICE)}
"""Memory in which fed codes may lie; pinned memory, from which a GPU copies without the host, needs a GPU."""
if DEVICE.type == "cuda":
    SOURCES["pinned"] = Tensor.pin_memory
REPEAT_TOLERANCE = 0.0 if DEVICE.type == "cpu" else 1e-5
"""Tolerance of one batch solved twice: cuDNN's transposed convolutions may add in another order every time."""

LEAST_DECIBEL = 40.0
"""Least ratio in dB of a stream's sound to its difference in another batch, in float16; each has 45 to float32."""


@pytest.fixture(scope="module", params=DTYPES)
def shared_engine(tiny_checkpoint: Path, request: pytest.FixtureRequest) -> Token2WavEngine:
    return Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"dtype": request.param}), DEVICE)


@pytest.fixture
def engine(shared_engine: Token2WavEngine) -> Iterator[Token2WavEngine]:
    yield shared_engine
    shared_engine.close()


def some_codes(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LARGEST_CODE + 1, (count,), generator=generator, dtype=torch.int32)


def drain(engine: Token2WavEngine) -> list[AudioOutput]:
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def speak(engine: Token2WavEngine, codes: Tensor, key: str = "a", seed: int = 1) -> list[AudioOutput]:
    engine.open(key, VOICE, seed, DEFAULTS)
    engine.feed(key, codes)
    engine.end(key)
    return drain(engine)


def waveform(outputs: list[AudioOutput], key: str = "a") -> Tensor:
    return torch.cat([output.samples for output in outputs if output.key == key])


def assert_repeats(again: Tensor, first: Tensor) -> None:
    torch.testing.assert_close(again, first, atol=REPEAT_TOLERANCE, rtol=0)


def assert_same_sound(engine: Token2WavEngine, ours: Tensor, alone: Tensor) -> None:
    """In batches of other sizes float32 differs by the order of its sums, float16 by its rounding too."""
    if engine._sampler.past.pages.dtype is torch.float32:
        torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    else:
        assert 10 * torch.log10(alone.square().sum() / (ours - alone).square().sum()) > LEAST_DECIBEL


def test_no_codes_give_one_empty_final_chunk(engine: Token2WavEngine) -> None:
    (output,) = speak(engine, some_codes(0))
    assert output.final
    assert output.error is None
    assert output.samples.shape == (0,)
    assert engine.stats() == EngineStats(0, 0, 0, 0)


def test_an_open_stream_without_enough_codes_is_no_work(engine: Token2WavEngine) -> None:
    engine.open("a", VOICE, 1, DEFAULTS)
    engine.feed("a", some_codes(18))
    assert not engine.has_work()
    assert engine.step() == []
    engine.feed("a", some_codes(1))
    assert engine.has_work()


def test_what_a_stream_wants_makes_its_next_window_due(engine: Token2WavEngine) -> None:
    engine.open("a", VOICE, 1, DEFAULTS)
    received = 0
    for wanted in (19, 43, 79, 115, 151):
        assert engine.wanted("a") == wanted
        engine.feed("a", some_codes(wanted - received - 1))
        assert not engine.has_work()
        engine.feed("a", some_codes(1))
        assert engine.has_work()
        assert len(next_outputs(engine)) == 1
        received = wanted
    # A window that is due waits for nothing, and a reply in one piece wants no code before its end.
    engine.feed("a", some_codes(100))
    assert engine.wanted("a") == 259
    engine.open("whole", VOICE, 1, StreamOptions(mode="offline"))
    assert engine.wanted("whole") > SETTINGS.max_codes


def test_samples_are_fp32_on_the_host_and_within_range(engine: Token2WavEngine) -> None:
    for output in speak(engine, some_codes(30)):
        assert output.samples.dtype == torch.float32
        assert output.samples.device == CPU
        assert output.samples.abs().max() <= 1.0


def test_codes_outside_the_table_are_counted_and_heard_as_the_nearest_code(engine: Token2WavEngine) -> None:
    wild = some_codes(60)
    wild[[0, 30, 59]] = torch.tensor([-7, LARGEST_CODE + 1, 2**31 - 1], dtype=torch.int32)
    outputs = speak(engine, wild)
    tame = speak(engine, wild.clamp(0, LARGEST_CODE))
    assert_repeats(waveform(outputs), waveform(tame))
    assert outputs[-1].clamped_codes == 3
    assert [output.clamped_codes for output in tame] == [0] * len(tame)


@pytest.mark.parametrize("source", SOURCES)
def test_fed_codes_may_be_overwritten_by_their_owner(engine: Token2WavEngine, source: str) -> None:
    expected = waveform(speak(engine, some_codes(30)))
    codes = SOURCES[source](some_codes(30))
    engine.open("a", VOICE, 1, DEFAULTS)
    engine.feed("a", codes)
    codes.zero_()
    engine.end("a")
    assert_repeats(waveform(drain(engine)), expected)
    assert not torch.allclose(waveform(speak(engine, codes)), expected, atol=1e-3)


def spoil(engine: Token2WavEngine, key: str, bad: float = float("nan")) -> None:
    """Give one stream a voice that makes its next window not finite; the engine does not know."""
    stream = engine._streams[key]
    speaking, silent = stream.request.voice.halves
    voice = Voice(torch.stack([torch.full_like(speaking, bad), silent]))
    stream.request = dataclasses.replace(stream.request, voice=voice)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_waveform_that_is_not_finite_fails_its_stream_alone(engine: Token2WavEngine, bad: float) -> None:
    codes = some_codes(60)
    expected = waveform(speak(engine, codes, key="good"), "good")
    for key in ("good", "sick"):
        engine.open(key, VOICE, 1, DEFAULTS)
        engine.feed(key, codes)
    spoil(engine, "sick", bad)
    first = {output.key: output for output in next_outputs(engine)}
    assert set(first) == {"good", "sick"}
    assert first["sick"].final
    assert "chunk 0 is not finite" in str(first["sick"].error)
    assert first["sick"].samples.shape == (0,)
    assert engine.stats().running == 1
    engine.end("good")
    got = waveform([first["good"], *drain(engine)], "good")
    assert_same_sound(engine, got, expected)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_past_that_is_not_finite_stays_with_its_stream(engine: Token2WavEngine, chunk: int) -> None:
    codes = some_codes(120)
    expected = waveform(speak(engine, codes))
    for key in ("sick", "well"):
        engine.open(key, VOICE, 1, DEFAULTS)
        engine.feed(key, codes)
        engine.end(key)
    page = engine._streams["sick"].page
    outputs = [output for _ in range(chunk) for output in next_outputs(engine)]
    spoil(engine, "sick")
    while not any(output.error for output in outputs):
        outputs += next_outputs(engine)
    assert [output.key for output in outputs if output.error] == ["sick"]
    assert not torch.isfinite(engine._sampler.past.pages[page]).all()
    # Opened in the pages of the one that failed, beside the one that did not.
    engine.open("new", VOICE, 1, DEFAULTS)
    assert engine._streams["new"].page == page
    engine.feed("new", codes)
    engine.end("new")
    outputs += drain(engine)
    for key in ("well", "new"):
        assert_same_sound(engine, waveform(outputs, key), expected)


@pytest.mark.parametrize("attention", ["block", "plain"])
def test_a_stream_reads_no_page_that_it_has_not_written(tiny_checkpoint: Path, attention: AttentionKind) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"attention": attention}), DEVICE)
    codes = some_codes(120)
    expected = waveform(speak(engine, codes))
    with torch.inference_mode():
        engine._sampler.past.pages.fill_(float("nan"))
    assert_repeats(waveform(speak(engine, codes)), expected)
    offline = StreamOptions(mode="offline")
    engine.open("whole", VOICE, 1, offline)
    engine.feed("whole", codes)
    engine.end("whole")
    assert torch.isfinite(waveform(drain(engine), "whole")).all()


def test_no_more_streams_than_set_keep_a_past(tiny_checkpoint: Path) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"max_streams": 2}), DEVICE)
    address = engine._sampler.past.pages.data_ptr()
    for key in ("a", "b"):
        engine.open(key, VOICE, 1, DEFAULTS)
    with pytest.raises(Overloaded, match=r"2 open streams .* max_streams 2") as refusal:
        engine.open("c", VOICE, 1, DEFAULTS)
    assert refusal.value.retry_after_ms
    assert engine.stats() == EngineStats(running=2, waiting=0, kv_blocks_used=4, rows_used=0)
    engine.open("whole", VOICE, 1, StreamOptions(mode="offline"))
    # A stream that is aborted, ends or fails gives its room back; and no other does.
    engine.abort("whole")
    engine.abort("a")
    for number in range(5):
        speak(engine, some_codes(60), key=f"again {number}")
    engine.open("sick", VOICE, 1, DEFAULTS)
    spoil(engine, "sick")
    engine.feed("sick", some_codes(24))
    assert [bool(output.error) for output in next_outputs(engine)] == [True]
    engine.open("c", VOICE, 1, DEFAULTS)
    engine.close()
    assert engine.stats() == EngineStats(0, 0, 0, 0)
    assert engine._sampler.past.pages.data_ptr() == address


def test_a_stream_of_more_evaluations_takes_the_room_of_several(tiny_checkpoint: Path) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"max_streams": 6}), DEVICE)
    finer = StreamOptions(num_steps=4)
    for key in ("a", "b"):
        engine.open(key, VOICE, 1, finer)
    with pytest.raises(Overloaded, match="max_streams 6"):
        engine.open("c", VOICE, 1, DEFAULTS)
    engine.abort("a")
    for key in ("c", "d"):
        engine.open(key, VOICE, 1, StreamOptions(num_steps=3, guidance_scale=0.0))
    engine.open("e", VOICE, 1, DEFAULTS)
    with pytest.raises(TooLarge, match=r"num_steps: 64 points of rk4 .* max_streams 6"):
        engine.open("f", VOICE, 1, StreamOptions(solver="rk4", num_steps=64))
    engine.close()
    expected = waveform(speak(engine, some_codes(90)))
    engine.open("finer", VOICE, 1, finer)
    engine.feed("finer", some_codes(90))
    engine.end("finer")
    assert len(waveform(drain(engine), "finer")) == len(expected)


class SilentVocoder:
    """Counts the mel frames of its calls; a minute through the real one takes longer than all else of it together."""

    def __init__(self, samples_per_frame: int) -> None:
        self.samples_per_frame = samples_per_frame
        self.frames: list[int] = []

    def __call__(self, mel: Tensor) -> Tensor:
        self.frames.append(mel.shape[0] * mel.shape[2])
        return torch.zeros(mel.shape[0], mel.shape[2] * self.samples_per_frame, device=mel.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cost_of_a_chunk_does_not_grow_with_the_stream(tiny_checkpoint: Path, dtype: str) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"dtype": dtype, "max_codes": MINUTE}), DEVICE)
    vocoder = engine._vocoder = SilentVocoder(engine._vocoder.samples_per_frame)
    engine.open("a", VOICE, 1, DEFAULTS)
    costs, held = [], []
    for part in torch.split(some_codes(MINUTE), 12):
        engine.feed("a", part)
        before = engine.frames_solved
        if next_outputs(engine):
            costs.append(engine.frames_solved - before)
            held.append((engine.stats().rows_used, engine.stats().kv_blocks_used))
    # 1, 2 and then 3 new blocks, and the look-ahead's 14 frames: no earlier frame is solved again.
    assert costs == [38, 62, *[86] * (len(costs) - 2)]
    assert sum(costs) - 14 * len(costs) == 2 * MINUTE - 24, "of two frames a code, all but a block for the look-ahead"
    assert vocoder.frames == [38, 72, *[96] * (len(costs) - 2)], "12 frames of context before and after"
    # As many as the vocoder reads of any chunk, less the two by which audio is ahead of the kept frames.
    assert held == [(24, 2), (72, 2), *[(94, 2)] * (len(held) - 2)]


def test_who_has_no_sound_goes_first_then_who_runs_out_of_it_first(
    tiny_checkpoint: Path, token2wav_clock: list[int]
) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"max_batch": 1}), DEVICE)

    def begin(key: str, codes: int) -> None:
        engine.open(key, VOICE, 1, DEFAULTS)
        engine.feed(key, some_codes(codes))

    begin("old", 48)
    # Chunks of 30 and 48 frames: 0.78 s of sound.
    assert [next_outputs(engine)[0].key for _ in range(2)] == ["old", "old"]
    token2wav_clock[0] += 100_000_000
    begin("new", 200)
    engine.feed("old", some_codes(152))
    # After its first chunk it has sound until 0.40 s, after its second until 0.88 s, the old one until 0.78 s.
    assert [next_outputs(engine)[0].key for _ in range(4)] == ["new", "new", "old", "new"]


def test_nobody_listens_for_the_beginning_of_a_whole_reply(engine: Token2WavEngine) -> None:
    for key, options in (("whole", StreamOptions(mode="offline")), ("stream", DEFAULTS)):
        assert not engine.wants_claim
        engine.open(key, VOICE, 1, options)
        engine.feed(key, some_codes(30))
        engine.end("whole") if key == "whole" else None
    assert engine.wants_claim
    drain(engine)
    assert not engine.wants_claim


def test_windows_are_told_from_the_launch_of_the_first_to_the_end_of_the_last(
    engine: Token2WavEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.open("a", VOICE, 1, DEFAULTS)
    engine.feed("a", some_codes(30))
    assert not engine.has_windows, "a window is due, and not launched"
    with monkeypatch.context() as patch:
        patch.setattr(InFlightBatch, "is_finished", False)
        engine.step()
        assert engine.has_windows
    engine.end("a")
    drain(engine)
    assert not engine.has_windows


def test_windows_of_listeners_with_enough_sound_stay_out_of_an_urgent_batch(
    tiny_checkpoint: Path, token2wav_clock: list[int]
) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS, DEVICE)
    engine.open("old", VOICE, 1, DEFAULTS)
    engine.feed("old", some_codes(48))
    for _ in range(2):
        next_outputs(engine)
    engine.feed("old", some_codes(36))
    for key in ("new", "newer"):
        engine.open(key, VOICE, 1, DEFAULTS)
        engine.feed(key, some_codes(24))
    assert engine.wants_claim
    assert [output.key for output in next_outputs(engine)] == ["new", "newer"]
    assert not engine.wants_claim
    assert [output.key for output in next_outputs(engine)] == ["old"]
    token2wav_clock[0] += 1_400_000_000
    for key in ("new", "old"):
        engine.feed(key, some_codes(36))
    # The new one's sound ended long ago, the old one's is about to.
    assert [output.key for output in next_outputs(engine)] == ["new", "old"]


def test_windows_of_listeners_with_enough_sound_stay_out_of_a_batch_that_will_soon_be_urgent(
    tiny_checkpoint: Path, token2wav_clock: list[int]
) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS, DEVICE)
    for key, codes in (("old", 48), ("new", 24)):
        engine.open(key, VOICE, 1, DEFAULTS)
        engine.feed(key, some_codes(codes))
    assert sorted(output.key for _ in range(2) for output in next_outputs(engine)) == ["new", "old", "old"]
    for key in ("old", "new"):
        engine.feed(key, some_codes(36))
    # 0.30 s of sound were left of the new one's, 0.78 s of the old one's.
    token2wav_clock[0] += 300_000_000 - WINDOW_NS
    assert [output.key for output in next_outputs(engine)] == ["new"]
    assert [output.key for output in next_outputs(engine)] == ["old"]


def test_who_is_about_to_hear_nothing_waits_like_who_has_heard_nothing(
    engine: Token2WavEngine, token2wav_clock: list[int]
) -> None:
    engine.open("a", VOICE, 1, DEFAULTS)
    engine.feed("a", some_codes(24))
    assert engine.wants_claim
    assert len(next_outputs(engine)) == 1
    # 0.26 s of sound; the window that must follow is due.
    engine.feed("a", some_codes(24))
    assert not engine.wants_claim
    token2wav_clock[0] += 259_000_000 - WINDOW_NS
    assert not engine.wants_claim
    token2wav_clock[0] += 1_000_000
    assert engine.wants_claim
    assert len(next_outputs(engine)) == 1
    assert not engine.wants_claim


def test_who_ran_out_of_sound_once_is_not_behind_for_ever(tiny_checkpoint: Path, token2wav_clock: list[int]) -> None:
    engine = Token2WavEngine(tiny_checkpoint, SETTINGS.model_copy(update={"max_batch": 1}), DEVICE)

    def feed(key: str, codes: int) -> None:
        engine.feed(key, some_codes(codes))
        assert [output.key for output in next_outputs(engine)] == [key]

    engine.open("late", VOICE, 1, DEFAULTS)
    feed("late", 24)
    token2wav_clock[0] += 5_000_000_000
    engine.open("new", VOICE, 1, DEFAULTS)
    feed("new", 24)
    # 0.48 s of sound after five seconds of silence; of the new one's first 0.30 s all are left.
    feed("late", 24)
    engine.feed("late", some_codes(36))
    engine.feed("new", some_codes(24))
    assert [next_outputs(engine)[0].key for _ in range(2)] == ["new", "late"]


def test_a_batch_holds_no_more_windows_and_frames_than_set(tiny_checkpoint: Path) -> None:
    engine = Token2WavEngine(
        tiny_checkpoint, SETTINGS.model_copy(update={"max_batch": 3, "max_batch_frames": 95}), DEVICE
    )
    for number in range(4):
        engine.open(f"s{number}", VOICE, 1, StreamOptions(mode="offline") if number == 1 else DEFAULTS)
        engine.feed(f"s{number}", some_codes(100))
        engine.end(f"s{number}")
    # Three first windows have 114 frames, a first and a second one 100. The whole reply of 200 frames lets listeners go
    # first, and runs alone when its turn comes.
    batches = []
    while engine.has_work():
        batches.append([output.key for output in next_outputs(engine)])
    assert batches[:2] == [["s0", "s2"], ["s3"]]
    assert ["s1"] in batches
    assert max(map(len, batches)) == 2


def test_streams_with_other_solvers_are_not_solved_together(engine: Token2WavEngine) -> None:
    kinds = {"a": DEFAULTS, "b": StreamOptions(solver="rk4"), "c": StreamOptions(guidance_scale=0.0), "d": DEFAULTS}
    for key, options in kinds.items():
        engine.open(key, VOICE, 1, options)
        engine.feed(key, some_codes(24))
    assert [[output.key for output in next_outputs(engine)] for _ in range(3)] == [["a", "d"], ["b"], ["c"]]


def test_streams_of_one_batch_keep_their_own_guidance(engine: Token2WavEngine) -> None:
    codes = some_codes(18)
    expected: dict[str, Tensor] = {}
    for together in (False, True):
        for key, scale in (("weak", 0.1), ("strong", 4.0)):
            engine.open(key, VOICE, 1, StreamOptions(guidance_scale=scale))
            engine.feed(key, codes)
            engine.end(key)
            expected |= {} if together else {key: waveform(drain(engine), key)}
    outputs = next_outputs(engine)
    assert len(outputs) == 2
    assert (expected["weak"] - expected["strong"]).abs().max() > 1e-3
    for key, samples in expected.items():
        assert_same_sound(engine, waveform(outputs, key), samples)


def test_seed_and_voice_change_the_waveform(engine: Token2WavEngine) -> None:
    codes = some_codes(20)
    first = waveform(speak(engine, codes))
    assert_repeats(waveform(speak(engine, codes)), first)
    assert not torch.allclose(first, waveform(speak(engine, codes, seed=2)), atol=1e-3)
    engine.open("a", "Chelsie", 1, DEFAULTS)
    engine.feed("a", codes)
    engine.end("a")
    assert not torch.allclose(first, waveform(drain(engine)), atol=1e-3)


def test_a_preset_gives_what_its_values_give(engine: Token2WavEngine) -> None:
    codes, sounds = some_codes(20), []
    for options in (StreamOptions(preset="fast"), StreamOptions(num_steps=4), StreamOptions(preset="reference")):
        engine.open("a", VOICE, 1, options)
        engine.feed("a", codes)
        engine.end("a")
        sounds.append(waveform(drain(engine)))
    assert_repeats(sounds[0], sounds[1])
    assert not torch.allclose(sounds[0], sounds[2], atol=1e-3)
    with pytest.raises(BadRequest, match=r"preset: 'best' is not one of \['fast', 'reference'\]"):
        engine.open("b", VOICE, 1, StreamOptions(preset="best"))


@pytest.mark.parametrize("fed", [0, 10, 50])
def test_abort_leaves_nothing(engine: Token2WavEngine, fed: int) -> None:
    engine.open("a", VOICE, 1, DEFAULTS)
    engine.feed("a", some_codes(fed))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    assert engine.stats() == EngineStats(0, 0, 0, 0)
    # On a GPU its window is still on the way.
    assert drain(engine) == []
    with pytest.raises(KeyError):
        engine.feed("a", some_codes(1))


def test_a_finished_stream_leaves_nothing_and_its_key_can_be_used_again(engine: Token2WavEngine) -> None:
    first = waveform(speak(engine, some_codes(60)))
    assert engine.stats() == EngineStats(0, 0, 0, 0)
    assert_repeats(waveform(speak(engine, some_codes(60))), first)


def test_misuse_is_refused_by_name(engine: Token2WavEngine) -> None:
    with pytest.raises(BadRequest, match=r"voice: 'Nobody' .*Chelsie"):
        engine.open("a", "Nobody", 1, DEFAULTS)
    with pytest.raises(BadRequest, match="seed: -1"):
        engine.open("a", VOICE, -1, DEFAULTS)
    with pytest.raises(BadRequest, match=r"num_steps: .*65"):
        engine.open("a", VOICE, 1, StreamOptions(num_steps=65))
    assert engine.stats().running == 0
    engine.open("a", VOICE, 1, DEFAULTS)
    with pytest.raises(ValueError, match="a is open already"):
        engine.open("a", VOICE, 1, DEFAULTS)
    with pytest.raises(TooLarge, match="401 exceed max_codes 400"):
        engine.feed("a", some_codes(401))
    engine.end("a")
    with pytest.raises(ValueError, match="a has ended"):
        engine.feed("a", some_codes(1))


def test_a_code_limit_beyond_the_positions_of_the_dit_stops_the_load(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_checkpoint)
    short = dataclasses.replace(config, dit=dataclasses.replace(config.dit, max_positions=799))
    monkeypatch.setattr("triton_omni.token2wav.networks.load_config", lambda _: short)
    with pytest.raises(SettingsError, match=r"max_codes: 400 codes are 800 mel frames.* 799"):
        load_networks(tiny_checkpoint, SETTINGS, CPU)


def test_a_reference_too_short_for_the_speaker_encoder_stops_the_load(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = load_speakers(tiny_checkpoint, load_config(tiny_checkpoint)).default
    short = Speakers({"Brief": dataclasses.replace(speaker, name="Brief", ref_mel=speaker.ref_mel[:, :4])})
    monkeypatch.setattr("triton_omni.token2wav.networks.load_speakers", lambda *_: short)
    with pytest.raises(CheckpointError, match=r"Brief.ref_mel has 4 mel frames, at least 5 needed"):
        load_networks(tiny_checkpoint, SETTINGS, CPU)


def test_nothing_between_codes_and_samples_waits_for_the_device(tiny_checkpoint: Path) -> None:
    """On the meta device every read of a value raises, and so does mixing in a tensor made on the host."""
    config = load_config(tiny_checkpoint)
    with META:
        dit, vocoder = DiT(config.dit, block_attention), BigVGAN(config.bigvgan)
        speaker, reference_mel, codes = torch.empty(192), torch.empty(40, 80), torch.empty(30, dtype=torch.int32)
    with torch.inference_mode():
        voice = dit.voice(speaker, reference_mel)
        windows = [Window(part, 24, 3, voice, 0.5) for part in (codes, codes[:12])]
        for guided in (True, False):
            mels = Sampler(dit, META).sample(windows, FlowOptions("rk4", 4, -1.0, guided))
            assert [tuple(mel.shape) for mel in mels] == [(60, 80), (24, 80)]
            assert vocoder(mels[0].T[None]).shape == (1, 60 * 240)


def test_a_batch_without_memory_ends_its_streams_and_not_the_engine(
    engine: Token2WavEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = waveform(speak(engine, some_codes(20)))

    def full(*args: object) -> NoReturn:
        raise torch.OutOfMemoryError("tried to allocate too much")

    with monkeypatch.context() as patched:
        patched.setattr(engine._sampler, "steps", full)
        outputs = speak(engine, some_codes(20))
    assert [output.error for output in outputs] == ["the device has no memory for this window"]
    assert "tried to allocate too much" in caplog.text
    assert engine.stats().running == 0
    assert_repeats(waveform(speak(engine, some_codes(20))), expected)
