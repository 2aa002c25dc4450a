# SPDX-License-Identifier: Apache-2.0
"""Where this server's own gRPC endpoint listens, read off tritonserver's command line: Triton tells no model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from triton_omni.settings import SettingsError

_FALSE = ("false", "0")
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")


def command_line(pid: int) -> list[str]:
    """The arguments that process `pid` was started with, its name left out."""
    return [part.decode() for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:-1]]


def own_grpc_url(arguments: Sequence[str]) -> str:
    """`HOST:PORT` at which a tritonserver of these arguments can be reached on its own machine.

    Raises:
        SettingsError: its gRPC endpoint is switched off, or speaks TLS only.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--grpc-port", default="8001")
    parser.add_argument("--grpc-address", default="0.0.0.0")
    parser.add_argument("--allow-grpc", default="true")
    parser.add_argument("--grpc-use-ssl", nargs="?", const="true", default="false")
    given, _ = parser.parse_known_args(arguments)
    if given.allow_grpc.lower() in _FALSE:
        raise SettingsError("the unary model streams from this server's gRPC endpoint, which --allow-grpc switches off")
    if given.grpc_use_ssl.lower() not in _FALSE:
        raise SettingsError("the unary model streams from this server's gRPC endpoint, which --grpc-use-ssl encrypts")
    host = "127.0.0.1" if given.grpc_address in _ANY_ADDRESS else given.grpc_address
    return f"{host}:{given.grpc_port}"
