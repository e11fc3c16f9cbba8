"""Our thin FlashInfer planner against FlashInfer's own plan(): the same plans, buffers and outputs, bit for bit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, LiveDataError
from breakgraph.models import flashinfer_slots
from breakgraph.models.attention import AttentionShape, BatchLayout
from breakgraph.models.flashinfer_hopper import HopperPlanner, proven_schedule
from breakgraph.models.flashinfer_packing import ALIGNMENT, HostArrays, Packing, blocks_of, offsets
from breakgraph.models.flashinfer_planner import (
    DecodePlanner,
    DeviceIndices,
    Planning,
    PrefillPlanner,
    check_version,
    proven,
)
from breakgraph.models.flashinfer_schedule import Scheduler, works_of
from breakgraph.models.flashinfer_slots import FIRST_CAPACITY, PinnedRing

CPU = torch.device("cpu")
BLOCK = 16
CACHE_BLOCKS = 2048
# Query heads, key-value heads, head dimension: 135M and 8B decode with tensor cores, 1B without.
SHAPES = [(9, 3, 64), (32, 8, 64), (32, 8, 128)]
BACKENDS = ["fa3", "fa2"]


# What needs no GPU: packing, and what is handed to the C++ plan.


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=70),
    block_size=st.sampled_from([1, 3, 16]),
    spare=st.integers(0, 3),
    queries=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed_arrays_equal_those_written_out(
    lens: list[tuple[int, int]], block_size: int, spare: int, queries: bool, seed: int
) -> None:
    """Lengths, offsets, last pages and pages of any batch, from one table or from an array each, as plain Python has them."""
    query_lens = np.array([q for q, _ in lens], dtype=np.int32)
    seq_lens = query_lens + np.array([c for _, c in lens], dtype=np.int32)
    needed = [-(-int(n) // block_size) for n in seq_lens]
    table = np.random.default_rng(seed).integers(0, 10_000, (len(lens), max(needed) + spare)).astype(np.int32)
    expected = [int(page) for row, count in zip(table, needed, strict=True) for page in row[:count]]

    blocks = blocks_of(seq_lens, block_size)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == needed
    packing = Packing.of(len(lens), queries=queries)
    starts = (packing.device, packing.page_indptr, packing.last_page, packing.pages)
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert (packing.device == packing.page_indptr) is not queries
    total = sum(needed)
    buffer = torch.full((packing.pages + total,), -7, dtype=torch.int32)
    host = HostArrays.of(buffer, packing)
    host.fill(seq_lens, blocks=blocks, block_size=block_size)
    if queries:
        assert host.fill_queries(query_lens) == int(query_lens.sum())
        assert host.native[0].tolist() == offsets(query_lens).tolist() == [0, *np.cumsum(query_lens).tolist()]
        tables = [row[: count + seed % 2] for row, count in zip(table, needed, strict=True)]
        host.fill_from_rows(tables, blocks=blocks, total=total)
    else:
        host.fill_from_table(table, blocks=blocks, total=total, ramp=np.arange(10_000))
    assert host.native[1].tolist() == [0, *np.cumsum(needed).tolist()]
    assert host.native[2].tolist() == seq_lens.tolist()
    last = buffer[packing.last_page : packing.last_page + len(lens)].tolist()
    assert last == [int(n) - (b - 1) * block_size for n, b in zip(seq_lens, needed, strict=True)]
    assert buffer[packing.pages :].tolist() == expected


def test_tables_that_do_not_cover_the_lengths_are_an_error() -> None:
    """Too few rows, columns or pages: an error before anything is planned, never a page of another row."""
    blocks = np.array([2, 3], dtype=np.int32)
    host = HostArrays.of(torch.zeros(1000, dtype=torch.int32), Packing.of(2, queries=True))
    pages = np.arange(6, dtype=np.int32)
    for tables in ([pages[:2]], [pages[:2], pages[:2]], [pages[:2], pages[:3], pages[:1]]):
        with pytest.raises(LiveDataError, match="need 5 pages"):
            host.fill_from_rows(tables, blocks=blocks, total=5)
    for shape in ((3, 2), (1, 6)):
        with pytest.raises(LiveDataError, match="need 5 pages"):
            host.fill_from_table(pages.reshape(shape), blocks=blocks, total=5, ramp=np.arange(10))
    with pytest.raises(LiveDataError, match="need 5 pages"):
        host.fill_from_table(np.zeros((2, 2), dtype=np.int32), blocks=blocks, total=5, ramp=np.arange(10))


@pytest.mark.parametrize("version", ["0.6.18", "0.6.18.post1", "0.6.19rc1", "0.6.100"])
def test_versions_that_were_read_are_taken(version: str) -> None:
    """Everything from 0.6.18 on, below 0.7."""
    check_version(version)


@pytest.mark.parametrize("version", ["0.6.17", "0.6.17.post3", "0.7", "0.7.0rc1", "1.0.0", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    """The internals of others were not read."""
    with pytest.raises(ConfigError, match="at least 0.6.18"):
        check_version(version)


class _HostEvent:
    """An event without a device."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("wait")

    def record(self, stream: object = None) -> None:
        self.log.append("record")


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots without page-locked memory and events without a device."""
    monkeypatch.setattr(flashinfer_slots, "_pinned", lambda count, dtype: torch.zeros(count, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", _HostEvent)


def _wrapper(**others: Any) -> Any:
    calls: list[tuple[Any, ...]] = []

    def plan(*args: Any) -> list[int]:
        calls.append(tuple(arg.tolist() if torch.is_tensor(arg) and arg.dtype == torch.int32 else arg for arg in args))
        return [len(args)]

    attributes = {
        "_cached_module": SimpleNamespace(plan=plan),
        "_float_workspace_buffer": torch.zeros(16, dtype=torch.uint8),
        "_int_workspace_buffer": torch.zeros(16, dtype=torch.uint8),
        "_num_qo_heads": 6,
        "_num_kv_heads": 2,
        "_window_left": -1,
        "_logits_soft_cap": 0.0,
        "_causal": True,
        "_plan_info": [20],
        "calls": calls,
    }
    return SimpleNamespace(**{**attributes, **others})


@pytest.mark.usefixtures("on_the_host")
def test_what_the_plan_of_a_prefill_gets() -> None:
    """Arguments in FlashInfer's order; what the wrapper runs with is on the device, also when the buffers have grown."""
    ring = PinnedRing(16, device=CPU)
    wrapper = _wrapper(is_cuda_graph_enabled=False, _backend="fa2")
    planner = PrefillPlanner(wrapper, ring=ring, device=CPU, head_dim=64, block_size=4)
    for length in (7, 4 * 2 * FIRST_CAPACITY):
        lens = np.array([length, 5], dtype=np.int32)
        tables = [np.arange(-(-int(n) // 4), dtype=np.int32) for n in lens]
        rows = np.array([3, 5], dtype=np.int32)
        planner.plan(BatchLayout(rows, lens - rows, tables))
        pages = len(tables[0])
        indptr = [0, pages, pages + 2]
        assert wrapper.calls[-1][3:] == (
            [0, 3, 8],
            indptr,
            lens.tolist(),
            8,
            2,
            6,
            2,
            4,
            False,
            64,
            64,
            True,
            -1,
            *(-1, False, 0, 0),
        )
        assert wrapper._plan_info == [20]
        assert wrapper._qo_indptr_buf.tolist() == [0, 3, 8]
        assert wrapper._paged_kv_indptr_buf.tolist() == indptr
        assert wrapper._paged_kv_last_page_len_buf.tolist() == [length - 4 * (pages - 1), 1]
        assert wrapper._paged_kv_indices_buf[: pages + 2].tolist() == [*range(pages), 0, 1]
        assert (wrapper._batch_size, wrapper._qo_indptr_last) == (2, 8)
    assert [slot.copied.log for slot in ring._slots] == [["wait", "record"]] * 2


@pytest.mark.usefixtures("on_the_host")
def test_what_a_prefill_with_fa3_runs() -> None:
    """The wrapper gets a schedule whose works are those of the public plan; buffers grow; other works are refused."""
    ring, scheduler = (
        PinnedRing(16, device=CPU),
        Scheduler(num_heads=6, head_dim=64, block_size=4, ctas=132),
    )

    def public(layout: BatchLayout) -> Any:
        """A wrapper as FlashInfer's plan leaves it, its works in another order."""
        wrapper = _wrapper(_backend="fa3", _pin_memory_int_workspace_buffer=None)
        array = HopperPlanner(wrapper, ring=PinnedRing(16, device=CPU), scheduler=scheduler, device=CPU).plan(layout)
        *arrays, blocks, requests = (offset // 4 for offset in wrapper._plan_info[:8])
        works = int(array[blocks + 132])
        for start in (*arrays, requests):
            array[start : start + works] = array[start : start + works][::-1].copy()
        wrapper._pin_memory_int_workspace_buffer = torch.from_numpy(array.copy()).view(torch.uint8)
        return wrapper

    for length in (7, 4 * 2 * FIRST_CAPACITY, 9):
        lens = np.array([length, 5], dtype=np.int32)
        tables = [np.arange(7, 7 + -(-int(n) // 4), dtype=np.int32) for n in lens]
        rows = np.array([3, 5], dtype=np.int32)
        layout = BatchLayout(rows, lens - rows, tables)
        wrapper = public(layout)
        held = works_of(
            wrapper._pin_memory_int_workspace_buffer.view(torch.int32).numpy(), wrapper._plan_info, ctas=132
        )

        def make(wrapper: Any = wrapper) -> HopperPlanner:
            return HopperPlanner(wrapper, ring=ring, scheduler=scheduler, device=CPU)

        def plan(planner: HopperPlanner, layout: BatchLayout = layout) -> Any:
            return planner.plan(layout)

        proven_schedule(wrapper, make, plan, ctas=132)
        ours = works_of(wrapper._int_workspace_buffer.numpy(), wrapper._plan_info, ctas=132)
        assert ours.tolist() == held.tolist()
        assert len(held) == 2 * 6
        pages = sum(map(len, tables))
        assert wrapper._paged_kv_indices_buf[:pages].tolist() == np.concatenate(tables).tolist()
        assert (wrapper._batch_size, wrapper._qo_indptr_last) == (2, 8)

        wrapper = public(layout)
        wrapper._pin_memory_int_workspace_buffer[wrapper._plan_info[4]] += 1  # one work over one token more
        with pytest.raises(ConfigError, match="12 works"):
            proven_schedule(wrapper, lambda wrapper=wrapper: make(wrapper), plan, ctas=132)
        wrapper._backend = "fa2"
        with pytest.raises(ConfigError, match="could not be read"):
            proven_schedule(wrapper, lambda wrapper=wrapper: make(wrapper), plan, ctas=132)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("tensor_cores", [True, False])
def test_what_the_plan_of_a_decode_gets(tensor_cores: bool) -> None:
    """Arguments of both modules in FlashInfer's order, into the wrapper's own buffers; other batches are refused."""
    packing = Packing.of(3, queries=False)
    indices = DeviceIndices(packing.pages - packing.device + 3 * 4, device=CPU)
    _, indptr, last, pages = indices.views(packing)
    wrapper = _wrapper(is_cuda_graph_enabled=True, use_tensor_cores=tensor_cores, _backend="fa2")
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    planner = proven(
        wrapper if tensor_cores else _with(wrapper, _plan_info=[15]),
        lambda: DecodePlanner(
            wrapper,
            indices=indices,
            packing=packing,
            ring=PinnedRing(16, device=CPU),
            head_dim=64,
            block_size=4,
            dtype=torch.bfloat16,
        ),
        lambda planner: planner.plan(block_tables=table, seq_lens=np.array([1, 9, 4], dtype=np.int32)),
    )
    args = wrapper.calls[-1][3:]
    if tensor_cores:
        head = ([0, 1, 2, 3], [0, 1, 4, 5], [1, 9, 4], 3, 3, 6, 2, 4, True, 64, 64, False, -1)
        assert args == (*head, -1, False, 0, 0)
    else:
        assert args[:-2] == ([0, 1, 4, 5], 3, 6, 2, 4, True, -1, 0.0, 64, 64)
        assert [(arg.numel(), arg.dtype) for arg in args[-2:]] == [(0, torch.bfloat16)] * 2
    assert (indptr.tolist(), last.tolist(), pages[:5].tolist()) == ([0, 1, 4, 5], [1, 1, 4], [0, 4, 5, 6, 8])
    for lens in ([1, 1], [1], [1, 17, 40]):
        with pytest.raises(LiveDataError):
            planner.plan(block_tables=table, seq_lens=np.array(lens, dtype=np.int32))


def _with(wrapper: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(wrapper, name, value)
    return wrapper


@pytest.mark.usefixtures("on_the_host")
def test_a_plan_that_differs_from_the_public_one_is_refused() -> None:
    """Another plan for the same batch, a backend that was not read, a missing attribute: a ConfigError each."""
    one = np.ones(1, dtype=np.int32)
    layout = BatchLayout(one, one - 1, [one - 1])
    good = {"is_cuda_graph_enabled": False, "_backend": "fa2"}
    for changes, said in (
        ({"_plan_info": [1]}, "planned \\[20\\]"),
        ({"_backend": "cudnn"}, "cudnn"),
        ({"_cached_module": None}, "could not be called"),
    ):
        wrapper = _wrapper(**{**good, **changes})

        def make(wrapper: Any = wrapper) -> PrefillPlanner:
            return PrefillPlanner(
                wrapper,
                ring=PinnedRing(16, device=CPU),
                device=CPU,
                head_dim=64,
                block_size=4,
            )

        with pytest.raises(ConfigError, match=said):
            proven(wrapper, make, lambda planner: planner.plan(layout))


# On a GPU: plans, buffers and outputs of real wrappers.


def _pair(shape: tuple[int, int, int], **options: Any) -> tuple[Any, Any]:
    """The same attention, planned by us and by FlashInfer."""
    pytest.importorskip("flashinfer")
    from breakgraph.models.attention_flashinfer import FlashInferAttention

    torch.manual_seed(0)
    whole = AttentionShape(*shape, BLOCK, torch.bfloat16, torch.device("cuda"))
    thin, public = (
        FlashInferAttention(whole, reason="test", planning=planning, **options)
        for planning in (Planning.THIN, Planning.PUBLIC)
    )
    assert (thin.planning, public.planning) == (Planning.THIN, Planning.PUBLIC)
    return thin, public


def _cache(shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    _, kv_heads, head_dim = shape
    k, v = torch.randn(2, CACHE_BLOCKS, BLOCK, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    return k, v


def _queries(rows: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(rows, shape[0], shape[2], device="cuda", dtype=torch.bfloat16)


def _random_layout(random: np.random.Generator, requests: int) -> BatchLayout:
    """Fresh prompts and chunks, up to 2,000 tokens each and some 16,000 rows; tables name any block, some too many."""
    rows = random.integers(1, min(2000, 16_000 // requests) + 1, requests)
    contexts = random.integers(0, 2001 - rows) * random.integers(0, 2, requests)
    needed = -(-(rows + contexts) // BLOCK)
    spare = random.integers(0, 2, requests) * random.integers(0, 3)
    tables = [random.integers(1, CACHE_BLOCKS, n).astype(np.int32) for n in needed + spare]
    return BatchLayout(rows.astype(np.int32), contexts.astype(np.int32), tables)


def _random_decode(random: np.random.Generator, rows: int, padding: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths 1 to 2,000, the last rows padding on the null block; the table as wide as the longest needs."""
    lens = random.integers(1, 2001, rows).astype(np.int32)
    lens[rows - padding :] = 1
    table = random.integers(1, CACHE_BLOCKS, (rows, -(-int(lens.max()) // BLOCK))).astype(np.int32)
    table[rows - padding :] = 0
    return table, lens


def _blank(attention: Any, wrapper: Any) -> None:
    """Zeros in all int workspaces, so that they can be compared as a whole: a plan leaves gaps in them."""
    torch.cuda.synchronize()
    wrapper._int_workspace_buffer.zero_()
    wrapper._pin_memory_int_workspace_buffer.zero_()
    if attention._ring is not None:
        for slot in attention._ring._slots:
            slot.workspace.zero_()
    torch.cuda.synchronize()


def _assert_same_plan(thin: Any, public: Any, *, pages: int, names: tuple[str, ...]) -> None:
    torch.cuda.synchronize()
    assert list(thin._plan_info) == list(public._plan_info)
    assert torch.equal(thin._int_workspace_buffer, public._int_workspace_buffer)
    assert public._int_workspace_buffer.any()
    for name in names:
        assert torch.equal(getattr(thin, name), getattr(public, name)), name
    ours, theirs = (wrapper._paged_kv_indices_buf[:pages] for wrapper in (thin, public))
    assert torch.equal(ours, theirs)


def _assert_same_works(thin: Any, public: Any, *, pages: int) -> None:
    """Two FA3 wrappers hold the same works and page numbers on the device, dealt in whatever way."""
    torch.cuda.synchronize()
    ctas = torch.cuda.get_device_properties("cuda").multi_processor_count
    ours, theirs = (
        works_of(wrapper._int_workspace_buffer.view(torch.int32).cpu().numpy(), wrapper._plan_info, ctas=ctas)
        for wrapper in (thin, public)
    )
    assert len(theirs)
    assert np.array_equal(ours, theirs)
    assert torch.equal(*(wrapper._paged_kv_indices_buf[:pages] for wrapper in (thin, public)))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_plans_equal_the_public_ones(shape: tuple[int, int, int], backend: str) -> None:
    """Random batches of 1 to 64 requests: the same plan (for FA3 the same works), pages and outputs, bit for bit."""
    thin, public = _pair(shape, prefill_backend=backend)
    k, v = _cache(shape)
    random = np.random.default_rng(7)
    for step, requests in enumerate([1, 1, 64, 2, 64, 17, 1, 33, 5, 64]):
        layout = _random_layout(random, requests)
        q = _queries(layout.rows, shape)
        outputs, wrappers = [], []
        for attention in (thin, public):
            _blank(attention, attention._prefill[step % 2].wrapper)
            batch = attention.plan_prefill(layout)
            out = torch.full_like(q, float("nan"))
            attention.prefill(q, k, v, out, batch)
            outputs.append(out)
            wrappers.append(batch.planner.wrapper)
            assert (batch.planner.thin is None) is (attention is public)
        total = int((-(-layout.seq_lens // BLOCK)).sum())
        names = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf")
        if backend == "fa3":
            _assert_same_works(*wrappers, pages=total)
        else:
            _assert_same_plan(*wrappers, pages=total, names=names)
        assert torch.isfinite(outputs[1]).all()
        assert torch.equal(*outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 8, 64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_plans_equal_the_public_ones(shape: tuple[int, int, int], batch: int) -> None:
    """The graph, replayed after our plans, equals the eager kernel after public plans; plans and buffers are the same."""
    thin, public = _pair(shape)
    k, v = _cache(shape)
    padding = batch // 3
    ours, theirs = (attention.decode_state(batch_size=batch, max_context=2000) for attention in (thin, public))
    assert ours.planner.thin is not None
    assert theirs.planner.thin is None
    q = _queries(batch, shape)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        thin.decode(q, k, v, ours, None, None)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = thin.decode(q, k, v, ours, None, None)
    random = np.random.default_rng(batch)
    for _ in range(5):
        table, lens = _random_decode(random, batch, padding)
        q.normal_()
        for attention, state in ((thin, ours), (public, theirs)):
            _blank(attention, state.planner.wrapper)
            attention.plan_decode(state, block_tables=table, seq_lens=lens)
        graph.replay()
        expected = public.decode(q, k, v, theirs, None, None)
        names = ("_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf")
        total = int((-(-lens // BLOCK)).sum())
        _assert_same_plan(ours.planner.wrapper, theirs.planner.wrapper, pages=total, names=names)
        assert torch.isfinite(expected).all()
        assert torch.equal(replayed, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1]], ids=str)
def test_plans_far_ahead_of_the_device_stay_right(shape: tuple[int, int, int]) -> None:
    """200 plans of two decode states and of prefills, the device always behind: each step computes what it was planned for."""
    thin, public = _pair(shape)
    k, v = _cache(shape)
    sizes = (8, 64)
    ours, theirs = ([a.decode_state(batch_size=n, max_context=2000) for n in sizes] for a in (thin, public))
    random = np.random.default_rng(3)
    steps: list[tuple[Any, ...]] = []
    for number in range(200):
        if number % 4 == 3:
            layout = _random_layout(random, int(random.integers(40, 65)))
            steps.append((None, layout, _queries(layout.rows, shape)))
        else:
            which = number % 2
            steps.append((which, _random_decode(random, sizes[which], 2), _queries(sizes[which], shape)))

    def run(attention: Any, states: list[Any], *, behind: bool) -> list[torch.Tensor]:
        outputs = []
        for which, work, q in steps:
            if which is None:
                batch = attention.plan_prefill(work)
            else:
                attention.plan_decode(states[which], block_tables=work[0], seq_lens=work[1])
            if behind:
                torch.cuda._sleep(1_500_000)  # most of a millisecond, between the plan's copies and their reader
            if which is None:
                out = torch.empty_like(q)
                attention.prefill(q, k, v, out, batch)
            else:
                out = attention.decode(q, k, v, states[which], None, None)
            outputs.append(out)
            if not behind:
                torch.cuda.synchronize()
        return outputs

    torch.cuda._sleep(50_000_000)
    got = run(thin, ours, behind=True)
    expected = run(public, theirs, behind=False)
    torch.cuda.synchronize()
    wrong = [number for number, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
    assert not wrong


@pytest.mark.gpu
def test_a_batch_larger_than_the_buffers_is_planned() -> None:
    """More pages than the first slots and buffers hold, then a small batch, then a large one: right each time."""
    shape = SHAPES[1]
    thin, public = _pair(shape)
    k, v = _cache(shape)
    random = np.random.default_rng(5)
    state = thin.decode_state(batch_size=1, max_context=64)  # its views of the slots are made anew when those grow
    for length in (100, 100, 80_000, 80_000, 100, 100, 170_000):
        tables = [random.integers(1, CACHE_BLOCKS, -(-length // BLOCK)).astype(np.int32) for _ in range(4)]
        rows = np.full(4, 8, dtype=np.int32)
        layout = BatchLayout(rows, np.full(4, length - 8, dtype=np.int32), tables)
        q = _queries(32, shape)
        outputs = []
        for attention in (thin, public):
            outputs.append(torch.empty_like(q))
            attention.prefill(q, k, v, outputs[-1], attention.plan_prefill(layout))
        assert torch.equal(*outputs), length
        thin.plan_decode(state, block_tables=np.array([[3, 4]], np.int32), seq_lens=np.array([20], np.int32))
        assert torch.isfinite(thin.decode(q[:1], k, v, state, None, None)).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_thin_plans_do_not_wait_for_the_device() -> None:
    """No copy of a thin plan makes torch synchronise."""
    thin, _ = _pair(SHAPES[2])
    state = thin.decode_state(batch_size=8, max_context=256)
    table, lens = np.zeros((8, state.max_blocks), dtype=np.int32), np.full(8, 200, dtype=np.int32)
    layout = _random_layout(np.random.default_rng(0), 8)
    for _ in range(2):
        thin.plan_prefill(layout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        thin.plan_prefill(layout)
        thin.plan_decode(state, block_tables=table, seq_lens=lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("reason", ["version", "difference"])
def test_without_a_thin_planner_the_public_one_serves(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version, or a plan that differs: a warning says why, and the outputs are FlashInfer's."""
    flashinfer = pytest.importorskip("flashinfer")
    from breakgraph.models.attention_flashinfer import FlashInferAttention

    shape = SHAPES[0]
    _, public = _pair(shape)
    if reason == "version":
        monkeypatch.setattr(flashinfer, "__version__", "0.7.1")
    else:

        def refuse(wrapper: Any, make: Any, plan: Any, **_: Any) -> Any:
            plan(make())
            raise ConfigError("they differ", why="w", fix="f")

        for name in ("proven", "proven_schedule"):
            monkeypatch.setattr(f"breakgraph.models.attention_flashinfer.{name}", refuse)
    k, v = _cache(shape)
    layout = _random_layout(np.random.default_rng(1), 4)
    q = _queries(layout.rows, shape)
    outputs = [torch.empty_like(q) for _ in range(4)]
    with caplog.at_level(logging.WARNING, logger="breakgraph"):
        attention = FlashInferAttention(public.shape, reason="test")
        for out in outputs[:3]:
            attention.prefill(q, k, v, out, attention.plan_prefill(layout))
    assert attention.planning is Planning.PUBLIC
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("breakgraph")]
    assert ("0.7.1" if reason == "version" else "they differ") in said
    public.prefill(q, k, v, outputs[3], public.plan_prefill(layout))
    assert all(torch.equal(out, outputs[3]) for out in outputs[:3])
    state, other = (a.decode_state(batch_size=4, max_context=2000) for a in (attention, public))
    table, lens = _random_decode(np.random.default_rng(2), 4, 1)
    for a, s in ((attention, state), (public, other)):
        a.plan_decode(s, block_tables=table, seq_lens=lens)
    assert torch.equal(attention.decode(q[:4], k, v, state, None, None), public.decode(q[:4], k, v, other, None, None))
