"""The elementwise steps of a decoder: plain torch, and FlashInfer's fused kernels where CUDA has them.

A decoder is given one `Ops` when it is made and never asks again. Plain torch is the reference: its numbers are
those of transformers, operation by operation.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F

__all__ = ["FlashInferOps", "Ops", "TorchOps", "make_ops"]


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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """FlashInfer's kernels for 16-bit weights on CUDA where it is installed, else plain torch."""
    from importlib.util import find_spec

    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and find_spec("flashinfer") is not None:
        return FlashInferOps()
    return TorchOps()
