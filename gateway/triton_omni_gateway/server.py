# SPDX-License-Identifier: Apache-2.0
"""The command `triton-omni-gateway`: options, the socket, one READY line, an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, cast

import uvicorn

from .app import create_app
from .connections import BoundedProtocol, allow_open_files
from .keys import VARIABLE, ApiKeys, read_keys
from .logs import FORMATS, log_config
from .pool import ServerPool
from .realtime.limits import RealtimeLimits
from .realtime.protocol import RealtimeProtocol
from .settings import MIB, PRIORITIES, TEXT_MARK, GatewaySettings, SettingsError

DEFAULT_PORT = 8080
_FAILED, _USAGE = 1, 2
_BACKLOG = 2048


@dataclass(frozen=True)
class Command:
    """Values of the command line."""

    settings: GatewaySettings
    keys: ApiKeys
    host: str
    port: int
    wait_s: float
    """How long to wait for the Triton server to be ready."""
    grace_s: int
    """Seconds that a stopping gateway gives the requests under way."""
    log_level: str
    log_format: str = "plain"
    check: bool = False
    """End after all checks that need no Triton server."""


class GatewayServer(uvicorn.Server):
    """uvicorn's server, which says when it listens."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then print the READY line."""
        await super().startup(sockets=sockets)
        if not self.should_exit:
            print(self._ready_line, flush=True)


def make_server(command: Command, listening: socket.socket) -> GatewayServer:
    """A server on this socket, not started yet; on SIGTERM or Ctrl-C it lets requests end for `grace_s`."""
    config = uvicorn.Config(
        create_app(command.settings, command.keys),
        # uvicorn makes one for each connection. h11 is the one of its two parsers that bounds all that it keeps.
        http=cast(Any, functools.partial(BoundedProtocol, command.settings)),
        ws=cast(Any, RealtimeProtocol),
        ws_max_size=command.settings.realtime.max_event_bytes,
        ws_ping_interval=command.settings.realtime.ping_seconds,
        ws_ping_timeout=command.settings.realtime.ping_seconds,
        ws_per_message_deflate=False,
        loop="asyncio",
        log_config=log_config(command.log_format, command.log_level),
        access_log=False,
        log_level=command.log_level,
        timeout_graceful_shutdown=command.grace_s,
        server_header=False,
    )
    address = _url(command.host, listening.getsockname()[1])
    return GatewayServer(config, f"READY openai={address}/v1 grpc={','.join(command.settings.triton_urls)}")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is a free one.

    Raises:
        SettingsError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # The reason of an address error alone; `create_server` adds a sentence of its own to the others.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise SettingsError(f"cannot listen on {host}:{port} ({reason})") from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; `--help` tells the options."""
        self.exit(2, f"error: {message}\n")


def parse_command(arguments: Sequence[str] | None = None) -> Command:
    """The command line and the environment, checked.

    Raises:
        SettingsError: a value cannot be served with.
    """
    default = GatewaySettings()
    given = parser().parse_args(arguments)
    settings = GatewaySettings(
        triton_urls=tuple(given.url or default.triton_urls),
        models=tuple(given.model_name or default.models),
        voices={**default.voices, **dict(given.voice)},
        min_priority=given.min_priority,
        max_requests=given.max_requests,
        max_body_bytes=given.max_body_mib * MIB,
        max_connections=given.max_connections,
        max_peer_connections=given.max_peer_connections,
        host_names=tuple(name.lower() for name in given.allow_host),
        origins=tuple(given.allow_origin),
        speech_prompt=given.speech_prompt,
        transcription_prompt=given.transcription_prompt,
        translation_prompt=given.translation_prompt,
        max_recording_seconds=given.max_recording_seconds,
        window_seconds=given.window_seconds,
        realtime=RealtimeLimits(max_sessions=given.max_sessions),
    )
    keys = read_keys(os.environ, given.api_keys)
    return Command(
        settings,
        keys,
        given.host,
        given.port,
        given.wait,
        given.grace,
        given.log_level,
        given.log_format,
        given.check,
    )


def parser() -> argparse.ArgumentParser:
    """All options of the gateway's command, with their defaults and meanings."""
    default = GatewaySettings()
    made = _Parser(prog="triton-omni-gateway", description="OpenAI-compatible gateway of a triton-omni server.")
    _add_addresses(made, default)
    _add_limits(made, default)
    _add_rest(made, default)
    return made


def _add_addresses(parser: _Parser, default: GatewaySettings) -> None:
    told = f"triton-omni-gateway {version('triton-omni-gateway')}"
    parser.add_argument("--version", action="version", version=told, help="tell the version, and end")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    parser.add_argument(
        "--port",
        type=_whole(0, 65535),
        default=DEFAULT_PORT,
        metavar="N",
        help="HTTP port (default 8080; 0 = a free port)",
    )
    served = f"Triton's gRPC endpoint; may be repeated, to spread requests (default: {default.triton_urls[0]})"
    parser.add_argument("--url", action="append", metavar="HOST:PORT", help=served)
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait until a server is ready (default 30)",
    )
    named = f"name of the model, or how names begin (NAME*); may be repeated (default: {' '.join(default.models)})"
    parser.add_argument("--model-name", action="append", metavar="NAME", help=named)
    spoken = "another name for a voice of the checkpoint; may be repeated (OpenAI's names mean its first voice)"
    parser.add_argument("--voice", type=_alias, action="append", default=[], metavar="NAME=VOICE", help=spoken)
    keyed = (
        "file of API keys, one a line, each with a name for the log or none; "
        f"also by {VARIABLE}, separated by commas (default: none, so anyone may call)"
    )
    parser.add_argument("--api-keys", type=Path, metavar="FILE", help=keyed)
    allowed = "host name by which callers without keys may address the gateway; may be repeated (always: localhost)"
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=allowed)
    pages = "origin whose web pages may ask, such as https://app.example, or * for all; may be repeated (default: none)"
    parser.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=pages)


def _add_limits(parser: _Parser, default: GatewaySettings) -> None:
    urgent = "lowest, so most urgent, priority that callers may ask for (default 0: no caller overtakes others)"
    parser.add_argument(
        "--min-priority",
        type=_whole(PRIORITIES[0], PRIORITIES[-1]),
        default=default.min_priority,
        metavar="N",
        help=urgent,
    )
    at_once = f"requests under way at once; the next one gets 429 (default {default.max_requests})"
    parser.add_argument("--max-requests", type=_whole(1), default=default.max_requests, metavar="N", help=at_once)
    mib = default.max_body_bytes // MIB
    body = f"MiB of one request's body; a larger one is refused (default {mib})"
    parser.add_argument("--max-body-mib", type=_whole(1), default=mib, metavar="N", help=body)
    longest = f"seconds of a recording to be written down (default {default.max_recording_seconds})"
    parser.add_argument(
        "--max-recording-seconds", type=_whole(1), default=default.max_recording_seconds, metavar="N", help=longest
    )
    heard = f"seconds of a recording that the model hears at once, at most (default {default.window_seconds:g})"
    parser.add_argument("--window-seconds", type=_whole(1), default=default.window_seconds, metavar="N", help=heard)
    talks = default.realtime.max_sessions
    held = f"realtime sessions open at once; the next one gets 429 (default {talks})"
    parser.add_argument("--max-sessions", type=_whole(1), default=talks, metavar="N", help=held)
    opened = f"connections open at once; the longest idle one makes room (default {default.max_connections})"
    parser.add_argument("--max-connections", type=_whole(1), default=default.max_connections, metavar="N", help=opened)
    parser.add_argument(
        "--max-peer-connections",
        type=_whole(1),
        default=default.max_peer_connections,
        metavar="N",
        help=f"connections of one address; raise it for a proxy (default {default.max_peer_connections})",
    )


def _add_rest(parser: _Parser, default: GatewaySettings) -> None:
    spoken = f"prompt that makes the model read a text aloud; {TEXT_MARK} stands for the text"
    parser.add_argument("--speech-prompt", default=default.speech_prompt, metavar="TEXT", help=spoken)
    written = f"prompt that makes the model write down what it hears (default {default.transcription_prompt!r})"
    parser.add_argument("--transcription-prompt", default=default.transcription_prompt, metavar="TEXT", help=written)
    translated = f"the same, in English (default {default.translation_prompt!r})"
    parser.add_argument("--translation-prompt", default=default.translation_prompt, metavar="TEXT", help=translated)
    parser.add_argument(
        "--grace",
        type=_whole(0),
        default=10,
        metavar="SECONDS",
        help="time that a stop gives requests under way (default 10)",
    )
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, default="info", help="lowest level logged (default info)")
    written = "form of the log's lines (default plain); json = an object a line"
    parser.add_argument("--log-format", choices=FORMATS, default="plain", help=written)
    parser.add_argument("--check", action="store_true", help="check the options and end")


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type of argparse: a whole number from `least` on, up to `most` where there is one."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            value = int(text)
            if least <= value and (most is None or value <= most):
                return value
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from {least} {'on' if most is None else f'to {most}'}"
        )

    return parse


def _alias(text: str) -> tuple[str, str]:
    name, equals, voice = text.partition("=")
    if not (name and equals and voice):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VOICE, such as nova=Ethan")
    return name, voice


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")


async def serve(command: Command) -> None:
    """Serve until a signal, or check that it could be.

    Raises:
        SettingsError: no Triton server answers, the address cannot be had, or too few files may be open.
    """
    listening = bind(command.host, command.port)
    try:
        allow_open_files(command.settings.max_connections)
        if command.check:
            return
        await _wait_for_triton(command.settings.triton_urls, command.wait_s)
        if not command.keys:
            _warn_of_open_gateway(command)
        await make_server(command, listening).serve(sockets=[listening])
    finally:
        listening.close()


def _warn_of_open_gateway(command: Command) -> None:
    if not _is_loopback(command.host):
        print(f"warning: {command.host} is open to others and no API key is set", file=sys.stderr)
    names = ", ".join(("an IP address", "localhost", *command.settings.host_names))
    said = "without API keys requests are taken in application/json, from no web pages of other origins"
    print(f"{said}, and by these hosts: {names}", file=sys.stderr)


async def _wait_for_triton(urls: Sequence[str], seconds: float) -> None:
    where = " or ".join(urls)
    async with ServerPool(urls).running() as pool:
        if await pool.ready():
            return
        print(f"waiting for the triton-omni server at {where} (at most {seconds:g} s)", file=sys.stderr, flush=True)
        if not await pool.wait_ready(seconds):
            said = f"no triton-omni server is ready at {where} (waited {seconds:g} s); ./build.sh serve starts one"
            raise SettingsError(said)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script.

    Returns:
        The exit code: 1 = it cannot serve, 2 = an option or a file of keys is wrong, and after a signal 128 + its
        number, as a shell has it (Ctrl-C 130, SIGTERM and SIGHUP 143).
    """
    # uvicorn ends in order on a signal, then raises it again: without handlers of its own that would be a traceback.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    # It knows no hang-up, which would cut all answers off. One that is ignored (nohup) stays so.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: signal.raise_signal(signal.SIGTERM))
    code = _USAGE
    try:
        command = parse_command(arguments)
        code = _FAILED
        asyncio.run(serve(command))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
