# SPDX-License-Identifier: Apache-2.0
"""How a stage tells the next one that the ledger has news: a datagram to a socket of the host, without content.

Sockets of Linux's abstract namespace, which go with their process. Nothing is lost with one that does not arrive: who
hears none looks into the ledger a little later.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from triton_omni.errors import StageName


class Bell:
    """The bell of one stage: calls `heard` on a thread of its own whenever somebody rang.

    Args:
        name: of the ledger's table.
        stage: whose bell it is.

    Raises:
        OSError: another process has it.
    """

    def __init__(self, name: str, stage: StageName, heard: Callable[[], object]) -> None:
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(_address(name, stage))
        except OSError:
            self._socket.close()
            raise
        self._open = True
        self._thread = threading.Thread(target=self._listen, name=f"omni-{stage}-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear nothing more."""
        self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                self._socket.recv(1)
            if self._open:
                self._heard()


class BellRope:
    """Rings the bell of a stage.

    Args:
        name: of the ledger's table.
    """

    def __init__(self, name: str, stage: StageName) -> None:
        self._address = _address(name, stage)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def ring(self) -> None:
        """Ring; where nobody listens, or so many rings wait that one more says nothing, nothing happens."""
        with contextlib.suppress(OSError):
            self._socket.sendto(b"", self._address)

    def close(self) -> None:
        """Ring no more."""
        self._socket.close()


def _address(name: str, stage: StageName) -> str:
    return f"\0{name}.{stage}"
