# SPDX-License-Identifier: Apache-2.0
"""This server's own gRPC address, by the ways in which tritonserver can be started."""

import os
import subprocess
import sys
import time

import pytest

from triton_omni.core.endpoint import command_line, own_grpc_url
from triton_omni.core.settings import SettingsError


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ([], "127.0.0.1:8001"),
        (["--model-repository=/m", "--http-port=9000"], "127.0.0.1:8001"),
        (["--grpc-port=9001", "--metrics-port=9002"], "127.0.0.1:9001"),
        (["--grpc-port", "9001"], "127.0.0.1:9001"),
        (["--grpc-address=0.0.0.0"], "127.0.0.1:8001"),
        (["--grpc-address=10.0.0.7", "--grpc-port=9001"], "10.0.0.7:9001"),
        (["--allow-grpc=true", "--allow-http=false"], "127.0.0.1:8001"),
        (["--grpc-use-ssl=false"], "127.0.0.1:8001"),
        (["--grpc-use-ssl-mutual=true"], "127.0.0.1:8001"),
    ],
)
def test_address_is_where_the_arguments_make_it_listen(arguments, url):
    assert own_grpc_url(arguments) == url


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--allow-grpc=false"], "--allow-grpc"),
        (["--allow-grpc=0"], "--allow-grpc"),
        (["--grpc-use-ssl=true"], "--grpc-use-ssl"),
        (["--grpc-use-ssl", "1"], "--grpc-use-ssl"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_by_name(arguments, reason):
    with pytest.raises(SettingsError, match=reason):
        own_grpc_url(arguments)


def test_a_process_s_arguments_are_read_as_they_were_given():
    arguments = ["-c", "input()", "--grpc-port=1", "a b", ""]
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE) as child:
        try:
            # A process has no arguments while it is being started.
            while command_line(child.pid) != arguments and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            assert command_line(child.pid) == arguments
        finally:
            child.communicate(os.linesep.encode())
