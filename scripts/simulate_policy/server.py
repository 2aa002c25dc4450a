# SPDX-License-Identifier: Apache-2.0
"""Three loops that share a GPU: each step takes its cost, longer while others run beside it.

The loops decide by the rules of `triton_omni.policy`, as the stages do. Rows and codes arrive at once, the host costs
nothing, and a step of the thinker is in flight alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from triton_omni.core.policy_settings import NS_PER_MS, ThinkerPolicy, Token2WavPolicy
from triton_omni.core.settings import Token2WavSettings
from triton_omni.policy.rules import Claim, Snapshot, must_pause, next_batch, wants_claim
from triton_omni.token2wav.chunking import streaming_plan

from .costs import Costs, Stage
from .replies import Due, Reply, Request

POLL_MS: Final = 1.0
"""Maximum milliseconds between two decisions of a loop."""
THINKER_TOKENS, TALKER_TOKENS = 2048, 1024
"""Tokens of a step with prompts."""
SOLVER_STEPS: Final = 9
"""Steps of a batch between which a more urgent batch may go."""


@dataclass
class Task:
    """A step on the GPU."""

    left_ms: float
    end: Callable[[], None]


@dataclass
class Batch:
    """Windows that are solved together."""

    windows: list[Due]
    steps: int = SOLVER_STEPS


@dataclass(frozen=True)
class Policies:
    """Limits of the rules, by the stage that evaluates them."""

    thinker: ThinkerPolicy = field(default_factory=ThinkerPolicy)
    token2wav: Token2WavPolicy = field(default_factory=Token2WavPolicy)


@dataclass
class Server:
    """The stages and their sessions at one moment; `run` serves requests.

    Args:
        costs: of the steps.
        policies: limits of the rules.
        speech: the plan of the replies' windows, and the sizes of a batch.
    """

    costs: Costs
    policies: Policies = field(default_factory=Policies)
    speech: Token2WavSettings = field(default_factory=Token2WavSettings)
    now_ms: float = 0.0
    _open: list[Reply] = field(default_factory=list)
    """Replies that have come and are not over."""
    _tasks: dict[Stage, Task] = field(default_factory=dict)
    _batches: list[Batch] = field(default_factory=list)
    """Batches that are being launched, the most urgent last."""

    def __post_init__(self) -> None:
        self._plan = streaming_plan(self.speech.plans[self.speech.plan])
        self._claim = Claim(self.policies.token2wav.claim_ms * NS_PER_MS)

    def run(self, requests: Sequence[Request], clients: int | None = None) -> list[Reply]:
        """Serve all requests to their ends; return their replies in the order of the requests.

        Args:
            requests: the load.
            clients: number of requests that may be open; the next one is sent when a reply ends. None: all of them.
        """
        waiting, replies = list(requests), list[Reply]()
        while waiting or self._open:
            room = len(waiting) if clients is None else clients - len(self._open)
            come = sum(request.at_ms <= self.now_ms for request in waiting[:room])
            begun = [replace(one, at_ms=max(one.at_ms, self.now_ms)) for one in waiting[:come]]
            replies += [Reply(one, self._plan) for one in begun]
            self._open += replies[len(replies) - come :]
            del waiting[:come]
            self._begin_steps()
            busy = set(self._tasks)
            rates = {stage: self.costs.rate(stage, busy) for stage in busy}
            step_ms = min([POLL_MS, *(task.left_ms / rates[stage] for stage, task in self._tasks.items())])
            self.now_ms += step_ms
            for stage in sorted(busy):
                task = self._tasks[stage]
                task.left_ms -= step_ms * rates[stage]
                if task.left_ms <= 1e-9:
                    del self._tasks[stage]
                    task.end()
        return replies

    @property
    def _now_ns(self) -> int:
        # The rules take 0 for "never".
        return int(self.now_ms * NS_PER_MS) + 1

    def _begin_steps(self) -> None:
        seen = self._snapshot()
        claimed = self._claim.until_ns(wants_claim(seen), self._now_ns) > self._now_ns
        if "token2wav" not in self._tasks:
            self._begin_window_step(seen)
        if not claimed and "talker" not in self._tasks:
            self._begin_talker_step()
        if not claimed and "thinker" not in self._tasks and not self._must_pause():
            self._begin_thinker_step()

    def _must_pause(self) -> bool:
        ready = [reply.ready_since_ns(self._now_ns) for reply in self._open if reply.is_silent]
        return must_pause(
            [one for one in ready if one is not None], self._now_ns, self.policies.thinker.pause_ms * NS_PER_MS
        )

    def _begin_thinker_step(self) -> None:
        prompts, room = [], THINKER_TOKENS
        for reply in self._open:
            if not reply.rows and reply.request.prompt_tokens <= room:
                prompts.append(reply)
                room -= reply.request.prompt_tokens
        decoding = [reply for reply in self._open if 0 < reply.rows < reply.request.tokens]
        if not prompts and not decoding:
            return
        costs = self.costs
        cost_ms = costs.thinker_step_ms + len(decoding) * costs.thinker_sequence_ms
        cost_ms += (THINKER_TOKENS - room) * costs.thinker_token_ms

        def end() -> None:
            for reply in [*prompts, *decoding]:
                reply.rows += 1

        self._tasks["thinker"] = Task(cost_ms, end)

    def _begin_talker_step(self) -> None:
        prompts, room = [], TALKER_TOKENS
        for reply in self._open:
            if reply.rows and not reply.has_talker_prompt and reply.request.prompt_tokens <= room:
                prompts.append(reply)
                room -= reply.request.prompt_tokens
        decoding = [reply for reply in self._open if reply.has_talker_prompt and reply.has_row]
        if not prompts and not decoding:
            return
        costs = self.costs
        cost_ms = costs.talker_step_ms + len(decoding) * costs.talker_sequence_ms
        cost_ms += (TALKER_TOKENS - room) * costs.talker_token_ms

        def end() -> None:
            for reply in prompts:
                reply.has_talker_prompt = True
            for reply in decoding:
                reply.take_code()

        self._tasks["talker"] = Task(cost_ms, end)

    def _begin_window_step(self, seen: Snapshot[Due]) -> None:
        batch = next_batch(
            seen,
            self.policies.token2wav,
            most_windows=self.speech.max_batch,
            most_frames=self.speech.max_batch_frames,
        )
        if batch:
            for due in batch:
                due.reply.launched = True
            self._batches.append(Batch(batch))
        if not self._batches:
            return
        current = self._batches[-1]
        cost_ms = self.costs.window_ms + sum(due.frames for due in current.windows) * self.costs.frame_ms

        def end() -> None:
            current.steps -= 1
            if not current.steps:
                self._batches.remove(current)
                for due in current.windows:
                    due.reply.take_sound(self.now_ms, self._now_ns)
                self._open = [reply for reply in self._open if not reply.is_over]

        self._tasks["token2wav"] = Task(cost_ms / SOLVER_STEPS, end)

    def _snapshot(self) -> Snapshot[Due]:
        due = [Due.of(reply) for reply in self._open if reply.is_due]
        return Snapshot(
            now_ns=self._now_ns,
            due=sorted(due, key=lambda window: window.deadline_ns),
            launching=[window for batch in reversed(self._batches) for window in batch.windows],
            on_device=[],
            awaited=sum(reply.is_silent and not reply.has_codes for reply in self._open),
            streams=len(self._open),
        )
