# SPDX-License-Identifier: Apache-2.0
"""Decode steps that run on a part of the GPU: each is recorded twice, and the engine's owner chooses which is replayed.

A decode step fills all multiprocessors, so kernels of another process on the same GPU wait for its kernels to end. A
confined step leaves the other multiprocessors to that process. It takes longer when nothing else runs, hence both.

CUDA's green contexts have a part of a GPU's multiprocessors. A kernel runs on those of the context to which its stream
belongs. A graph keeps that context for each of its kernels, whatever stream it is launched on. So the second recording
only needs such a stream; steps are launched as before. The driver gives every process the same multiprocessors first.

Only steps of fused layers are recorded so. Their programs never wait for programs that have not begun, so they need not
all have room at once. Products of 4-bit weights do wait for each other. It knows vLLM's graphs, neither thinker nor
talker.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from triton_omni.vllm_hooks.shared.compat import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GPUModelRunner,
    VllmConfig,
)

if TYPE_CHECKING:
    from triton_omni.vllm_hooks.shared.fused_layers import Switch

    _Runner = GPUModelRunner
else:
    _Runner = object

PARTITION: Final = "partition_percent"
"""Key of vLLM's `additional_config`: percentage of the multiprocessors of a confined step; 0 = none is recorded."""
_GRANULE: Final = 8
"""Multiprocessors by which a green context grows on Hopper, and the fewest it has; other GPUs take such numbers too."""

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of a GPU."""

    context: object
    """The green context, which must outlive the stream and all graphs that were recorded on it."""
    stream: torch.cuda.Stream


def processors_of(every: int, percent: int) -> int:
    """Return the multiprocessors of a part, whole granules, of a GPU that has `every`."""
    return max(every * percent // 100 // _GRANULE, 1) * _GRANULE


# For the process's life: torch never ends such a stream, and a graph may be replayed until the process ends.
@functools.cache
def part_of(device: torch.device, percent: int) -> Part | None:
    """Return a part of a GPU; None, and why in the log, if torch or the driver has no green contexts."""
    index = torch.cuda.current_device() if device.index is None else device.index
    count = processors_of(torch.cuda.get_device_properties(index).multi_processor_count, percent)
    try:
        from torch.cuda.green_contexts import GreenContext

        context: Any = GreenContext.create(num_sms=count, device_id=index)
        stream = context.Stream()
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.warning("decode steps are not confined: %s", str(error).splitlines()[0])
        return None
    logger.info("decode steps are recorded for %d multiprocessors, too", count)
    return Part(context, stream)


class PartitionMixin(_Runner):
    """Adds `confine` to vLLM's runner.

    Put it first in the bases, so that both recordings of a step are made by all other mixins alike.
    """

    if TYPE_CHECKING:
        _fused: Switch | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._whole: dict[BatchDescriptor, Any] = {}
        """vLLM's recordings of all steps; this and the next are valid once steps are recorded."""
        self._confined: dict[BatchDescriptor, Any] = {}
        """Second recordings of decode steps."""
        self._is_confined = False

    def confine(self, confined: bool) -> None:
        """Launch decode steps on the part of the GPU from now on, or on all of it; without second recordings, ignore
        this.
        """
        if self._confined and confined != self._is_confined:
            self._is_confined = confined
            chosen = self._whole | self._confined if confined else self._whole
            cast(CUDAGraphWrapper, self.model).concrete_cudagraph_entries = chosen

    def _capture_cudagraphs(
        self,
        batch_descriptors: list[BatchDescriptor],
        cudagraph_runtime_mode: CUDAGraphMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Record steps, then those of one token a sequence once more."""
        super()._capture_cudagraphs(batch_descriptors, cudagraph_runtime_mode, *args, **kwargs)
        decode = [descriptor for descriptor in batch_descriptors if descriptor.uniform]
        part = self._part() if decode and cudagraph_runtime_mode == CUDAGraphMode.FULL else None
        if part is not None:
            with self._apart(), _on(part.stream):
                super()._capture_cudagraphs(decode, cudagraph_runtime_mode, *args, **kwargs)

    def _part(self) -> Part | None:
        """Return where decode steps are recorded again; None = nowhere."""
        percent = cast(dict[str, int], self.vllm_config.additional_config).get(PARTITION, 0)
        fuses_layers = self._fused is not None and self._fused.layers
        if not percent or not fuses_layers or not isinstance(self.model, CUDAGraphWrapper):
            return None
        return part_of(self.device, percent)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep what is recorded meanwhile in `_confined`."""
        graphs = cast(CUDAGraphWrapper, self.model)
        self._whole = graphs.concrete_cudagraph_entries
        graphs.concrete_cudagraph_entries = self._confined
        try:
            yield
        finally:
            graphs.concrete_cudagraph_entries = self._whole


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream current, after the work of the current one; that one goes on after the stream's."""
    before = torch.cuda.current_stream()
    stream.wait_stream(before)
    # vLLM records on the stream that was last made current by torch's function, which this calls.
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)
