"""Paged attention with FlashInfer (>= 0.6.18, < 0.7), on CUDA. Imported only when it is chosen.

A FlashInfer *wrapper* plans on the host and runs on the device. What follows from how it plans:

- Its `plan()` is called once for each wrapper; the planner of `flashinfer_planner` makes the other plans, with less
  work on the host. Where that one does not fit, all plans are FlashInfer's.
- `plan()` fills a page-locked buffer of the wrapper and copies it to the device asynchronously. The host runs one
  step ahead, so the next plan could overwrite what the copy has yet to read: an event is recorded behind each
  plan, and waited for before the next plan of the same wrapper. The thin planner guards its slots likewise.
- The scratch buffers of the kernels are baked into captured graphs: they are allocated once and never grow. Kernels
  of one stream run in order, so all wrappers share the float scratch.
- Plans are made on the current stream, which must be the one that launches the step.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import flashinfer
import numpy as np
import torch

from breakgraph.errors import ConfigError, InternalError, LiveDataError
from breakgraph.models import flashinfer_public as public
from breakgraph.models.attention import (
    PLAIN,
    Attention,
    AttentionShape,
    AttentionVariant,
    BatchLayout,
    DecodeState,
    Int32Array,
    Placement,
    PrefillState,
)
from breakgraph.models.flashinfer_hopper import FixedSchedule, HopperPlanner, proven_schedule, scheduler_for
from breakgraph.models.flashinfer_kernels import prefers_tensor_cores, short_context
from breakgraph.models.flashinfer_packing import Packing
from breakgraph.models.flashinfer_planner import (
    DecodePlanner,
    DeviceIndices,
    Planning,
    PrefillPlanner,
    check_version,
    proven,
)
from breakgraph.models.flashinfer_public import Planner
from breakgraph.models.flashinfer_slots import PinnedRing

__all__ = ["FlashInferAttention", "FlashInferBatch", "FlashInferDecodeState"]

FLOAT_WORKSPACE_BYTES = 128 * 1024 * 1024  # FlashInfer's recommendation; enough to decode 400 rows of an 8B model
DECODE_INT_WORKSPACE_BYTES = 1024 * 1024  # a plan of 1,024 rows takes about 50 KiB; the default is 8 MiB a wrapper
PREFILL_INT_WORKSPACE_BYTES = 8 * 1024 * 1024  # what FlashInfer allocates

P = TypeVar("P", DecodePlanner, PrefillPlanner | HopperPlanner)

_LOG = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class FlashInferBatch:
    """Live metadata of one prefill step.

    Attributes:
        rows: Real rows of the step.
        planner: Who planned it; None for a step without rows.
        plan: Number of the plan, to notice that the planner has been reused.
    """

    rows: int
    planner: Planner[PrefillPlanner | HopperPlanner] | None
    plan: int


@attrs.define(eq=False)
class FlashInferDecodeState(DecodeState):
    """Adds the wrapper whose buffers are baked into the graph.

    Attributes:
        planner: The graph wrapper.
        indices: Its buffers on the device.
        packing: Where its arrays lie in them.
    """

    planner: Planner[DecodePlanner]
    indices: DeviceIndices
    packing: Packing


class FlashInferAttention(Attention):
    """FlashInfer's paged prefill (FA3 on Hopper, else FA2) and paged decode.

    Key and value caches must have equal strides, so allocate them alike. Kernels that were not prebuilt for this
    dtype and head dimension are compiled at the first plan, which takes a minute or more.

    Memory: 128 MiB of scratch, twice 8 MiB for prefill, 1 MiB for each decode state; on the host, page-locked, twice 8 MiB.

    Args:
        shape: Heads, sizes, dtype and device.
        reason: Why this implementation was chosen, for people.
        planning: Who plans. Where the thin planner does not fit, FlashInfer does, and a warning says so.
        prefill_backend: "fa3" or "fa2"; None is FA3 on Hopper, else FA2.

    Attributes:
        planning: Who plans from here on.
    """

    kind = "flashinfer"
    plans_decode = True
    best_placement = Placement.CAPTURED

    def __init__(
        self,
        shape: AttentionShape,
        *,
        reason: str,
        planning: Planning = Planning.THIN,
        prefill_backend: str | None = None,
    ) -> None:
        super().__init__(shape, reason=reason)
        device = shape.device
        self._scratch = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        backend = prefill_backend or ("fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2")
        self._backend, self._scheduler = backend, scheduler_for(shape)
        # Two planners by turns: the host plans step n+1 while the device still reads the plan of step n.
        self._prefill: tuple[Planner[PrefillPlanner | HopperPlanner], ...] = tuple(
            Planner(flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._scratch, kv_layout="NHD", backend=backend))
            for _ in range(2)
        )
        self._turn = 0
        self._graph_wrapper: Any = None
        self.planning = planning
        self._ring: PinnedRing | None = None
        if planning is Planning.THIN:
            try:
                check_version(flashinfer.__version__)
                self._ring = PinnedRing(PREFILL_INT_WORKSPACE_BYTES, device=device)
            except ConfigError as error:
                self._plan_publicly_from_now_on(error)

    def _plan_publicly_from_now_on(self, error: ConfigError) -> None:
        self.planning, self._ring = Planning.PUBLIC, None
        _LOG.warning("FlashInfer's own plan() is used, which takes more host time: %s", error.what)

    def _set_up(
        self,
        planner: Planner[P],
        *,
        publicly: Callable[[], None],
        thinly: Callable[[PinnedRing], P],
    ) -> None:
        """Plan a batch publicly; where a thin planner serves, make it, let it plan the same batch, and prove it."""
        publicly()
        ring = self._ring
        if ring is None:
            return
        try:
            planner.thin = thinly(ring)
        except ConfigError as error:
            self._plan_publicly_from_now_on(error)
            publicly()  # the attempt has left its traces in the wrapper
            return
        # Its own page-locked memory is not needed any more. One of the slots takes its place: nothing writes to it there.
        planner.copied.synchronize()
        planner.wrapper._pin_memory_int_workspace_buffer = ring.workspace

    def plan_prefill(self, layout: BatchLayout) -> FlashInferBatch:
        """See `Attention`. Waits for the copies of the plan before the last one; host time: docs/benchmarks.md."""
        rows = layout.rows
        if rows == 0:
            return FlashInferBatch(0, None, 0)
        planner = self._prefill[self._turn]
        self._turn = (self._turn + 1) % len(self._prefill)
        planner.plans += 1
        if planner.thin is not None:
            planner.thin.plan(layout)
        else:
            self._set_up(
                planner,
                publicly=lambda: public.plan_prefill(planner, layout, shape=self.shape),
                thinly=lambda ring: self._thin_prefill(planner.wrapper, layout, ring=ring),
            )
        return FlashInferBatch(rows, planner, planner.plans)

    def _thin_prefill(self, wrapper: Any, layout: BatchLayout, *, ring: PinnedRing) -> PrefillPlanner | HopperPlanner:
        """A proven planner of a wrapper that has just planned this batch."""
        shape, device = self.shape, self.shape.device
        if self._backend == "fa3":
            return proven_schedule(
                wrapper,
                lambda: HopperPlanner(wrapper, ring=ring, scheduler=self._scheduler, device=device),
                lambda thin: thin.plan(layout),
                ctas=self._scheduler.ctas,
            )
        sizes = {"head_dim": shape.head_dim, "block_size": shape.block_size}
        return proven(
            wrapper, lambda: PrefillPlanner(wrapper, ring=ring, device=device, **sizes), lambda thin: thin.plan(layout)
        )

    def attend(
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

    def no_capture(self) -> str | None:
        """See `Attention`. The first call plans a batch, which shows whether schedules made here are right.

        FA2 under a graph always splits the cache: a kernel more a layer, and scratch of hundreds of MB.
        """
        if self._backend != "fa3":
            return f"FlashInfer's {self._backend} is slower in a graph than between segments"
        if self.planning is Planning.THIN and self._prefill[0].thin is None:
            self._turn = 0
            one = np.ones(1, dtype=np.int32)
            self.plan_prefill(BatchLayout(one, one - 1, [one - 1]))
        if self.planning is not Planning.THIN:
            return "FlashInfer's own plan() is in use, which does not know padding"
        return None

    def prefill_state(self, *, rows: int, requests: int, max_context: int) -> PrefillState:
        """See `Attention`. Memory: four bytes for each page that `requests` sequences can have, and some KB."""
        if (reason := self.no_capture()) is not None:
            raise ConfigError(
                f"A prefill of {rows} rows cannot be captured: {reason}.",
                why="The graph needs a kernel whose plan stays in fixed places.",
                fix="Leave the attention a break (Placement.BREAK), or AUTO to have that chosen.",
            )
        assert self._ring is not None
        if self._graph_wrapper is None:
            self._graph_wrapper = copy.copy(
                self._prefill[0].wrapper
            )  # planned, so it knows its kernel; plans are bound to it
        return FixedSchedule(
            rows=rows,
            requests=requests,
            max_context=max_context,
            scheduler=self._scheduler,
            shape=self.shape,
            ring=self._ring,
        )

    def plan_captured(self, state: PrefillState, layout: BatchLayout) -> None:
        """See `Attention`. Waits for the copies of the plan before the last one; host time: docs/benchmarks.md."""
        assert isinstance(state, FixedSchedule)
        state.plan(layout)

    def prefill_captured(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        state: PrefillState,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """See `Attention`."""
        assert isinstance(state, FixedSchedule)
        _refuse_variant(variant)
        out = torch.empty_like(q)
        state.bind(self._graph_wrapper)
        self._graph_wrapper.run(q, (k_cache, v_cache), out=out)
        return out

    def decode_contexts(self, *, batch_size: int) -> tuple[int, ...]:
        """See `Attention`. One where both decode kernels have contexts at which they are the faster one."""
        short = short_context(self.shape, batch_size=batch_size)
        return (short,) if short else ()

    def decode_state(self, *, batch_size: int, max_context: int) -> FlashInferDecodeState:
        """See `Attention`. Plans once, for one token on the null block in every row, so that it may be captured."""
        shape = self.shape
        blocks = shape.blocks_for(max_context)
        packing = Packing.of(batch_size, queries=False)
        indices = DeviceIndices(packing.pages - packing.device + batch_size * blocks, device=shape.device)
        _, page_indptr, last, pages = indices.views(packing)
        tensor_cores = prefers_tensor_cores(shape, batch_size=batch_size, context=max_context)
        # Without tensor cores it is bounded by what fits on the device at once: a few MiB.
        needed = self._decode_scratch_bytes(batch_size) if tensor_cores else 0
        scratch = self._scratch
        if needed > scratch.numel():
            scratch = torch.zeros(needed, dtype=torch.uint8, device=shape.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=page_indptr,
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=last,
        )
        small = torch.zeros(DECODE_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=shape.device)
        wrapper.reset_workspace_buffer(scratch, small)
        planner: Planner[DecodePlanner] = Planner(wrapper)
        state = FlashInferDecodeState(batch_size, max_context, blocks, planner, indices, packing)
        tables, lens = np.zeros((batch_size, blocks), dtype=np.int32), np.ones(batch_size, dtype=np.int32)
        self._set_up(
            planner,
            publicly=lambda: self._plan_decode_publicly(state, tables, lens),
            thinly=lambda ring: proven(
                wrapper,
                lambda: DecodePlanner(
                    wrapper,
                    indices=indices,
                    packing=packing,
                    ring=ring,
                    head_dim=shape.head_dim,
                    block_size=shape.block_size,
                    dtype=shape.dtype,
                ),
                lambda thin: thin.plan(block_tables=tables, seq_lens=lens),
            ),
        )
        return state

    def _decode_scratch_bytes(self, batch_size: int) -> int:
        """The most that the tensor-core kernel takes for its partial results, as its planner computes it."""
        shape = self.shape
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
        """See `Attention`. Waits for the copies of the plan before the last one; host time: docs/benchmarks.md."""
        assert isinstance(state, FlashInferDecodeState)
        lens = np.asarray(seq_lens, dtype=np.int32)
        thin = state.planner.thin
        if thin is None:
            self._plan_decode_publicly(state, block_tables, lens)
        else:
            thin.plan(block_tables=block_tables, seq_lens=lens)

    def _plan_decode_publicly(self, state: FlashInferDecodeState, block_tables: Int32Array, lens: Int32Array) -> None:
        resident = state.indices.views(state.packing)[-1]
        public.plan_decode(state.planner, block_tables, lens, resident=resident, shape=self.shape)


def _refuse_variant(variant: AttentionVariant) -> None:
    if not variant.is_plain:
        raise InternalError(f"FlashInfer's plain kernels were chosen for a layer with {variant}")
