"""Server-sent events: an answer in pieces over one HTTP response, for as long as its client is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "EventStream", "event", "json_bytes"]

DONE = b"data: [DONE]\n\n"


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def event(value: Mapping[str, Any]) -> bytes:
    """One event.

    Args:
        value: What JSON has.
    """
    return b"data: " + json_bytes(value) + b"\n\n"


class EventStream(Response):
    """Sends events until there are no more, the client is gone, or it has not taken them in time.

    Starlette's own streaming response was rejected: whether it notices a client that is gone depends on the server's version.

    Args:
        events: The events; closed at the end, whatever happens.
        seconds: After so long a client that does not read is left.
        on_end: Called once, at the end, with the outcome: "200" or "disconnect".
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, seconds: float, on_end: Callable[[str], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # of the empty body that the base class assumes
        self._events = events
        self._seconds = seconds
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the response; see ASGI."""
        produced = asyncio.create_task(self._produce(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({produced, gone}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            whole = produced.done() and not produced.cancelled() and produced.exception() is None
            for task in (produced, gone):
                task.cancel()
            await asyncio.gather(produced, gone, return_exceptions=True)
            self._on_end("200" if whole else "disconnect")

    async def _produce(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
