# SPDX-License-Identifier: Apache-2.0
"""How vLLM is told to sample a thinker's sequence, and by which ids its reply ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from triton_omni.session.engine import Sampling
from triton_omni.vllm_hooks.shared.compat import RequestOutputKind, StructuredOutputsParams
from triton_omni.vllm_hooks.shared.sampling import drawing, seed_args
from triton_omni.vllm_hooks.thinker.json_schemas import CheckedParams
from triton_omni.vllm_hooks.thinker.tool_grammar import tool_grammar


def end_ids(thinker_config: Any) -> list[int]:
    """Ids that end a reply, as HF's `generate` finds them: the generation config made from the thinker's config."""
    found = GenerationConfig.from_model_config(thinker_config).eos_token_id
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def to_parameters(sampling: Sampling, ends: Sequence[int]) -> CheckedParams:
    """vLLM's parameters.

    Args:
        sampling: of the request.
        ends: ids that end its reply.

    Raises:
        VLLMValidationError: a value is out of range.
    """
    return CheckedParams(
        **drawing(sampling),
        logit_bias=dict(sampling.logit_bias) or None,
        stop=list(sampling.stop),
        structured_outputs=_structure(sampling),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        # The end ids are HF's, whatever the tokenizer calls its end.
        ignore_eos=True,
        stop_token_ids=list(ends),
        skip_special_tokens=True,
        output_kind=RequestOutputKind.DELTA,
        extra_args=seed_args(sampling.seed),
        # Made for this request alone: vLLM need not copy all that it holds.
        skip_clone=True,
    )


def _structure(sampling: Sampling) -> StructuredOutputsParams | None:
    """Return the constraint on the reply; None = there is none."""
    if sampling.tools is not None:
        return StructuredOutputsParams(grammar=tool_grammar(sampling.tools, sampling.json_schema))
    return None if sampling.json_schema is None else StructuredOutputsParams(json=sampling.json_schema)
