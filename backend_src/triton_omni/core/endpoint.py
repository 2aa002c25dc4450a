# SPDX-License-Identifier: Apache-2.0
"""Addresses on which a tritonserver listens, read from its command line, since Triton reports them nowhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import psutil

from triton_omni.core.settings import SettingsError

OWN_CHANNEL: Final = (("grpc.enable_http_proxy", 0),)
"""Options of gRPC to a server on this machine: no proxy of the environment, which leads elsewhere."""
_FALSE = ("false", "0")
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")


def command_line(pid: int) -> list[str]:
    """The arguments that process `pid` was started with, its name left out.

    Raises:
        psutil.NoSuchProcess: there is no such process, or it has ended.
    """
    return psutil.Process(pid).cmdline()[1:]


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
    return _reached_at(given.grpc_address, given.grpc_port)


def http_addresses(arguments: Sequence[str]) -> tuple[str, str]:
    """`HOST:PORT` at which HTTP and metrics of a tritonserver of these arguments can be reached on its own machine;
    empty where they are switched off.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for service, port in (("http", "8000"), ("metrics", "8002")):
        parser.add_argument(f"--{service}-port", default=port)
        parser.add_argument(f"--{service}-address")
        parser.add_argument(f"--allow-{service}", default="true")
    given, _ = parser.parse_known_args(arguments)
    http_address = given.http_address or "0.0.0.0"
    http = _reached_at(http_address, given.http_port)
    # Without an address of their own, metrics are where HTTP is.
    metrics = _reached_at(given.metrics_address or http_address, given.metrics_port)
    is_off = [text.lower() in _FALSE for text in (given.allow_http, given.allow_metrics)]
    return "" if is_off[0] else http, "" if is_off[1] else metrics


def _reached_at(address: str, port: str) -> str:
    host = "127.0.0.1" if address in _ANY_ADDRESS else address
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
