# SPDX-License-Identifier: Apache-2.0
"""A run of the training: which stage starts when and where, what a run gives back, how another goes on."""

import json
import sys
import time
import types

import pytest
import torch
from training import bank, log, packing, run, state
from training.bank import Bank, Doc, VoiceCodes
from training.export import SOLVER_POINTS, export, take
from training.jobs import Job
from training.loop import Guard, Loop
from training.parts import PREFIXES, part
from training.recorded import Recorded
from training.schedule import Clock, Ema, Rate
from training.settings import Settings
from training.sizes import VOICES
from training.stages import STAGES
from training.talker_data import Replies

from triton_omni.checkpoint.config import load_config
from triton_omni.checkpoint.speakers import load_speakers


@pytest.fixture(name="settings")
def _settings(tmp_path):
    return Settings(tmp_path / "work", toy=True)


def test_a_state_is_what_was_kept(settings):
    assert state.load(settings, "x") is None
    state.save(settings, "x", {"a": torch.ones(2, dtype=torch.float16), "n": torch.tensor([3])}, steps=7)
    found = state.load(settings, "x")
    assert found.steps == 7
    assert found.tensors["a"].dtype == torch.float32
    assert found.tensors["n"].dtype == torch.int64


def test_a_state_of_another_size_is_refused(settings):
    state.save(settings, "x", torch.nn.Linear(2, 2).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        state.load_into(settings, "x", torch.nn.Linear(3, 3))


def test_archives_are_bounded_and_take_all_states(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "LARGEST", 150_000)
    for number in range(5):
        state.save(settings, f"s{number}", {"w": torch.full((30_000,), float(number))}, steps=number)
    log.Log(settings, "dit").curve(3, loss=0.5)
    files = packing.pack(settings, tmp_path / "out")
    assert len([file for file in files if file.name.startswith("state-")]) > 1
    assert all(file.stat().st_size <= 160_000 for file in files)
    other = Settings(tmp_path / "other", toy=True)
    state.save(other, "s1", {"w": torch.full((30_000,), 9.0)}, steps=99)
    assert packing.unpack(other, tmp_path / "out") == ["s0", "s2", "s3", "s4"]
    assert [state.load(other, f"s{number}").steps for number in range(5)] == [0, 99, 2, 3, 4]
    assert float(state.load(other, "s3").tensors["w"][5]) == 3.0
    assert json.loads((other.work / "curves" / "dit.jsonl").read_text())["loss"] == 0.5


def test_a_folder_without_archives_is_refused(settings, tmp_path):
    with pytest.raises(FileNotFoundError, match="state-"):
        packing.unpack(settings, tmp_path)


@pytest.mark.parametrize(
    ("gpus", "wanted"),
    [
        (["0"], {"speech": "0", "thinker": "0", "talker": "0", "more": ""}),
        (
            ["4", "5", "6", "7"],
            {"speech": "4", "thinker": "5", "vocoder": "6", "dit": "7", "talker": "4", "prompts": ""},
        ),
        ([], {"thinker": None, "more": None}),
    ],
)
def test_networks_take_turns_at_the_gpus(settings, gpus, wanted):
    found = {job.name: job.gpu for job in run.jobs_of(settings, list(STAGES), gpus)}
    assert {name: found[name] for name in wanted} == wanted


class _Stage:
    """Stands in for a job; `log_of` notes what happens to it."""

    def __init__(self, settings, name, outcomes):
        self.settings, self.name, self.gpu, self.tries, self.deadline = settings, name, None, 0, time.monotonic() + 99
        self.status, self._outcomes = "waits", list(outcomes)

    def start(self, seconds):
        assert seconds > 0
        self.tries += 1
        self.status = self._outcomes.pop(0)
        if self.status == "done":
            for path in {"speech": ["data/bank.pt"], "thinker": ["state/thinker_text.pt"]}.get(self.name, []):
                (self.settings.work / path).parent.mkdir(parents=True, exist_ok=True)
                (self.settings.work / path).touch()

    def forget(self):
        self.status = "waits"

    def kill(self):
        self.status = "killed" if self.status == "runs" else self.status

    def tail(self):
        return ""

    last_line = tail


def _run(settings, outcomes, budget=1000.0):
    jobs = [_Stage(settings, name, what) for name, what in outcomes.items()]
    found = run.Run(settings, jobs, time.monotonic(), budget)
    found.train()
    return {job.name: (job.status, job.tries) for job in jobs}


def test_stages_wait_for_what_they_need(settings, monkeypatch):
    monkeypatch.setattr(run, "_POLL_S", 0)
    done = {name: ["done"] for name in ("speech", "thinker", "vocoder", "talker")}
    assert _run(settings, done) == dict.fromkeys(done, ("done", 1))


def test_a_failed_stage_is_tried_twice_and_those_that_need_it_do_not_start(settings, monkeypatch):
    monkeypatch.setattr(run, "_POLL_S", 0)
    found = _run(settings, {"speech": ["failed", "failed"], "thinker": ["failed", "done"], "vocoder": ["done"]})
    assert found == {"speech": ("waits", 2), "thinker": ("done", 2), "vocoder": ("waits", 0)}


def test_nothing_starts_when_the_budget_is_over(settings, monkeypatch):
    monkeypatch.setattr(run, "_POLL_S", 0)
    assert _run(settings, {"speech": ["done"]}, budget=1.0) == {"speech": ("waits", 0)}


def test_a_stage_runs_as_a_process_plainly_the_second_time(settings, monkeypatch):
    commands = []
    monkeypatch.setattr("training.jobs.subprocess.Popen", lambda command, **_k: commands.append(command))
    job = Job(settings, "dit", "3")
    job.start(5)
    job.start(5)
    assert ["--plain" in command for command in commands] == [False, True]
    assert all("--toy" in command for command in commands)


def test_a_loop_goes_on_where_it_stopped(settings):
    layer = torch.nn.Linear(1, 1)
    seen = []

    def step(number, rate):
        seen.append(number)
        return {"loss": torch.tensor(float(number))}

    for done in (0, 100):
        loop = Loop(settings, "x", "loss", log.Log(settings, "x"), Ema(layer, 0.9), Rate(1.0), shown_every=10)
        clock = Clock(0.2)
        clock.restart = lambda: None
        loop.run(step, clock, done)
    assert seen[0] == 0
    assert 100 in seen
    assert state.load(settings, "x").steps == seen[-1] + 1
    assert state.load_into(settings, "x", torch.nn.Linear(1, 1)).steps > 100


def test_on_the_cpu_a_recorded_step_runs_as_it_is():
    count = []
    recorded = Recorded(lambda: torch.tensor(float(len(count.append(0) or count))), torch.device("cpu"))
    assert [float(recorded()) for _ in range(3)] == [1.0, 2.0, 3.0]


def test_the_bank_comes_back_and_its_batches_differ_by_start(settings):
    settings.data.mkdir(parents=True)
    length = torch.tensor([30, 40])
    voice = VoiceCodes(
        torch.arange(70).short() + 1,
        length.cumsum(0) - length,
        length,
        torch.zeros(70).short(),
        torch.zeros(70).short(),
    )
    kept = Bank(["One.", "Two."], [[5], [6]], [[7], [8]], [Doc([1, 2, 3], [1])], {v.flite: voice for v in VOICES})
    bank.save(settings, kept)
    bank.save(settings, kept, "more_000000.pt")
    found = bank.load(settings)
    assert (found.texts, found.first, found.later, found.docs) == (kept.texts, kept.first, kept.later, kept.docs)
    assert torch.equal(found.voices["slt"].codes, voice.codes)
    first, again, other = (next(iter(Replies(settings, 500, start))) for start in (0, 0, 5))
    assert torch.equal(first.code, again.code)
    assert first.code.shape != other.code.shape or not torch.equal(first.code, other.code)


def test_a_checkpoint_without_states_loads_in_hf_and_server(settings, tmp_path):
    speakers = {
        f"{voice.flite}.{name}": value
        for voice in VOICES
        for name, value in (("cond", torch.randn(192)), ("ref_mel", torch.randn(40, 80)))
    }
    state.save(settings, "speakers", speakers)
    talker = part("talker", settings.sizes)
    state.save(settings, "talker", talker.state_dict(), steps=1)
    folder = tmp_path / "checkpoint"
    assert export(settings, folder) == ["thinker", "dit", "vocoder"]
    config = load_config(folder)
    assert config.talker.decoder.hidden_size == settings.sizes.talker_hidden
    assert config.dit.num_layers == settings.sizes.dit_layers
    assert config.flow.num_steps == SOLVER_POINTS
    assert set(load_speakers(folder, config).names) == {voice.name for voice in VOICES}
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(model.talker.codec_head.weight, talker.codec_head.weight.half().float(), atol=0, rtol=0)
    assert set(PREFIXES) == {"thinker", "talker", "dit", "vocoder"}
    assert Qwen2_5OmniProcessor.from_pretrained(folder).tokenizer.eos_token == "<|im_end|>"


def test_a_run_goes_on_from_an_exported_checkpoint(settings, tmp_path):
    conds = {f"{voice.flite}.cond": torch.randn(192) for voice in VOICES}
    state.save(settings, "speakers", conds | {f"{voice.flite}.ref_mel": torch.randn(40, 80) for voice in VOICES})
    state.save(settings, "codebook", {"centers": torch.randn(64, 320)})
    for number, name in enumerate(("thinker", "talker", "dit")):
        state.save(settings, name, part(name, settings.sizes).state_dict(), steps=number + 5)
    export(settings, tmp_path / "checkpoint")
    other = Settings(tmp_path / "other", toy=True)
    state.save(other, "talker", {}, steps=99)
    taken = ["codebook", "dit", "speakers", "thinker", "thinker_text"]
    assert take(other, tmp_path / "checkpoint") == taken
    for name, far in zip(taken, (0.04, 1e-3, 1e-6, 1e-3, 1e-3), strict=True):
        wanted, found = (state.load(where, name.removesuffix("_text")) for where in (settings, other))
        torch.testing.assert_close(found.tensors, wanted.tensors, atol=far, rtol=1e-3)
        assert found.steps == wanted.steps
    assert state.load(other, "talker").steps == 99


def test_a_weight_that_fp16_cannot_hold_is_refused(settings, tmp_path):
    vocoder = part("vocoder", settings.sizes)
    weights = vocoder.state_dict()
    weights["conv_post.weight"][0] = 1e6
    state.save(settings, "vocoder", weights)
    with pytest.raises(ValueError, match=r"conv_post\.weight: not finite"):
        export(settings, tmp_path / "checkpoint")


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--out", "x", "--only", "speech,singer"])
    assert "singer: no such stage" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(settings):
    first = run.alone(settings.work)
    with pytest.raises(SystemExit, match="another run works there"):
        run.alone(settings.work)
    first.close()
    run.alone(settings.work).close()


def test_a_stage_is_found_by_its_name(settings, monkeypatch):
    called = []
    fake = types.SimpleNamespace(train=lambda *given: called.append(given))
    monkeypatch.setitem(sys.modules, "training.dit", fake)
    from training import stages

    stages.train("dit", settings, 3.0)
    assert called == [(settings, 3.0)]


def test_the_system_prompt_is_the_servers():
    from training.world.chats import DEFAULT_SYSTEM_PROMPT

    from triton_omni.thinker import prompt

    assert prompt.DEFAULT_SYSTEM_PROMPT == DEFAULT_SYSTEM_PROMPT


def test_weights_are_taken_back_when_training_diverges(settings):
    layer = torch.nn.Linear(1, 1, bias=False)
    ema, told = Ema(layer, 0.0), []
    guard = Guard(ema, "loss", types.SimpleNamespace(say=told.append))
    for value, loss in ((1.0, 5.0), (2.0, 1.0), (3.0, 1.2), (99.0, 1.6), (98.0, float("nan")), (4.0, 0.9)):
        with torch.no_grad():
            layer.weight.fill_(value)
        ema.update()
        guard.look({"loss": loss})
        if loss == 1.6:
            assert float(layer.weight.detach()) == 2.0  # not 3: there the loss had begun to rise
    assert len(told) == 2
    assert guard.factor == 0.25
    with torch.no_grad():
        layer.weight.fill_(97.0)
    guard.look({"loss": 7.0})
    assert float(layer.weight.detach()) == pytest.approx(4.0, rel=0.3)
    assert torch.equal(layer.weight.detach(), ema.tensors["weight"])
