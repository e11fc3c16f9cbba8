"""The stream ledger: which streams and events take part in a capture, so that no dependency is lost at a break.

A capture spreads to a stream that waits for a capturing one, and a segment can only end when every such stream was
joined again. A model forks and joins where it likes, also around a break. So while a capture runs, this module watches
what its thread does with streams and events:

- a fork is joined when a segment ends and made again when the next one begins;
- a wait for work outside the capture cannot go into a graph: it becomes a *boundary wait*, made for real before the whole
  segment, at capture and at each replay;
- an event recorded in a segment and still alive at its end is recorded again, for real, behind that segment;
- side streams that a break used are joined before the next segment;
- a stream made current in a segment that never joined the capture is refused when it is left: its work would run once, at
  capture, and never again.

torch's methods call one another (`wait_stream` records an event and waits for it), so each hook acts on the outermost
call only. Hooks are shared by threads, counted, and taken off by the last user; in a thread without a capture they cost one
attribute read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from breakgraph.call_site import user_line
from breakgraph.errors import StreamJoinError

__all__ = ["Boundary", "Fork", "StreamLedger"]


@attrs.frozen(eq=False)
class Fork:
    """A side stream that joined the capture, and the line that forked it."""

    stream: torch.cuda.Stream
    line: str


@attrs.frozen(eq=False)
class _Wait:
    """A real wait before a segment: for all work of a stream at that moment, or for the latest record of an event."""

    target: torch.cuda.Stream | torch.cuda.Event
    line: str


@attrs.frozen(eq=False)
class _Recorded:
    """Where an event was recorded last: in which segment, or outside every segment (None)."""

    event: torch.cuda.Event
    segment: int | None
    line: str

    def is_held_elsewhere(self) -> bool:
        """True where anybody but this ledger holds the event.

        By reference count: a weak reference to a `torch.cuda.Event` is left dangling when the event dies (torch 2.11 does
        not clear it), and the process crashes some calls later.
        """
        return sys.getrefcount(self.event) > _OUR_REFERENCES


_OUR_REFERENCES = 2  # the attribute above, and the argument of getrefcount


@attrs.frozen(eq=False)
class Boundary:
    """What must be done for real around one segment.

    Attributes:
        waits: Before it.
        events: Recorded behind it.
        notes: The same in words, with forks and joins, for `explain()`.
    """

    waits: tuple[torch.cuda.Stream | torch.cuda.Event, ...] = ()
    events: tuple[torch.cuda.Event, ...] = ()
    notes: tuple[str, ...] = ()

    def before(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for what the segment must not overtake."""
        for target in self.waits:
            if isinstance(target, torch.cuda.Event):
                stream.wait_event(target)
            else:
                stream.wait_stream(target)

    def behind(self, stream: torch.cuda.Stream) -> None:
        """Record the events of the segment behind it."""
        for event in self.events:
            event.record(stream)


class _Thread(threading.local):
    ledger: StreamLedger | None = None
    depth = 0


_thread = _Thread()


class StreamLedger:
    """Forks, joins, waits and events of one capture.

    Args:
        main: The capture stream.
    """

    def __init__(self, main: torch.cuda.Stream) -> None:
        self.forks: dict[int, Fork] = {}
        self._main = main
        self._segment: int | None = None
        self._segments = 0
        self._waits: list[_Wait] = []
        self._events: dict[int, _Recorded] = {}
        self._entered: dict[int, str] = {}
        self._used_by_break: dict[int, torch.cuda.Stream] | None = None
        self._forked_here: list[Fork] = []
        self._handled: BaseException | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch this thread's streams and events."""
        _hooks.install()
        self._handled = sys.exception()
        previous, _thread.ledger = _thread.ledger, self
        try:
            yield
        finally:
            _thread.ledger = previous
            _hooks.remove()

    # The moves of the capture.

    def begin_segment(self) -> None:
        """A segment has begun on the capture stream: fork again whatever was forked before."""
        with _unwatched():
            for fork in self.forks.values():
                fork.stream.wait_stream(self._main)
        self._segments += 1
        self._segment = self._segments
        # What nobody else holds can never be waited for again.
        self._events = {key: recorded for key, recorded in self._events.items() if recorded.is_held_elsewhere()}
        self._waits, self._forked_here, self._entered = [], [], {}

    def join_forks(self) -> None:
        """Let the capture stream wait for every fork: a segment is about to end."""
        self._segment = None
        with _unwatched():
            for fork in self.forks.values():
                self._main.wait_stream(fork.stream)

    def abandon(self) -> None:
        """The segment failed; nothing that follows belongs to it."""
        self._segment = None
        self._used_by_break = None

    def boundary(self, *, unseen: int = 0) -> Boundary:
        """What the segment that has just ended needs around it.

        Args:
            unseen: Pieces of side work that no hook saw and the backend joined.
        """
        recorded_here = [recorded for recorded in self._events.values() if recorded.segment == self._segments]
        alive = [recorded for recorded in recorded_here if recorded.is_held_elsewhere()]
        return Boundary(
            waits=tuple(wait.target for wait in self._waits),
            events=tuple(recorded.event for recorded in alive),
            notes=(
                *(f"forks stream {fork.stream.cuda_stream:#x} at {fork.line}" for fork in self._forked_here),
                *(f"joins stream {fork.stream.cuda_stream:#x} at its end" for fork in self.forks.values()),
                *((f"joins {unseen} pieces of side work that no hook saw",) if unseen else ()),
                *(f"waits before it for {_name(wait.target)}, asked for at {wait.line}" for wait in self._waits),
                *(f"records an event behind it, recorded at {recorded.line}" for recorded in alive),
            ),
        )

    def begin_break(self) -> None:
        """A break begins: note the side streams that it uses."""
        self._used_by_break = {}

    def end_break(self) -> tuple[torch.cuda.Stream, ...]:
        """The side streams that the break used; the capture stream must wait for them before the next segment."""
        used, self._used_by_break = self._used_by_break or {}, None
        return tuple(used.values())

    # What the hooks tell. Each returns True where torch's own method must not run.

    def on_wait_stream(self, waiter: torch.cuda.Stream, waited: torch.cuda.Stream) -> bool:
        """`waiter.wait_stream(waited)`."""
        if self._segment is None:
            self._note_break_use(waiter)
            return False
        if self._is_member(waited):
            self._admit(waiter)
            return False
        if self._is_member(waiter):
            self._waits.append(_Wait(waited, user_line()))
            return True
        return False

    def on_wait_event(self, waiter: torch.cuda.Stream, event: torch.cuda.Event) -> bool:
        """`waiter.wait_event(event)`."""
        if self._segment is None:
            self._note_break_use(waiter)
            return False
        recorded = self._events.get(id(event))
        if recorded is not None and recorded.segment is not None:
            if recorded.segment == self._segment:
                self._admit(waiter)
                return False
            # Of an earlier segment: this one begins after that one has ended, so a member waits already.
            if not self._is_member(waiter):
                with _unwatched():
                    waiter.wait_stream(self._main)
                self._admit(waiter)
            return True
        if self._is_member(waiter):
            self._waits.append(_Wait(event, user_line()))
            return True
        return False

    def on_record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> bool:
        """`event.record(stream)`."""
        inside = self._segment is not None and self._is_member(stream)
        self._events[id(event)] = _Recorded(event, self._segment if inside else None, user_line())
        if self._segment is None:
            self._note_break_use(stream)
        return False

    def on_switch(self, left: torch.cuda.Stream, entered: torch.cuda.Stream) -> None:
        """The current stream changes.

        Raises:
            StreamJoinError: The stream that is left was used in a segment and never joined the capture.
        """
        if self._segment is None:
            self._note_break_use(entered)
            return
        line = self._entered.pop(left.cuda_stream, None)
        if not self._is_member(entered):
            self._entered[entered.cuda_stream] = user_line()
        # On its way out of a `with` block the user's own exception comes first.
        if line is not None and not self._is_member(left) and sys.exception() is self._handled:
            raise StreamJoinError(
                f"Stream {left.cuda_stream:#x} was made current in a segment at {line}, and left without joining the capture.",
                why="Its work ran once, now, and no replay would run it again.",
                fix="Fork it: side.wait_stream(torch.cuda.current_stream()) before its work; or do the work in a break.",
            )

    def _note_break_use(self, stream: torch.cuda.Stream) -> None:
        if self._used_by_break is not None and stream.cuda_stream != self._main.cuda_stream:
            self._used_by_break[stream.cuda_stream] = stream

    def _admit(self, stream: torch.cuda.Stream) -> None:
        if not self._is_member(stream):
            fork = self.forks[stream.cuda_stream] = Fork(stream, user_line())
            self._forked_here.append(fork)

    def _is_member(self, stream: torch.cuda.Stream) -> bool:
        return stream.cuda_stream == self._main.cuda_stream or stream.cuda_stream in self.forks


def _name(target: torch.cuda.Stream | torch.cuda.Event) -> str:
    return f"stream {target.cuda_stream:#x}" if isinstance(target, torch.cuda.Stream) else "an event"


@contextmanager
def _unwatched() -> Iterator[None]:
    """Our own waits are no news to the ledger."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


class _Hooks:
    """Methods of torch.cuda that are replaced while at least one capture runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the methods, for the first user."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            stream, event = torch.cuda.Stream, torch.cuda.Event
            self._replace(stream, "wait_stream", _around(stream.wait_stream, StreamLedger.on_wait_stream))
            self._replace(stream, "wait_event", _around(stream.wait_event, StreamLedger.on_wait_event))
            self._replace(event, "record", _around_event(event.record, StreamLedger.on_record))
            self._replace(event, "wait", _around_event(event.wait, lambda led, e, s: led.on_wait_event(s, e)))
            self._replace(stream, "__enter__", _entering(stream.__enter__))
            self._replace(stream, "__exit__", _leaving(stream.__exit__))
            self._replace(torch.cuda, "set_stream", _set_stream(torch.cuda.set_stream))

    def remove(self) -> None:
        """Put the methods back exactly, for the last user: also those that a class had only inherited."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for owner, name, original in reversed(self._saved):
                if original is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            self._saved.clear()

    def _replace(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        self._saved.append((owner, name, owner.__dict__.get(name, _INHERITED)))
        setattr(owner, name, hook)


_INHERITED = object()
_hooks = _Hooks()


def _outermost() -> StreamLedger | None:
    """The ledger of this thread, where the call at hand is not made by torch or by us inside another."""
    ledger = _thread.ledger
    return None if ledger is None or _thread.depth else ledger


def _around(original: Callable[..., Any], tell: Callable[..., bool]) -> Callable[..., Any]:
    def hook(self: Any, other: Any) -> Any:
        ledger = _outermost()
        if ledger is None:
            return original(self, other)
        with _unwatched():
            return None if tell(ledger, self, other) else original(self, other)

    return hook


def _around_event(original: Callable[..., Any], tell: Callable[..., bool]) -> Callable[..., Any]:
    def hook(self: Any, stream: Any = None) -> Any:
        ledger = _outermost()
        if ledger is None:
            return original(self, stream)
        if stream is None:
            stream = torch.cuda.current_stream()
        with _unwatched():
            return None if tell(ledger, self, stream) else original(self, stream)

    return hook


def _set_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(stream: Any) -> Any:
        ledger = _outermost()
        if ledger is None or stream is None:
            return original(stream)
        left = torch.cuda.current_stream()
        with _unwatched():
            result = original(stream)
        ledger.on_switch(left, stream)  # after the switch: the error must not leave the wrong stream current
        return result

    return hook


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any) -> Any:
        ledger = _outermost()
        if ledger is None:
            return original(self)
        left = torch.cuda.current_stream()
        with _unwatched():
            result = original(self)
        ledger.on_switch(left, self)
        return result

    return hook


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *error: Any) -> Any:
        ledger = _outermost()
        if ledger is None:
            return original(self, *error)
        with _unwatched():
            result = original(self, *error)
        ledger.on_switch(self, torch.cuda.current_stream())
        return result

    return hook
