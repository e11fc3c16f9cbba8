"""The allocator pool of a runner's segments: its handle, what keeps it in use, and which addresses lie in it."""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import logging
from typing import Any

import torch

from breakgraph.backends.cuda_capture import fill_bytes, pool_handle_kept
from breakgraph.structure import storage_address

__all__ = ["CudaPool"]

_LOG = logging.getLogger(__name__)


class CudaPool:
    """One pool of torch's caching allocator.

    Args:
        device: Where it allocates.

    Attributes:
        handle: What torch knows it by; another one after a capture that the driver invalidated.
        lost_bytes: What torch could not give back after such captures.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.lost_bytes = 0
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._ranges: list[tuple[int, int]] = []
        self._outside: set[int] = set()
        self._may_have_grown = True

    def hold(self) -> None:
        """A capture begins: keep the pool in use by a one-kernel graph for as long as it has segments.

        Without it the pool is given up when its last graph is reset (an empty segment may be its only one), and torch
        refuses to capture into a pool that was given up while tensors in it are still alive.
        """
        self._ranges, self._outside, self._may_have_grown = [], set(), True
        if self._anchor is None:
            self._anchor = self._one_kernel()

    def grows(self) -> None:
        """A segment begins: only segments allocate from the pool."""
        self._may_have_grown = True

    def give_up(self) -> None:
        """No segment is left: let `torch.cuda.empty_cache()` free the memory.

        Later captures go to a pool of a new handle: torch refuses one that was given up.
        """
        if self._anchor is not None:
            self._anchor.reset()
            self._renew()

    def abandon(self) -> None:
        """A capture was invalidated by the driver, and torch does not clean up after it.

        `capture_end` throws before it takes the pool out of recording and the generators out of capture mode. On torch
        2.11 the pool cannot be captured into again, also not after `_cuda_endAllocateToPool` and `_cuda_releasePool`
        (tried: "already recording to mempool_id"), so later captures get a new pool, and what the old one holds is
        counted as lost. A capture of one kernel into the new pool brings the generators back.
        """
        lost = 0
        with contextlib.suppress(Exception):  # an error of the driver that sticks comes back from every call
            torch.cuda.synchronize(self.device)
            lost = self.nbytes
        self.lost_bytes += lost
        _LOG.warning("a capture was invalidated by the driver; torch cannot give back %d bytes of its pool", lost)
        self._renew()
        with contextlib.suppress(Exception):
            self.hold()

    def holds(self, tensor: torch.Tensor) -> bool:
        """True where the tensor's storage lies in the pool.

        The pool only grows while a capture runs, so a range once seen holds. An address in no known range makes the
        ranges be read again, once after each segment. An address found outside stays so: the tensor is an argument that
        its break holds from now on, so no block of the pool can take its place before the capture ends.

        Cost: a bisection, 1 us; 25 us on an H200's host where the ranges are read.
        """
        if tensor.get_device() != self.device.index or not tensor.numel():
            return False
        address = storage_address(tensor)
        if not address or address in self._outside:
            return False
        if self._is_in_known_range(address):
            return True
        if self._may_have_grown:
            self._may_have_grown = False
            self._ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in self._blocks())
            if self._is_in_known_range(address):
                return True
        self._outside.add(address)
        return False

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(int(block["total_size"]) for block in self._blocks())

    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """(first address, end) of every block that a tensor holds now."""
        found = []
        for block in self._blocks():
            address = block["address"]
            for part in block["blocks"]:
                if part["state"] == "active_allocated":
                    found.append((address, address + part["size"]))
                address += part["size"]
        return tuple(found)

    def poison(self) -> None:
        """Fill all of it with 0xFF bytes: NaN in every floating dtype, -1 in signed integers. Cost: two host syncs."""
        torch.cuda.synchronize(self.device)
        for block in self._blocks():
            fill_bytes(block["address"], block["total_size"])
        torch.cuda.synchronize(self.device)

    def _is_in_known_range(self, address: int) -> bool:
        position = bisect.bisect_right(self._ranges, (address, 1 << 63)) - 1
        return position >= 0 and address < self._ranges[position][1]

    def _renew(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._anchor = None
        self._ranges, self._outside, self._may_have_grown = [], set(), True

    def _blocks(self) -> list[dict[str, Any]]:
        """What the allocator has reserved for the pool (it says segments; a segment is something else here)."""
        snapshot: Any = torch.cuda.memory_snapshot
        with pool_handle_kept(self.handle):
            found: list[dict[str, Any]] = snapshot(mempool_id=self.handle, **_snapshot_options())
        return found

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


@functools.cache
def _snapshot_options() -> dict[str, bool]:
    """Leave the allocator's traces out where this torch can: they cost 300 us, and asking for the signature 15."""
    return (
        {"include_traces": False}
        if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
        else {}
    )
