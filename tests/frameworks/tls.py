# SPDX-License-Identifier: Apache-2.0
"""A proxy with TLS before a gateway, for a client that knows no address without."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trustme


@asynccontextmanager
async def run_tls_proxy(target: str, authority: trustme.CA) -> AsyncIterator[str]:
    """The address of the proxy of `target`; its certificate is the authority's."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    behind = urlsplit(target)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
