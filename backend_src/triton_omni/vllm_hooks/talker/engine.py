# SPDX-License-Identifier: Apache-2.0
"""The talker's engine: vLLM in this process, hidden rows in and codec codes out while the rows still arrive.

It implements `engine.TalkerEngine`; sessions, messages and Triton are unknown here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor

from triton_omni.checkpoint.config import load_config
from triton_omni.core.errors import BadRequest, InternalError, Overloaded, TooLarge
from triton_omni.core.settings import TalkerSettings
from triton_omni.session.engine import EngineStats, FinishReason, Sampling, TalkerOutput, TalkerPrompt
from triton_omni.vllm_hooks.shared.compat import (
    EngineCoreOutput,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
)
from triton_omni.vllm_hooks.shared.engine_args import (
    apply_thread_share,
    build_engine_args,
    check_length,
    resolve_dtype,
    schedules_ahead,
)
from triton_omni.vllm_hooks.shared.incremental_schedule import core_step
from triton_omni.vllm_hooks.shared.platform import lone_groups
from triton_omni.vllm_hooks.shared.sampling import drawing
from triton_omni.vllm_hooks.talker.conditioning import TextRows, prompt_ids, prompt_length
from triton_omni.vllm_hooks.talker.network import register_talker, talker_config
from triton_omni.vllm_hooks.talker.rows import Sequence, TalkerRows
from triton_omni.vllm_hooks.talker.runner import ROWS, SESSIONS
from triton_omni.vllm_hooks.talker.schedulers import HeldPrefix, HeldPrefixMixin, scheduler_name
from triton_omni.vllm_hooks.talker.step import codec_ids

_WORKER: Final = "triton_omni.vllm_hooks.talker.runner.TalkerWorker"
_FINISH: Final[dict[str | None, FinishReason]] = {"stop": "stop", "length": "length"}


class TalkerVllmEngine:
    """vLLM's engine with rows added to its inputs; owned by one thread.

    Args:
        checkpoint: folder of a whole Qwen2.5-Omni checkpoint.
        settings: limits and engine switches of `stage.yaml`.
        device: `cpu` or a CUDA device.

    Raises:
        SettingsError: the device cannot be used.
        CheckpointError, ValueError: the checkpoint lacks something of the talker.
    """

    def __init__(self, checkpoint: Path, settings: TalkerSettings, device: torch.device) -> None:
        config = load_config(checkpoint)
        self._settings = settings
        check_length(settings.engine, config.talker.decoder)
        dtype = resolve_dtype(settings.dtype, device)
        self._text_rows = TextRows(checkpoint, dtype, device)
        self._llm = _start_vllm(checkpoint, settings, device, dtype)
        self._core: Any = self._llm.engine_core.engine_core  # type: ignore[attr-defined]
        self._ids = codec_ids(config)
        self._open: dict[str, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._silent: list[str] = []
        self._runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self._rows: TalkerRows = self._runner.step.rows
        self._positions = _rotary_positions(self._runner.get_model())
        self._runner.serve(self._by_request)
        # Compile the zeroing now, on vLLM's unread null block: the first abort would delay every stream.
        self._runner.clear_blocks([0])
        scheduler = self._core.scheduler
        scheduler.wait_for(lambda request_id: self._by_request[request_id].ready_positions)
        self._held: dict[str, HeldPrefix] = {}
        self._prefixes = scheduler if isinstance(scheduler, HeldPrefixMixin) else None
        if self._prefixes is not None:
            self._prefixes.failed_id = self._ids.mask
            # All prompts have the same ids, so by their hashes each would be taken for every other.
            self._core.request_block_hasher = None
        if device.type == "cuda":
            # Another thread may step the engine, and its stream would not wait for this one's.
            torch.cuda.synchronize(device)

    def open(self, key: str, prompt: TalkerPrompt, sampling: Sampling, *, priority: int = 0) -> int:
        """Reserve the session's rows; vLLM learns of the sequence with its first reply row.

        Among waiting sequences the one with the lowest `priority` is next.

        Returns:
            Number of prompt rows that must not be fed: the prefix cache has their blocks, and keeps them until this
            sequence ends. 0 without a prefix cache.

        Raises:
            Overloaded: there is no room for the rows now.
            TooLarge: the prompt leaves no room for a code, or its positions none in the rotary table.
            BadRequest: a sampling value is out of range.
            InternalError: the key is in use, or the prompt contradicts itself.
        """
        self._check_prompt(key, prompt)
        checked = self._check_sampling(sampling)
        self._check_positions(prompt.positions, checked.max_tokens)
        text_bos = self._text_rows[prompt.text_bos_id]
        sequence = self._reserve(key, prompt, text_bos, self._parameters(checked))
        sequence.priority = priority
        self._runner.step.draws.choose(sequence.slot, checked, prompt_length(prompt.prompt_rows))
        self._open[key] = sequence
        return sequence.begin

    def _reserve(self, key: str, prompt: TalkerPrompt, text_bos: Tensor, parameters: SamplingParams) -> Sequence:
        """Pin the prompt's blocks in the prefix cache, and reserve the rows after them."""
        prefixes = self._prefixes
        if prefixes is None or prompt.prefixes is None:
            return self._rows.open(key, prompt, text_bos, parameters)
        held = prefixes.pin(prompt.prefixes, prompt.prompt_rows)
        try:
            sequence = self._rows.open(key, prompt, text_bos, parameters, prefixes.held_tokens(held))
        except Overloaded:
            prefixes.release(None, held, failed=False)
            raise
        self._held[key] = held
        return sequence

    def feed(self, key: str, rows: Tensor) -> None:
        """Take the next rows [N, H] (prompt rows from where `open` said, then the reply's), which the next step copies;
        unknown keys are ignored.

        Raises:
            InternalError: more rows than announced, another width, or rows after the end.
        """
        sequence = self._open.get(key)
        if sequence is None or not rows.shape[0]:
            return
        self._rows.feed(sequence, rows)
        # The sequence does not start on the prompt's rows alone: prefill would run in one step or two, depending on
        # when rows arrive, and in half precision a seed would not give the same codes twice.
        if sequence.request_id is None and sequence.speaks:
            self._submit(sequence)

    def settle(self) -> None:
        """Enqueue the copies of all rows that were fed, now instead of with the next step."""
        self._rows.store()

    def end(self, key: str) -> None:
        """No more rows: from here on the tail is added. Without any reply row the sequence ends with no code."""
        sequence = self._open.get(key)
        if sequence is None:
            return
        if sequence.speaks:
            sequence.ended = True
        else:
            self.abort(key)
            self._silent.append(key)

    def pause(self, paused: bool) -> None:
        """Begin no step from now on, or begin steps again; what is under way is taken in any case."""
        self._core.scheduler.paused = paused

    def confine(self, confined: bool) -> None:
        """Run decode steps on a part of the GPU from now on, or on all of it, see `shared/partition.py`."""
        self._runner.confine(confined)

    def step(self) -> list[TalkerOutput]:
        """Run one engine step over every sequence whose next row is there."""
        silent, self._silent = self._silent, []
        outputs = [TalkerOutput(key, finish_reason="stop") for key in silent]
        if self._vllm_has_work():
            if self._runner.device.type == "cuda":
                # The current device is a thread's, and another thread may have made the engine.
                torch.cuda.set_device(self._runner.device)
            outputs += [self._output(found) for found in self._vllm_step() if found.request_id in self._by_request]
        return outputs

    def _vllm_step(self) -> list[EngineCoreOutput]:
        """Return the outputs of one step of vLLM's engine.

        `LLMEngine.step` would make a `RequestOutput` with a text for each, which costs a tenth of a step at a large
        batch. It only learns which sequences ended, to forget them.
        """
        given = core_step(self._llm.engine_core, self._runner)
        ended = [output for output in given if output.finished]
        if ended:
            self._llm.output_processor.process_outputs(ended)
        return given

    def abort(self, key: str) -> None:
        """Drop a sequence and its rows; unknown keys are ignored."""
        sequence = self._open.get(key)
        if sequence is None:
            return
        if sequence.request_id is not None:
            self._llm.abort_request([sequence.request_id], internal=True)
            self._clear_cache_of(sequence.request_id)
        self._close(sequence, failed=False)

    def has_work(self) -> bool:
        """True if `step` could advance a sequence now; False while every sequence waits for rows."""
        return bool(self._silent) or self._vllm_has_work()

    def _vllm_has_work(self) -> bool:
        """True if vLLM could schedule something, or one of its steps is in flight."""
        in_flight = self._core.batch_queue or ()
        if any(output.total_num_scheduled_tokens for _, output, _ in in_flight):
            return True
        return bool(self._core.scheduler.can_advance())

    def stats(self) -> EngineStats:
        """Figures of this moment, from the scheduler's and the pool's own state."""
        scheduler = self._core.scheduler
        running = len(scheduler.running)
        blocks = scheduler.kv_cache_manager.block_pool
        return EngineStats(
            running=running,
            waiting=len(self._open) - running,
            # vLLM keeps one block for itself (the null block).
            kv_blocks_used=blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
            kv_blocks_limit=blocks.num_gpu_blocks - 1,
            kv_blocks_cached=len(blocks.cached_block_hash_to_block),
            rows_used=self._rows.rows_used,
        )

    def close(self) -> None:
        """Drop every sequence and release the device; the engine cannot be used afterwards."""
        for key in list(self._open):
            self.abort(key)
        self._llm.engine_core.shutdown()

    def _check_prompt(self, key: str, prompt: TalkerPrompt) -> None:
        length, limit = prompt_length(prompt.prompt_rows), self._settings.engine.max_model_len
        if key in self._open:
            raise InternalError(f"talker sequence {key} is open already", stage="talker")
        if prompt.prompt_rows < 1 or tuple(prompt.positions.shape) != (3, length):
            raise InternalError(
                f"talker positions {tuple(prompt.positions.shape)}: expected (3, {length}), "
                f"two more than the {prompt.prompt_rows} prompt rows, of which there must be one",
                stage="talker",
            )
        if prompt.max_rows <= prompt.prompt_rows:
            raise InternalError(
                f"talker max_rows {prompt.max_rows} leaves no reply row after {prompt.prompt_rows} prompt rows",
                stage="talker",
            )
        if length >= limit:
            raise TooLarge(
                f"the prompt has {prompt.prompt_rows} tokens, which leave the talker no room to speak: "
                f"its sequences may have {limit} positions (engine.max_model_len), {length} of them are the prompt",
                stage="talker",
            )

    def _check_positions(self, positions: Tensor, codes: int) -> None:
        """Check that the rotary table has all positions: a kernel would read beyond its end."""
        known = positions.numpy()
        first, last = int(known.min()), int(known.max()) + codes
        if first < 0:
            raise InternalError(f"talker positions begin at {first}, the first there is is 0", stage="talker")
        if last >= self._positions:
            raise TooLarge(
                f"prompt and speech reach position {last}, the checkpoint's rotary table ends at "
                f"{self._positions - 1}: send fewer or shorter media",
                stage="talker",
            )

    def _submit(self, sequence: Sequence) -> None:
        """Give the sequence to vLLM: dummy prompt ids, since every input is a row plus an embedding."""
        ids = prompt_ids(sequence.prompt.prompt_rows, self._ids)
        parameters = cast(SamplingParams, sequence.parameters)
        sequence.request_id = self._llm.add_request(
            sequence.key, {"prompt_token_ids": ids}, parameters, priority=sequence.priority
        )
        self._by_request[sequence.request_id] = sequence
        if self._prefixes is not None and sequence.key in self._held:
            self._prefixes.serve(sequence.request_id, self._held[sequence.key])

    def _check_sampling(self, sampling: Sampling) -> Sampling:
        """Return the values as vLLM takes them (it raises a very low temperature), with its refusals as our errors."""
        limit = min(sampling.max_tokens, self._settings.max_codes)
        try:
            checked = SamplingParams(**drawing(sampling), max_tokens=limit, min_tokens=sampling.min_tokens)
        except VLLMValidationError as error:
            raise BadRequest(f"the talker's sampling: {error}", stage="talker") from error
        return dataclasses.replace(sampling, temperature=checked.temperature, max_tokens=limit)

    def _parameters(self, sampling: Sampling) -> SamplingParams:
        """Return vLLM's parameters of a sequence: when it ends. Its sampling is in `SlotDraws`."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            # Only a sequence that met a non-finite value draws the mask id.
            stop_token_ids=[*self._ids.stops, self._ids.mask],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _output(self, found: EngineCoreOutput) -> TalkerOutput:
        sequence, ids = self._by_request[found.request_id], found.new_token_ids
        finish = None if found.finish_reason is None else str(found.finish_reason)
        codes = sequence.accept(len(ids), spoken=len(ids) - (finish == "stop"))
        error = self._reason_of_failure(finish, found.stop_reason) if finish else None
        if error:
            self._clear_cache_of(found.request_id)
        if finish:
            self._close(sequence, failed=error is not None)
        return TalkerOutput(
            sequence.key,
            codes=codes.ids if codes is not None else None,
            codes_ready=codes.ready if codes is not None else None,
            finish_reason=None if error else _FINISH.get(finish),
            error=error,
        )

    def _reason_of_failure(self, finish: str, stop: int | str | None) -> str | None:
        """Return why a finished sequence failed; None = it did not."""
        if stop == self._ids.mask:
            return "a hidden row or a logit of this sequence is not finite (NaN or infinity)"
        if finish not in _FINISH:
            return f"the engine gave the sequence up ({finish})"
        return None

    def _clear_cache_of(self, request_id: str) -> None:
        kept = 0 if self._prefixes is None else self._prefixes.kept.get(request_id, 0)
        self._runner.clear_cache_of(request_id, kept)

    def _release(self, sequence: Sequence, *, failed: bool) -> None:
        held = self._held.pop(sequence.key, None)
        if self._prefixes is None or held is None:
            return
        if spoilt := self._prefixes.release(sequence.request_id, held, failed=failed):
            self._runner.clear_blocks(spoilt)

    def _close(self, sequence: Sequence, *, failed: bool) -> None:
        del self._open[sequence.key]
        self._release(sequence, failed=failed)
        if sequence.request_id is not None:
            del self._by_request[sequence.request_id]
        self._rows.close(sequence)


def _rotary_positions(network: torch.nn.Module) -> int:
    """Positions in the network's rotary table."""
    return next(len(table) for name, table in network.named_buffers() if name.endswith("cos_sin_cache"))


def _start_vllm(checkpoint: Path, settings: TalkerSettings, device: torch.device, dtype: torch.dtype) -> LLMEngine:
    register_talker()
    apply_thread_share(settings.engine)
    arguments = build_engine_args(
        checkpoint,
        settings.engine,
        device,
        dtype,
        worker_cls=_WORKER,
        scheduler_cls=scheduler_name(
            ahead=schedules_ahead(settings.engine, device), prefix_caching=settings.prefix_caching
        ),
        prefix_caching=settings.prefix_caching,
        hf_overrides=talker_config,
        skip_tokenizer_init=True,
        for_runner={SESSIONS: settings.max_sessions, ROWS: settings.engine.cached_tokens},
    )
    with lone_groups(1):
        return LLMEngine.from_engine_args(arguments)
