"""What the graphs of one runner share: pool, capture stream, bridges, and the rule of one replay at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from breakgraph.backends import Backend, make_backend
from breakgraph.bridge_arena import BridgeArena
from breakgraph.errors import ConcurrentReplayError

__all__ = ["GraphPool"]


class GraphPool:
    """Memory and stream shared by several graphs whose replays never overlap.

    Args:
        backend: `"auto"`, `"cuda"` or `"emulated"`.
        device: Device of the graphs; the current CUDA device or the CPU by default.
        stream: Capture stream (CUDA only); a new one by default.
        poison: Debug aid: before each replay everything that segments computed is filled with NaN, so that a step
            which reads what the replay has not yet written shows. Costs a host sync and a fill of the pool.

    Raises:
        ConfigError: The backend cannot be had here.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        device: torch.device | None = None,
        stream: torch.cuda.Stream | None = None,
        poison: bool = False,
    ) -> None:
        self.backend: Backend = make_backend(backend, device=device, stream=stream)
        self.arena = BridgeArena(self.backend.device)
        self.poison = poison
        self._lock = threading.Lock()
        self._user: object = None

    @property
    def device(self) -> torch.device:
        """Device of the graphs."""
        return self.backend.device

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Make the capture stream current, for warm-up; ordered with the caller's stream. Nothing on a CPU."""
        return self.backend.on_capture_stream()

    @contextmanager
    def used_by(self, what: object) -> Iterator[None]:
        """Hold the pool for one capture or replay.

        Raises:
            ConcurrentReplayError: Another thread, or an outer replay of this one, holds it.
        """
        self.acquire(what)
        try:
            yield
        finally:
            self.release()

    def acquire(self, what: object) -> None:
        """Take the pool for `what`, or refuse; the plain form of `used_by`, for the replay's hot path."""
        if not self._lock.acquire(blocking=False):
            raise ConcurrentReplayError(
                f"{_use(what)} was started while {_use(self._user)} was using the same pool.",
                why="Graphs of one pool share memory, so both would read and write each other's temporaries.",
                fix="Finish one before the other, or give each thread a graph with a pool of its own.",
            )
        self._user = what

    def release(self) -> None:
        """Give the pool back."""
        self._lock.release()

    def __repr__(self) -> str:
        return f"GraphPool({self.backend.name} on {self.device}, {self.arena.nbytes} bridge bytes)"


def _use(what: object) -> str:
    return what if isinstance(what, str) else f"a replay of {what}"
