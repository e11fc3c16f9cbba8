"""What the server takes on, and how long it waits."""

from __future__ import annotations

import math
from typing import Any

import attrs

from breakgraph.errors import ConfigError

__all__ = ["Limits"]


def _positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    number = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value > 0
    if not number or (attribute.metadata.get("whole") and not isinstance(value, int)):
        kind = "an integer of at least 1" if attribute.metadata.get("whole") else "a number of seconds above 0"
        raise ConfigError(
            f"{attribute.name} is {value!r}; expected {kind}.",
            why="It bounds what one client can make the server do.",
            fix=f"Give {attribute.name} as {kind}, or leave it out.",
        )


def _whole(default: int) -> Any:
    return attrs.field(default=default, validator=_positive, metadata={"whole": True})


def _seconds(default: float) -> Any:
    return attrs.field(default=default, validator=_positive)


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds of the server.

    Attributes:
        max_body_bytes: Largest body of a request.
        max_queue: Most prompts that wait or run at a time, beyond those that the engine runs together.
        max_prompts: Most prompts in one request.
        body_seconds: Longest time that a body may take to arrive.
        request_seconds: Longest time from a whole body to the end of its answer.
        drain_seconds: How long answers may go on after the server was told to stop.

    Raises:
        ConfigError: A value is not above 0, or of another type.
    """

    max_body_bytes: int = _whole(8_000_000)
    max_queue: int = _whole(1024)
    max_prompts: int = _whole(512)
    body_seconds: float = _seconds(30.0)
    request_seconds: float = _seconds(600.0)
    drain_seconds: float = _seconds(30.0)
