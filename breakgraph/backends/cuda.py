"""Segments as `torch.cuda.CUDAGraph`s in one memory pool, captured on one stream."""

from __future__ import annotations

import bisect
import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from breakgraph.aliases import borrowed_view
from breakgraph.backends.base import Backend, Segment
from breakgraph.errors import ConfigError, InternalError
from breakgraph.streams import StreamLedger

try:
    from cuda.bindings import runtime as cudart
except ImportError as error:  # pragma: no cover - a CPU machine never imports this module
    raise ConfigError(
        f"CUDA graphs need the package cuda-bindings ({error}).",
        why="Nodes of a captured segment are counted and segments are launched through it.",
        fix='Install it: pip install "breakgraph[cuda]".',
    ) from error

__all__ = ["CudaBackend", "CudaSegment"]


class CudaSegment(Segment):
    """One instantiated CUDA graph.

    Args:
        graph: Captured with `keep_graph=True` and instantiated.
        nodes: Count of its nodes.
        backend: Whose pool it lives in.
        draws_random_numbers: Its launches must advance the generators, which only `CUDAGraph.replay()` does.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, *, nodes: int, backend: CudaBackend, draws_random_numbers: bool
    ) -> None:
        self.graph = graph
        self.nodes = nodes
        self.backend = backend
        self.draws_random_numbers = draws_random_numbers
        self._executable = cudart.cudaGraphExec_t(graph.raw_cuda_graph_exec())

    def launch(self) -> None:
        """Launch on the stream of the replay. Cost on an H200's host: 2-3 us, no sync."""
        if self.draws_random_numbers:
            self.graph.replay()
            return
        (status,) = cudart.cudaGraphLaunch(self._executable, self.backend.replay_stream)
        if status != cudart.cudaError_t.cudaSuccess:
            raise RuntimeError(f"cudaGraphLaunch failed: {status.name}")

    def reset(self) -> None:
        """Destroy the graph and give its share of the pool back."""
        self.graph.reset()

    def describe(self) -> str:
        """The count of graph nodes."""
        return f"{self.nodes} nodes{', random' if self.draws_random_numbers else ''}"


class CudaBackend(Backend):
    """Captures segments on one stream into one pool.

    Args:
        device: Device of the graphs.
        stream: Capture stream; a new one by default. Never the default stream, which cannot be captured.
    """

    name = "cuda"

    def __init__(self, device: torch.device, *, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = stream if stream is not None else torch.cuda.Stream(device)
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.replay_stream: Any = self.stream.cuda_stream
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
            try:
                with torch.cuda.stream(self.stream):
                    yield
            finally:
                caller.wait_stream(self.stream)

    @contextlib.contextmanager
    def capturing(self, generators: Iterable[torch.Generator]) -> Iterator[None]:
        """Capture stream and stream hooks for the whole capture."""
        index = self.device.index
        self._generators = (torch.cuda.default_generators[index], *generators)
        self._ledger = StreamLedger(self.stream)
        with self.on_capture_stream(), self._ledger.hooked():
            try:
                self._hold_pool()
                yield
            finally:
                self._last_stream = self.stream

    def begin(self) -> None:
        """Begin a segment: the stream is captured and allocations of this thread go to the pool."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators[1:]:
            graph.register_generator_state(generator)
        # thread_local: another thread's cudaMalloc or event query must not invalidate this capture.
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        self._current = graph
        self._ledger.fork_all()

    def end(self) -> CudaSegment | None:
        """Join the forks, end the segment, and launch it once, since a capture runs nothing."""
        graph = self._require_current()
        self._ledger.join_all()
        self._current = None
        try:
            _end_quietly(graph)
        except Exception:
            self._heal()
            raise
        status, _, count = cudart.cudaGraphGetNodes(cudart.cudaGraph_t(graph.raw_cuda_graph()))
        if status != cudart.cudaError_t.cudaSuccess:
            raise InternalError(f"cudaGraphGetNodes failed: {status.name}")
        if count == 0:
            graph.reset()
            return None
        graph.instantiate()
        before = [generator.get_offset() for generator in self._generators]
        graph.replay()
        random = before != [generator.get_offset() for generator in self._generators]
        return CudaSegment(graph, nodes=count, backend=self, draws_random_numbers=random)

    def abort(self) -> None:
        """End the capture of a segment whose body raised; an error of its own must not replace the body's."""
        self._ledger.recording = False
        graph, self._current = self._current, None
        if graph is None:
            return
        with contextlib.suppress(Exception):
            self._ledger.join_all()
        try:
            _end_quietly(graph)
            graph.reset()
        except Exception:
            self._heal()

    def _hold_pool(self) -> None:
        """Keep the pool in use by a one-kernel graph for as long as this backend lives.

        Without it the pool is given up when its last graph is reset (an empty segment may be its only one), and torch
        refuses to capture into a pool that was given up while tensors in it are still alive.
        """
        if self._anchor is None:
            anchor = torch.cuda.CUDAGraph()
            anchor.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            torch.zeros(1, device=self.device)
            anchor.capture_end()
            self._anchor = anchor

    def _heal(self) -> None:
        """After the driver invalidated a capture: torch leaves the pool recording and the generator in capture mode.

        The old pool handle cannot be captured into again, so later segments get a new one; a one-kernel capture into
        another pool takes the generator out of capture mode (seen on torch 2.11).
        """
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = None
        with contextlib.suppress(Exception):
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self.device)
                graph.capture_end()
            graph.reset()

    def _require_current(self) -> torch.cuda.CUDAGraph:
        if self._current is None:
            raise InternalError("A segment ended that had not begun.")
        return self._current

    def replaying(self) -> None:
        """Launch on the caller's current stream, after what another stream still runs of this pool."""
        stream = torch.cuda.current_stream(self.device)
        last = self._last_stream
        if last is not None and last.cuda_stream != stream.cuda_stream:
            stream.wait_stream(last)
        self._last_stream = stream
        self.replay_stream = stream.cuda_stream

    def made_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where the tensor's storage lies in the pool. Cost: a bisection; 41 us where the ranges are read again."""
        if tensor.device != self.device or not tensor.numel():
            return False
        address = tensor.untyped_storage().data_ptr()
        if self._in_ranges(address):
            return True
        # A miss is the usual answer for parameters and static buffers, and the pool may have grown since: read again.
        self._ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in self._pool_segments())
        return self._in_ranges(address)

    def _in_ranges(self, address: int) -> bool:
        position = bisect.bisect_right(self._ranges, (address, 1 << 63)) - 1
        return position >= 0 and self._ranges[position][0] <= address < self._ranges[position][1]

    def _pool_segments(self) -> list[dict[str, Any]]:
        snapshot: Any = torch.cuda.memory_snapshot
        options = {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}
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
        self.synchronize()
        for segment in self._pool_segments():
            _fill(segment["address"], segment["total_size"])
        torch.cuda.synchronize(self.device)

    def pool_bytes(self) -> int:
        """Bytes the pool has reserved."""
        return sum(int(segment["total_size"]) for segment in self._pool_segments())


def _end_quietly(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture; torch warns about an empty graph, which is a usual thing here and is asked for by node count."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _fill(address: int, nbytes: int) -> None:
    (status,) = cudart.cudaMemset(address, 0xFF, nbytes)
    if status != cudart.cudaError_t.cudaSuccess:
        raise InternalError(f"cudaMemset of {nbytes} pool bytes failed: {status.name}")
