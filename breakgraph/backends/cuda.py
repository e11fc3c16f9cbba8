"""Segments as `torch.cuda.CUDAGraph`s in one memory pool, captured on one stream."""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from breakgraph.aliases import borrowed_view
from breakgraph.backends.base import Backend, Segment
from breakgraph.backends.cuda_capture import (
    bound_launch,
    error_name,
    fill_bytes,
    join_leaves,
    node_count,
    pool_handle_kept,
)
from breakgraph.errors import InternalError
from breakgraph.streams import Boundary, StreamLedger
from breakgraph.structure import storage_address

__all__ = ["CudaBackend", "CudaSegment"]

_LOG = logging.getLogger(__name__)


class CudaSegment(Segment):
    """One instantiated CUDA graph, and what must be done for real around it.

    Args:
        graph: Captured with `keep_graph=True` and instantiated.
        nodes: Count of its nodes.
        backend: Whose pool it lives in.
        boundary: Waits before it, events behind it.
        draws_random_numbers: Its launches must advance the generators, which only `CUDAGraph.replay()` does.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        nodes: int,
        backend: CudaBackend,
        boundary: Boundary,
        draws_random_numbers: bool,
    ) -> None:
        self.graph = graph
        self.boundary = boundary
        self.draws_random_numbers = draws_random_numbers
        self._nodes = nodes
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
        return f"{self._nodes} nodes{', random' if self.draws_random_numbers else ''}"

    @property
    def size(self) -> int:
        """The count of graph nodes."""
        return self._nodes

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

    @property
    def size(self) -> int:
        """None."""
        return 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Waits and events, each with its line."""
        return self.boundary.notes


class CudaBackend(Backend):
    """Captures segments on one stream into one pool.

    Args:
        device: Device of the graphs.
        stream: Capture stream; a new one by default. Never the default stream, which cannot be captured.

    Attributes:
        handle: The pool; another one after a capture that the driver invalidated and torch could not clean up.
        lost_bytes: What torch could not give back after such captures.
        live_segments: Segments that were not reset.
        replay_stream: Handle of the stream that the replay at hand launches on.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = stream if stream is not None else torch.cuda.Stream(device)
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.lost_bytes = 0
        self.live_segments: weakref.WeakSet[CudaSegment] = weakref.WeakSet()
        self.replay_stream: int = self.stream.cuda_stream
        self._last_stream: torch.cuda.Stream | None = None
        self._current: torch.cuda.CUDAGraph | None = None
        self._ledger = StreamLedger(self.stream)
        self._generators: tuple[torch.Generator, ...] = ()
        self._ranges: list[tuple[int, int]] = []
        self._anchor: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Make the capture stream current; it waits for the caller's, and the caller's for it on exit."""
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            self.stream.wait_stream(caller)
            torch.cuda.set_stream(self.stream)
            try:
                yield
            finally:
                # Not `torch.cuda.stream`: a body that failed may have left another stream current.
                torch.cuda.set_stream(caller)
                caller.wait_stream(self.stream)

    @contextlib.contextmanager
    def capturing(self, generators: Iterable[torch.Generator]) -> Iterator[None]:
        """Capture stream and stream hooks for the whole capture."""
        self._generators = (torch.cuda.default_generators[self.device.index], *generators)
        self._ledger = StreamLedger(self.stream)
        with self.on_capture_stream():
            try:
                self._hold_pool()
                with self._ledger.hooked():
                    yield
            finally:
                self._last_stream = self.stream
                self.replay_stream = self.stream.cuda_stream

    def begin(self) -> None:
        """Begin a segment: the stream is captured and allocations of this thread go to the pool."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators[1:]:
            graph.register_generator_state(generator)
        # thread_local: another thread's cudaMalloc or event query must not invalidate this capture.
        with pool_handle_kept(self.handle):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        self._current = graph
        self._ledger.begin_segment()

    def end(self) -> Segment | None:
        """Join the forks, end the segment, and launch it once, since a capture runs nothing."""
        graph = self._current
        if graph is None:
            raise InternalError("A segment ended that had not begun.")
        self._ledger.join_forks()
        unseen = join_leaves(self.stream.cuda_stream)
        self._current = None
        try:
            _end_quietly(graph)
        except Exception:
            self._recover(graph)
            raise
        # No segment runs while a break does, so the ranges hold for all that the next break receives.
        self._ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in self._pool_segments())
        boundary = self._ledger.boundary(unseen=unseen)
        nodes = node_count(graph.raw_cuda_graph())
        if not nodes:
            graph.reset()
            if not boundary.waits and not boundary.events:
                return None
            alone = BoundarySegment(boundary, device=self.device)
            alone.bound()()
            return alone
        try:
            graph.instantiate()
        except Exception:
            graph.reset()
            raise
        before = [generator.get_offset() for generator in self._generators]
        boundary.before(self.stream)
        graph.replay()
        boundary.behind(self.stream)
        random = before != [generator.get_offset() for generator in self._generators]
        return CudaSegment(graph, nodes=nodes, backend=self, boundary=boundary, draws_random_numbers=random)

    def begin_break(self) -> None:
        """Note the side streams that the break uses."""
        self._ledger.begin_break()

    def end_break(self) -> Callable[[], None] | None:
        """Let the capture stream wait for the side streams of the break."""
        used = self._ledger.end_break()
        if not used:
            return None
        join = functools.partial(_join, used, self.device)
        join()
        return join

    def abort(self) -> None:
        """End the capture of a segment whose body raised; an error of its own must not replace the body's."""
        self._ledger.abandon()
        graph, self._current = self._current, None
        if graph is None:
            return
        # The body may have left a side stream current; the capture ends on the one where it began.
        torch.cuda.set_stream(self.stream)
        with contextlib.suppress(Exception):
            self._ledger.join_forks()
            join_leaves(self.stream.cuda_stream)
        try:
            _end_quietly(graph)
            graph.reset()
        except Exception:
            self._recover(graph)

    def release(self) -> None:
        """Give the pool up where no segment is left, so that `torch.cuda.empty_cache()` can free it.

        Later captures go to a pool of a new handle: torch refuses one that was given up.
        """
        if not self.live_segments and self._anchor is not None:
            self._anchor.reset()
            self._anchor = None
            self.handle = torch.cuda.graph_pool_handle()
            self._ranges = []

    def _hold_pool(self) -> None:
        """Keep the pool in use by a one-kernel graph for as long as it has segments.

        Without it the pool is given up when its last graph is reset (an empty segment may be its only one), and torch
        refuses to capture into a pool that was given up while tensors in it are still alive.
        """
        if self._anchor is None:
            self._anchor = self._one_kernel()

    def _one_kernel(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with pool_handle_kept(self.handle):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        try:
            torch.zeros(1, device=self.device)
        except BaseException:
            # Out of memory: the stream must not stay in capture.
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Clean up after a capture that the driver invalidated, which torch does not.

        `capture_end` throws before it takes the pool out of recording and the generators out of capture mode. On torch
        2.11 the pool cannot be captured into again, also not after `_cuda_endAllocateToPool` and `_cuda_releasePool`
        (tried: "already recording to mempool_id"), so later captures get a new pool, and what the old one holds is
        counted as lost. A capture of one kernel into the new pool brings the generators back.
        """
        del graph
        torch.cuda.synchronize(self.device)
        lost = self.pool_bytes()
        self.lost_bytes += lost
        _LOG.warning("a capture was invalidated by the driver; torch cannot give back %d bytes of its pool", lost)
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = None
        self._ranges = []
        with contextlib.suppress(Exception):
            self._hold_pool()

    def replaying(self) -> None:
        """Launch on the caller's current stream, after what another stream still runs of this pool."""
        # The raw handle costs a tenth of a microsecond, a Stream object three.
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        last = self._last_stream
        if last is None or last.cuda_stream != raw:
            stream = torch.cuda.current_stream(self.device)
            if last is not None:
                stream.wait_stream(last)
            self._last_stream = stream
        self.replay_stream = raw

    def made_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where the tensor's storage lies in the pool as it was when the last segment ended. Cost: a bisection."""
        address = storage_address(tensor) if tensor.device == self.device and tensor.numel() else 0
        position = bisect.bisect_right(self._ranges, (address, 1 << 63)) - 1
        return position >= 0 and self._ranges[position][0] <= address < self._ranges[position][1]

    def written_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """Never known: a kernel does not say what it writes."""
        return False

    def _pool_segments(self) -> list[dict[str, Any]]:
        snapshot: Any = torch.cuda.memory_snapshot
        options = {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}
        with pool_handle_kept(self.handle):
            found: list[dict[str, Any]] = snapshot(mempool_id=self.handle, **options)
        return found

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view that owns nothing where a segment made the tensor, else the tensor."""
        return borrowed_view(tensor) if self.made_by_a_segment(tensor) else tensor

    def synchronize(self) -> None:
        """Wait for the stream that launched last."""
        if self._last_stream is not None:
            self._last_stream.synchronize()

    def poison(self) -> None:
        """Fill the pool with 0xFF bytes: NaN in every floating dtype, -1 in signed integers."""
        torch.cuda.synchronize(self.device)
        for segment in self._pool_segments():
            fill_bytes(segment["address"], segment["total_size"])
        torch.cuda.synchronize(self.device)

    def pool_bytes(self) -> int:
        """Bytes the pool has reserved."""
        return sum(int(segment["total_size"]) for segment in self._pool_segments())

    def free_bytes(self) -> int:
        """Free bytes of the device plus what torch has reserved: what is missing afterwards, graphs have taken."""
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)


def _join(streams: tuple[torch.cuda.Stream, ...], device: torch.device) -> None:
    current = torch.cuda.current_stream(device)
    for stream in streams:
        current.wait_stream(stream)


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture; torch warns about an empty graph, which is a usual thing here and is asked for by node count."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
