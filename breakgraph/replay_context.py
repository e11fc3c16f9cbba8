"""What a marked function can ask about the step it runs in: live data, row counts, phase, scratch.

One thread has at most one `Frame`: the thing that marked functions report to. A capture, a replay and
an eager step each install their own; with none installed a marked function is a plain call. The frame is
the only thread-local of the package, set once per step and never per break.
"""

from __future__ import annotations

import abc
import enum
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from breakgraph.errors import CaptureIllegalError, LiveDataError

__all__ = [
    "Around",
    "Frame",
    "MarkedCall",
    "Phase",
    "ReplayContext",
    "current_frame",
    "current_replay",
    "eager_step",
    "install",
    "observed_calls",
]

T = TypeVar("T")

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class Phase(enum.Enum):
    """What kind of step a marked function runs in."""

    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


class ReplayContext:
    """The facts of the step that is running.

    Attributes:
        live: Live data of this step, by name.
        valid_rows: Real rows of this step; None when every row is valid.
        padded_rows: Rows that the segments work on (the captured length of the token axis); None when unknown.
        phase: Capture, replay or eager step.
        scratch: A dict for values that one break hands to a later break of the same step; emptied at each step.
        token: Another number at each step: tells two steps apart.
    """

    __slots__ = ("_once", "live", "padded_rows", "phase", "scratch", "token", "valid_rows")

    def __init__(self, *, phase: Phase, live: Mapping[str, Any] = _EMPTY, padded_rows: int | None = None) -> None:
        self.phase = phase
        self.live = live
        self.valid_rows: int | None = None
        self.padded_rows = padded_rows
        self.scratch: dict[str, Any] = {}
        self.token = 0
        self._once: dict[Hashable, Any] = {}

    def next_step(self) -> None:
        """A step begins: empty what belongs to the last one."""
        self.token += 1
        self.scratch.clear()
        self._once.clear()

    def once_per_replay(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make()` returns, called by the first break of a step that asks and kept for the others.

        Args:
            key: Names the value within the step.
            make: Makes it; host work that every layer would otherwise repeat.
        """
        if key not in self._once:
            self._once[key] = make()
        value: T = self._once[key]
        return value

    def __repr__(self) -> str:
        return (
            f"ReplayContext(phase={self.phase.value}, live={sorted(self.live)}, "
            f"valid_rows={self.valid_rows}, padded_rows={self.padded_rows})"
        )


class MarkedCall(Protocol):
    """What a frame needs of a marked function; `eager_on_graph.BreakSpec` is the one implementation."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as if it were not marked."""
        ...

    def call_eagerly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, context: ReplayContext, around: Around | None
    ) -> Any:
        """Call the function with the semantics of a replay: live data, narrowed rows, zeroed tails."""
        ...


Around = Callable[["MarkedCall", tuple[Any, ...], dict[str, Any], ReplayContext], Any]
"""Called as `around(call, args, kwargs, context)` with what the function receives; returns what the function returns."""


class Frame(abc.ABC):
    """What the marked functions of one thread report to while a step runs."""

    context: ReplayContext

    @property
    def is_in_segment(self) -> bool:
        """True while device work of this thread is being recorded."""
        return False

    @property
    def is_in_break(self) -> bool:
        """True in an eager step while a marked function runs, its rows being cut before and padded behind it included."""
        return False

    @abc.abstractmethod
    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a marked function and return what the caller goes on with."""

    @abc.abstractmethod
    def on_split(self) -> None:
        """Handle `break_graph()`."""


class _Local(threading.local):
    frame: Frame | None = None
    around: Around | None = None


_local = _Local()


def current_frame() -> Frame | None:
    """The frame of this thread, or None outside every step."""
    return _local.frame


def install(frame: Frame | None) -> Frame | None:
    """Make `frame` this thread's frame and return the previous one, which the caller must put back."""
    previous = _local.frame
    _local.frame = frame
    return previous


def current_replay() -> ReplayContext:
    """The context of the capture, replay or eager step that this thread is in.

    Raises:
        LiveDataError: Outside every step.
    """
    frame = _local.frame
    if frame is None:
        raise LiveDataError(
            "current_replay() was called outside a capture, a replay and an eager step.",
            why="There is no live data here, and a made-up value would hide that this code runs elsewhere than you think.",
            fix="Call it inside a function marked with @eager_on_graph, or wrap the eager run in eager_step(live=...).",
        )
    return frame.context


class _EagerFrame(Frame):
    """Marked functions behave as in a replay; nothing is recorded. A marked function inside one is a plain call."""

    def __init__(self, context: ReplayContext) -> None:
        self.context = context
        self._in_break = False

    @property
    def is_in_break(self) -> bool:
        """True while a marked function runs."""
        return self._in_break

    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_break:
            return call.call(args, kwargs)
        self._in_break = True
        try:
            return call.call_eagerly(args, kwargs, context=self.context, around=_local.around)
        finally:
            self._in_break = False

    def on_split(self) -> None:
        return None


@contextmanager
def observed_calls(around: Around) -> Iterator[None]:
    """Let something look at the breaks of this thread's eager steps inside a `with` block.

    Args:
        around: Calls them; see `Around`.

    Yields:
        Nothing.
    """
    previous, _local.around = _local.around, around
    try:
        yield
    finally:
        _local.around = previous


@contextmanager
def eager_step(
    live: Mapping[str, Any] | None = None, *, valid_rows: int | None = None, padded_rows: int | None = None
) -> Iterator[ReplayContext]:
    """Run marked functions with the semantics of a replay, and no graph: warm-up, verification, eager fallback.

    Live parameters are taken from `live`, rows parameters arrive narrowed to `valid_rows`, tails are zeroed,
    returned rows come back padded to the captured length.

    Args:
        live: Live data by name; a live parameter of a marked function that is missing here is an error.
        valid_rows: Real rows; None means every row.
        padded_rows: Length of the token axis, needed only by a break that returns rows and receives none.

    Yields:
        The context, the same object that `current_replay()` returns inside.

    Raises:
        LiveDataError: `valid_rows` is negative or above `padded_rows`.
    """
    check_valid_rows(valid_rows, padded_rows=padded_rows, where="eager_step")
    check_live(live, where="eager_step")
    outer = current_frame()
    if outer is not None and outer.is_in_segment:
        raise CaptureIllegalError(
            "eager_step() was entered inside a segment of a capture.",
            why="Its breaks would be recorded into the segment, with the live data of the capture for ever.",
            fix="Enter it outside the capture, or inside a function marked with @eager_on_graph.",
        )
    context = ReplayContext(phase=Phase.EAGER, live=dict(live or {}), padded_rows=padded_rows)
    context.valid_rows = valid_rows
    previous = install(_EagerFrame(context))
    try:
        yield context
    finally:
        install(previous)


def check_valid_rows(valid_rows: int | None, *, padded_rows: int | None, where: str) -> None:
    """Refuse a row count that no captured buffer has room for."""
    if valid_rows is None:
        return
    whole = isinstance(valid_rows, int) and not isinstance(valid_rows, bool)
    if not whole or valid_rows < 0 or (padded_rows is not None and valid_rows > padded_rows):
        most = "of at least 0" if padded_rows is None else f"from 0 to {padded_rows}, the captured rows"
        raise LiveDataError(
            f"{where}: valid_rows is {valid_rows!r}; it must be an integer {most}.",
            why="It says how many rows are real; rows above the captured length have no place in the static buffers.",
            fix="Use a graph of a larger bucket, or run this step eagerly.",
        )


def check_live(live: object, *, where: str) -> None:
    """Refuse live data that is no mapping from names."""
    if live is not None and not isinstance(live, Mapping):
        raise LiveDataError(
            f"{where}: live is a {type(live).__name__}; expected a mapping from names to values.",
            why="Breaks ask for live data by name.",
            fix="Pass live={'metadata': metadata}.",
        )
