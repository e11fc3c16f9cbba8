"""Which of FlashInfer's two decode kernels a step takes: with tensor cores or without.

The one without reads a key once for a whole group of heads and needs no second kernel where the batch fills the device; the one
with them computes faster, which matters from some context on. Where they cross depends on the shape and on the batch, so a batch
may have a graph for short contexts and another one for long ones. The numbers here are from
`benchmarks/results/decode_kernels_h200.json` (`benchmarks/decode_kernels.py`), and a test compares them with it.
"""

from __future__ import annotations

from breakgraph.models.attention_types import AttentionShape

__all__ = ["CUDA_CORE_GROUP_SIZES", "prefers_tensor_cores", "short_context"]

CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 6, 8)
"""Query heads of a key head for which the kernel without tensor cores exists."""

_FILLS = 96  # requests from which the kernel without tensor cores does not split sequences
_FEW = 8
_LARGE = 192


def short_context(shape: AttentionShape, *, batch_size: int) -> int | None:
    """The context up to which the kernel without tensor cores is the faster one.

    Args:
        shape: Heads and sizes.
        batch_size: Requests of the step.

    Returns:
        Tokens; 0 where it never is, None where it always is.
    """
    group, wide = shape.group_size, shape.head_dim >= 128
    if group not in CUDA_CORE_GROUP_SIZES:
        return 0
    if group <= 3:
        return 1024 if batch_size >= _LARGE else None
    if wide:
        return 320 if batch_size >= _FILLS else 0
    if batch_size <= _FEW:
        return None
    return 640 if batch_size >= _FILLS else 0


def prefers_tensor_cores(shape: AttentionShape, *, batch_size: int, context: int) -> bool:
    """Whether a decode of sequences of at most `context` tokens takes the kernel with tensor cores.

    Args:
        shape: Heads and sizes.
        batch_size: Requests of the step.
        context: Tokens of the longest sequence that it is made for.
    """
    short = short_context(shape, batch_size=batch_size)
    return short is not None and context > short
