# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that is served by default, with the settings that are shipped: it speaks, sees, hears and answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from evaluations import small
from gateway_fakes import MODEL, run_gateway
from realtime_client import talk
from server.serving import REPLY_S, ROOT, Served
from triton_omni_client import OmniClient
from triton_omni_client.audio import pcm16_from_waveform
from triton_omni_client.evaluate.words import agreement, words_of
from triton_omni_gateway.sound import encode_whole

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str | Path, folder: Path) -> str:
    """Run an example in `folder`; its stdout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "client")}
    command = [sys.executable, EXAMPLES / name, *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=REPLY_S
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_passes_the_small_evaluation(mini: Served, tmp_path: Path) -> None:
    result = small(mini.supervisor.grpc_url, tmp_path / "out")
    assert result.exit_code == 0, result.output


def test_the_example_of_a_picture_names_what_is_drawn(mini: Served, tmp_path: Path) -> None:
    out = run("ask_about_an_image.py", EXAMPLES / "red_circle.png", mini.supervisor.grpc_url, folder=tmp_path)
    assert "red circle" in out
    assert "in one word: Circle. (" in out


def test_the_example_of_a_voice_loop_answers_what_is_asked(mini: Served, tmp_path: Path) -> None:
    with OmniClient(mini.supervisor.grpc_url) as client:
        client.say("Say: What color is the sky?", voice="Chelsie", seed=0).save_wav(tmp_path / "question.wav")
    assert "The sky is blue." in run("voice_loop.py", mini.supervisor.grpc_url, "question.wav", folder=tmp_path)


def test_what_it_says_is_written_down_by_the_gateway(mini: Served) -> None:
    said = "What color is the sky?"
    with OmniClient(mini.supervisor.grpc_url) as client, run_gateway(mini.supervisor.grpc_url) as gateway:
        speech = client.say(f"Say: {said}", voice="Chelsie", seed=0)
        sound = encode_whole("mp3", speech.audio)
        written = gateway.openai.audio.transcriptions.create(model=MODEL, file=("said.mp3", sound))
        events = list(gateway.openai.audio.transcriptions.create(model=MODEL, file=("said.mp3", sound), stream=True))
    assert agreement(words_of(said), words_of(written.text)).errors <= 1, (speech.text, written.text)
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == written.text
    assert written.usage.input_token_details.audio_tokens > 0


async def test_a_realtime_session_hears_a_question_answers_and_is_interrupted(mini: Served) -> None:
    url = mini.supervisor.grpc_url
    with OmniClient(url) as client:
        spoken = client.say("Say: What color is the sky?", voice="Chelsie", seed=0).audio
    question = np.frombuffer(pcm16_from_waveform(spoken), "<i2")
    silence = np.zeros(24_000, np.int16)
    vad = {"input": {"turn_detection": {"type": "server_vad"}}, "output": {"voice": "Chelsie"}}
    with run_gateway(url) as gateway:
        async with talk(gateway.base, audio=vad) as session:
            await session.append(np.concatenate([silence, question, silence]))
            answer = (await session.until("response.done")).response
            assert "The sky is blue." in answer.output[0].content[0].transcript
            assert len(session.heard()) > 24_000
            await session.say("Tell me a story")
            await session.send("response.create")
            item = (await session.until("response.output_item.added")).item
            await session.until("response.output_audio.delta")
            await session.append(question)
            assert (await session.until("response.done")).response.status_details.reason == "turn_detected"
            cut = {"item_id": item.id, "content_index": 0, "audio_end_ms": 100}
            await session.asked("conversation.item.truncate", "conversation.item.truncated", **cut)
            told = await session.asked("conversation.item.retrieve", "conversation.item.retrieved", item_id=item.id)
            assert len(told.item.content[0].transcript) <= 2
            await session.append(silence)
            assert (await session.until("response.done")).response.status == "completed"
    mini.wait_until_idle()
