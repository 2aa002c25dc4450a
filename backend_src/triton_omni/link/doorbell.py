# SPDX-License-Identifier: Apache-2.0
"""How a stage tells the next one that the ledger has news: an empty datagram to a socket in the server's folder.

The folder is open to the server's user alone, and so is the bell. A datagram that does not arrive loses nothing: a
stage that hears none looks into the ledger a little later.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from triton_omni.core.errors import StageName
from triton_omni.session.server_folder import own_folder, table_path

_UNHEARD: Final = (FileNotFoundError, ConnectionRefusedError, BlockingIOError)
"""Errors of a ring that loses nothing: no stage listens, or enough rings wait already."""

logger = logging.getLogger(__name__)


class Doorbell:
    """The bell of one stage: calls `heard` on a thread of its own whenever somebody rang. It takes the place of the
    bell of an earlier process of the stage.

    Args:
        name: of the ledger's table.
        stage: whose bell it is.

    Raises:
        LedgerError: the server's folder is not this user's alone.
        OSError: the socket cannot be made.
    """

    def __init__(self, name: str, stage: StageName, heard: Callable[[], object]) -> None:
        path = own_folder(name) / _file_name(stage)
        self._heard = heard
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
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
            try:
                self._socket.recv(1)
            except OSError as error:
                if self._open:  # the loop still polls, at most 50 ms later
                    logger.warning("the doorbell is not heard any more: %s", error)
                return
            if self._open:
                self._heard()


class DoorbellRinger:
    """Rings the bell of a stage.

    Args:
        name: of the ledger's table.
    """

    def __init__(self, name: str, stage: StageName) -> None:
        self._address = str(table_path(name).with_name(_file_name(stage)))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._failure = ""

    def ring(self) -> None:
        """Ring; nothing happens if no stage listens, or if enough rings wait already."""
        try:
            self._socket.sendto(b"", self._address)
        except _UNHEARD:
            return
        except OSError as error:
            if str(error) != self._failure:
                logger.warning("a doorbell could not be rung: %s", error)
            self._failure = str(error)

    def close(self) -> None:
        """Ring no more."""
        self._socket.close()


def _file_name(stage: StageName) -> str:
    return f"{stage}-bell"
