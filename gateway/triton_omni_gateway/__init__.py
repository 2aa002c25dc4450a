# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible gateway of triton-omni: OpenAI's HTTP in front, the project's own gRPC client behind.

`create_app` makes the ASGI application, `server.main` runs it.
"""

from .app import create_app
from .settings import GatewaySettings, SettingsError

__all__ = ["GatewaySettings", "SettingsError", "create_app"]
