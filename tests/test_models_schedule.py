"""Schedules for FA3's prefill kernel: the same works as FlashInfer's plan, dealt evenly, padding included."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import LiveDataError
from breakgraph.models import flashinfer_hopper, flashinfer_slots
from breakgraph.models.attention import AttentionShape, BatchLayout
from breakgraph.models.flashinfer_hopper import FixedSchedule
from breakgraph.models.flashinfer_schedule import TILE_ROWS, Scheduler, Step, works_of
from breakgraph.models.flashinfer_slots import PinnedRing

CTAS = 132


class Work(NamedTuple):
    """One work, as the kernel reads it."""

    tile: int
    first_row: int
    first_page: int
    rows: int
    tokens: int
    head: int
    request: int


def _by_block(scheduler: Scheduler, step: Step, *, works: int | None = None) -> tuple[list[list[Work]], np.ndarray]:
    """The works of each block of the kernel, and the page numbers."""
    layout = scheduler.layout(step.works if works is None else works)
    buffer = np.full(layout.pages + step.pages, -7, dtype=np.int32)
    assert scheduler.fill(buffer, step, layout=layout) == len(buffer)
    starts = [offset // 4 for offset in layout.plan_info[:8]]
    begins = buffer[starts[6] : starts[6] + scheduler.ctas + 1].tolist()
    assert begins[0] == 0
    assert begins[-1] == step.works <= layout.works
    places = (*starts[:6], starts[7])
    assert all(start % 4 == 0 for start in starts)
    found = [Work(*(int(buffer[place + index]) for place in places)) for index in range(begins[-1])]
    assert works_of(buffer, layout.plan_info, ctas=scheduler.ctas).tolist() == sorted(
        (list(work) for work in found), key=lambda work: work[::-1]
    )
    blocks = [found[first:last] for first, last in pairwise(begins)]
    return blocks, buffer[layout.pages :]


def _kv_end(work: Work, tile_rows: int) -> int:
    """Tokens that a work looks at."""
    last = (work.tile + 1) * tile_rows >= work.rows
    return work.tokens if last else work.tokens - work.rows + (work.tile + 1) * tile_rows


def _layout(lens: list[tuple[int, int]], *, block_size: int = 16) -> BatchLayout:
    query_lens = np.array([q for q, _ in lens], dtype=np.int32)
    seq_lens = query_lens + np.array([c for _, c in lens], dtype=np.int32)
    tables = [1000 * (index + 1) + np.arange(-(-int(n) // block_size) + 1) for index, n in enumerate(seq_lens)]
    return BatchLayout(query_lens, seq_lens - query_lens, [table.astype(np.int32) for table in tables])


LENS = st.lists(st.tuples(st.integers(1, 700), st.sampled_from([0, 0, 1, 16, 129, 900])), min_size=0, max_size=40)


@settings(max_examples=120, deadline=None)
@given(
    lens=LENS,
    padding=st.one_of(st.none(), st.integers(0, 700)),
    heads=st.sampled_from([1, 9, 32]),
    head_dim=st.sampled_from([64, 128]),
    block_size=st.sampled_from([1, 16, 256]),
    spare=st.integers(0, 50),
)
def test_every_tile_of_every_head_is_computed_once(
    lens: list[tuple[int, int]], padding: int | None, heads: int, head_dim: int, block_size: int, spare: int
) -> None:
    """Any batch: the works are those that a plain loop makes, over the right rows and pages; rows of padding see null pages."""
    own = sum(q for q, _ in lens)
    padded = None if padding is None else own + padding
    if not own and not padded:
        return
    scheduler = Scheduler(num_heads=heads, head_dim=head_dim, block_size=block_size, ctas=CTAS)
    layout = _layout(lens, block_size=block_size)
    step = scheduler.step(layout, padded=padded)
    most = scheduler.most_works(rows=padded or own, requests=len(lens))
    assert step.works <= most
    blocks, pages = _by_block(scheduler, step, works=None if padded is None else most + spare)
    tile = TILE_ROWS[head_dim]
    expected, first_row = [], 0
    first_page = 0 if padded is None else scheduler.null_pages
    for index, ((q, context), table) in enumerate(zip(lens, layout.block_tables, strict=True)):
        needed = -(-(q + context) // block_size)
        assert pages[first_page : first_page + needed].tolist() == table[:needed].tolist()
        for head in range(heads):
            expected += [
                Work(number, first_row, first_page, q, q + context, head, index) for number in range(-(-q // tile))
            ]
        first_row, first_page = first_row + q, first_page + needed
    found = [work for block in blocks for work in block]
    real = [work for work in found if work.first_row < own]
    assert sorted(real) == sorted(expected)

    covered = np.zeros((padding or 0, heads), dtype=int)
    for work in found:
        if work.first_row >= own:
            assert work.tile == 0
            assert work.rows == work.tokens <= tile
            assert not pages[work.first_page : work.first_page + -(-work.tokens // block_size)].any()
            covered[work.first_row - own : work.first_row - own + work.rows, work.head] += 1
    assert (covered == 1).all()


@settings(max_examples=60, deadline=None)
@given(lens=LENS.filter(len), heads=st.sampled_from([9, 32]), head_dim=st.sampled_from([64, 128]))
def test_works_are_dealt_evenly(lens: list[tuple[int, int]], heads: int, head_dim: int) -> None:
    """No block has more to do than the average and one longest work, and its longer works come first."""
    scheduler = Scheduler(num_heads=heads, head_dim=head_dim, block_size=16, ctas=CTAS)
    blocks, _ = _by_block(scheduler, scheduler.step(_layout(lens)))
    tile = TILE_ROWS[head_dim]

    def cost(work: Work) -> int:
        return 2 * tile + _kv_end(work, tile)

    sums = [sum(map(cost, block)) for block in blocks]
    works = [work for block in blocks for work in block]
    longest, mean = max(map(cost, works)), sum(sums) / CTAS
    assert max(sums) <= mean + longest
    for block in blocks:
        assert [cost(work) for work in block] == sorted(map(cost, block), reverse=True)


def test_schedules_are_as_even_as_those_of_flashinfer() -> None:
    """Over 60 mixed batches the fullest block has less to do, on average, than by FlashInfer's rule."""
    random, tile, heads = np.random.default_rng(0), 128, 32
    ratios = []
    for _ in range(60):
        lens = [(int(q), int(c)) for q, c in zip(random.integers(1, 700, 12), random.integers(0, 900, 12), strict=True)]
        scheduler = Scheduler(num_heads=heads, head_dim=128, block_size=16, ctas=CTAS)
        blocks, _ = _by_block(scheduler, scheduler.step(_layout(lens)))
        ours = max(sum(2 * tile + _kv_end(work, tile) for work in block) for block in blocks)
        loads = [(0, index) for index in range(CTAS)]
        for _ in range(heads):
            for q, context in sorted(lens, key=lambda one: -sum(one)):
                for number in range(-(-q // tile) - 1, -1, -1):
                    load, index = loads[0]
                    work = Work(number, 0, 0, q, q + context, 0, 0)
                    heapq.heapreplace(loads, (load + 2 * tile + _kv_end(work, tile), index))
        ratios.append(ours / max(loads)[0])
    assert np.mean(ratios) < 1


def test_a_schedule_of_the_worst_step_fits() -> None:
    """As many requests as there is room for, all but one of one row, and padding of one row more than a tile."""
    scheduler = Scheduler(num_heads=4, head_dim=128, block_size=16, ctas=CTAS)
    for requests in (1, 2, 64):
        for rows in (requests, requests + 1, 129, 1024):
            for last in (1, 128, 129, rows - requests + 1):
                if requests - 1 + last <= rows and last > 0:
                    step = scheduler.step(_layout([(1, 0)] * (requests - 1) + [(last, 0)]), padded=rows)
                    assert step.works <= scheduler.most_works(rows=rows, requests=requests)
                    _by_block(scheduler, step)


class _HostEvent:
    """An event without a device."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def record(self, stream: object = None) -> None:
        """Nothing runs."""


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> FixedSchedule:
    """A state of 32 rows and 4 requests of at most 64 tokens, without a device."""
    monkeypatch.setattr(flashinfer_slots, "_pinned", lambda count, dtype: torch.zeros(count, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", _HostEvent)
    shape = AttentionShape(4, 2, 64, 16, torch.bfloat16, torch.device("cpu"))
    return flashinfer_hopper.FixedSchedule(
        rows=32,
        requests=4,
        max_context=64,
        scheduler=Scheduler(num_heads=4, head_dim=64, block_size=16, ctas=CTAS),
        shape=shape,
        ring=PinnedRing(16, device=torch.device("cpu")),
    )


def test_a_fixed_schedule_stays_where_it_is(state: FixedSchedule) -> None:
    """Every step, full or with padding, is written to the same buffer; a wrapper that is bound to it runs that."""
    address = state.buffer.data_ptr()
    for lens in ([(32, 0)], [(1, 63), (2, 62), (8, 0), (1, 0)], [(1, 0)], [], [(29, 35), (1, 0), (1, 0), (1, 0)]):
        layout = _layout(lens)
        state.plan(layout)
        works = works_of(state.buffer.numpy(), state.layout.plan_info, ctas=CTAS)
        assert works[:, 3].sum() == 4 * 32  # one tile a request, and one for padding: all rows, for each head
        assert state.buffer.data_ptr() == address
    wrapper = type("Wrapper", (), {})()
    state.bind(wrapper)
    assert wrapper._int_workspace_buffer.data_ptr() == address
    assert wrapper._paged_kv_indices_buf.data_ptr() == address + 4 * state.layout.pages
    assert (wrapper._plan_info, wrapper._qo_indptr_last) == (state.layout.plan_info, 32)


@pytest.mark.parametrize(
    "lens",
    [[(33, 0)], [(1, 0)] * 5, [(1, 64)] * 4, [(20, 0), (13, 0)]],
    ids=["rows", "requests", "context", "rows together"],
)
def test_a_step_that_does_not_fit_is_refused(state: FixedSchedule, lens: list[tuple[int, int]]) -> None:
    """Too many rows, requests or tokens: an error before anything is written."""
    state.plan(_layout([(3, 4)]))
    before = state.buffer.clone()
    with pytest.raises(LiveDataError, match="room for"):
        state.plan(_layout(lens))
    assert torch.equal(state.buffer, before)


def test_tables_that_are_too_short_are_refused(state: FixedSchedule) -> None:
    """A page that no table names is never read: the step is refused, and the slot can be taken again."""
    layout = _layout([(5, 20), (3, 0)])
    short = BatchLayout(layout.query_lens, layout.context_lens, [layout.block_tables[0][:1], layout.block_tables[1]])
    for _ in range(3):
        with pytest.raises(LiveDataError, match="need 3 pages"):
            state.plan(short)
    state.plan(layout)
