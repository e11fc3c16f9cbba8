"""Every error that breakgraph raises.

```
BreakgraphError
├── CaptureError(RuntimeError)        a capture could not be made
│   ├── CaptureIllegalError           an operation that a graph cannot hold
│   ├── NestedCaptureError            a capture inside a capture
│   └── StreamJoinError               side-stream work that would be lost
├── ReplayError(RuntimeError)         a captured graph cannot run as asked
│   ├── CopyBackError                 a break returned something else than it did at capture
│   ├── MovedBufferError              a tensor whose address is baked in has moved
│   ├── LiveDataError                 live data is missing, unknown or ambiguous
│   ├── ConcurrentReplayError         two replays of one pool at the same time
│   └── NoGraphError                  no graph was captured for this key
├── StaticInputError(ValueError)      an input differs from its declaration
├── RankError(RuntimeError)           the ranks of a group are not together
├── ConfigError(ValueError)           an option, a file or a combination that cannot work
└── InternalError(RuntimeError)       our bug
```

An error is made of three parts, and the constructor insists on them: *what* and where with got and
expected, *why* it matters, and how to *fix* it. An exception raised by the user's own code is never
replaced by one of these.
"""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = [
    "BreakgraphError",
    "CaptureError",
    "CaptureIllegalError",
    "ConcurrentReplayError",
    "ConfigError",
    "CopyBackError",
    "InternalError",
    "LiveDataError",
    "MovedBufferError",
    "NestedCaptureError",
    "NoGraphError",
    "RankError",
    "ReplayError",
    "StaticInputError",
    "StreamJoinError",
]


def add_note(error: BaseException, text: str) -> None:
    """Say where an exception of the user's code came from; one that takes no notes (a frozen class) stays as it is."""
    with contextlib.suppress(Exception):
        error.add_note(text)


class BreakgraphError(Exception):
    """Base of every error of this package.

    Args:
        what: What happened and where, with got and expected.
        why: Why it matters.
        fix: What to do about it.
    """

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(f"{what}\n{why}\n{fix}")
        self.what = what
        self.why = why
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the class with the joined text alone, which the constructor refuses.
        return _rebuild, (type(self), self.what, self.why, self.fix)


def _rebuild(cls: type[BreakgraphError], what: str, why: str, fix: str) -> BreakgraphError:
    return cls(what, why=why, fix=fix)


class CaptureError(BreakgraphError, RuntimeError):
    """A capture could not be made."""


class CaptureIllegalError(CaptureError):
    """A segment ran an operation that a device graph cannot hold: a host sync, a data-dependent shape."""


class NestedCaptureError(CaptureError):
    """A capture was begun inside a capture, a break or a replay of the same thread."""


class StreamJoinError(CaptureError):
    """Work on a side stream would run once, at capture, and never again."""


class ReplayError(BreakgraphError, RuntimeError):
    """A captured graph cannot be replayed as asked."""


class CopyBackError(ReplayError):
    """A break returned another structure, shape, dtype, device or plain value than at capture."""


class MovedBufferError(ReplayError):
    """A tensor whose address was baked in at capture lies somewhere else now."""


class LiveDataError(ReplayError):
    """Live data is missing, unknown, or two different things were bound to one name."""


class ConcurrentReplayError(ReplayError):
    """A second thread replayed a graph of a pool that is in use."""


class NoGraphError(ReplayError):
    """No graph was captured for the requested key."""


class StaticInputError(BreakgraphError, ValueError):
    """An input differs in name, shape, dtype or device from its declaration."""


class RankError(BreakgraphError, RuntimeError):
    """A rank of the group raised, is gone, or is in another place than this one."""


class ConfigError(BreakgraphError, ValueError):
    """An option, a file, or a combination of them cannot work."""


class InternalError(BreakgraphError, RuntimeError):
    """A state that breakgraph itself should have made impossible: a bug, please report it."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(
            what,
            why=why or "breakgraph's own state machine was left, so nothing it did since can be trusted.",
            fix=fix or "Please report this with the traceback; it is a bug in breakgraph, not in your code.",
        )
