# SPDX-License-Identifier: Apache-2.0
"""The conversation of one client: each turn has all turns before it, and of a reply that was cut off what was heard."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from .asking import Ended
from .plan import Planned

LONGEST: Final = 20
"""Messages of a conversation, after which another begins."""


@dataclass
class Talk:
    """Turns so far, all with one salt."""

    _salt: str = field(default_factory=secrets.token_urlsafe)
    _messages: tuple[Mapping[str, Any], ...] = ()
    _media: tuple[bytes, ...] = ()

    def follow(self, planned: Planned) -> Planned:
        """The same request with all turns before; one that is no turn stays as it is."""
        if not planned.is_turn:
            return planned
        if len(self._messages) >= LONGEST:
            self._salt, self._messages, self._media = secrets.token_urlsafe(), (), ()
        asked = planned.request
        messages, media = (*self._messages, *(asked.messages or ())), (*self._media, *asked.media)
        return replace(planned, request=replace(asked, messages=messages, media=media, cache_salt=self._salt))

    def hear(self, ended: Ended) -> None:
        """Keep a turn and what was heard of its reply; one that failed is as if it had not been asked."""
        if ended.planned.is_turn and ended.outcome in ("finished", "cancelled"):
            asked = ended.planned.request
            heard = ({"role": "assistant", "content": ended.heard},) if ended.heard else ()
            self._messages, self._media = (*(asked.messages or ()), *heard), tuple(asked.media)
