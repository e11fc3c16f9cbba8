"""What a decoder layer is built from: parameters without gradients, projections, and the gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from breakgraph.models.ops import Ops

__all__ = ["GatedMLP", "Linear", "parameter"]


def parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter of that shape.

    Inference only: one that asked for gradients would drag autograd into every capture.
    """
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T + bias`; several projections of a checkpoint may share it, one below the other."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, device=device, dtype=dtype)
        self.bias = parameter(outputs, device=device, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, inputs) -> (T, outputs)."""
        return F.linear(x, self.weight, self.bias)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, the same matrices for every row."""

    def __init__(self, hidden: int, inner: int, *, ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=False, device=device, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """(T, H) -> (T, H). `padding` is for layers with experts; here rows of padding cost what all rows cost."""
        down: torch.Tensor = self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))
        return down
