# SPDX-License-Identifier: Apache-2.0
"""Answer each line of a file, eight at a time, with a progress bar; one JSON object a line, in the file's order.

Usage: python examples/batch_of_prompts.py PROMPTS.txt REPLIES.jsonl [HOST:PORT]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rich.progress import Progress

from triton_omni_client import AsyncOmniClient, OmniClientError

AT_ONCE = 8


async def main(prompts: str, output: str, url: str = "localhost:8001") -> None:
    """A server without room is asked again by the client itself; what else fails is written down as such."""
    lines = [line for line in Path(prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
    places = asyncio.Semaphore(AT_ONCE)

    async with AsyncOmniClient(url) as client:
        if obstacle := await client.obstacle():
            sys.exit(f"error: {obstacle}")  # not once for each line
        with Progress() as bar:
            task = bar.add_task("replies", total=len(lines))

            async def answer(index: int, prompt: str) -> dict[str, object]:
                async with places:
                    try:
                        reply = await client.say(prompt, seed=index, modalities=["text"], thinker={"max_tokens": 100})
                    except OmniClientError as error:
                        return {"prompt": prompt, "error": error.code, "message": error.message}
                    finally:
                        bar.advance(task)
                return {"prompt": prompt, "reply": reply.text, "seconds": reply.timings.total}

            replies = await asyncio.gather(*(answer(index, prompt) for index, prompt in enumerate(lines)))
    Path(output).write_text("".join(json.dumps(reply) + "\n" for reply in replies), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (OmniClientError, OSError) as error:
        sys.exit(f"error: {error}")
