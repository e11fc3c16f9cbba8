"""Segments as `torch.cuda.CUDAGraph`s in one memory pool, captured on one stream."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from breakgraph.aliases import borrowed_view
from breakgraph.backends.base import Backend, Segment
from breakgraph.backends.cuda_capture import (
    bound_launch,
    captures_with,
    error_name,
    join_leaves,
    pool_handle_kept,
)
from breakgraph.backends.cuda_pool import CudaPool
from breakgraph.errors import InternalError
from breakgraph.streams import Boundary, StreamLedger

__all__ = ["CudaBackend", "CudaSegment"]


class CudaSegment(Segment):
    """One instantiated CUDA graph, and what must be done for real around it.

    Args:
        graph: Captured with `keep_graph=True` and instantiated.
        nodes: Count of its nodes.
        backend: Whose pool it lives in.
        boundary: Waits before it, events behind it.
        draws_random_numbers: Its launches must advance the generators, which only `CUDAGraph.replay()` does.
        instantiate_seconds: Host time of its instantiation.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        nodes: int,
        backend: CudaBackend,
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
        return f"{self._nodes} nodes{', random' if self.draws_random_numbers else ''}"

    @property
    def size(self) -> int:
        """The count of graph nodes."""
        return self._nodes

    @property
    def instantiate_seconds(self) -> float:
        """Host time of its instantiation."""
        return self._instantiate_seconds

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
    def instantiate_seconds(self) -> float:
        """None."""
        return 0.0

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
        pool: Where the segments allocate.
        live_segments: Segments that were not reset.
        replay_stream: Handle of the stream that the replay at hand launches on.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = stream if stream is not None else torch.cuda.Stream(device)
        self.pool = CudaPool(device)
        self.live_segments: weakref.WeakSet[CudaSegment] = weakref.WeakSet()
        self.replay_stream: int = self.stream.cuda_stream
        self._last_stream: torch.cuda.Stream | None = None
        self._current: torch.cuda.CUDAGraph | None = None
        self._ledger = StreamLedger(self.stream, captures=self._captures)
        self._generators: tuple[torch.Generator, ...] = ()

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
        self._ledger = StreamLedger(self.stream, captures=self._captures)
        with self.on_capture_stream():
            try:
                self.pool.hold()
                with self._ledger.hooked():
                    yield
            finally:
                self._last_stream = self.stream
                self.replay_stream = self.stream.cuda_stream

    def begin(self) -> None:
        """Begin a segment: the stream is captured and allocations of this thread go to the pool."""
        self.pool.grows()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators[1:]:
            graph.register_generator_state(generator)
        # thread_local: another thread's cudaMalloc or event query must not invalidate this capture.
        with pool_handle_kept(self.pool.handle):
            graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
        self._current = graph
        self._ledger.begin_segment()

    def end(self) -> Segment | None:
        """Join the forks, end the segment, and launch it once, since a capture runs nothing."""
        graph = self._current
        if graph is None:
            raise InternalError("A segment ended that had not begun.")
        self._ledger.join_forks()
        unseen, nodes = join_leaves(self.stream.cuda_stream)
        self._current = None
        try:
            if nodes:
                graph.capture_end()
            else:
                _end_quietly(graph)
        except Exception:
            self.pool.abandon()
            raise
        boundary = self._ledger.boundary(unseen=unseen)
        if not nodes:
            graph.reset()
            if not boundary.waits and not boundary.events:
                return None
            alone = BoundarySegment(boundary, device=self.device)
            alone.bound()()
            return alone
        begin = time.perf_counter()
        try:
            graph.instantiate()
        except Exception:
            graph.reset()
            raise
        taken = time.perf_counter() - begin
        before = [generator.get_offset() for generator in self._generators]
        boundary.before(self.stream)
        graph.replay()
        boundary.behind(self.stream)
        random = before != [generator.get_offset() for generator in self._generators]
        return CudaSegment(
            graph,
            nodes=nodes,
            backend=self,
            boundary=boundary,
            draws_random_numbers=random,
            instantiate_seconds=taken,
        )

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

    def abort(self) -> bool:
        """End the capture of a segment whose body raised; an error of its own must not replace the body's."""
        self._ledger.abandon()
        graph, self._current = self._current, None
        if graph is None:
            return False
        # The body may have left a side stream current; the capture ends on the one where it began.
        torch.cuda.set_stream(self.stream)
        with contextlib.suppress(Exception):
            self._ledger.join_forks()
            join_leaves(self.stream.cuda_stream)
        try:
            _end_quietly(graph)
            graph.reset()
        except Exception:
            self.pool.abandon()
            return True
        return False

    def _captures(self, stream: torch.Stream) -> bool:
        # A `torch.Stream` has no handle to give.
        same = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        return captures_with(same.cuda_stream, main=self.stream.cuda_stream)

    def release(self) -> None:
        """Give the pool up where no segment is left, so that `torch.cuda.empty_cache()` can free it."""
        if not self.live_segments:
            self.pool.give_up()

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
        """True where the tensor's storage lies in the pool. Cost: a bisection, or a look at the allocator."""
        return self.pool.holds(tensor)

    def written_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """Never known: a kernel does not say what it writes."""
        return False

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view that owns nothing where a segment made the tensor, else the tensor."""
        return borrowed_view(tensor) if self.made_by_a_segment(tensor) else tensor

    def synchronize(self) -> None:
        """Wait for the stream that launched last."""
        if self._last_stream is not None:
            self._last_stream.synchronize()

    def poison(self) -> None:
        """Fill the pool with 0xFF bytes: NaN in every floating dtype, -1 in signed integers."""
        self.pool.poison()

    def pool_bytes(self) -> int:
        """Bytes the pool has reserved."""
        return self.pool.nbytes

    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """Blocks of the pool that a tensor holds now."""
        return self.pool.live_blocks()

    def free_bytes(self) -> int:
        """Free bytes of the device plus what torch has reserved: what is missing afterwards, graphs have taken."""
        # Not `memory_reserved`: it flattens every statistic there is to return this one, 114 us.
        reserved: int = torch.cuda.memory_stats_as_nested_dict(self.device)["reserved_bytes"]["all"]["current"]
        return torch.cuda.mem_get_info(self.device)[0] + reserved


def _join(streams: tuple[torch.Stream, ...], device: torch.device) -> None:
    current = torch.cuda.current_stream(device)
    for stream in streams:
        current.wait_stream(stream)


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture; torch warns about an empty graph, which is a usual thing here and is asked for by node count."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
