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

Streams are known by device and number, not by object: the same stream can be had as `torch.cuda.Stream`, as
`torch.Stream` and as an external one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch

from breakgraph.call_site import user_line
from breakgraph.errors import StreamJoinError
from breakgraph.stream_hooks import Watcher, unwatched, watched

__all__ = ["Boundary", "Fork", "StreamLedger", "StreamUse"]

_Key = tuple[int, int]
"""Device index and number of a stream."""


@attrs.frozen(eq=False)
class Fork:
    """A side stream that joined the capture, and the line that forked it."""

    stream: torch.Stream
    line: str


@attrs.frozen(eq=False)
class _Wait:
    """A real wait before a segment: for all work of a stream at that moment, or for the latest record of an event."""

    target: torch.Stream | torch.cuda.Event
    line: str


@attrs.frozen(eq=False)
class _Entered:
    """A stream outside the capture that was made current in a segment, and the exception that was handled then."""

    stream: torch.Stream
    line: str
    handled: BaseException | None


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


@attrs.frozen
class StreamUse:
    """What one segment does with streams other than its own, in counts.

    Attributes:
        forks: Side streams that it starts.
        joins: Side streams that it awaits at its end, those that no hook saw among them.
        waits: Real waits before it, for work outside the capture.
        events: Events that are recorded again behind it.
    """

    forks: int = 0
    joins: int = 0
    waits: int = 0
    events: int = 0


@attrs.frozen(eq=False)
class Boundary:
    """What must be done for real around one segment.

    Attributes:
        waits: Before it.
        events: Recorded behind it.
        use: The same in counts, with forks and joins.
        notes: The same in words, for `explain()`.
    """

    waits: tuple[torch.Stream | torch.cuda.Event, ...] = ()
    events: tuple[torch.cuda.Event, ...] = ()
    use: StreamUse = StreamUse()
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


_NOTHING = Boundary()


class StreamLedger(Watcher):
    """Forks, joins, waits and events of one capture.

    Args:
        main: The capture stream.
        captures: Asks the driver whether a stream takes part in the capture of the main one. It knows of forks that no
            hook saw, and is asked about streams that are new to the ledger.
    """

    def __init__(self, main: torch.cuda.Stream, *, captures: Callable[[torch.Stream], bool]) -> None:
        self.forks: dict[_Key, Fork] = {}
        self._main = main
        self._main_key = _key(main)
        self._captures = captures
        self._segment: int | None = None
        self._segments = 0
        self._waits: list[_Wait] = []
        self._events: dict[int, _Recorded] = {}
        self._entered: dict[_Key, _Entered] = {}
        self._used_by_break: dict[_Key, torch.Stream] | None = None
        self._forked_here: list[Fork] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch this thread's streams and events."""
        with watched(self):
            yield

    # The moves of the capture.

    def begin_segment(self) -> None:
        """A segment has begun on the capture stream: fork again whatever was forked before."""
        if self.forks:
            with unwatched():
                for fork in self.forks.values():
                    fork.stream.wait_stream(self._main)
        self._segments += 1
        self._segment = self._segments
        # What nobody else holds can never be waited for again.
        if self._events:
            self._events = {key: recorded for key, recorded in self._events.items() if recorded.is_held_elsewhere()}
        self._waits, self._forked_here, self._entered = [], [], {}

    def join_forks(self) -> None:
        """Let the capture stream wait for every fork: a segment is about to end."""
        self._segment = None
        if self.forks:
            with unwatched():
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
        if not (unseen or self.forks or self._waits or self._events):
            return _NOTHING
        recorded_here = [recorded for recorded in self._events.values() if recorded.segment == self._segments]
        alive = [recorded for recorded in recorded_here if recorded.is_held_elsewhere()]
        return Boundary(
            waits=tuple(wait.target for wait in self._waits),
            events=tuple(recorded.event for recorded in alive),
            use=StreamUse(
                forks=len(self._forked_here),
                joins=len(self.forks) + unseen,
                waits=len(self._waits),
                events=len(alive),
            ),
            notes=(
                *(f"forks stream {fork.stream.stream_id:#x} at {fork.line}" for fork in self._forked_here),
                *(f"joins stream {fork.stream.stream_id:#x} at its end" for fork in self.forks.values()),
                *((f"joins {unseen} pieces of side work that no hook saw",) if unseen else ()),
                *(f"waits before it for {_name(wait.target)}, asked for at {wait.line}" for wait in self._waits),
                *(f"records an event behind it, recorded at {recorded.line}" for recorded in alive),
            ),
        )

    def begin_break(self) -> None:
        """A break begins: note the side streams that it uses."""
        self._used_by_break = {}

    def end_break(self) -> tuple[torch.Stream, ...]:
        """The side streams that the break used; the capture stream must wait for them before the next segment."""
        used, self._used_by_break = self._used_by_break or {}, None
        return tuple(used.values())

    # What the hooks tell. Each returns True where torch's own method must not run.

    def on_wait_stream(self, waiter: torch.cuda.Stream, waited: torch.Stream) -> bool:
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

    def on_wait_event(self, waiter: torch.cuda.Stream, event: torch.Event) -> bool:
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
                with unwatched():
                    waiter.wait_stream(self._main)
                self._admit(waiter)
            return True
        if self._is_member(waiter) and isinstance(event, torch.cuda.Event):
            self._waits.append(_Wait(event, user_line()))
            return True
        # A `torch.Event` is recorded where no hook sees it. The driver knows: of this segment, it waits in the graph;
        # of work outside, it refuses the capture.
        return False

    def on_record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> bool:
        """`event.record(stream)`."""
        inside = self._segment is not None and self._is_member(stream)
        self._events[id(event)] = _Recorded(event, self._segment if inside else None, user_line())
        if self._segment is None:
            self._note_break_use(stream)
        return False

    def on_switch(self, left: torch.Stream, entered: torch.Stream) -> None:
        """The current stream changes.

        Raises:
            StreamJoinError: The capture goes on with one of its own streams, and one that was current meanwhile never
                joined it.
        """
        if self._segment is None:
            self._note_break_use(entered)
        elif not self._is_member(entered):
            self._entered.setdefault(_key(entered), _Entered(entered, user_line(), sys.exception()))
        else:
            self.refuse_unjoined()

    def refuse_unjoined(self) -> None:
        """Refuse streams that were made current in the segment and never joined the capture.

        Raises:
            StreamJoinError: There is one.
        """
        entered, self._entered = self._entered, {}
        for stream in entered.values():
            # On its way out of a `with` block the user's own exception comes first; one that was being handled already
            # when the stream was entered is not on its way.
            if not self._is_member(stream.stream) and sys.exception() is stream.handled:
                raise StreamJoinError(
                    f"Stream {stream.stream.stream_id:#x} was made current in a segment at {stream.line}, and left without "
                    "joining the capture.",
                    why="Its work ran once, now, and no replay would run it again.",
                    fix="Fork it: side.wait_stream(torch.cuda.current_stream()) before its work; or do the work in a break.",
                )

    def _note_break_use(self, stream: torch.Stream) -> None:
        if self._used_by_break is not None and (key := _key(stream)) != self._main_key:
            self._used_by_break[key] = stream

    def _admit(self, stream: torch.Stream) -> None:
        if not self._is_known(stream):
            fork = self.forks[_key(stream)] = Fork(stream, user_line())
            self._forked_here.append(fork)

    def _is_member(self, stream: torch.Stream) -> bool:
        if self._is_known(stream):
            return True
        if self._segment is None or not self._captures(stream):
            return False
        self._admit(stream)  # forked where no hook saw it; from here on it is a fork like others
        return True

    def _is_known(self, stream: torch.Stream) -> bool:
        key = _key(stream)
        return key == self._main_key or key in self.forks


def _key(stream: torch.Stream) -> _Key:
    return stream.device_index, stream.stream_id


def _name(target: torch.Stream | torch.cuda.Event) -> str:
    return "an event" if isinstance(target, torch.cuda.Event) else f"stream {target.stream_id:#x}"
