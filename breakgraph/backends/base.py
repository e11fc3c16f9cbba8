"""What a backend must do: record device work, run it again, and say who owns memory."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from breakgraph.streams import StreamUse

__all__ = ["Backend", "Piece", "Segment"]


@attrs.frozen(eq=False)
class Piece:
    """One kernel, copy or operator of a segment, to be run by itself.

    Attributes:
        name: Of the kernel or operator.
        run: Puts it on the backend's `replay_stream` with the arguments of the capture.
        line: Where the model asked for it; empty where the backend does not know.
    """

    name: str
    run: Callable[[], Any]
    line: str = ""


class Segment(abc.ABC):
    """One recorded piece of device work; final classes belong to the backends."""

    @abc.abstractmethod
    def bound(self) -> Callable[[], tuple[int] | None]:
        """A function that runs the recorded work again, on the backend's `replay_stream`. No host sync.

        Made when a graph is first replayed on a stream, so that a replay looks nothing up. It returns None, or a tuple
        whose first item is an error code, 0 where all is well: a raw launch, called without a Python frame around it.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Give the recording back; it cannot be launched afterwards."""

    @abc.abstractmethod
    def describe(self) -> str:
        """What it holds, in a few words, for `explain()`."""

    @abc.abstractmethod
    def kernels(self) -> Mapping[str, int]:
        """How often each kernel, copy or operator occurs, by name, in the order of first use; the counts add up to `size`.

        Cost: on CUDA a question to the driver for each, some microseconds; nothing is kept of it.
        """

    @abc.abstractmethod
    def pieces(self) -> tuple[Piece, ...]:
        """The recorded work piece by piece, in the order of the capture, each a launch of its own: for debugging.

        They read and write what the segment reads and writes, on one stream, so that work which the segment runs at the same
        time runs in turn. Cost: on CUDA a graph for each piece, made anew at each call.
        """

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Count of kernels or operators; a very small one is not worth a launch of its own."""

    @property
    @abc.abstractmethod
    def instantiate_seconds(self) -> float:
        """Host time that making it launchable took, seconds; a part of its capture."""

    @property
    @abc.abstractmethod
    def streams(self) -> StreamUse:
        """Forks, joins, waits and events, in counts."""

    @property
    @abc.abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Forks, joins and waits around it, each with the line that asked for it."""


class Backend(abc.ABC):
    """Records segments on one device. One backend belongs to one pool.

    The order of calls in a capture: `capturing()` entered, then `begin` and `end` in turn, then left; `abort` in
    place of `end` where the body raised.
    """

    name: str
    device: torch.device
    replay_stream: int
    """Handle of the stream that the replay at hand launches on."""

    @abc.abstractmethod
    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Make the capture stream current, ordered after the caller's, and the caller's after it on exit."""

    @abc.abstractmethod
    def capturing(self, generators: Iterable[torch.Generator]) -> AbstractContextManager[None]:
        """Everything that must be in force for the whole capture: stream, hooks."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a segment on this thread."""

    @abc.abstractmethod
    def end(self) -> Segment | None:
        """End the segment and see to it that its work has run exactly once; None where it held no device work."""

    @abc.abstractmethod
    def begin_break(self) -> None:
        """A break begins; its segment has ended and run."""

    @abc.abstractmethod
    def end_break(self) -> Callable[[], None] | None:
        """The break has ended: join the side streams it used. Returns what does the same at a replay, or None."""

    @abc.abstractmethod
    def abort(self) -> bool:
        """End a segment whose body raised, keep nothing of it; what it raises, the capture makes a note of.

        Returns:
            True where the driver had invalidated the capture: the body did what no segment can hold.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give the pool's memory back where no segment lives in it any more; called after segments were reset."""

    @abc.abstractmethod
    def elsewhere(self) -> AbstractContextManager[Any] | None:
        """What a replay must enter where the caller's current device is another one; None where it is not."""

    @abc.abstractmethod
    def replaying(self) -> None:
        """Called at the start of every replay: order it after earlier replays of the pool, whatever their stream."""

    @abc.abstractmethod
    def made_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where the tensor's memory belongs to the pool that segments allocate from."""

    @abc.abstractmethod
    def written_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where a segment of the running capture is known to have written the tensor's memory."""

    @abc.abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or, where a segment made it, a view that does not keep its memory from being reused."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything this pool has launched. Cost: a host sync."""

    @abc.abstractmethod
    def poison(self) -> None:
        """Fill what segments computed with NaN (integers: -1 bits), so that a stale read shows."""

    @abc.abstractmethod
    def poison_unwritten(self) -> None:
        """The same for the proof of a graph, where no tensor of the pool is held: at least what was allocated without values.

        What a break leaves unwritten and a segment reads holds the values of the capture otherwise, and may be right by chance.
        """

    @abc.abstractmethod
    def pool_bytes(self) -> int:
        """Bytes of memory that recorded segments keep."""

    @abc.abstractmethod
    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """(first address, end) of the pool's blocks that a tensor holds now; nothing where blocks are never used again.

        Cost: on CUDA a look at the allocator, tens of microseconds.
        """

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Bytes that the device has free outside this process's allocator; 0 where nothing can tell."""
