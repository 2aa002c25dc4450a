# SPDX-License-Identifier: Apache-2.0
"""Scripts whose figures stand in documents: GPU memory by the settings, CPU seconds to decode a video, sessions."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
import soundfile
from markdown_table import table

from client_fakes import FakeTriton, chunk, final, serve_grpc
from gateway_fakes import run_gateway
from realtime_client import WHOLE, chat_of, speech
from triton_omni.core.settings import Token2WavSettings
from triton_omni.token2wav.sampler import FlowOptions

ROOT = Path(__file__).parents[2]
MEMORY = runpy.run_path(str(ROOT / "scripts" / "gpu_memory.py"))
COLUMNS = MEMORY["COLUMNS"].items()
DECODING = runpy.run_path(str(ROOT / "scripts" / "decode_cost.py"))


def test_documents_have_the_memory_that_the_settings_give() -> None:
    table, _, tokens = MEMORY["document"]().strip().partition("\n\n")
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), "run python scripts/gpu_memory.py"
    assert tokens in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("size", "thinker", "talker"), [("tiny", 384, 640), ("3b", 40_960, 16_384), ("7b", 64_512, 56_320)]
)
def test_a_cached_token_takes_its_keys_values_and_row(size: str, thinker: int, talker: int) -> None:
    needs = MEMORY["Needs"].of(size)
    assert (needs.thinker_token, needs.talker_token) == (thinker, talker)


def test_small_fits_a_gpu_of_24_gb_with_room_for_contexts_and_activations() -> None:
    totals = {
        title: sum(MEMORY["parts"](name, MEMORY["settings"](profile)).values()) for title, (name, profile) in COLUMNS
    }
    assert all(total < 17 * 2**30 for title, total in totals.items() if "small" in title)
    assert all(total > 22 * 2**30 for title, total in totals.items() if "small" not in title)


def test_fewer_streams_need_fewer_pages() -> None:
    pages = FlowOptions.of(Token2WavSettings().diffusion_of(None, {})).pages
    assert Token2WavSettings().max_streams == MEMORY["SHIPPED_STREAMS"]
    assert pages * 196_608 == MEMORY["WINDOW_CACHE"]
    shipped, small = (MEMORY["parts"]("tiny", MEMORY["settings"](profile)) for profile in (None, "small"))
    name = "token2wav with its CUDA graphs"
    assert shipped[name] - small[name] == 56 * MEMORY["WINDOW_CACHE"]


@pytest.mark.parametrize(("pixel_s", "byte_s"), [(3.6e-9, 0.1e-6), (1e-9, 0.0), (0.0, 2e-7)])
def test_costs_of_a_pixel_and_a_byte_give_both_clips_back(pixel_s: float, byte_s: float) -> None:
    cost, sizes = DECODING["Cost"], [(6_000_000, 40_000), (6_000_000, 900_000)]
    clips = [cost(pixels * pixel_s + size * byte_s, pixels, size) for pixels, size in sizes]
    assert DECODING["fitted"](*clips) == pytest.approx((pixel_s, byte_s), abs=1e-15)


@pytest.mark.parametrize("codec", DECODING["CODECS"], ids=lambda codec: codec.name)
def test_every_frame_of_a_measured_clip_is_decoded(codec: object) -> None:
    if codec.encoder not in av.codecs_available:  # type: ignore[attr-defined]
        pytest.skip("the installed FFmpeg cannot encode it")
    count = 6  # x265 leaves packets without times where a clip is shorter than its reordering of two frames
    cost = DECODING["decode"](DECODING["encode"](codec, "moving", count))
    assert cost.pixels == count * DECODING["WIDTH"] * DECODING["HEIGHT"]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the processes that this one starts starve all others"


def test_times_of_realtime_sessions_are_told_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measuring = runpy.run_path(str(ROOT / "scripts" / "realtime_times.py"))
    question = tmp_path / "question.wav"
    soundfile.write(question, speech(0.8), 24_000)

    def long(request: Any, context: Any) -> Iterator[Any]:
        # The last reply of a session is asked for after another one. It goes on until it is interrupted.
        interrupted = chat_of(request)[-1]["role"] == "assistant"
        for _ in itertools.count() if interrupted else range(5):
            yield chunk(text="word ", audio=np.zeros(2400, np.float32))
            if not context.is_active():
                return
            time.sleep(0.01)
        yield chunk(info=WHOLE)
        yield final()

    with serve_grpc(FakeTriton(long)) as triton, run_gateway(triton.url) as gateway:
        measuring["main"]([gateway.base, str(question), "--turns", "1", "--cuts", "1", "--sessions", "2"])
        # It has no stage's sessions, so all are idle as soon as it is asked.
        idle = ["--metrics", f"{gateway.base}/metrics"]
        measuring["main"]([gateway.base, str(question), "--turns", "0", "--cuts", "1", *idle])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [(row[0], row[1]) for row in rows[1:]] == [
        ("| manual: end of speech, first audio", "2"),
        ("| server_vad: end of speech, speech_stopped", "2"),
        ("| server_vad: speech_stopped, first audio", "2"),
        ("| barge-in: speech, response.done", "2"),
        ("| from … to", "turns"),
        ("| lost connection, idle engines", "1"),
    ]
    assert all(float(row[2]) > 0 for row in rows[1:5])


def test_a_realtime_reply_without_sound_ends_a_turn_and_is_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring = runpy.run_path(str(ROOT / "scripts" / "realtime_times.py"))
    question = tmp_path / "question.wav"
    soundfile.write(question, speech(0.8), 24_000)

    def silent(_request: Any, _context: Any) -> Iterator[Any]:
        yield chunk(text="word ")
        yield chunk(info=WHOLE)
        yield final()

    with serve_grpc(FakeTriton(silent)) as triton, run_gateway(triton.url) as gateway:
        measuring["main"]([gateway.base, str(question), "--turns", "1", "--cuts", "1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[:2] for row in rows[1:]] == [["| server_vad: end of speech, speech_stopped", "1"]]


def test_rows_of_a_table_come_as_they_are_measured() -> None:
    measured: list[str] = []

    def rows() -> Iterator[list[str]]:
        for name in ("first", "a|b"):
            measured.append(name)
            yield [name, "1"]

    lines = table(("what", "ms"), rows())
    assert [next(lines), next(lines), next(lines)] == ["| what | ms |", "|---|---|", "| first | 1 |"]
    assert measured == ["first"]
    assert list(lines) == ["| a\\|b | 1 |"]


def test_no_script_writes_a_table_of_its_own() -> None:
    by_hand = re.compile(r"""["']\|(?: |-{3})|["'] \| ["']""")
    scripts = [path for path in (ROOT / "scripts").rglob("*.py") if path.stem != "markdown_table"]
    assert [path.name for path in scripts if by_hand.search(path.read_text(encoding="utf-8"))] == []


async def test_engines_are_idle_once_no_stage_has_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = runpy.run_path(str(ROOT / "scripts" / "realtime_times.py"))
    page = (
        '# TYPE omni_sessions gauge\nomni_sessions{{stage="talker"}} {} 1730000000\nomni_waiting{{stage="talker"}} 3\n'
    )
    pages = [page.format(count) for count in (2, 1, 0)]

    async def get(_client: httpx.AsyncClient, _url: str) -> httpx.Response:
        return httpx.Response(200, text=pages.pop(0))

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    await measuring["_idle"]("http://metrics")
    assert pages == []
