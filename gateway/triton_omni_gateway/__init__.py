# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible gateway of triton-omni: serves OpenAI's HTTP API through the project's own gRPC client.

`create_app` makes the ASGI application, `server.main` runs it.
"""

from .app import create_app
from .settings import GatewaySettings, SettingsError

__all__ = ["GatewaySettings", "SettingsError", "create_app"]
