"""One instantiated CUDA graph, and what must be done for real around its launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from breakgraph.backends.base import Piece, Segment
from breakgraph.backends.cuda_capture import bound_launch, error_name
from breakgraph.backends.cuda_nodes import node_names, single_nodes
from breakgraph.streams import Boundary, StreamUse

__all__ = ["BoundarySegment", "CudaSegment"]


class LaunchesOn(Protocol):
    """What a segment asks its backend."""

    device: torch.device
    replay_stream: int
    live_segments: weakref.WeakSet[CudaSegment]


class CudaSegment(Segment):
    """One instantiated CUDA graph, and what must be done for real around it.

    Args:
        graph: Captured with `keep_graph=True` and instantiated.
        nodes: Count of its nodes.
        backend: Whose pool it lives in, and which says on which stream to launch.
        boundary: Waits before it, events behind it.
        draws_random_numbers: Its launches must advance the generators, which only `CUDAGraph.replay()` does.
        instantiate_seconds: Host time of its instantiation.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        nodes: int,
        backend: LaunchesOn,
        boundary: Boundary,
        draws_random_numbers: bool,
        instantiate_seconds: float,
    ) -> None:
        self.graph = graph
        self.boundary = boundary
        self.draws_random_numbers = draws_random_numbers
        self._nodes = nodes
        self._instantiate_seconds = instantiate_seconds
        self._backend = backend
        backend.live_segments.add(self)

    def bound(self) -> Callable[[], tuple[int] | None]:
        """Launches raw, or through torch where random numbers are drawn. Host cost on an H200: 2-3 us."""
        launch: Callable[[], tuple[int] | None] = self.graph.replay
        if not self.draws_random_numbers:
            launch = bound_launch(self.graph.raw_cuda_graph_exec(), stream=self._backend.replay_stream)
        boundary, backend = self.boundary, self._backend
        if not boundary.waits and not boundary.events:
            return launch

        def between() -> None:
            stream = torch.cuda.current_stream(backend.device)
            boundary.before(stream)
            status = launch()
            if status is not None and status[0]:
                raise RuntimeError(f"cudaGraphLaunch failed: {error_name(status[0])}")
            boundary.behind(stream)

        return between

    def reset(self) -> None:
        """Destroy the graph and give its share of the pool back to the pool."""
        self.graph.reset()
        self._backend.live_segments.discard(self)

    def describe(self) -> str:
        """The count of graph nodes."""
        return f"{self._nodes} node{'' if self._nodes == 1 else 's'}{', random' if self.draws_random_numbers else ''}"

    def kernels(self) -> Mapping[str, int]:
        """Nodes by the driver's name of the kernel, or by type."""
        return node_names(self.graph.raw_cuda_graph())

    def pieces(self) -> tuple[Piece, ...]:
        """A graph for each node; where random numbers are drawn, their state stays that of the last launch."""
        nodes = single_nodes(self.graph.raw_cuda_graph(), stream=lambda: self._backend.replay_stream)
        boundary, device = self.boundary, self._backend.device
        if not boundary.waits and not boundary.events:
            return nodes
        before = Piece("waits before it", lambda: boundary.before(torch.cuda.current_stream(device)))
        behind = Piece("events behind it", lambda: boundary.behind(torch.cuda.current_stream(device)))
        return (before, *nodes, behind)

    @property
    def size(self) -> int:
        """The count of graph nodes."""
        return self._nodes

    @property
    def instantiate_seconds(self) -> float:
        """Host time of its instantiation."""
        return self._instantiate_seconds

    @property
    def streams(self) -> StreamUse:
        """Forks, joins, waits and events, in counts."""
        return self.boundary.use

    @property
    def notes(self) -> tuple[str, ...]:
        """Forks, joins, waits and events, each with its line."""
        return self.boundary.notes


class BoundarySegment(Segment):
    """A segment without work of its own whose waits and events must happen all the same.

    Args:
        boundary: They.
        device: Device of the replay's stream.
    """

    def __init__(self, boundary: Boundary, *, device: torch.device) -> None:
        self.boundary = boundary
        self._device = device

    def bound(self) -> Callable[[], None]:
        """Waits and records on the current stream."""

        def run() -> None:
            stream = torch.cuda.current_stream(self._device)
            self.boundary.before(stream)
            self.boundary.behind(stream)

        return run

    def reset(self) -> None:
        """Nothing is held."""

    def describe(self) -> str:
        """That there is no work."""
        return "no work"

    def kernels(self) -> Mapping[str, int]:
        """None."""
        return {}

    def pieces(self) -> tuple[Piece, ...]:
        """Waits and records only."""
        return (Piece("waits and events", self.bound()),)

    @property
    def size(self) -> int:
        """None."""
        return 0

    @property
    def instantiate_seconds(self) -> float:
        """None."""
        return 0.0

    @property
    def streams(self) -> StreamUse:
        """Waits and events, in counts."""
        return self.boundary.use

    @property
    def notes(self) -> tuple[str, ...]:
        """Waits and events, each with its line."""
        return self.boundary.notes
