# SPDX-License-Identifier: Apache-2.0
"""`triton-omni ask`: a question about files given by path."""

from __future__ import annotations

from typing import Any

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.answer import Answer
from triton_omni_client.conversation import Conversation
from triton_omni_client.messages import Request
from triton_omni_client.terminal import errors

from .options import (
    AsJson,
    MaxTokens,
    Model,
    Output,
    Paths,
    Seed,
    System,
    Text,
    TextOnly,
    Timeout,
    Url,
    VideoSound,
    Voice,
    examples,
    read_question,
    request_options,
)

EXAMPLES = examples(
    'ask "What is in these pictures?" one.jpg two.png -o reply.wav',
    'ask "" question.wav --voice Ethan -o answer.wav',
    'ask "What happens here?" film.mp4 --video-sound --text-only',
    'ask "Write down what is said." - --text-only < speech.wav',
)


def ask(
    text: Text = "",
    files: Paths = None,
    *,
    output: Output = "",
    system: System = None,
    voice: Voice = None,
    seed: Seed = None,
    text_only: TextOnly = False,
    video_sound: VideoSound = False,
    max_tokens: MaxTokens = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    model: Model = "",
) -> None:
    """Ask about files: text, images, sounds and videos in one question."""
    answer = Answer(url, model, output, as_json)
    options = request_options(voice=voice, seed=seed, text_only=text_only, timeout=timeout, max_tokens=max_tokens)
    with errors(url, as_json=as_json):
        answer.give(question(text, files, system, video_sound=video_sound, **options))


def question(text: str, files: list[str] | None, system: str | None, *, video_sound: bool, **options: Any) -> Request:
    """A request of one user message with files, behind a system prompt where there is one; see `read_question`."""
    said, media = read_question(text, files)
    options["use_audio_in_video"] = video_sound or None
    if system is None:
        return Request.ask(said, media, **options)
    return Conversation(system=system).request(said, media, **options)
