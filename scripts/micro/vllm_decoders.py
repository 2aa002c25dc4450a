# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM as the reference: its own worker, runner, scheduler and sampler, on the arguments of our engines.

`TritonOmni*` architecture names are ours; the classes used here are vLLM's own. They are registered as objects, since
vLLM would inspect its registry's in a child process without `compat`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from triton_omni.checkpoint.config import load_config
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.vllm_hooks.shared.compat import (
    EngineArgs,
    LLMEngine,
    ModelRegistry,
    Qwen2_5OmniThinkerForConditionalGeneration,
    RequestOutputKind,
    SamplingParams,
)
from triton_omni.vllm_hooks.shared.engine_args import (
    apply_thread_share,
    build_engine_args,
    resolve_dtype,
)
from triton_omni.vllm_hooks.thinker.quantization import quantization_arguments

from .decoding import TOKENS_OF_A_STEP, Mode, longest_sequence
from .plan import Plan

_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
"""The worker that vLLM chooses where none is named."""
_THINKER = "MicroPlainThinker"
_TALKER = "MicroPlainTalker"


def engine_settings(plan: Plan) -> EngineSettings:
    """Limits and switches that ours and plain vLLM share."""
    return EngineSettings(
        max_num_seqs=max(plan.batches),
        max_model_len=longest_sequence(plan),
        max_num_batched_tokens=max(TOKENS_OF_A_STEP, *plan.batches),
        enforce_eager=plan.enforce_eager,
        torch_compile=plan.torch_compile,
    )


def engine_facts(llm: LLMEngine) -> dict[str, Any]:
    """Facts, as vLLM resolved them, that must be equal for two engines' steps to be compared."""
    config: Any = llm.vllm_config
    graphs = config.compilation_config
    return {
        "dtype": str(config.model_config.dtype),
        "quantization": config.model_config.quantization,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "kv_block_size": config.cache_config.block_size,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "enforce_eager": bool(config.model_config.enforce_eager),
        "compilation_mode": str(graphs.mode),
        "cuda_graphs": str(graphs.cudagraph_mode),
        "cuda_graph_sizes": list(graphs.cudagraph_capture_sizes or ()),
    }


class PlainDecoder:
    """vLLM without anything of ours.

    Args:
        arguments: of the engine.
        vocabulary: prompts are ids in [0, vocabulary).
        detokenize: whether text is made of the tokens, as the engine that it is compared with does.
    """

    by = "vllm"

    def __init__(self, arguments: EngineArgs, plan: Plan, vocabulary: int, *, detokenize: bool) -> None:
        self._llm = LLMEngine.from_engine_args(arguments)
        self._core: Any = self._llm.engine_core.engine_core  # type: ignore[attr-defined]
        self._plan, self._vocabulary, self._detokenize = plan, vocabulary, detokenize
        self._ids: list[str] = []

    def begin(self, batch: int, mode: Mode, tokens: int) -> None:
        """Submit prompts of random ids."""
        numbers = random.Random(0)
        parameters = SamplingParams(
            temperature=mode.temperature,
            top_p=mode.top_p,
            top_k=mode.top_k,
            repetition_penalty=mode.repetition_penalty,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=self._detokenize,
            output_kind=RequestOutputKind.DELTA,
        )
        for number in range(batch):
            ids = [numbers.randrange(self._vocabulary) for _ in range(self._plan.prompt_tokens)]
            self._ids.append(self._llm.add_request(str(number), {"prompt_token_ids": ids}, parameters.clone()))

    def step(self) -> int:
        """Tokens of one engine step."""
        outputs: list[Any] = list(self._llm.step())
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def clear(self) -> None:
        """Abort and drain."""
        self._llm.abort_request(self._ids, internal=True)
        self._ids = []
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._llm.step()

    def facts(self) -> dict[str, Any]:
        """See `engine_facts`."""
        return engine_facts(self._llm)

    def close(self) -> None:
        """Release the device."""
        self._llm.engine_core.shutdown()


def plain_thinker(plan: Plan, device: torch.device, ordinary_ids: int) -> PlainDecoder:
    """vLLM's own `Qwen2_5OmniThinkerForConditionalGeneration` on the checkpoint, with the arguments of our thinker.

    Its logits, KV cache and graphs are those of ours; what ours adds is the rows, their check for NaN, and seeds.
    """
    return PlainDecoder(
        plain_thinker_arguments(plan, engine_settings(plan), device), plan, ordinary_ids, detokenize=True
    )


def plain_thinker_arguments(plan: Plan, engine: EngineSettings, device: torch.device) -> EngineArgs:
    """Those of our thinker, but for what makes it ours."""
    ModelRegistry.register_model(_THINKER, Qwen2_5OmniThinkerForConditionalGeneration)
    settings = ThinkerSettings(engine=engine, quantization=plan.quantization)
    dtype = resolve_dtype(settings.dtype, device)
    apply_thread_share(settings.engine)
    return build_engine_args(
        Path(plan.model),
        settings.engine,
        device,
        dtype,
        worker_cls=_WORKERS[device.type],
        **quantization_arguments(settings, load_config(Path(plan.model)).four_bit, device, dtype),
        hf_overrides={"architectures": [_THINKER]},
        renderer_num_workers=settings.preprocess_threads,
        mm_processor_cache_gb=0,
        skip_mm_profiling=True,
    )


def plain_talker(plan: Plan, device: torch.device, codes: int) -> PlainDecoder:
    """vLLM's `LlamaForCausalLM` with the talker's layers on dummy weights.

    The closest model that vLLM ships: our talker's layers are the very same `LlamaModel` with `qkv_bias` (vLLM's Qwen2
    takes a head to be hidden_size / heads wide, which the talker's is not). It does less than ours: ids instead of
    rows go in, the embedding is hidden_size wide without a projection, and the rotary embedding has one axis, not
    three. Weights are dummies because a step's time does not depend on them; sequences do not end by a drawn id.
    """
    from vllm.model_executor.models.llama import LlamaForCausalLM

    ModelRegistry.register_model(_TALKER, LlamaForCausalLM)
    engine = engine_settings(plan)
    apply_thread_share(engine)
    arguments = build_engine_args(
        Path(plan.model),
        engine,
        device,
        resolve_dtype("auto", device),
        worker_cls=_WORKERS[device.type],
        hf_overrides=_as_llama,
        skip_tokenizer_init=True,
        load_format="dummy",
    )
    return PlainDecoder(arguments, plan, codes, detokenize=False)


def _as_llama(config: Any) -> Any:
    """The talker's part of a whole checkpoint's config as plain vLLM's Llama reads it."""
    talker = getattr(config, "talker_config", None)
    if talker is None:
        return config
    talker.architectures = [_TALKER]
    talker.qkv_bias = True
    # One position a token: vLLM feeds three to every model whose config has sections.
    talker.rope_parameters = {name: value for name, value in talker.rope_parameters.items() if name != "mrope_section"}
    return talker
