"""The stream ledger: which side streams took part in a capture, so that none of their work is lost at a break.

A capture spreads to a stream that waits for a capturing one, and a segment can only end when every such stream was
joined again. A model forks and joins where it likes, also around a break. So the ledger joins every fork when a segment
ends and forks it again when the next one begins; the model's own join then finds the stream in the capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from breakgraph.call_site import user_line
from breakgraph.errors import StreamJoinError

__all__ = ["Fork", "StreamLedger"]


@attrs.frozen(eq=False)
class Fork:
    """A side stream that joined the capture, and the line that forked it."""

    stream: torch.cuda.Stream
    line: str


class _Active(threading.local):
    ledger: StreamLedger | None = None


_active = _Active()
_hook_lock = threading.Lock()
_hook_users = 0
_original: Callable[[Any, Any], None] | None = None


class StreamLedger:
    """Forks of one capture.

    Args:
        main: The capture stream.
    """

    __slots__ = ("_main", "forks", "recording")

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self.forks: dict[int, Fork] = {}
        self.recording = False

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch this thread's waits; the hook is shared by threads, counted, and taken off by the last one."""
        _install_hook()
        previous, _active.ledger = _active.ledger, self
        try:
            yield
        finally:
            _active.ledger = previous
            _remove_hook()

    def before_wait(self, waiter: torch.cuda.Stream, waited: torch.cuda.Stream) -> None:
        """Note `waiter.wait_stream(waited)`.

        Raises:
            StreamJoinError: A capturing stream would wait for one that is not part of the capture.
        """
        if self._is_member(waited):
            if not self._is_member(waiter):
                self.forks[waiter.cuda_stream] = Fork(waiter, user_line())
        elif self._is_member(waiter):
            raise StreamJoinError(
                f"A segment waits for stream {waited.cuda_stream:#x}, not part of the capture, at {user_line()}.",
                why="A graph cannot hold a wait for work outside it; the replays would run without that wait.",
                fix="Fork it first (side.wait_stream(torch.cuda.current_stream())), or wait inside a break.",
            )

    def join_all(self) -> None:
        """Let the capture stream wait for every fork: before a segment ends."""
        self.recording = False
        for fork in self.forks.values():
            self._main.wait_stream(fork.stream)

    def fork_all(self) -> None:
        """Let every fork wait for the capture stream again: after a segment began."""
        for fork in self.forks.values():
            fork.stream.wait_stream(self._main)
        self.recording = True

    def _is_member(self, stream: torch.cuda.Stream) -> bool:
        return stream.cuda_stream == self._main.cuda_stream or stream.cuda_stream in self.forks


def _install_hook() -> None:
    global _hook_users, _original
    with _hook_lock:
        _hook_users += 1
        if _hook_users > 1:
            return
        _original = torch.cuda.Stream.wait_stream
        original = _original

        def wait_stream(self: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
            ledger = _active.ledger
            if ledger is not None and ledger.recording:
                ledger.before_wait(self, stream)
            original(self, stream)

        torch.cuda.Stream.wait_stream = wait_stream  # type: ignore[method-assign,assignment]


def _remove_hook() -> None:
    global _hook_users, _original
    with _hook_lock:
        _hook_users -= 1
        if _hook_users == 0 and _original is not None:
            torch.cuda.Stream.wait_stream = _original  # type: ignore[method-assign,assignment]
            _original = None
