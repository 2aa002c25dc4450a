# SPDX-License-Identifier: Apache-2.0
"""`triton-omni play`: as `ask`, and the reply is heard from this machine's loudspeaker while it comes."""

from __future__ import annotations

from dataclasses import replace

from triton_omni_client.answer import Answer
from triton_omni_client.option_groups import grouped
from triton_omni_client.player import Player
from triton_omni_client.terminal import errors

from .options import Device, Paths, QuestionOptions, Text, WhereOptions, examples, read_question

EXAMPLES = examples(
    'play "Tell me a story"',
    'play "What is in the picture?" beach.jpg --voice Ethan -o reply.wav',
    'play "" question.wav --device 3',
)


@grouped
def play(
    text: Text = "", files: Paths = None, *, device: Device = "", options: QuestionOptions, where: WhereOptions
) -> None:
    """Ask, and play the reply on this machine's sound device (needs the package's extra `play`); Ctrl-C stops it."""
    answer = Answer(where.url, where.model, where.output, where.as_json, where.check, where.spectrogram)
    request = options.request(*read_question(text, files))
    with errors(where.url, as_json=where.as_json), Player(device) as player:
        replace(answer, player=player).give(request)
