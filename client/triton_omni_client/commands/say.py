# SPDX-License-Identifier: Apache-2.0
"""`triton-omni say`: a text, with media by options."""

from __future__ import annotations

from triton_omni_client.answer import Answer
from triton_omni_client.option_groups import grouped
from triton_omni_client.options import Audios, Images, Videos, read_media
from triton_omni_client.terminal import usage_errors

from .options import Text, WhereOptions, WrittenOptions, examples, read_text

EXAMPLES = examples(
    'say "Tell me a story" -o story.wav --spectrogram story.png',
    'say "What is in the picture?" --image beach.jpg --voice Ethan --seed 7 -o - | aplay',
    'say "What happens here?" --video film.mp4 --video-sound --text-only',
    'say "Short, please." --url http://localhost:8000 --json',
)


@grouped
def say(
    text: Text = "",
    *,
    image: Images = None,
    audio: Audios = None,
    video: Videos = None,
    options: WrittenOptions,
    where: WhereOptions,
) -> None:
    """Ask a question in text, with files by options; print the reply, and write its speech."""
    options.check_output(where.output, where.spectrogram)
    answer = Answer(where.url, where.model, where.output, where.as_json, where.check, where.spectrogram)
    with usage_errors():
        media = read_media(image, audio, video)
    answer.give(options.request(read_text(text), media))
