"""Our own thin planner for FlashInfer's paged wrappers, after one public `plan()` has chosen module and options.

The public `plan()` does much on the host that a step does not need: Python's `max()` over tensors, lengths from indptr, a
copy to the device for each array. This one builds all arrays of a step with numpy in one page-locked slot, copies them with
one call into one device buffer, of which the wrapper's own buffers are views, and calls the module's C++ plan once.

What follows from FlashInfer's sources (0.6.18.post1):

- The C++ plan reads `indptr` and lengths on the host, fills the page-locked int workspace that it is given, and copies the
  used part to the device int workspace asynchronously, on torch's current stream. A slot therefore has a workspace of its
  own, and an event behind both copies: it is not taken again before that. Slots are shared by all planners of an attention.
- It allocates from the size of the *device* workspace, so that of a slot must be as large as the largest of them.
- FA3's C++ plan takes far longer than fa2's for many requests, so it is not called at all: see `flashinfer_hopper`.
- `run()` of the fa2, fa3 and decode modules reads `_plan_info`, the four index buffers and `_qo_indptr_last`. Only trtllm-gen
  and cudnn read `_max_q_len`, `_max_kv_len`, `_kv_lens_buffer` and `_seq_lens_*`; those attributes are cleared here, once.

A planner is proven when it is made: it plans the batch that was planned publicly, and must come to the same plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch

from breakgraph.errors import ConfigError, LiveDataError
from breakgraph.models.attention import BatchLayout, Int32Array
from breakgraph.models.flashinfer_packing import Packing, blocks_of
from breakgraph.models.flashinfer_slots import FIRST_CAPACITY, PinnedRing, Slot

__all__ = [
    "DecodePlanner",
    "DeviceIndices",
    "Planning",
    "PrefillPlanner",
    "check_version",
    "proven",
]

P = TypeVar("P")

OLDEST, NEWEST = (0, 6, 18), (0, 7)  # at least, below


class Planning(Enum):
    """Who plans.

    Attributes:
        THIN: Our planner.
        PUBLIC: FlashInfer's `plan()`.
    """

    THIN = "thin"
    PUBLIC = "public"


def check_version(version: str) -> None:
    """Refuse a FlashInfer whose internals were not read.

    Args:
        version: Its version.

    Raises:
        ConfigError: It is not at least 0.6.18 and below 0.7.
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    numbers = () if found is None else tuple(int(part or 0) for part in found.groups())
    if not OLDEST <= numbers < NEWEST:
        raise ConfigError(
            f"FlashInfer is {version}; the thin planner expects at least 0.6.18 and less than 0.7.",
            why="It calls the C++ plan and sets attributes of the wrappers, which other versions may have changed.",
            fix="pip install 'flashinfer-python>=0.6.18,<0.7', or use Planning.PUBLIC.",
        )


class DeviceIndices:
    """One int32 buffer on the device, with the arrays that a wrapper reads as views of it.

    Args:
        capacity: Elements, counted from `packing.device` on.
        device: Where.

    Attributes:
        buffer: The whole.
    """

    buffer: torch.Tensor

    def __init__(self, capacity: int, *, device: torch.device) -> None:
        self._device = device
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self._views: dict[Packing, tuple[torch.Tensor, ...]] = {}
        with torch.inference_mode(mode=False):
            self.buffer = torch.zeros(capacity, dtype=torch.int32, device=self._device)

    def views(self, packing: Packing) -> tuple[torch.Tensor, ...]:
        """Query indptr (or the page indptr, without one), page indptr, tokens in the last pages, pages."""
        views = self._views.get(packing)
        if views is None:
            count, base = packing.requests, packing.device
            starts = (packing.device - base, packing.page_indptr - base)
            query, page = (self.buffer[start : start + count + 1] for start in starts)
            last = packing.last_page - base
            views = (query, page, self.buffer[last : last + count], self.buffer[packing.pages - base :])
            self._views[packing] = views
        return views

    def reserve(self, count: int) -> None:
        """Have room for `count` elements; a larger buffer loses what the old one held."""
        if count > self.buffer.numel():
            self._allocate(max(count, 2 * self.buffer.numel()))

    def load(self, slot: Slot, packing: Packing, *, pages: int) -> None:
        """Copy the part for the device of a slot, asynchronously, on the current stream."""
        start, stop = packing.device, packing.pages + pages
        self.buffer[: stop - start].copy_(slot.buffer[start:stop], non_blocking=True)


def _native_tail(wrapper: Any, *, head_dim: int, block_size: int, causal: bool) -> tuple[Any, ...]:
    """What a prefill module's C++ plan takes after the number of requests."""
    tail: tuple[Any, ...] = (
        wrapper._num_qo_heads,
        wrapper._num_kv_heads,
        block_size,
        wrapper.is_cuda_graph_enabled,
        head_dim,
        head_dim,
        causal,
        wrapper._window_left,
    )
    if wrapper._backend != "fa2":
        raise ConfigError(
            f"FlashInfer chose the backend {wrapper._backend!r}; the thin planner calls the plan of fa2.",
            why="Other backends plan with other arguments.",
            fix="Use Planning.PUBLIC, or backend fa2 or fa3.",
        )
    return (
        *tail,
        -1,
        False,
        0,
        0,
    )  # split size not fixed, split allowed, no co-located blocks, no uniform query length


class DecodePlanner:
    """Plans a decode wrapper with CUDA graphs on, which has been planned publicly once.

    Args:
        wrapper: A `BatchDecodeWithPagedKVCacheWrapper` whose buffers are views of `indices`.
        indices: Its buffers, laid out as `packing` says.
        packing: Of its fixed number of requests, without a query indptr.
        ring: The slots.
        head_dim: Width of a head.
        block_size: Tokens of a page.
        dtype: Of queries and cache.
    """

    def __init__(
        self,
        wrapper: Any,
        *,
        indices: DeviceIndices,
        packing: Packing,
        ring: PinnedRing,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._wrapper, self._indices, self._packing, self._ring = wrapper, indices, packing, ring
        self._block_size = block_size
        ring.reserve(packing.device + indices.buffer.numel())
        self._capacity = packing.device + indices.buffer.numel() - packing.pages
        self._native = wrapper._cached_module.plan
        self._workspaces = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer)
        requests = packing.requests
        if wrapper.use_tensor_cores:
            # One row a request: the query indptr never changes, and the wrapper has it on the device.
            self._queries: tuple[torch.Tensor, ...] = (torch.arange(requests + 1, dtype=torch.int32),)
            tail = _native_tail(wrapper, head_dim=head_dim, block_size=block_size, causal=False)
            self._tail: tuple[Any, ...] = (requests, requests, *tail)
        else:
            empty = torch.empty(0, dtype=dtype)
            heads = (wrapper._num_qo_heads, wrapper._num_kv_heads)
            options = (block_size, wrapper.is_cuda_graph_enabled, wrapper._window_left, wrapper._logits_soft_cap)
            self._queries = ()
            self._tail = (requests, *heads, *options, head_dim, head_dim, empty, empty)
        wrapper._max_kv_len = None

    def plan(self, *, block_tables: Int32Array, seq_lens: Int32Array) -> None:
        """Plan a step; returns before the device has read anything.

        Args:
            block_tables: int32 (R, W).
            seq_lens: int32 (R,), at least 1 each.

        Raises:
            LiveDataError: They do not fit each other or the wrapper.
        """
        packing = self._packing
        blocks = blocks_of(seq_lens, self._block_size)
        total = int(np.add.reduce(blocks))
        if len(blocks) != packing.requests or total > self._capacity:
            raise LiveDataError(
                f"The step has {len(blocks)} requests of {total} pages; its graph has {packing.requests}, of at most "
                f"{self._capacity} pages in all.",
                why="The graph has the addresses and sizes of its buffers baked in.",
                fix="Plan with one length for each row of the graph, none longer than its max_context.",
            )
        slot = self._ring.take(packing.pages + total)
        host = slot.arrays(packing)
        host.fill(seq_lens, blocks=blocks, block_size=self._block_size)
        host.fill_from_table(block_tables, blocks=blocks, total=total, ramp=self._ring.ramp)
        try:
            self._indices.load(slot, packing, pages=total)
            _, page_indptr, lens = host.native
            lengths = (lens,) if self._queries else ()
            self._wrapper._plan_info = self._native(
                *self._workspaces, slot.workspace, *self._queries, page_indptr, *lengths, *self._tail
            )
        finally:
            self._ring.read(slot)


class PrefillPlanner:
    """Plans a FA2 prefill wrapper without CUDA graphs, which has been planned publicly once, causal.

    Args:
        wrapper: A `BatchPrefillWithPagedKVCacheWrapper`.
        ring: The slots.
        device: Where its buffers are.
        head_dim: Width of a head.
        block_size: Tokens of a page.
    """

    def __init__(self, wrapper: Any, *, ring: PinnedRing, device: torch.device, head_dim: int, block_size: int) -> None:
        self._wrapper, self._ring, self._block_size = wrapper, ring, block_size
        self._indices = DeviceIndices(FIRST_CAPACITY, device=device)
        self._native = wrapper._cached_module.plan
        self._workspaces = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer)
        self._tail = _native_tail(wrapper, head_dim=head_dim, block_size=block_size, causal=wrapper._causal)
        wrapper._max_q_len = wrapper._max_kv_len = wrapper._seq_lens_q = wrapper._seq_lens_kv = None

    def plan(self, layout: BatchLayout) -> None:
        """Plan a step; returns before the device has read anything.

        Args:
            layout: Rows and pages of each request.

        Raises:
            LiveDataError: Lengths and pages do not fit each other.
        """
        query_lens, seq_lens, block_tables = layout.query_lens, layout.seq_lens, layout.block_tables
        wrapper, requests = self._wrapper, len(query_lens)
        blocks = blocks_of(seq_lens, self._block_size)
        total = int(np.add.reduce(blocks))
        packing = self._ring.prefill_packing(requests)
        slot = self._ring.take(packing.pages + total)
        self._indices.reserve(packing.pages + total - packing.device)
        host = slot.arrays(packing)
        host.fill(seq_lens, blocks=blocks, block_size=self._block_size)
        host.fill_from_rows(block_tables, blocks=blocks, total=total)
        rows = host.fill_queries(query_lens)
        try:
            self._indices.load(slot, packing, pages=total)
            wrapper._plan_info = self._native(
                *self._workspaces, slot.workspace, *host.native, rows, requests, *self._tail
            )
        finally:
            self._ring.read(slot)
        (
            wrapper._qo_indptr_buf,
            wrapper._paged_kv_indptr_buf,
            wrapper._paged_kv_last_page_len_buf,
            wrapper._paged_kv_indices_buf,
        ) = self._indices.views(packing)
        wrapper._batch_size = requests
        wrapper._qo_indptr_last = rows


def proven(wrapper: Any, make: Callable[[], P], plan: Callable[[P], None]) -> P:
    """Make a thin planner, let it plan what was planned publicly just now, and compare.

    Args:
        wrapper: The wrapper.
        make: Makes the planner.
        plan: Plans the same batch with it.

    Returns:
        The planner.

    Raises:
        ConfigError: The two plans differ, or the wrapper is not what the thin planner knows.
    """
    public = list(wrapper._plan_info)
    try:
        planner = make()
        plan(planner)
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"FlashInfer's C++ plan could not be called ({type(error).__name__}: {error}).",
            why="The thin planner calls it as FlashInfer 0.6.18 does.",
            fix="Use Planning.PUBLIC, and report the version of FlashInfer.",
        ) from error
    thin = list(wrapper._plan_info)
    if thin != public:
        raise ConfigError(
            f"The thin planner planned {thin}; FlashInfer's plan() planned {public} for the same batch.",
            why="A kernel that runs with another plan than FlashInfer's may compute something else.",
            fix="Use Planning.PUBLIC, and report the version of FlashInfer.",
        )
    return planner
