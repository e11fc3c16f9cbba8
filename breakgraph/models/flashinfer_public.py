"""FlashInfer's own `plan()`, as it is called where the thin planners do not serve, and once for each wrapper."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.models.attention import AttentionShape, BatchLayout, Int32Array
from breakgraph.models.flashinfer_packing import blocks_of, offsets

__all__ = ["Planner", "plan_decode", "plan_prefill"]

P = TypeVar("P")


@attrs.define(eq=False)
class Planner(Generic[P]):
    """A wrapper, its thin planner if it has one, the guard of its own page-locked buffer, and the steps it planned."""

    wrapper: Any
    thin: P | None = None
    copied: torch.cuda.Event = attrs.field(factory=torch.cuda.Event)
    plans: int = 0

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """FlashInfer's plan, when its previous one has been copied to the device."""
        # An event that was never recorded counts as complete.
        self.copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self.copied.record()


def plan_prefill(planner: Planner[Any], layout: BatchLayout, *, shape: AttentionShape) -> None:
    """Plan a prefill step.

    Args:
        planner: Of a prefill wrapper.
        layout: The step.
        shape: Heads, sizes, dtype.
    """
    lens = layout.seq_lens
    blocks = blocks_of(lens, shape.block_size)
    pages = [np.asarray(t[:n], dtype=np.int32) for t, n in zip(layout.block_tables, blocks, strict=True)]
    indptr, page_indptr, last, kv_lens, indices = _pinned(
        offsets(layout.query_lens),
        offsets(blocks),
        _last_page(lens, blocks, shape.block_size),
        lens,
        np.concatenate(pages),
    )
    planner.plan(
        indptr,
        page_indptr,
        indices,
        last,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        causal=True,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        seq_lens=kv_lens,
        max_token_per_sequence=int(layout.query_lens.max()),
    )


def plan_decode(
    planner: Planner[Any], block_tables: Int32Array, lens: Int32Array, *, resident: torch.Tensor, shape: AttentionShape
) -> None:
    """Plan a decode step.

    Args:
        planner: Of a decode wrapper with CUDA graphs on.
        block_tables: int32 (B, W).
        lens: int32 (B,).
        resident: The wrapper's page numbers on the device.
        shape: Heads, sizes, dtype.
    """
    blocks = blocks_of(lens, shape.block_size)
    used = np.arange(block_tables.shape[1], dtype=np.int32) < blocks[:, None]
    indptr, last, kv_lens, pages = _pinned(
        offsets(blocks), _last_page(lens, blocks, shape.block_size), lens, block_tables[used]
    )
    # Pages on the host would be copied by FlashInfer with a wait for the device, so they are brought over here
    # and handed in from the buffer itself: copying it onto itself is nothing.
    resident = resident[: pages.shape[0]]
    resident.copy_(pages, non_blocking=True)
    planner.plan(
        indptr,
        resident,
        last,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.block_size,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        seq_lens=kv_lens,
    )


def _last_page(lens: Int32Array, blocks: Int32Array, block_size: int) -> Int32Array:
    return (lens - (blocks - 1) * block_size).astype(np.int32)


def _pinned(*arrays: npt.NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
    """The arrays as int32 CPU tensors in one page-locked block.

    Copies from pageable memory may make the host wait for the stream. The block comes from torch's host allocator,
    which does not hand it out again before the copies that read it have ended.
    """
    packed = torch.from_numpy(np.concatenate(arrays).astype(np.int32, copy=False)).pin_memory()
    return torch.split(packed, [len(array) for array in arrays])
