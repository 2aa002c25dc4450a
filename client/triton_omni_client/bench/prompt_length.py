# SPDX-License-Identifier: Apache-2.0
"""Prompts of a given number of tokens: the server counts, since it alone has the tokenizer and the chat template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from triton_omni_client.errors import BadRequest, TooLarge
from triton_omni_client.messages import Info

from .load import Streamer
from .workload import Workload

Count = Callable[[str], Awaitable[int | None]]
"""Tokens of a prompt with all that the server adds to it; None = more than it takes."""


async def of_tokens(client: Streamer, workload: Workload, tokens: int) -> tuple[Workload, list[int]]:
    """The workload with prompts of so many tokens, as nearly as they can be had without being longer.

    Args:
        client: is asked for replies of one token.
        workload: its prompts are cut or repeated.
        tokens: of the whole prompt: system prompt, chat template and media count.

    Returns:
        The workload, and the server's count of each of its prompts.

    Raises:
        BadRequest: a single character makes a longer prompt, or the server does not count.
        OmniClientError: the server refused a prompt for another reason than its length.
    """

    async def count(text: str) -> int | None:
        return await _prompt_tokens(client, workload, text)

    found = [await fit(prompt, tokens, count) for prompt in workload.prompts]
    return replace(workload, prompts=[text for text, _ in found]), [length for _, length in found]


async def fit(prompt: str, tokens: int, count: Count) -> tuple[str, int]:
    """The longest beginning of the prompt, repeated without end, that has at most `tokens` tokens; and its length.

    Words are searched by halving (a word has one token at least), then characters of the next word are added one by
    one: a character more may mean a token less.

    Raises:
        BadRequest: a single character makes a longer prompt.
    """
    words = prompt.split()
    best, length = "", 0
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        text = _beginning(words, middle, 0)
        found = await count(text)
        if found is None or found > tokens:
            high = middle - 1
        else:
            best, length, low = text, found, middle
    for characters in range(1, len(words[low % len(words)])):
        if length == tokens:
            break
        text = _beginning(words, low, characters)
        found = await count(text)
        if found is not None and length < found <= tokens:
            best, length = text, found
    if not best:
        raise BadRequest(
            f"--prompt-tokens {tokens}: even one character of {prompt!r} makes a longer prompt; "
            'the server\'s own system prompt counts, --system "" leaves it out'
        )
    return best, length


def _beginning(words: Sequence[str], whole: int, characters: int) -> str:
    """So many words of the endless prompt, then so many characters of the next."""
    taken = [words[at % len(words)] for at in range(whole)]
    return " ".join([*taken, words[whole % len(words)][:characters]] if characters else taken)


async def _prompt_tokens(client: Streamer, workload: Workload, text: str) -> int | None:
    """The server's count of this prompt's tokens; None where it is over a limit of the server."""
    shortest = replace(workload, modalities=("text",), thinker={"max_tokens": 1}, talker={}, token2wav={})
    # A turn of a conversation need not show a medium.
    media = workload.media if workload.turns == 1 else ()
    asked = replace(shortest, prompts=[text], media=media)
    try:
        async with client.stream(asked.request(0)) as stream:
            infos = [delta async for delta in stream if isinstance(delta, Info)]
    except TooLarge:
        return None
    if not infos or infos[0].prompt_tokens is None:
        raise BadRequest("--prompt-tokens: the server does not say how many tokens a prompt has")
    return infos[0].prompt_tokens
