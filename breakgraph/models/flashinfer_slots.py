"""Page-locked memory that plans are written to, and what keeps it from being written again too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from breakgraph.models.attention_types import Int32Array
from breakgraph.models.flashinfer_packing import HostArrays, Packing

__all__ = ["FIRST_CAPACITY", "PinnedRing", "Slot"]

FIRST_CAPACITY = 16 * 1024  # int32 elements; grows by doubling


def _pinned(count: int, dtype: torch.dtype) -> torch.Tensor:
    # Buffers that are written later must not be inference tensors, whatever mode their first use is in.
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=dtype, pin_memory=True)


class Slot:
    """Page-locked memory of one plan: its arrays, an int workspace, and the event behind the copies out of both.

    Args:
        count: int32 elements of the arrays.
        workspace_bytes: Of the int workspace.

    Attributes:
        workspace: The int workspace.
        copied: The event.
        buffer: int32, the arrays as one.
        array: The same, for numpy.
    """

    def __init__(self, count: int, *, workspace_bytes: int) -> None:
        self.workspace = _pinned(workspace_bytes, torch.uint8)
        self.copied: Any = torch.cuda.Event()
        self.grow(count)

    def grow(self, count: int) -> None:
        """Replace the arrays by larger ones. Torch keeps the old ones until what it copied from them has arrived."""
        self.buffer = _pinned(count, torch.int32)
        self.array: Int32Array = self.buffer.numpy()
        self._arrays: dict[Packing, HostArrays] = {}

    def arrays(self, packing: Packing) -> HostArrays:
        """The arrays at their places."""
        made = self._arrays.get(packing)
        if made is None:
            made = self._arrays[packing] = HostArrays.of(self.buffer, packing)
        return made


class PinnedRing:
    """Page-locked slots that all planners of one attention use by turns.

    Args:
        workspace_bytes: Of a slot: the largest device int workspace among the wrappers.
        device: Where the copies go.
        slots: How many.

    Attributes:
        ramp: 0, 1, 2, ... as many as a slot has elements.
    """

    def __init__(self, workspace_bytes: int, *, device: torch.device, slots: int = 2) -> None:
        self._capacity = FIRST_CAPACITY
        self._device = torch.empty(0, device=device).device  # with its index
        self._stream: torch.cuda.Stream | None = None
        self._slots = tuple(Slot(self._capacity, workspace_bytes=workspace_bytes) for _ in range(slots))
        self._turn = 0
        self._packings: dict[int, Packing] = {}
        self.ramp: npt.NDArray[np.intp] = np.arange(self._capacity, dtype=np.intp)

    @property
    def workspace(self) -> torch.Tensor:
        """The int workspace of one slot, for a wrapper that needs to have one and will not use it."""
        return self._slots[0].workspace

    def reserve(self, count: int) -> None:
        """Let every slot hold `count` int32 elements."""
        if count <= self._capacity:
            return
        self._capacity = max(count, 2 * self._capacity)
        for slot in self._slots:
            slot.grow(self._capacity)
        self.ramp = np.arange(self._capacity, dtype=np.intp)

    def take(self, count: int) -> Slot:
        """The next slot, with room for `count` elements, when its last copies are done."""
        self.reserve(count)
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        # An event that was never recorded counts as complete.
        slot.copied.synchronize()
        return slot

    def read(self, slot: Slot) -> None:
        """Note that all copies out of a slot have been put on the current stream.

        Args:
            slot: From `take`.
        """
        slot.copied.record(self._current_stream())

    def _current_stream(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda":
            return None
        # Torch looks long for the current stream; its raw handle shows in a tenth of that time whether it is the same one.
        raw = torch._C._cuda_getCurrentRawStream(self._device.index)
        if self._stream is None or self._stream.cuda_stream != raw:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream

    def prefill_packing(self, requests: int) -> Packing:
        """The packing of a prefill of this many requests, always the same object."""
        packing = self._packings.get(requests)
        if packing is None:
            packing = self._packings[requests] = Packing.of(requests, queries=True)
        return packing
