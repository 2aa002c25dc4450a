# SPDX-License-Identifier: Apache-2.0
"""Bodies with a file in them (`multipart/form-data`), as types, under the limits of other bodies.

They are kept in memory, as bodies of JSON are: a gateway may have no folder to write to.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from .errors import ClientGone, GatewayError, bad_request, too_large
from .schemas import refusal

FORM = "multipart/form-data"
TAKES_FORM = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))
"""Paths whose bodies are forms."""
_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 64 << 10
"""Bytes of one field that is no file."""


class FormModel(BaseModel):
    """Fields of a form, which are texts: numbers and booleans are read of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Form = TypeVar("Form", bound=FormModel)


class _Parser(MultiPartParser):
    spool_max_size = sys.maxsize


async def read_form(request: Request, schema: type[Form], limit: int, seconds: float) -> tuple[Form, bytes]:
    """The fields of a body as a type, and its `file`.

    Raises:
        GatewayError: 413 over `limit` bytes, 408 when it has not arrived within `seconds`, 415 if it is no form, 400
            if it is none that can be read, or a field is wrong.
        ClientGone: the caller left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        said = f"The header Content-Type is {kind[:80]!a}: this path takes {FORM}, as `curl -F file=@speech.wav` sends."
        raise GatewayError(415, said, code="unsupported_media_type")
    parser = _Parser(
        request.headers, _bounded(request, limit), max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES
    )
    try:
        async with asyncio.timeout(seconds):
            form = await parser.parse()
    except TimeoutError as error:
        raise GatewayError(408, f"The request's body did not arrive within {seconds:g} s.") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    except MultiPartException as error:
        raise bad_request(f"The body is no {FORM}: {error.message}", code="invalid_form") from error
    try:
        return schema.model_validate(_fields(form)), await _file(form)
    except ValidationError as error:
        raise refusal(error.errors(include_url=False, include_context=False)) from error
    finally:
        await form.close()


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    taken = 0
    async for part in request.stream():
        taken += len(part)
        if taken > limit:
            raise too_large(limit)
        yield part


def _fields(form: FormData) -> dict[str, Any]:
    """The fields but for the file: one whose name ends in `[]` is a list, an empty one counts as not given.

    Raises:
        GatewayError: 400, a field is given twice.
    """
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name == "file" or value == "":
            continue
        if name.endswith("[]"):
            fields.setdefault(name.removesuffix("[]"), []).append(value)
        elif name in fields:
            raise bad_request(f"'{name[:80]}' is given more than once.", param=name[:80], code="invalid_form")
        else:
            fields[name] = value
    return fields


async def _file(form: FormData) -> bytes:
    given = form.getlist("file")
    if not given:
        raise bad_request("Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
    if len(given) > 1 or not isinstance(given[0], UploadFile):
        said = "Invalid value for 'file': it must be one file with a name, as `curl -F file=@speech.wav` sends it."
        raise bad_request(said, param="file", code="invalid_file")
    return await given[0].read()
