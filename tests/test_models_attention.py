"""Paged attention in plain torch against a dense reference, on random layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, LiveDataError
from breakgraph.models.attention import Attention, BatchLayout, make_attention
from breakgraph.replay_context import eager_step

HEAD_DIM = 8


def _attention(*, heads: int, kv_heads: int, block_size: int) -> Attention:
    return make_attention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=torch.float32,
        device="cpu",
    )


def _dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last q.shape[0] tokens, written out: q (T, Hq, D), keys and values (L, Hkv, D)."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = keys.shape
    keys, values = (x.double().repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->htl", q.double(), keys) / dim**0.5
    visible = torch.arange(length) <= torch.arange(length - rows, length)[:, None]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, values).float()


class _Layout:
    """Random requests whose blocks are scattered over a cache that also holds other requests' data."""

    def __init__(self, lengths: list[tuple[int, int]], *, heads: int, kv_heads: int, block_size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        total = [context + rows for rows, context in lengths]
        needed = [-(-n // block_size) for n in total]
        blocks = 1 + sum(needed) + 5
        shape = (blocks, block_size, kv_heads, HEAD_DIM)
        self.k_cache = torch.randn(shape, generator=generator)
        self.v_cache = torch.randn(shape, generator=generator)
        order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in needed]
        self.q = torch.randn(sum(rows for rows, _ in lengths), heads, HEAD_DIM, generator=generator)

    def tokens(self, cache: torch.Tensor, index: int) -> torch.Tensor:
        rows, context = self.lengths[index]
        return cache[self.tables[index]].flatten(0, 1)[: context + rows]

    def batch(self) -> BatchLayout:
        return BatchLayout(
            np.array([rows for rows, _ in self.lengths], dtype=np.int32),
            np.array([context for _, context in self.lengths], dtype=np.int32),
            [np.array(table, dtype=np.int32) for table in self.tables],
        )

    def expected(self) -> torch.Tensor:
        parts, start = [], 0
        for index, (rows, _) in enumerate(self.lengths):
            q = self.q[start : start + rows]
            parts.append(_dense(q, self.tokens(self.k_cache, index), self.tokens(self.v_cache, index)))
            start += rows
        return torch.cat(parts)


_SHAPES = st.sampled_from([(1, 1), (4, 4), (6, 2), (4, 1), (9, 3)])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 19), st.integers(0, 23)), min_size=1, max_size=5),
    heads=_SHAPES,
    block_size=st.sampled_from([1, 3, 4, 16]),
    padding=st.integers(0, 6),
    seed=st.integers(0, 10_000),
)
def test_prefill_equals_dense_attention(
    lengths: list[tuple[int, int]], heads: tuple[int, int], block_size: int, padding: int, seed: int
) -> None:
    """Any mix of fresh prompts and chunks over scattered blocks: dense attention; tails zero, caches untouched."""
    layout = _Layout(lengths, heads=heads[0], kv_heads=heads[1], block_size=block_size, seed=seed)
    attention = _attention(heads=heads[0], kv_heads=heads[1], block_size=block_size)
    batch = attention.plan_prefill(layout.batch())
    rows = layout.q.shape[0]
    q = torch.cat((layout.q, torch.full((padding, heads[0], HEAD_DIM), float("nan"))))
    out = torch.full_like(q, float("nan"))
    before = (layout.k_cache.clone(), layout.v_cache.clone())
    with eager_step(live={"batch": batch}, valid_rows=rows, padded_rows=rows + padding):
        attention.prefill(q, layout.k_cache, layout.v_cache, out, batch)
    torch.testing.assert_close(out[:rows], layout.expected(), atol=1e-5, rtol=1e-5)
    assert not out[rows:].any()
    assert torch.equal(layout.k_cache, before[0])
    assert torch.equal(layout.v_cache, before[1])


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    heads=_SHAPES,
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 9),
    padding=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
def test_decode_equals_dense_attention(
    contexts: list[int], heads: tuple[int, int], block_size: int, spare: int, padding: int, seed: int
) -> None:
    """One token of each sequence: dense attention whatever the context bucket; padding rows finite."""
    layout = _Layout([(1, c) for c in contexts], heads=heads[0], kv_heads=heads[1], block_size=block_size, seed=seed)
    attention = _attention(heads=heads[0], kv_heads=heads[1], block_size=block_size)
    rows = len(contexts)
    state = attention.decode_state(batch_size=rows + padding, max_context=max(contexts) + 1 + spare)
    assert state.max_blocks == -(-(max(contexts) + 1 + spare) // block_size)
    tables = torch.zeros(rows + padding, state.max_blocks, dtype=torch.int32)
    for row, table in enumerate(layout.tables):
        tables[row, : len(table)] = torch.tensor(table)
    lens = torch.tensor([c + 1 for c in contexts] + [1] * padding, dtype=torch.int32)
    q = torch.cat((layout.q, torch.zeros(padding, heads[0], HEAD_DIM)))
    attention.plan_decode(state, block_tables=tables.numpy(), seq_lens=lens.numpy())
    out = attention.decode(q, layout.k_cache, layout.v_cache, state, tables, lens)
    assert out.shape == q.shape
    torch.testing.assert_close(out[:rows], layout.expected(), atol=1e-5, rtol=1e-5)
    assert torch.isfinite(out).all()


def test_other_requests_blocks_have_no_influence() -> None:
    """NaN in every slot that a request does not own changes nothing, in prefill and past the end of a block."""
    layout = _Layout([(5, 6), (1, 2)], heads=6, kv_heads=2, block_size=4, seed=1)
    attention = _attention(heads=6, kv_heads=2, block_size=4)
    expected = layout.expected()
    for cache in (layout.k_cache, layout.v_cache):
        kept = [layout.tokens(cache, index) for index in range(2)]
        cache.fill_(float("nan"))
        for table, tokens in zip(layout.tables, kept, strict=True):
            padded = torch.full((len(table) * 4, 2, HEAD_DIM), float("nan"))
            padded[: len(tokens)] = tokens
            cache[table] = padded.view(len(table), 4, 2, HEAD_DIM)
    batch = attention.plan_prefill(layout.batch())
    out = torch.empty_like(layout.q)
    attention.prefill(layout.q, layout.k_cache, layout.v_cache, out, batch)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_plan_outlives_the_callers_arrays() -> None:
    """Host arrays may be reused for the next step as soon as plan_prefill returns."""
    layout = _Layout([(3, 5)], heads=4, kv_heads=4, block_size=4, seed=2)
    attention = _attention(heads=4, kv_heads=4, block_size=4)
    host = layout.batch()
    batch = attention.plan_prefill(host)
    host.block_tables[0][:] = 0
    host.query_lens[:] = 0
    out = torch.empty_like(layout.q)
    attention.prefill(layout.q, layout.k_cache, layout.v_cache, out, batch)
    torch.testing.assert_close(out, layout.expected(), atol=1e-5, rtol=1e-5)


def test_rows_that_the_batch_does_not_describe_are_an_error() -> None:
    """A batch planned for other rows than the break receives is a LiveDataError with both counts."""
    layout = _Layout([(3, 0)], heads=4, kv_heads=4, block_size=4, seed=3)
    attention = _attention(heads=4, kv_heads=4, block_size=4)
    batch = attention.plan_prefill(layout.batch())
    q = torch.zeros(5, 4, HEAD_DIM)
    with pytest.raises(LiveDataError, match="received 5 rows; its batch describes 3"):
        attention.prefill(q, layout.k_cache, layout.v_cache, torch.empty_like(q), batch)


def test_an_empty_step_writes_zero_rows() -> None:
    """No request at all: the plan is empty and every padded row becomes zero."""
    attention = _attention(heads=4, kv_heads=4, block_size=4)
    none = np.zeros(0, dtype=np.int32)
    batch = attention.plan_prefill(BatchLayout(none, none, []))
    cache = torch.zeros(2, 4, 4, HEAD_DIM)
    out = torch.full((3, 4, HEAD_DIM), float("nan"))
    with eager_step(live={"batch": batch}, valid_rows=0, padded_rows=3):
        attention.prefill(torch.zeros(3, 4, HEAD_DIM), cache, cache, out, batch)
    assert not out.any()


def test_auto_says_why_it_chose_torch() -> None:
    """On a CPU the automatic choice is torch, and the reason names the device."""
    attention = _attention(heads=4, kv_heads=4, block_size=4)
    assert attention.kind == "torch"
    assert "cpu" in attention.reason


def test_flashinfer_by_name_is_refused_where_it_cannot_run() -> None:
    """Asked for by name on a CPU, FlashInfer is a ConfigError with the reason, never another kernel."""
    with pytest.raises(ConfigError, match="needs CUDA"):
        make_attention(
            num_heads=4,
            num_kv_heads=4,
            head_dim=64,
            block_size=16,
            dtype=torch.bfloat16,
            device="cpu",
            kind="flashinfer",
        )


def test_unknown_kind_is_refused() -> None:
    """A misspelt kind is a ConfigError that lists the kinds."""
    with pytest.raises(ConfigError, match='"auto", "torch" or "flashinfer"'):
        make_attention(
            num_heads=4, num_kv_heads=4, head_dim=64, block_size=16, dtype=torch.float32, device="cpu", kind="cuda"
        )
