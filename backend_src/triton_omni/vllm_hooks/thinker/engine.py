# SPDX-License-Identifier: Apache-2.0
"""The thinker's engine: vLLM in this process, giving text deltas and one hidden row a token.

It implements `engine.ThinkerEngine`; sessions, messages and Triton are unknown here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from triton_omni.checkpoint.config import load_config
from triton_omni.core.errors import BadRequest, TooLarge
from triton_omni.core.settings import ThinkerSettings
from triton_omni.session.engine import (
    EngineStats,
    FinishReason,
    Sampling,
    ThinkerOutput,
    ThinkerPlaced,
    ThinkerPrompt,
    ToolRules,
)
from triton_omni.vllm_hooks.shared.compat import (
    EncoderCacheManagerConfig,
    LLMEngine,
    RequestOutput,
    StructuredOutputsConfig,
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
from triton_omni.vllm_hooks.shared.schedulers import PrefixCacheMixin
from triton_omni.vllm_hooks.thinker import networks, prompt_media
from triton_omni.vllm_hooks.thinker.hidden_rows import HiddenRowCollector
from triton_omni.vllm_hooks.thinker.json_schemas import GRAMMAR_BACKEND, JsonSchemas, why_given_up
from triton_omni.vllm_hooks.thinker.prefix_cache import prefix_keys, salted, scheduler_name
from triton_omni.vllm_hooks.thinker.quantization import quantization_arguments
from triton_omni.vllm_hooks.thinker.rows import Piece, RowRelease
from triton_omni.vllm_hooks.thinker.sequence import Sequence, Speech, end_ids, stop_string_of, to_parameters

_WORKER = "triton_omni.vllm_hooks.thinker.worker.ThinkerWorker"
_ENCODER_CACHE_MANAGER = "triton_omni.vllm_hooks.shared.schedulers.EagerEncoderCacheManager"
_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class ThinkerVllmEngine:
    """vLLM's engine with the hidden-row runner; owned by one thread, except `prepare`.

    Args:
        checkpoint: folder of a whole Qwen2.5-Omni checkpoint.
        settings: limits and engine switches of `stage.yaml`.
        device: `cpu` or a CUDA device.

    Raises:
        SettingsError: the device, a class name, the length of sequences or a quantisation cannot be used.
        UnsupportedEngineError: the configuration asks for speculative decoding.
    """

    def __init__(self, checkpoint: Path, settings: ThinkerSettings, device: torch.device) -> None:
        networks.register()
        facts = load_config(checkpoint)
        check_length(settings.engine, facts.thinker.decoder)
        self.dtype = resolve_dtype(settings.dtype, device)
        self.device = device
        apply_thread_share(settings.engine)
        arguments = build_engine_args(
            checkpoint,
            settings.engine,
            device,
            self.dtype,
            worker_cls=_WORKER,
            scheduler_cls=scheduler_name(
                ahead=schedules_ahead(settings.engine, device),
                incremental=settings.steady_decode and settings.tensor_parallel_size == 1,
                prefix_caching=settings.prefix_caching,
            ),
            prefix_caching=settings.prefix_caching,
            **quantization_arguments(settings, facts.four_bit, device, self.dtype),
            tensor_parallel_size=settings.tensor_parallel_size,
            hf_overrides={"architectures": [networks.THINKER_ARCHITECTURE]},
            # `prepare` runs on that many threads, and vLLM keeps a tokenizer for each. vLLM's cache of processed media
            # is not thread-safe, and its keys need decoded media.
            renderer_num_workers=settings.preprocess_threads,
            mm_processor_cache_gb=0,
            skip_mm_profiling=True,
            ec_manager_config=EncoderCacheManagerConfig(encoder_cache_manager_cls=_ENCODER_CACHE_MANAGER),
            structured_outputs_config=StructuredOutputsConfig(backend=GRAMMAR_BACKEND),
        )
        with lone_groups(settings.tensor_parallel_size):
            self._llm = LLMEngine.from_engine_args(arguments)
        self._core: Any = self._llm.engine_core.engine_core  # type: ignore[attr-defined]
        self._schemas = JsonSchemas(self._llm.vllm_config, self._core.structured_output_manager)
        self._runner: Any = self._llm.model_executor.driver_worker.worker.model_runner
        self._row_collector: HiddenRowCollector = self._runner.row_collector
        self._model: Any = self._runner.get_model()
        config: Any = self._llm.model_config.hf_config.thinker_config
        networks.check_time_scale(config)
        self._media_ids = {
            "audio": config.audio_token_index,
            "image": config.image_token_index,
            "video": config.video_token_index,
        }
        self._media: Any = self._llm.renderer.get_mm_processor()
        self._end_ids = end_ids(config)
        renderer: Any = self._llm.renderer
        end = renderer.get_eos_token_id()
        # vLLM has the tokenizer look it up for each request.
        renderer.get_eos_token_id = lambda: end
        self._max_model_len = settings.engine.max_model_len
        self._sequences: dict[str, Sequence] = {}
        self._keys: dict[str, str] = {}
        self._touched: dict[str, None] = {}
        """Keys that got rows in this step, in order."""
        scheduler = self._core.scheduler
        self._prefixes = scheduler if isinstance(scheduler, PrefixCacheMixin) else None
        if self._prefixes is not None:
            self._prefixes.collect = self._collect_rows
            self._core.request_block_hasher = salted(self._core.request_block_hasher)
        # Compile the zeroing now, on vLLM's unread null block: the first cancel would delay every stream.
        self._llm.model_executor.collective_rpc("clear_blocks", args=([0],))
        if device.type == "cuda":
            # vLLM warms up on a stream of this thread; another thread's, which may step, would not wait for it.
            torch.cuda.synchronize(device)

    def prepare(self, prompt: ThinkerPrompt, *, max_tokens: int = 1) -> ThinkerPlaced:
        """Preprocess media and expand their placeholders; may be called from any thread.

        `multi_modal_data` holds a list a modality: "image" (PIL, or uint8 [H, W, 3]), "audio" (float32 [S] at 16 kHz),
        "video" (uint8 [T, H, W, 3]); with `use_audio_in_video` every video has its sound. `second_per_grid_ts` of the
        processor's arguments has the seconds between two time steps of each video; without it frames are 2 a second.

        Raises:
            TooLarge: the expanded prompt and `max_tokens` exceed `max_model_len`.
            BadRequest: the media do not fit the placeholders, or cannot be processed.
        """
        self._check_length(len(prompt.token_ids), max_tokens)
        prompt_media.check_placeholders(prompt, self._media_ids)
        if prompt.multi_modal_data:
            # Check before the media are processed, which takes memory and time in proportion to their size.
            self._check_length(prompt_media.expanded_length(self._media.info, prompt, self._media_ids), max_tokens)
        engine_input = self._render(prompt)
        ids: list[int] = engine_input["prompt_token_ids"]
        self._check_length(len(ids), max_tokens)
        positions, _ = self._model.get_mrope_input_positions(ids, networks.media_features(engine_input))
        hasher = self._core.request_block_hasher
        # Here, not when the session opens, since all other sessions would then wait.
        prefixes = None if hasher is None else prefix_keys(hasher, self._core.scheduler.block_size, engine_input)
        return ThinkerPlaced(tuple(ids), positions.to(torch.int64), engine_input, prefixes)

    def media_tokens(self, media: Mapping[str, list[Any]]) -> int:
        """Tokens of media in a prompt, see `session.engine.ThinkerEngine`."""
        return prompt_media.media_length(self._media.info, media)

    def check_schema(self, schema: str, salt: str | None = None) -> None:
        """Check that a JSON schema can be compiled; may be called from any thread. Only requests of the same salt share
        the result.

        Raises:
            BadRequest: it is no schema, or cannot be compiled.
        """
        self._schemas.check(schema, salt)

    def check_tools(self, rules: ToolRules, salt: str | None = None) -> None:
        """Check that the schemas of tools can be compiled, each and together; raises as `check_schema`."""
        self._schemas.check_tools(rules, salt)

    def add_sequence(
        self, key: str, placed: ThinkerPlaced, sampling: Sampling, *, want_rows: bool, priority: int = 0
    ) -> None:
        """Queue a sequence; `want_rows` False (a text-only request) gives no rows. The lowest `priority` is next.

        A JSON schema that `check_schema` refuses fails its sequence at a later step.

        Raises:
            ValueError: the key is in use.
            TooLarge: prompt and `sampling.max_tokens` exceed `max_model_len`.
            BadRequest: vLLM refuses a sampling value or a medium.
        """
        if key in self._sequences:
            raise ValueError(f"key {key!r} is in use")
        self._check_length(len(placed.prompt_token_ids), sampling.max_tokens)
        is_held = sampling.json_schema is not None or sampling.tools is not None
        ends = [*self._end_ids, self._schemas.end_id] if is_held else self._end_ids
        try:
            parameters = to_parameters(sampling, ends)
            request_id = self._llm.add_request(key, placed.engine_input, parameters, priority=priority)
        except VLLMValidationError as error:
            raise BadRequest(f"the thinker refused the request: {error}") from error
        self._runner.place(request_id, placed.positions)
        is_shared = self._prefixes is not None and "cache_salt" in placed.engine_input
        self._row_collector.follow(request_id, self._media_places(placed), wants_rows=want_rows, is_shared=is_shared)
        speech = Speech(sampling)
        release = RowRelease(len(placed.prompt_token_ids), cuts=speech.cuts)
        # Kept, since vLLM forgets them before it reports how the reply ended.
        detokenizer = self._llm.output_processor.request_states[request_id].detokenizer
        structured = self._core.scheduler.requests[request_id].structured_output_request
        self._sequences[key] = Sequence(key, request_id, want_rows, release, detokenizer, structured, speech)
        self._keys[request_id] = key

    def pause(self, paused: bool) -> None:
        """Begin no step from now on, or begin steps again; what is under way is taken in any case."""
        self._core.scheduler.paused = paused

    def confine(self, confined: bool) -> None:
        """Run decode steps on a part of the GPU from now on, or on all of it, see `shared/partition.py`."""
        self._runner.confine(confined)

    @property
    def steps_under_way(self) -> int:
        """Steps that were begun, and whose results have not been given."""
        return len(self._core.batch_queue or ())

    def step(self) -> list[ThinkerOutput]:
        """Run one engine step and return what it gave; an empty list when there is nothing to do."""
        if not self.has_work():
            return []
        if self.device.type == "cuda":
            # The current device is a thread's, and another thread may have made the engine.
            torch.cuda.set_device(self._runner.device)
        news: dict[str, RequestOutput] = {output.request_id: output for output in self._vllm_step()}
        failed = self._fail_for_memory()
        news = {key: output for key, output in news.items() if key in self._sequences}
        for key, output in news.items():
            self._sequences[key].count(output.outputs[0])
        self._collect_rows()
        touched, self._touched = self._touched | dict.fromkeys(news), {}
        present = [self._sequences[key] for key in touched if key in self._sequences]
        return failed + [output for sequence in present for output in self._advance(sequence, news.get(sequence.key))]

    def _vllm_step(self) -> list[RequestOutput]:
        """vLLM's `LLMEngine.step`, for a step of its core or an incremental one."""
        processor: Any = self._llm.output_processor
        processed = processor.process_outputs(core_step(self._llm.engine_core, self._runner))
        # The core does not know that the sequence ended with a stop string.
        self._llm.engine_core.abort_requests(processed.reqs_to_abort)
        outputs: list[RequestOutput] = processed.request_outputs
        return outputs

    def abort(self, key: str) -> None:
        """Drop a sequence and everything it holds; unknown keys are ignored."""
        sequence = self._give_up(key)
        if sequence is not None:
            # A step may be in flight, so its values may not be finite.
            self._clear_cache_of(sequence)

    def has_work(self) -> bool:
        """True if `step` could advance a sequence, or must still tell the device of an ended one."""
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def stats(self) -> EngineStats:
        """Figures of this moment, from the scheduler's own state."""
        running, waiting = self._core.scheduler.get_request_counts()
        pool = self._core.scheduler.kv_cache_manager.block_pool
        held = sum(sequence.release.held_rows for sequence in self._sequences.values())
        # The null block is never free.
        limit = pool.num_gpu_blocks - 1
        used = limit - pool.get_num_free_blocks()
        mirror = self._runner.mirror
        return EngineStats(
            running,
            waiting,
            kv_blocks_used=used,
            rows_used=held,
            kv_blocks_limit=limit,
            kv_blocks_cached=len(pool.cached_block_hash_to_block),
            mirror_bytes=0 if mirror is None else mirror.rows.nbytes,
        )

    def close(self) -> None:
        """Release the device; the engine cannot be used afterwards."""
        for key in tuple(self._sequences):
            self._give_up(key)
        self._row_collector.steps.clear()
        self._llm.engine_core.shutdown()

    def _media_places(self, placed: ThinkerPlaced) -> NDArray[np.bool_]:
        """Return bool [P], True for tokens that stand for a medium; text alone has none, as `prepare` ensured."""
        ids = placed.prompt_token_ids
        if not placed.engine_input.get("mm_placeholders"):
            return np.zeros(len(ids), np.bool_)
        return np.isin(ids, list(self._media_ids.values()))

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self._max_model_len:
            raise TooLarge(
                f"the prompt has {prompt_tokens} tokens and the reply may have {max_tokens}, together "
                f"{prompt_tokens + max_tokens}; this deployment's limit is {self._max_model_len} (max_model_len)"
            )

    def _render(self, prompt: ThinkerPrompt) -> Mapping[str, Any]:
        """vLLM's engine input: ids with expanded placeholders, and the processed media."""
        rendered: dict[str, Any]
        if prompt.multi_modal_data:
            with prompt_media.medium_refused():
                rendered = self._media.place(prompt)
        else:
            (rendered,) = self._llm.renderer.render_cmpl([{"prompt_token_ids": list(prompt.token_ids)}])
        return rendered if prompt.cache_salt is None else {**rendered, "cache_salt": prompt.cache_salt}

    def _fail_for_memory(self) -> list[ThinkerOutput]:
        """Fail the sequences with a medium that found no memory in the step just begun."""
        found, self._runner.without_memory = self._runner.without_memory, {}
        failed = {self._keys[request_id]: kind for request_id, kind in found.items() if request_id in self._keys}
        for key in failed:
            self.abort(key)
        return [ThinkerOutput(key, error=f"the device has no memory for this {kind}") for key, kind in failed.items()]

    def _collect_rows(self) -> None:
        """Give the rows that have arrived to their sequences, and note which sequences got some."""
        while self._row_collector.steps and self._row_collector.steps[0].arrived:
            step = self._row_collector.steps.popleft()
            finite = bool(step.finite.all())
            for segment in step.segments:
                key = self._keys.get(segment.request_id)
                if key is None:
                    continue  # aborted or ended while the step ran
                piece, release = Piece.of(step, segment, finite=finite), self._sequences[key].release
                release.held.append(piece)
                release.is_sound = release.is_sound and piece.is_finite
                release.has_computed |= release.is_sound and not step.are_cached
                if self._prefixes is not None and release.is_sound:
                    self._prefixes.verify(segment.request_id, segment.stop)
                self._touched[key] = None

    def _advance(self, sequence: Sequence, news: RequestOutput | None) -> list[ThinkerOutput]:
        """Return the outputs of one sequence in this step; several only if rows of more than one step are released."""
        given = sequence.release.pop_pieces()
        if not (sequence.is_sound and all(piece.is_finite for piece in given)):
            if self._prefixes is not None and not sequence.release.has_computed:
                # The cached blocks that it hit may be the cause, and would fail the next caller too.
                self._prefixes.distrust(sequence.request_id)
            self.abort(sequence.key)
            return [ThinkerOutput(sequence.key, error="a hidden state is not finite (NaN or infinity)")]
        outputs = [
            ThinkerOutput(sequence.key, rows=piece.rows, row_start=piece.start, rows_ready=piece.ready)
            for piece in given
            if piece.rows is not None
        ]
        if news is None:
            return outputs
        last = outputs.pop() if outputs else ThinkerOutput(sequence.key)
        return [*outputs, self._with_news(sequence, last, news)]

    def _with_news(self, sequence: Sequence, rows: ThinkerOutput, news: RequestOutput) -> ThinkerOutput:
        completion, release, reader = news.outputs[0], sequence.release, sequence.speech.reader
        finish = _FINISH.get(completion.finish_reason)
        error, given_up, stop_string = None, None, stop_string_of(completion)
        if stop_string is not None:
            # A step may be in flight, and the withheld rows may not be finite.
            self._clear_cache_of(sequence)
        if news.finished:
            self._drop(sequence.key)
            if finish is None:
                error = f"the engine gave the sequence up ({completion.finish_reason})"
            elif sequence.structured is not None:
                error = given_up = why_given_up(sequence.structured.grammar, has_tools=reader is not None)
            if error is None and release.next_position != release.limit:
                error = f"{release.next_position} of the sequence's {release.limit} hidden rows were computed"
        return ThinkerOutput(
            key=sequence.key,
            text=completion.text if reader is None else reader.delta.text,
            token_ids=tuple(completion.token_ids),
            cached_tokens=news.num_cached_tokens or 0,
            rows=rows.rows,
            row_start=rows.row_start,
            rows_ready=rows.rows_ready,
            finish_reason=None if error or finish is None else sequence.speech.why_finished(finish, stop_string),
            stop_string=stop_string,
            calls=() if reader is None else reader.delta.calls,
            rows_done=sequence.rows_done,
            error=error,
            is_refused=given_up is not None,
        )

    def _clear_cache_of(self, sequence: Sequence) -> None:
        kept = 0 if self._prefixes is None else self._prefixes.kept.get(sequence.request_id, 0)
        self._llm.model_executor.collective_rpc("clear_cache_of", args=(sequence.request_id, kept), single_value=True)

    def _give_up(self, key: str) -> Sequence | None:
        sequence = self._drop(key)
        if sequence is not None:
            self._llm.abort_request([sequence.request_id], internal=True)
        return sequence

    def _drop(self, key: str) -> Sequence | None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._keys.pop(sequence.request_id)
            self._row_collector.forget(sequence.request_id)
            self._runner.forget_place(sequence.request_id)
        return sequence
