"""Our thin planner for FlashInfer's FA3 prefill: a schedule of our own in one page-locked slot, brought over by one copy.

Of a wrapper `run()` takes the plan's offsets, the int workspace and the page numbers, and passes on three indptr buffers
that FA3 does not read. So a plan sets four attributes of the wrapper. With *fixed* places the same buffers serve every step, and
their addresses may be baked into a graph: one `FixedSchedule` for each captured size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from breakgraph.errors import ConfigError, LiveDataError
from breakgraph.models.attention import AttentionShape, BatchLayout, Int32Array, PrefillState
from breakgraph.models.flashinfer_schedule import Scheduler, Step, WorkLayout, works_of
from breakgraph.models.flashinfer_slots import PinnedRing

__all__ = ["FixedSchedule", "HopperPlanner", "proven_schedule", "scheduler_for"]


def scheduler_for(shape: AttentionShape) -> Scheduler:
    """The scheduler of a shape of attention on its device.

    Args:
        shape: Heads, sizes and device.
    """
    return Scheduler(
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        ctas=torch.cuda.get_device_properties(shape.device).multi_processor_count,
    )


def _buffer(count: int, device: torch.device) -> torch.Tensor:
    # It is written at every step, so it must not be an inference tensor, whatever mode its first use is in.
    with torch.inference_mode(mode=False):
        return torch.zeros(count, dtype=torch.int32, device=device)


def _write(scheduler: Scheduler, step: Step, layout: WorkLayout, *, ring: PinnedRing, to: torch.Tensor) -> Int32Array:
    """Write a schedule into a slot and copy it over, asynchronously, on the current stream; returns the slot's array."""
    slot = ring.take(layout.pages + step.pages)
    used = scheduler.fill(slot.array, step, layout=layout)
    try:
        to[:used].copy_(slot.buffer[:used], non_blocking=True)
    finally:
        ring.read(slot)
    return slot.array


class HopperPlanner:
    """Plans a FA3 prefill wrapper that has been planned publicly once, causal, without CUDA graphs.

    Args:
        wrapper: A `BatchPrefillWithPagedKVCacheWrapper`.
        ring: The slots.
        scheduler: Of its shape.
        device: Where its buffers are.
    """

    def __init__(self, wrapper: Any, *, ring: PinnedRing, scheduler: Scheduler, device: torch.device) -> None:
        self._wrapper, self._ring, self._scheduler, self._device = wrapper, ring, scheduler, device
        self._buffer = _buffer(0, device)

    def plan(self, layout: BatchLayout) -> Int32Array:
        """Plan a step; returns before the device has read anything.

        Args:
            layout: Rows and pages of each request.

        Returns:
            The schedule on the host, until the plan after the next one.

        Raises:
            LiveDataError: Lengths and pages do not fit each other.
        """
        step = self._scheduler.step(layout)
        works = self._scheduler.layout(step.works)
        needed = works.pages + step.pages
        if needed > self._buffer.numel():
            self._buffer = _buffer(2 * needed, self._device)
        array = _write(self._scheduler, step, works, ring=self._ring, to=self._buffer)
        wrapper = self._wrapper
        wrapper._plan_info = works.plan_info
        wrapper._int_workspace_buffer = self._buffer
        wrapper._paged_kv_indices_buf = self._buffer[works.pages :]
        wrapper._batch_size, wrapper._qo_indptr_last = len(step.row_ends), int(step.row_ends[-1])
        return array


class FixedSchedule(PrefillState):
    """The schedule of a captured prefill: buffers of fixed size at fixed addresses.

    Args:
        rows: Rows of the graph, padding included.
        requests: Most requests of a step.
        max_context: Longest sequence in tokens.
        scheduler: Of the attention's shape.
        shape: Heads, sizes and device.
        ring: The slots.

    Attributes:
        buffer: int32, on the device: schedule and page numbers.
        layout: Where the arrays lie in it.
    """

    def __init__(
        self,
        *,
        rows: int,
        requests: int,
        max_context: int,
        scheduler: Scheduler,
        shape: AttentionShape,
        ring: PinnedRing,
    ) -> None:
        super().__init__(rows, requests, max_context)
        self._scheduler, self._ring = scheduler, ring
        self.layout = scheduler.layout(scheduler.most_works(rows=rows, requests=requests))
        self._pages = requests * shape.blocks_for(max_context) + scheduler.null_pages
        self.buffer = _buffer(self.layout.pages + self._pages, shape.device)

    def plan(self, layout: BatchLayout) -> None:
        """Plan a step, its padding included; returns before the device has read anything.

        Args:
            layout: Rows and pages of each request.

        Raises:
            LiveDataError: The step has more rows, requests or pages than the graph has room for.
        """
        step = self._scheduler.step(layout, padded=self.rows)
        if step.padding < 0 or step.pages > self._pages or len(step.row_ends) > self.requests:
            requests, rows = len(step.row_ends), self.rows - step.padding
            raise LiveDataError(
                f"The step has {rows} rows of {requests} requests, over {step.pages} pages, padding included; its graph has "
                f"room for {self.rows}, {self.requests} and {self._pages}.",
                why="The graph has the addresses and sizes of its buffers baked in.",
                fix="Use a graph of a larger bucket, or run the step with the attention in a break.",
            )
        _write(self._scheduler, step, self.layout, ring=self._ring, to=self.buffer)

    def bind(self, wrapper: Any) -> None:
        """Let a wrapper run this schedule.

        Args:
            wrapper: A FA3 wrapper of the same shape that has been planned.
        """
        wrapper._plan_info = self.layout.plan_info
        wrapper._int_workspace_buffer = self.buffer
        wrapper._paged_kv_indices_buf = self.buffer[self.layout.pages :]
        wrapper._qo_indptr_last = self.rows


def proven_schedule(
    wrapper: Any, make: Callable[[], HopperPlanner], plan: Callable[[HopperPlanner], Int32Array], *, ctas: int
) -> HopperPlanner:
    """Make a planner, let it plan what was planned publicly just now, and compare: the same works, in whatever order.

    Args:
        wrapper: The wrapper.
        make: Makes the planner.
        plan: Plans the same batch with it; returns the schedule on the host.
        ctas: Blocks of the kernel.

    Returns:
        The planner.

    Raises:
        ConfigError: The works differ, or the wrapper is not what the planner knows.
    """
    try:
        if wrapper._backend != "fa3":
            raise TypeError(f"the backend is {wrapper._backend!r}")
        held = wrapper._pin_memory_int_workspace_buffer.view(torch.int32).numpy()
        info = list(wrapper._plan_info)
        public = works_of(held, info, ctas=ctas)
        planner = make()
        thin = works_of(plan(planner), wrapper._plan_info, ctas=ctas)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"FlashInfer's plan for FA3 could not be read ({type(error).__name__}: {error}).",
            why="Its schedule is made here as FlashInfer 0.6.18 lays it out.",
            fix="Use Planning.PUBLIC, and report the version of FlashInfer.",
        ) from error
    if info[8] or not np.array_equal(thin, public):
        raise ConfigError(
            f"The schedule made here has {len(thin)} works, other ones than FlashInfer's plan() with {len(public)}.",
            why="A tile that is left out or computed over other tokens is a wrong result.",
            fix="Use Planning.PUBLIC, and report the version of FlashInfer.",
        )
    return planner
