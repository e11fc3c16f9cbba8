"""Segments as `torch.cuda.CUDAGraph`s in one memory pool, captured on one stream."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from breakgraph.aliases import borrowed_view
from breakgraph.backends.base import Backend, Segment
from breakgraph.backends.cuda_capture import (
    captures_with,
    join_leaves,
    pool_handle_kept,
)
from breakgraph.backends.cuda_pool import CudaPool
from breakgraph.backends.cuda_segment import BoundarySegment, CudaSegment
from breakgraph.call_site import user_line
from breakgraph.errors import CaptureIllegalError, InternalError
from breakgraph.stream_hooks import unwatched
from breakgraph.streams import StreamLedger

__all__ = ["CudaBackend"]


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
        self._model_stream: torch.cuda.Stream | None = None

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
        self._model_stream = None
        with self.on_capture_stream():
            try:
                # cuBLAS cannot be initialised while a stream is captured, and its workspace for the stream must not lie in
                # the pool: where no warm-up has made both, this does. A microsecond otherwise.
                torch.cuda.current_blas_handle()
                self.pool.hold()
                with self._ledger.hooked():
                    yield
            finally:
                self._last_stream = self.stream
                self.replay_stream = self.stream.cuda_stream

    def begin(self) -> None:
        """Begin a segment: the stream is captured and allocations of this thread go to the pool."""
        self.pool.grows()
        with unwatched():  # what a break has left current, the model goes on with
            self._model_stream = self._leave_side_stream() or self._model_stream
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators[1:]:
            graph.register_generator_state(generator)
        # thread_local: another thread's cudaMalloc or event query must not invalidate this capture.
        with pool_handle_kept(self.pool.handle):
            graph.capture_begin(pool=self.pool.handle, capture_error_mode="thread_local")
        self._current = graph
        self._ledger.begin_segment()
        if self._model_stream is not None:
            with unwatched():
                torch.cuda.set_stream(self._model_stream)

    def end(self) -> Segment | None:
        """Join the forks, end the segment, and launch it once, since a capture runs nothing."""
        graph = self._current
        if graph is None:
            raise InternalError("A segment ended that had not begun.")
        with unwatched():
            self._model_stream = self._leave_side_stream()
        self._ledger.refuse_unjoined()
        self._ledger.join_forks()
        unseen, nodes = join_leaves(self.stream.cuda_stream)
        self._current = None
        try:
            if nodes:
                graph.capture_end()
            else:
                _end_quietly(graph)
        except Exception as error:
            self.pool.abandon()
            raise CaptureIllegalError(
                f"A segment that ends at {user_line()} had been invalidated: {_first_line(error)}",
                why="Something in it cannot be captured, such as a host read or a synchronisation, and the error that it raised "
                "there was swallowed.",
                fix="Let errors inside a capture through: the first one names its line. Mark the function that does it with "
                "@eager_on_graph.",
            ) from error
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

    def _leave_side_stream(self) -> torch.cuda.Stream | None:
        """Make the capture stream current, and return the other one that was, for the model to go on with.

        A segment ends on the stream that it began on, and a break runs on the capture stream, as it does at a replay.
        """
        current = torch.cuda.current_stream(self.device)
        if current.cuda_stream == self.stream.cuda_stream:
            return None
        torch.cuda.set_stream(self.stream)
        return current

    def elsewhere(self) -> AbstractContextManager[Any] | None:
        """A context that makes the device current, where another one is."""
        index = self.device.index
        return None if torch._C._cuda_getDevice() == index else torch.cuda.device(index)

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

    def poison_unwritten(self) -> None:
        """Fill the pool: every replay writes what it reads of it."""
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _join(streams: tuple[torch.Stream, ...], device: torch.device) -> None:
    current = torch.cuda.current_stream(device)
    for stream in streams:
        current.wait_stream(stream)


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture; torch warns about an empty graph, which is a usual thing here and is asked for by node count."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
