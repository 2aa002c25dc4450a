# SPDX-License-Identifier: Apache-2.0
"""`triton-omni ask`: a question about files given by path."""

from __future__ import annotations

from triton_omni_client.answer import Answer
from triton_omni_client.option_groups import grouped

from .options import Paths, Text, WhereOptions, WrittenOptions, examples, read_question

EXAMPLES = examples(
    'ask "What is in these pictures?" one.jpg two.png -o reply.wav',
    'ask "" question.wav --voice Ethan -o answer.wav',
    'ask "What happens here?" film.mp4 --video-sound --text-only',
    'ask "Write down what is said." - --text-only < speech.wav',
)


@grouped
def ask(text: Text = "", files: Paths = None, *, options: WrittenOptions, where: WhereOptions) -> None:
    """Ask as `say` does, with files as arguments: the text, then images, sounds and videos."""
    options.check_output(where.output, where.spectrogram)
    answer = Answer(where.url, where.model, where.output, where.as_json, where.check, where.spectrogram)
    answer.give(options.request(*read_question(text, files)))
