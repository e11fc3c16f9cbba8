"""Reads the JSON object of a request, within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from breakgraph.server.errors import ApiError
from breakgraph.server.limits import Limits

__all__ = ["read_json", "until_gone"]

# A client that still sends does not read: closing on it would show it a broken connection and not the answer. So what is too
# long is read and thrown away, up to this many times the bound.
_THROWN_AWAY = 32
_LONG = 1 << 18


async def read_json(request: Request, *, limits: Limits, body: bytearray, note: Callable[[], None]) -> dict[str, Any]:
    """The body as a dict.

    Args:
        request: Its body has not been read.
        limits: Of size and time.
        body: Where it is put.
        note: Called after each part.

    Raises:
        ApiError: It is too long (413), too slow (408), of another type (415), or no JSON object (400).
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            f"The content encoding is {encoding!r:.40}; expected none.", status=415, code="invalid_content_encoding"
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also a defence: a web page may post anything else to a server on loopback without asking it first.
        raise ApiError(
            f"The content type is {kind or 'missing'}; expected application/json.",
            status=415,
            code="invalid_content_type",
        )
    try:
        async with asyncio.timeout(limits.body_seconds):
            await _read(request, most=limits.max_body_bytes, body=body, note=note)
    except TimeoutError:
        raise ApiError(
            f"The body did not arrive within {limits.body_seconds:g} s.", status=408, code="body_too_slow"
        ) from None
    # A long body is read elsewhere: other answers go on meanwhile.
    return _parse(body) if len(body) < _LONG else await asyncio.to_thread(_parse, body)


async def _read(request: Request, *, most: int, body: bytearray, note: Callable[[], None]) -> None:
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most * _THROWN_AWAY:
            break
        if size <= most:
            body += part
            note()
    if size > most:
        raise ApiError(
            f"The body is longer than {most} bytes. Shorten the prompt, or raise the server's --max-body-mb.",
            status=413,
            code="body_too_large",
        )


def _parse(text: bytearray) -> dict[str, Any]:
    try:
        # Decoded here: given bytes, json takes UTF-16 as well, and lets halves of surrogate pairs pass.
        value = json.loads(text.decode(), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"The body is not valid JSON: {said}.", code="invalid_json") from None
    if b"\\u" in text and not _is_text(value):
        raise ApiError(
            "The body has half of a surrogate pair in a string, which is no character, or is nested too deeply.",
            code="invalid_json",
        )
    if not isinstance(value, dict):
        raise ApiError(f"The body is a JSON {type(value).__name__}; expected an object.", code="invalid_json")
    return value


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r:.80} is there twice, and one of the two would be dropped")
            seen.add(name)
    return made


async def until_gone(request: Request) -> None:
    """Returns when the client has gone away. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
