# SPDX-License-Identifier: Apache-2.0
"""`triton-omni play`: as `ask`, and the reply is heard from this machine's loudspeaker while it comes."""

from __future__ import annotations

from triton_omni_client.address import DEFAULT_URL
from triton_omni_client.answer import Answer
from triton_omni_client.player import Player
from triton_omni_client.terminal import check_wav_name, errors

from .ask import question
from .options import (
    AsJson,
    Device,
    MaxTokens,
    Model,
    Output,
    Paths,
    Seed,
    System,
    Text,
    Timeout,
    Url,
    VideoSound,
    Voice,
    examples,
    request_options,
)

EXAMPLES = examples(
    'play "Tell me a story"',
    'play "What is in the picture?" beach.jpg --voice Ethan -o reply.wav',
    'play "" question.wav --device 3',
)


def play(
    text: Text = "",
    files: Paths = None,
    *,
    device: Device = "",
    output: Output = "",
    system: System = None,
    voice: Voice = None,
    seed: Seed = None,
    video_sound: VideoSound = False,
    max_tokens: MaxTokens = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    model: Model = "",
) -> None:
    """Ask, and play the reply on this machine's sound device (needs the package's extra `play`); Ctrl-C stops it."""
    check_wav_name(output)
    options = request_options(voice=voice, seed=seed, text_only=False, timeout=timeout, max_tokens=max_tokens)
    with errors(url, as_json=as_json):
        request = question(text, files, system, video_sound=video_sound, **options)
        with Player(device) as player:
            Answer(url, model, output, as_json, player).give(request)
