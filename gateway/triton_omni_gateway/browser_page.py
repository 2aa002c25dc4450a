# SPDX-License-Identifier: Apache-2.0
"""The browser page: plain files beside this module, which use the gateway's public API like any other caller."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, stat_result
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
MOUNT = "/page"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), camera=(self), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""Headers of every file of the page. It runs only its own scripts and talks to no other host. Browsers ask for it anew
each time, so that no page mixes two versions.
"""


class PageFiles(StaticFiles):
    """The files that the page names, and no others."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """One of them, or 304 where the browser has it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def is_of_the_page(path: str) -> bool:
    """True for what `add_page` serves."""
    return path == "/" or path.startswith(f"{MOUNT}/")


def add_page(app: FastAPI) -> None:
    """Serve the page at `/`, and what it is made of at `/page/`."""
    files = PageFiles(directory=FOLDER)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        """The page."""
        return await files.get_response("index.html", request.scope)

    app.mount(MOUNT, files)
