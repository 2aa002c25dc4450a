# SPDX-License-Identifier: Apache-2.0
"""Stage `thinker`: text, pictures, videos and spoken prompts at once, from weights of its own.

Every kind of batch has one shape. On a GPU its whole step, optimiser included, is recorded once as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training import judge_thinker, prompts, state
from training.batches import HeardKind, Kind, Loader, SceneKind, TextKind
from training.heard import Store
from training.log import Log
from training.objectives import Inputs, Objectives
from training.parts import part
from training.recorded import Recorded
from training.rows import FULL_COUNTS, TEXT_LENGTHS, TOY_COUNTS, Tables, make_tables
from training.schedule import Clock, Rate, autocast
from training.settings import Settings, cores
from training.sound import WhisperMel

STATE, TEXT_STATE, HEADS_STATE = "thinker", "thinker_text", "thinker_heads"
"""Names of states: the thinker; as it was when the talker might begin; the readers that only training uses."""
_TEXT_READY = 0.4
"""Part of the time after which the talker may begin with the thinker's rows."""
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Plan:
    """Sizes of batches and of the run."""

    text: tuple[int, int, int] = (208, 112, 80)
    """Rows of a batch by `TEXT_LENGTHS`."""
    pictures: int = 80
    videos: int = 14
    looks: int = 240
    """Pictures of a batch that only the vision encoder sees."""
    heard: tuple[int, int, int] = (64, 32, 32)
    """Rows of a batch of short sounds, long ones, and two short ones."""
    store_samples: int = 1_300_000_000
    least_clips: int = 1500
    """Sounds join when there are so many."""
    report: int = 500
    """Steps from one point of the curves to the next."""
    judged: int = 24
    """Items of each group that the judge asks at the end."""
    judge_seconds: float = 45.0
    peak: float = 2.0e-3


_PLAN = Plan()
_TOY = Plan((4, 2, 2), 2, 1, 2, (2, 1, 1), 4_000_000, 8, 20, judged=0, judge_seconds=0.0)


def train(settings: Settings, seconds: float) -> None:
    """Train for some seconds from what an earlier run left."""
    plan = _TOY if settings.toy else _PLAN
    log, clock = Log(settings, "thinker"), Clock(seconds - plan.judge_seconds)
    tables = make_tables(settings.seed, TOY_COUNTS if settings.toy else FULL_COUNTS, _workers(settings))
    log.say(f"{sum(len(rows) for rows in tables.texts.values())} chats, {sum(map(len, tables.scenes.values()))} scenes")
    run = _Run(settings, plan, tables, log)
    clock.restart()
    thinker = run.go(clock)
    if plan.judged:
        judge_thinker.report(thinker, settings, plan.judged, log)


def _workers(settings: Settings) -> int:
    return 1 if settings.toy else max(1, min(28, cores() // 2))


def new_thinker(settings: Settings) -> Any:
    """A thinker with random weights of a size that suits its width."""
    model: Any = part("thinker", settings.sizes)
    layers = settings.sizes.thinker_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            fan_in = parameter[0].numel()
            ends_branch = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight"))
            parameter.normal_(0, (fan_in * (2 * layers if ends_branch else 1)) ** -0.5)
        model.model.embed_tokens.weight.normal_(0, 0.5)
    return model


class _Run:
    """One run of the stage."""

    def __init__(self, settings: Settings, plan: Plan, tables: Tables, log: Log) -> None:
        self._settings, self._plan, self._log = settings, plan, log
        self._device = settings.device
        thinker = new_thinker(settings)
        found = state.load(settings, STATE)
        self._done = found.steps if found else 0
        self._objectives = Objectives(thinker, settings.sizes).to(self._device).train()
        if found:
            self._take(found, thinker)
            if heads := state.load(settings, HEADS_STATE):
                self._take(heads, self._objectives)
        self._rate = Rate(plan.peak * (0.6 if found else 1.0), warm_steps=10 if settings.toy else 300)
        self._stepper = Stepper(self._objectives, self._device, plain=settings.plain)
        self._store = Store(self._device, plan.store_samples)
        self._kinds = [*_text_kinds(plan, tables, self._device), *_scene_kinds(plan, tables, self._device)]
        self._heard_kinds = _heard_kinds(plan, self._store, self._device)

    def _take(self, found: state.State, module: nn.Module) -> None:
        """Take the weights of an earlier run; parts whose sizes were changed since begin anew."""
        own = {name: value.shape for name, value in module.state_dict().items()}
        fitting = {name: value for name, value in found.tensors.items() if own.get(name) == value.shape}
        module.load_state_dict(fitting, strict=False)
        if len(fitting) < len(found.tensors):
            self._log.say(f"{len(found.tensors) - len(fitting)} tensors of an earlier run have other sizes: left out")

    def go(self, clock: Clock) -> Any:
        """Train until the time is over; returns the thinker."""
        loader = Loader(self._kinds, self._settings.seed + self._done)
        text_is_kept, saved, step = self._done > 0, 0.0, 0
        while not clock.over:
            self._listen(loader, step)
            kind, batch = loader.next()
            self._stepper.step(kind, kind.inputs(batch), self._rate.at(step, clock.part))
            step += 1
            if step % self._plan.report == 0:
                self._log.curve(self._done + step, rate=self._rate.at(step, clock.part), **self._stepper.means())
            if not text_is_kept and clock.part > _TEXT_READY:
                self._save(TEXT_STATE, step)
                text_is_kept = True
            if clock.part > saved + 0.1:
                saved = clock.part
                self._save(STATE, step)
        loader.stop()
        self._save(STATE, step)
        self._save(TEXT_STATE, step)
        self._log.say(f"{step} steps, {self._done + step} in all; {len(self._store)} spoken prompts")
        return self._objectives.thinker

    def _listen(self, loader: Loader, step: int) -> None:
        """Take new clips now and then; once there are enough, draw batches of sounds."""
        if step % 25:
            return
        self._store.load_new(prompts.folder(self._settings), 2)
        if self._heard_kinds and len(self._store.short) >= self._plan.least_clips and self._store.long:
            loader.add(self._heard_kinds)
            self._log.say(f"step {step}: spoken prompts join, {len(self._store)} so far")
            self._heard_kinds = []

    def _save(self, name: str, step: int) -> None:
        state.save(self._settings, name, self._objectives.thinker.state_dict(), steps=self._done + step)
        heads = {key: value for key, value in self._objectives.state_dict().items() if not key.startswith("thinker.")}
        state.save(self._settings, HEADS_STATE, heads)


def _text_kinds(plan: Plan, tables: Tables, device: torch.device) -> list[Kind]:
    weights = (0.13, 0.10, 0.06)
    return [
        TextKind(f"text{length}", weight, size, tables.texts[length], device)
        for length, size, weight in zip(TEXT_LENGTHS, plan.text, weights, strict=True)
    ]


def _scene_kinds(plan: Plan, tables: Tables, device: torch.device) -> list[Kind]:
    kinds: list[Kind] = []
    for grid, rows in tables.scenes.items():
        like = sum(1 for other in tables.scenes if (other.pairs == 1) == (grid.pairs == 1))
        size, weight, looks = (plan.pictures, 0.26, plan.looks) if grid.pairs == 1 else (plan.videos, 0.10, 0)
        name = f"see{grid.pairs}x{grid.height}x{grid.width}"
        kinds.append(SceneKind(name, weight / like, size, looks, rows, grid, device))
    return kinds


def _heard_kinds(plan: Plan, store: Store, device: torch.device) -> list[Kind]:
    mel = WhisperMel().to(device)
    shapes = ((0.34, 1, 400, 224), (0.12, 1, 800, 352), (0.06, 2, 400, 352))
    return [
        HeardKind(f"hear{sounds}x{frames}", weight, size, sounds, frames, length, store, mel, device)
        for size, (weight, sounds, frames, length) in zip(plan.heard, shapes, strict=True)
    ]


class Stepper:
    """Steps of the optimiser, recorded once for each kind of batch."""

    def __init__(self, objectives: Objectives, device: torch.device, *, plain: bool = False) -> None:
        self._objectives, self._device, self._plain = objectives, device, plain
        self._parameters = [parameter for parameter in objectives.parameters() if parameter.requires_grad]
        self._rate = torch.tensor(0.0, device=device)
        self._optimizer = self._new_optimizer()
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._steps: dict[str, tuple[dict[str, Tensor], Recorded]] = {}
        self._names: dict[str, list[str]] = {}
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def _new_optimizer(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self._parameters if parameter.ndim > 1]
        others = [parameter for parameter in self._parameters if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
        on_gpu = self._device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self._rate, betas=(0.9, 0.98), fused=True, capturable=on_gpu)

    def step(self, kind: Kind, given: Inputs, rate: float) -> None:
        """Descend the loss of one batch."""
        self._rate.fill_(rate)
        if kind.name not in self._steps:
            places = {name: value.clone() for name, value in given.items()}
            self._steps[kind.name] = (
                places,
                Recorded(lambda: self._run(kind, places), self._device, self._pool, plain=self._plain),
            )
        places, recorded = self._steps[kind.name]
        for name, value in given.items():
            places[name].copy_(value)
        values = recorded()
        total, count = self._sums.get(kind.name, (torch.zeros_like(values), 0))
        self._sums[kind.name] = total + values, count + 1

    def means(self) -> dict[str, float]:
        """Mean losses by kind since the last call."""
        found = {
            f"{kind}_{name}": value / count
            for kind, (total, count) in self._sums.items()
            for name, value in zip(self._names[kind], total.tolist(), strict=True)
            if name != "loss"
        }
        self._sums.clear()
        return found

    def _run(self, kind: Kind, given: Inputs) -> Tensor:
        """One whole step; returns the losses [n] in the order of their names."""
        # Without gradients of its own, an encoder that the batch does not use keeps its weights.
        for parameter in self._parameters:
            parameter.grad = None
        with autocast(self._device):
            losses = kind.loss(self._objectives, given)
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        for parameter in self._parameters:
            if parameter.grad is not None:
                torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)
        self._optimizer.step()
        self._names[kind.name] = list(losses)
        return torch.stack([value.detach() for value in losses.values()])
