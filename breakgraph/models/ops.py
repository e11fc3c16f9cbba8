"""The elementwise steps of a decoder: plain torch, and FlashInfer's fused kernels where CUDA has them.

A decoder is given one `Ops` when it is made and never asks again. Plain torch is the reference: its numbers are
those of transformers, operation by operation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from breakgraph.models.attention_types import KVLayer

__all__ = ["FlashInferOps", "Ops", "Places", "TorchOps", "make_ops"]


Places = tuple[torch.Tensor, ...]
"""Where the keys and values of a step go, as the kernel wants to be told."""


class Ops(Protocol):
    """What a decoder layer needs beside matrix products and attention. Arguments may be overwritten."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last axis of x (..., N); weight (N,)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and its norm: returns (norm, sum), both (T, H)."""
        ...

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn q (T, Hq, D) and k (T, Hkv, D) by the angles of `table` (positions, D) at positions (T,)."""
        ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up` of x (T, 2 * I) = gate | up; returns (T, I)."""
        ...

    def places(self, slots: torch.Tensor, *, blocks: int) -> Places:
        """What `append` takes for the slots (T,) of a step, made once a step: slots of a cache of so many blocks."""
        ...

    def append(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, places: Places) -> None:
        """Write keys and values (T, heads, D) to the caches of a layer. Where rows share a slot, one of them is kept."""
        ...


class TorchOps:
    """Plain torch, on any device, in the order of operations that transformers uses."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops`. The mean is taken in float32, the weight is applied in the dtype of x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`. Computed in float32, as FlashInfer does; for float32 models these are transformers' numbers."""
        cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def places(self, slots: torch.Tensor, *, blocks: int) -> Places:
        """See `Ops`. The slots themselves."""
        return (slots,)

    def append(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, places: Places) -> None:
        """See `Ops`."""
        _copy(k, v, cache, places[0])


def _copy(k: torch.Tensor, v: torch.Tensor, cache: KVLayer, slots: torch.Tensor) -> None:
    for rows, blocks in zip((k, v), cache, strict=True):
        # `view` and not `flatten`: of a cache that is not dense, flatten would make a copy and write to that.
        blocks.view(-1, *rows.shape[1:]).index_copy_(0, slots, rows)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


_APPENDED = (64, 128, 256, 512)  # head dimensions of FlashInfer's kernel


class FlashInferOps:
    """FlashInfer's kernels: one launch each, in place where they can be. bfloat16 or float16 on CUDA."""

    def __init__(self) -> None:
        # Here and not at the top: importing FlashInfer takes seconds and fails without CUDA.
        import flashinfer

        self._lib: Any = flashinfer

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops`. Heads (T, heads, D) are normed as T * heads rows."""
        normed = self._lib.norm.rmsnorm(x.reshape(-1, x.shape[-1]), weight, eps)
        result: torch.Tensor = normed.view(x.shape)
        return result

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`. In place: `x` becomes the norm and `residual` the sum."""
        self._lib.norm.fused_add_rmsnorm(x, residual, weight, eps)
        return x, residual

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Ops`. In place."""
        self._lib.rope.apply_rope_with_cos_sin_cache_inplace(
            positions, q.flatten(1), k.flatten(1), q.shape[-1], table, is_neox=True
        )
        return q, k

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ops`."""
        result: torch.Tensor = self._lib.activation.silu_and_mul(x)
        return result

    def places(self, slots: torch.Tensor, *, blocks: int) -> Places:
        """See `Ops`. FlashInfer finds a page through the table of a request: all rows are of one request that owns every page."""
        pages = torch.arange(blocks + 1, dtype=torch.int32, device=slots.device)
        return slots, slots.int(), torch.zeros_like(slots, dtype=torch.int32), pages

    def append(self, k: torch.Tensor, v: torch.Tensor, cache: KVLayer, places: Places) -> None:
        """See `Ops`. One kernel for both; head dimensions that it does not have, and unlike caches, take two of torch."""
        slots, positions, requests, pages = places
        if not len(k):
            return  # a kernel without blocks cannot be launched
        if k.shape[-1] not in _APPENDED or k.shape != v.shape or cache[0].stride() != cache[1].stride():
            _copy(k, v, cache, slots)
            return
        # The last two are where each request's pages begin and how full its last page is, which is not read.
        self._lib.page.append_paged_kv_cache(k, v, requests, positions, cache, pages[:-1], pages, pages[:-1])


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """FlashInfer's kernels for 16-bit weights on CUDA where it is installed, else plain torch."""
    from importlib.util import find_spec

    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and find_spec("flashinfer") is not None:
        return FlashInferOps()
    return TorchOps()
