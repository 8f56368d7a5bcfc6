"""JSON of a request that may be anybody's: read up to a limit, and nothing of it believed."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

LARGEST = 128 << 10
"""Bytes of a request that anybody has to send here."""


async def read_json(request: web.Request) -> Any:
    """Its JSON; None where it is none, and an empty object where nothing was sent.

    Raises:
        HTTPRequestEntityTooLarge: it is longer than `LARGEST`; the rest is not read.
    """
    body = b""
    async for piece in request.content.iter_chunked(LARGEST):  # as they come: the first need not be all
        body += piece
        if len(body) > LARGEST:
            raise web.HTTPRequestEntityTooLarge(max_size=LARGEST, actual_size=len(body))
    try:
        return json.loads(body.decode("utf-8", "replace") or "{}")
    except (ValueError, RecursionError):  # the latter for ten thousand open brackets
        return None
