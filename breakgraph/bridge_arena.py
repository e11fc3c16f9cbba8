"""Memory for bridges: the buffers at fixed addresses that breaks' outputs are copied into."""

from __future__ import annotations

import math
import weakref

import attrs
import torch

__all__ = ["BridgeArena"]

_ALIGNMENT = 256
_SMALLEST_CHUNK = 1 << 16
_WIDEST = 8
"""How many times its own bytes a bridge may span: the parts of a merged projection keep their strides."""


@attrs.frozen(eq=False)
class _Handed:
    """A bridge that was handed to a model, and where it lies."""

    tensor: weakref.ref[torch.Tensor]
    chunk: int
    start: int
    end: int


class BridgeArena:
    """Memory for bridges, shared by all graphs of a pool: their replays never overlap, so their bridges may.

    Every capture starts at the beginning again; with the largest bucket first, the others fit in what it took. A bridge
    that somebody still holds then (a result that the caller keeps, a table that a model built in a break) is left alone:
    later captures take memory around it.

    Args:
        device: Device of the bridges.
    """

    __slots__ = ("_chunk", "_chunks", "_handed", "_offset", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._chunks: list[torch.Tensor] = []
        self._chunk = 0
        self._offset = 0
        self._handed: list[_Handed] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(chunk.numel() for chunk in self._chunks)

    def rewind(self) -> None:
        """Start at the beginning: the next capture of this pool."""
        self._chunk = self._offset = 0
        self._handed = [handed for handed in self._handed if handed.tensor() is not None]

    def forget(self) -> None:
        """Give the memory back, where no graph is left; bridges that somebody still holds keep theirs."""
        self._chunks, self._handed = [], []
        self.rewind()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer of the shape, dtype and strides of `like`; never an inference tensor.

        Strides are kept although a dense buffer would be smaller: kernels choose their order of summation by them, and
        a replay must give eager's bits. Only what overlaps itself (an expanded tensor) or lies too thin becomes dense.
        """
        strides = like.stride() if _is_spread_at_most(like, _WIDEST) else _contiguous(like.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
        nbytes = span * like.element_size() if like.numel() else 0
        with torch.inference_mode(mode=False), torch.no_grad():
            start = self._reserve(nbytes)
            memory = self._chunks[self._chunk][start : start + nbytes]
            # Detached, so that views of it hold it and not the chunk: then one weak reference tells whether it is in use.
            bridge = memory.view(like.dtype).as_strided(like.shape, strides).detach()
        self._handed.append(_Handed(weakref.ref(bridge), self._chunk, start, start + nbytes))
        return bridge

    def _reserve(self, nbytes: int) -> int:
        while self._chunk < len(self._chunks):
            start = self._offset
            if start + nbytes <= self._chunks[self._chunk].numel():
                in_use = self._in_use(start, start + nbytes)
                if in_use is None:
                    self._offset = start + math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
                    return start
                self._offset = math.ceil(in_use.end / _ALIGNMENT) * _ALIGNMENT
                continue
            self._chunk += 1
            self._offset = 0
        size = max(_SMALLEST_CHUNK, math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT)
        self._chunks.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        self._offset = math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        return 0

    def _in_use(self, start: int, end: int) -> _Handed | None:
        """The last bridge of an earlier capture that overlaps a span of the current chunk and is still held."""
        found = None
        for handed in self._handed:
            if handed.chunk == self._chunk and handed.start < end and start < handed.end:
                found = handed if found is None or handed.end > found.end else found
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """True where the tensor lies in the arena: copying several such tensors may overwrite one before it is read."""
        address = tensor.data_ptr()
        return any(0 <= address - chunk.data_ptr() < chunk.numel() for chunk in self._chunks)


def _is_spread_at_most(tensor: torch.Tensor, times: int) -> bool:
    """True where no two elements share memory and the span is at most `times` the number of elements."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < span:
                return False
            span += (size - 1) * stride
    return span <= times * tensor.numel()


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides[: len(shape)]))
