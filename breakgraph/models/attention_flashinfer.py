"""Paged attention with FlashInfer (>= 0.6.18, < 0.7), on CUDA. Imported only when it is chosen.

A FlashInfer *wrapper* plans on the host and runs on the device. What follows from how it plans:

- `plan()` fills a page-locked buffer of the wrapper and copies it to the device asynchronously. The host runs one
  step ahead, so the next plan could overwrite what the copy has yet to read: an event is recorded behind each
  plan, and waited for before the next plan of the same wrapper.
- The scratch buffers of the kernels are baked into captured graphs: they are allocated once and never grow. Kernels
  of one stream run in order, so all wrappers share the float scratch.
- Plans are made on the current stream, which must be the one that launches the step.
"""

from __future__ import annotations

from typing import Any

import attrs
import flashinfer
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import InternalError, LiveDataError
from breakgraph.models.attention import (
    PLAIN,
    Attention,
    AttentionShape,
    AttentionVariant,
    BatchLayout,
    DecodeState,
    Int32Array,
)

__all__ = ["FlashInferAttention", "FlashInferBatch", "FlashInferDecodeState"]

FLOAT_WORKSPACE_BYTES = 128 * 1024 * 1024  # FlashInfer's recommendation; enough to decode 400 rows of an 8B model
DECODE_INT_WORKSPACE_BYTES = 1024 * 1024  # a plan of 1,024 rows takes about 50 KiB; the default is 8 MiB a wrapper
CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 6, 8)  # the decode kernel without tensor cores exists for these only


@attrs.define(eq=False)
class _Planner:
    """A wrapper, the guard of its page-locked buffer, and how often it has planned."""

    wrapper: Any
    copied: torch.cuda.Event = attrs.field(factory=torch.cuda.Event)
    plans: int = 0

    def plan(self, *args: Any, **kwargs: Any) -> int:
        """Plan when the previous plan has been copied to the device; returns the number of this plan."""
        # An event that was never recorded counts as complete.
        self.copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self.copied.record()
        self.plans += 1
        return self.plans


@attrs.frozen(eq=False)
class FlashInferBatch:
    """Live metadata of one prefill step.

    Attributes:
        rows: Real rows of the step.
        planner: Who planned it; None for a step without rows.
        plan: Number of the plan, to notice that the planner has been reused.
    """

    rows: int
    planner: _Planner | None
    plan: int


@attrs.define(eq=False)
class FlashInferDecodeState(DecodeState):
    """Adds the wrapper whose buffers are baked into the graph.

    Attributes:
        planner: The graph wrapper.
        indices: int32 (batch_size * max_blocks,), on the device: the pages of all rows, packed.
    """

    planner: _Planner
    indices: torch.Tensor


class FlashInferAttention(Attention):
    """FlashInfer's paged prefill (FA3 on Hopper, else FA2) and paged decode.

    Key and value caches must have equal strides, so allocate them alike. Kernels that were not prebuilt for this
    dtype and head dimension are compiled at the first plan, which takes a minute or more.

    Memory: 128 MiB of scratch, twice 8 MiB for prefill, 1 MiB for each decode state.
    """

    kind = "flashinfer"
    plans_decode = True

    def __init__(self, shape: AttentionShape, *, reason: str) -> None:
        super().__init__(shape, reason=reason)
        device = shape.device
        self._scratch = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._backend = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
        self._tensor_cores = _prefers_tensor_cores(shape)
        # Two planners by turns: the host plans step n+1 while the device still reads the plan of step n.
        self._prefill = tuple(
            _Planner(
                flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._scratch, kv_layout="NHD", backend=self._backend)
            )
            for _ in range(2)
        )
        self._turn = 0

    def plan_prefill(self, layout: BatchLayout) -> FlashInferBatch:
        """See `Attention`. 80 to 290 us of host time; waits for the copy of the plan before the last one."""
        if layout.rows == 0:
            return FlashInferBatch(0, None, 0)
        planner = self._prefill[self._turn]
        self._turn = (self._turn + 1) % len(self._prefill)
        shape = self.shape
        lens = layout.seq_lens
        blocks = _blocks(lens, shape.block_size)
        pages = [np.asarray(t[:n], dtype=np.int32) for t, n in zip(layout.block_tables, blocks, strict=True)]
        indptr, page_indptr, last, kv_lens, indices = _pinned(
            _offsets(layout.query_lens),
            _offsets(blocks),
            _last_page(lens, blocks, shape.block_size),
            lens,
            np.concatenate(pages),
        )
        number = planner.plan(
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
        return FlashInferBatch(layout.rows, planner, number)

    @eager_on_graph(name="attention", live=("batch",), rows=("q", "out"), writes=("out",))
    def prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        batch: FlashInferBatch,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """See `Attention`. 25 to 40 us of host time."""
        _refuse_variant(variant)
        if q.shape[0] != batch.rows:
            raise LiveDataError(
                f"The attention received {q.shape[0]} rows; its batch describes {batch.rows}.",
                why="The plan fixes which rows belong to which request.",
                fix="Pass valid_rows equal to the sum of query_lens of the layout that was planned.",
            )
        if batch.planner is None:
            return
        if batch.planner.plans != batch.plan:
            raise LiveDataError(
                f"The attention received the batch of plan {batch.plan}; its planner has made plan "
                f"{batch.planner.plans} since.",
                why="The device buffers of the plan now describe another step.",
                fix="Launch a step before the second next one is planned.",
            )
        batch.planner.wrapper.run(q, (k_cache, v_cache), out=out)

    def decode_state(self, *, batch_size: int, max_context: int) -> FlashInferDecodeState:
        """See `Attention`. Plans once, for one token on the null block in every row, so that it may be captured."""
        shape = self.shape
        blocks = shape.blocks_for(max_context)
        indices = torch.zeros(batch_size * blocks, dtype=torch.int32, device=shape.device)
        needed = self._decode_scratch_bytes(batch_size)
        scratch = self._scratch
        if needed > scratch.numel():
            scratch = torch.zeros(needed, dtype=torch.uint8, device=shape.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=shape.device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=shape.device),
        )
        small = torch.zeros(DECODE_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        wrapper.reset_workspace_buffer(scratch, small)
        state = FlashInferDecodeState(batch_size, max_context, blocks, _Planner(wrapper), indices)
        self.plan_decode(
            state,
            block_tables=np.zeros((batch_size, blocks), dtype=np.int32),
            seq_lens=np.ones(batch_size, dtype=np.int32),
        )
        return state

    def _decode_scratch_bytes(self, batch_size: int) -> int:
        """The most that the tensor-core kernel takes for its partial results, as its planner computes it."""
        shape = self.shape
        if not self._tensor_cores:
            return 0  # bounded by what fits on the device at once: a few MiB
        tile = 16 if shape.group_size <= 16 else 64
        tiles = max(
            2 * torch.cuda.get_device_properties(shape.device).multi_processor_count // shape.num_kv_heads,
            batch_size + -(-batch_size * shape.group_size // tile),
        )
        return 4 * shape.num_heads * tiles * tile * (shape.head_dim + 1)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        state: DecodeState,
        block_tables: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """See `Attention`. Reads the pages of the last `plan_decode`, not `block_tables` and `seq_lens`."""
        assert isinstance(state, FlashInferDecodeState)
        _refuse_variant(variant)
        out: torch.Tensor = state.planner.wrapper.run(q, (k_cache, v_cache))
        return out

    def plan_decode(self, state: DecodeState, *, block_tables: Int32Array, seq_lens: Int32Array) -> None:
        """See `Attention`. About 0.1 ms of host time, up to 0.7 ms for 128 rows with tensor cores."""
        assert isinstance(state, FlashInferDecodeState)
        shape = self.shape
        lens = np.asarray(seq_lens, dtype=np.int32)
        blocks = _blocks(lens, shape.block_size)
        used = np.arange(block_tables.shape[1], dtype=np.int32) < blocks[:, None]
        indptr, last, kv_lens, pages = _pinned(
            _offsets(blocks), _last_page(lens, blocks, shape.block_size), lens, block_tables[used]
        )
        # Pages on the host would be copied by FlashInfer with a wait for the device, so they are brought over here
        # and handed in from the buffer itself: copying it onto itself is nothing.
        resident = state.indices[: pages.shape[0]]
        resident.copy_(pages, non_blocking=True)
        state.planner.plan(
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


def _refuse_variant(variant: AttentionVariant) -> None:
    if not variant.is_plain:
        raise InternalError(f"FlashInfer's plain kernels were chosen for a layer with {variant}")


def _prefers_tensor_cores(shape: AttentionShape) -> bool:
    # Measured on an H200: faster for groups of 3 (64 channels) and of 4 with 128 channels, slower for 4 with 64.
    group = shape.group_size
    return group not in CUDA_CORE_GROUP_SIZES or group == 3 or (group >= 4 and shape.head_dim >= 128)


def _blocks(lens: Int32Array, block_size: int) -> Int32Array:
    return (-(-lens // block_size)).astype(np.int32)


def _offsets(counts: Int32Array) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _last_page(lens: Int32Array, blocks: Int32Array, block_size: int) -> Int32Array:
    return (lens - (blocks - 1) * block_size).astype(np.int32)


def _pinned(*arrays: npt.NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
    """The arrays as int32 CPU tensors in one page-locked block.

    Copies from pageable memory may make the host wait for the stream. The block comes from torch's host allocator,
    which does not hand it out again before the copies that read it have ended.
    """
    packed = torch.from_numpy(np.concatenate(arrays).astype(np.int32, copy=False)).pin_memory()
    return torch.split(packed, [len(array) for array in arrays])
