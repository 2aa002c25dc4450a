# SPDX-License-Identifier: Apache-2.0
"""Images in recorded passes of the vision tower, against the same images kernel by kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from media_samples import picture
from reference.hf import HfReference
from reference.thinker_rig import DEVICE, Answer, run, token_ids
from reference.thinker_rig import make_engine as make_plain_engine
from triton_omni.core.settings import EngineSettings, ThinkerSettings
from triton_omni.session.engine import Sampling, ThinkerPrompt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SIZES = [(28, 28), (56, 280), (252, 28), (140, 140), (112, 84), (364, 336), (504, 476), (28, 308), (84, 84), (700, 392)]
"""Width and height of images of 1 to 350 tokens, thin and square; all of them are more than share a pass."""
TOO_LARGE = (1176, 896)
"""An image of more tokens than are recorded."""
RECORDED = 512
GPU_ONLY = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are CUDA graphs on a GPU only")


@dataclass
class _Again:
    """Stand-in for a CUDA graph: runs what was recorded once more, on the same buffers."""

    replay: Callable[[], None]


def with_padding_attended(values: dict[str, Any]) -> dict[str, Any]:
    """The buffers with the padding as a sequence: attention on the CPU wants each row in one, a GPU's does not."""
    end = torch.tensor([len(values["pixel_values"])], dtype=torch.int32, device=DEVICE)
    return values | {name: torch.cat([values[name], end]) for name in ("cu_seqlens", "cu_window_seqlens")}


def record_by_hand(manager: Any, settings: EngineSettings) -> None:
    """Do what vLLM's manager does at the start of a GPU's engine, but repeat passes instead of recording them."""
    from vllm.v1.worker.encoder_cudagraph import BudgetGraphMetadata

    from triton_omni.vllm_hooks.shared.graphs import image_budgets

    network, most, frames = manager.model, manager.max_batch_size, manager.max_frames_per_batch
    assert manager.token_budgets == image_budgets(settings)
    for budget in manager.token_budgets:
        values = network.prepare_encoder_cudagraph_capture_inputs(budget, most, frames, DEVICE, torch.float32).values
        output = network.encoder_cudagraph_forward(dict(values))

        def replay(values: Any = values, output: Any = output) -> None:
            output.copy_(network.encoder_cudagraph_forward(with_padding_attended(values)))

        manager._get_graph_set()[budget] = BudgetGraphMetadata(budget, most, frames, _Again(replay), values, output)


@pytest.fixture
def network(tiny_checkpoint: Path) -> Any:
    engine = make_plain_engine(tiny_checkpoint)
    yield engine._model
    engine.close()


def pixels_of(sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Random patches of images, as the processor gives them: the tower takes patches of 14 x 14 pixels."""
    grid = torch.tensor([[1, height // 14, width // 14] for width, height in sizes])
    patches = int(grid.prod(-1).sum())
    dice = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randint(256, (patches, 3 * 2 * 14 * 14), dtype=torch.uint8, generator=dice).to(DEVICE),
        "image_grid_thw": grid,
    }


@torch.inference_mode()
def test_padded_passes_on_fixed_buffers_give_the_rows_of_plain_ones(network: Any) -> None:
    """vLLM's own manager packs and pads; passes follow each other on the buffers that the one before left full."""
    manager = manager_of(network, EngineSettings(max_graph_tokens=RECORDED))
    assert manager.supports_modality("image")
    assert not manager.supports_modality("video")
    for sizes in (SIZES, SIZES[::-1], SIZES[:1], [*SIZES[4:7], TOO_LARGE], SIZES[1:3]):
        inputs = pixels_of(sizes)
        together = network.embed_multimodal(**inputs)
        for ours, expected in zip(manager.execute(inputs), together, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert manager.graph_misses == 1


def manager_of(network: Any, settings: EngineSettings) -> Any:
    """vLLM's own manager of passes, recorded by hand."""
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    from triton_omni.vllm_hooks.shared.graphs import vision_graphs

    config = network.vllm_config
    for name, value in vision_graphs(settings).items():
        setattr(config.compilation_config, name, value)
    manager = EncoderCudaGraphManager(config, DEVICE, torch.float32, network)
    record_by_hand(manager, settings)
    return manager


def test_an_image_too_large_to_be_recorded_and_for_the_memory_fails_its_request_alone(
    tiny_checkpoint: Path, hf: HfReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_plain_engine(tiny_checkpoint, max_num_batched_tokens=1024)
    runner, settings = engine._runner, EngineSettings(max_graph_tokens=64)
    with torch.inference_mode():
        monkeypatch.setattr(runner, "encoder_cudagraph_manager", manager_of(engine._model, settings))
    ids = token_ids(hf, {"type": "image"}, {"type": "text", "text": "what is this?"})
    sizes = {"small": (28, 308), "too large": (364, 336), "square": (84, 84)}
    prompts = {key: ThinkerPrompt(ids, {"image": [Image.fromarray(picture(*size))]}) for key, size in sizes.items()}
    undisturbed = run(engine, prompts)

    forward = engine._model.visual.forward

    def full(*arguments: Any, **named: Any) -> torch.Tensor:
        if "encoder_metadata" not in named:
            raise torch.OutOfMemoryError("tried to allocate too much")
        replayed: torch.Tensor = forward(*arguments, **named)
        return replayed

    with monkeypatch.context() as patched:
        # A recorded pass has its memory.
        patched.setattr(engine._model.visual, "forward", full)
        answers = run(engine, prompts)
    assert answers["too large"].last.error == "the device has no memory for this image"
    for key in ("small", "square"):
        assert answers[key].token_ids == undisturbed[key].token_ids
        torch.testing.assert_close(answers[key].rows, undisturbed[key].rows, rtol=1e-4, atol=1e-4)
    assert run(engine, prompts)["too large"].token_ids == undisturbed["too large"].token_ids
    engine.close()


def make_engine(checkpoint: Path, dtype: Any, max_graph_tokens: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from triton_omni.vllm_hooks.thinker.engine import ThinkerVllmEngine

        sizes = EngineSettings(max_num_seqs=16, max_graph_tokens=max_graph_tokens)
        return ThinkerVllmEngine(checkpoint, ThinkerSettings(dtype=dtype, engine=sizes), DEVICE)


def ask(engine: Any, hf: HfReference) -> dict[str, Answer]:
    """One question about each image, all at once."""
    ids = token_ids(hf, {"type": "image"}, {"type": "text", "text": "what is this?"})
    images = {size: Image.fromarray(picture(*size)) for size in (*SIZES, TOO_LARGE)}
    prompts = {str(size): ThinkerPrompt(ids, {"image": [image]}) for size, image in images.items()}
    return run(engine, prompts, Sampling(max_tokens=1))


@GPU_ONLY
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float32", 1e-4)])
def test_an_engine_that_records_images_gives_the_rows_of_one_that_does_not(
    tiny_checkpoint: Path, hf: HfReference, dtype: str, tolerance: float
) -> None:
    recording, plain = (make_engine(tiny_checkpoint, dtype, tokens) for tokens in (RECORDED, 0))
    runner = recording._core.model_executor.driver_worker.worker.model_runner
    plain_answers = ask(plain, hf)
    for _ in range(2):
        for size, answer in ask(recording, hf).items():
            ours, expected = answer.rows.float(), plain_answers[size].rows.float()
            assert (ours - expected).norm() / expected.norm() < tolerance
    assert runner.encoder_cudagraph_manager.graph_hits == 2 * len(SIZES)
    assert runner.encoder_cudagraph_manager.graph_misses == 2
    assert plain._core.model_executor.driver_worker.worker.model_runner.encoder_cudagraph_manager is None
    recording.close()
    plain.close()


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        (EngineSettings(), 2048),
        (EngineSettings(max_graph_tokens=1000), 896),
        (EngineSettings(max_graph_tokens=63), None),
        (EngineSettings(deterministic=True), None),
    ],
)
def test_images_are_recorded_up_to_the_size_of_steps_with_prompts(settings: EngineSettings, last: int | None) -> None:
    from triton_omni.vllm_hooks.shared.graphs import vision_graphs

    assert vision_graphs(settings).get("encoder_cudagraph_token_budgets", [None])[-1] == last
