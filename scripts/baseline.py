# SPDX-License-Identifier: Apache-2.0
"""First figures of a deployment: latency, time a step in each stage and memory, beside HF `generate` in the same run.

    python scripts/baseline.py --model CHECKPOINT --out baseline.json

Starts the server on free loopback ports, asks one request at a time and then several at once, stops the server, and
runs HF's model on the same prompt on the same device. Prints a table and writes every figure as JSON.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from triton_omni.checkpoint.torchvision_ops import define_torchvision_operators
from triton_omni.supervisor.options import ServerConfig
from triton_omni.supervisor.serve import Supervisor
from triton_omni.thinker.prompt import DEFAULT_SYSTEM_PROMPT
from triton_omni_client import OmniClient, Reply

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Tell me a story about the sea and the people who live beside it. " * 4
STAGES = ("thinker", "talker", "token2wav")

Samples = np.ndarray[tuple[int], np.dtype[np.float32]]

console = Console(stderr=True)


def main(
    *,
    model: Annotated[Path, typer.Option(help="checkpoint folder")],
    out: Annotated[Path, typer.Option(help="JSON file to write")] = Path("baseline.json"),
    repository: Annotated[Path, typer.Option(help="model repository to serve")] = ROOT / "model_repository",
    tokens: Annotated[int, typer.Option(help="reply tokens at most")] = 150,
    codes: Annotated[int, typer.Option(help="codec codes at most, 50 a second")] = 1000,
    repeats: Annotated[int, typer.Option(help="requests one after another")] = 5,
    at_once: Annotated[list[int] | None, typer.Option(help="numbers of requests at once")] = None,
    with_hf: Annotated[bool, typer.Option(help="also run HF's generate")] = True,
) -> None:
    """Measure a deployment and HF's generate on the same machine."""
    figures: dict[str, Any] = {"machine": _machine(), "tokens": tokens, "codes": codes}
    log = out.with_suffix(".log")
    begin = time.monotonic()
    with Supervisor(ServerConfig(repository, model=str(model), log_path=log)) as server:
        figures["start_s"] = time.monotonic() - begin
        client = OmniClient(server.grpc_url)
        ask = _asker(client, tokens, codes)
        for seed in track(range(2), "warm-up", console=console):
            ask(seed)
        alone = [ask(seed) for seed in track(range(repeats), "one at a time", console=console)]
        figures["alone"] = _summary(alone)
        again = [ask(0) for _ in track(range(2), "the first seed again", console=console)]
        figures["same_seed_again"] = [_snr(reply.audio, alone[0].audio) for reply in again]
        for count in at_once or [8]:
            console.print(f"{count} at once")
            with ThreadPoolExecutor(count) as pool:
                begin = time.monotonic()
                replies = list(pool.map(ask, range(count)))
                wall = time.monotonic() - begin
            audio = sum(reply.timings.audio for reply in replies)
            figures[f"{count} at once"] = _summary(replies) | {"audio_s_per_s": audio / wall}
        figures["memory_mib"] = _memory_by_stage()
        figures["link_bytes"] = _link_bytes(server.metrics_url)
        figures["stop_s"] = server.stop()
    if with_hf:
        figures["hf"] = _hf(model, tokens, codes)
    out.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    _print(figures)


def _snr(found: Samples, expected: Samples) -> str:
    """Signal-to-noise ratio of a reply to what it should be, in words."""
    if len(found) != len(expected):
        return f"{len(found)} samples, not {len(expected)}"
    noise = float(np.square(found - expected).sum())
    return f"{10 * math.log10(float(np.square(expected).sum()) / noise):.1f} dB" if noise else "identical"


def _asker(client: OmniClient, tokens: int, codes: int) -> Callable[[int], Reply]:
    # Sampled, so that random weights give long replies.
    def ask(seed: int) -> Reply:
        return client.say(
            PROMPT,
            seed=seed,
            thinker={"temperature": 1.0, "max_tokens": tokens},
            talker={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": codes},
        )

    return ask


def _summary(replies: Sequence[Reply]) -> dict[str, float]:
    """Medians over replies; a stage's time a step is its working time by its outputs."""
    columns: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in _figures(reply).items():
            columns.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in columns.items()}


def _figures(reply: Reply) -> Mapping[str, float]:
    info, timings = reply.info, reply.timings
    if info is None or info.reply_tokens is None or info.codes is None:
        raise RuntimeError("the server's info is missing")
    found = {
        "first_text_s": timings.first_text,
        "first_audio_s": timings.first_audio,
        "total_s": timings.total,
        "audio_s": timings.audio,
        "real_time_factor": timings.real_time_factor,
        "prompt_tokens": info.prompt_tokens,
        "reply_tokens": info.reply_tokens,
        "codes": info.codes,
        "thinker_ms_a_token": _per_output(info.stage_ms["thinker"], info.reply_tokens),
        "talker_ms_a_code": _per_output(info.stage_ms["talker"], info.codes),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _per_output(stage: Mapping[str, float | None], outputs: int) -> float | None:
    first, done = stage.get("first"), stage.get("done")
    return None if first is None or done is None or outputs < 2 else (done - first) / (outputs - 1)


def _memory_by_stage() -> dict[str, int]:
    """MiB of device memory a process, by the stage whose model.py it runs."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return {}
    found: dict[str, int] = {}
    for line in lines:
        pid, used = (int(part) for part in line.split(","))
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        name = next((stage for stage in STAGES if f"/{stage}/" in command), "tritonserver")
        found[name] = found.get(name, 0) + used
    return found


def _link_bytes(metrics_url: str) -> dict[str, float]:
    from urllib.request import urlopen

    with urlopen(f"http://{metrics_url}/metrics") as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("omni_link_bytes_total{"))
    return {name: float(value) for name, value in pairs}


def _hf(model: Path, tokens: int, codes: int) -> dict[str, float]:
    """HF's generate with the same sampling and limits; its second run is timed."""
    define_torchvision_operators()
    from transformers import Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    console.print("loading HF's model")
    loaded: Any = Qwen2_5OmniForConditionalGeneration
    hf = loaded.from_pretrained(model, dtype=dtype).to(device).eval()
    processor: Any = Qwen2_5OmniProcessor.from_pretrained(model)
    turns = (("system", DEFAULT_SYSTEM_PROMPT), ("user", PROMPT))
    chat = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    inputs = processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(device)
    config = hf.config.talker_config
    options = {
        "thinker_max_new_tokens": tokens,
        "thinker_do_sample": True,
        "talker_max_new_tokens": codes,
        "talker_temperature": 1.0,
        "talker_top_p": 1.0,
        "talker_top_k": 0,
        "talker_eos_token_id": [config.tts_codec_pad_token_id, config.tts_codec_end_token_id],
    }
    for seed, limit in ((0, 16), (1, tokens)):
        torch.manual_seed(seed)
        begin = time.monotonic()
        text, audio = hf.generate(**inputs, **(options | {"thinker_max_new_tokens": limit}))
        audio_s = audio.numel() / 24000
        total = time.monotonic() - begin
    prompt_tokens = inputs["input_ids"].shape[1]
    return {
        "prompt_tokens": prompt_tokens,
        "reply_tokens": text.shape[1] - prompt_tokens,
        "total_s": total,
        "audio_s": audio_s,
        "real_time_factor": total / audio_s,
        "memory_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0,
    }


def _machine() -> dict[str, str]:
    import transformers
    import vllm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {"torch": torch.__version__, "vllm": vllm.__version__, "transformers": transformers.__version__}
    return {"gpu": gpu, **versions, "date": time.strftime("%Y-%m-%d")}


def _print(figures: Mapping[str, Any]) -> None:
    columns = [name for name, value in figures.items() if isinstance(value, dict) and "total_s" in value]
    table = Table("figure", *columns)
    for row in dict.fromkeys(name for column in columns for name in figures[column]):
        values = [figures[column].get(row) for column in columns]
        table.add_row(row, *("" if value is None else f"{value:.3f}" for value in values))
    Console().print(table)
    for name in ("machine", "memory_mib", "link_bytes", "same_seed_again", "start_s", "stop_s"):
        Console().print(name, figures[name])


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
