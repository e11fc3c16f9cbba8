"""Layers that are not plain causal attention: windows, chunks, soft caps, sinks, scales, values of another width."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.models.attention import AttentionShape, AttentionVariant, BatchLayout
from breakgraph.models.attention_torch import TorchAttention

CPU = torch.device("cpu")
BLOCK, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 6, 2, 8, 5


def one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: AttentionVariant, *, first: int
) -> torch.Tensor:
    """Attention of rows at positions first, first + 1, ..., with a loop over rows, heads and tokens that it sees."""
    out = torch.zeros(len(q), HEADS, VALUE_DIM)
    for row in range(len(q)):
        at = first + row
        for head in range(HEADS):
            seen = [
                j
                for j in range(at + 1)
                if (variant.window is None or j > at - variant.window)
                and (variant.chunk is None or j // variant.chunk == at // variant.chunk)
            ]
            group = head // (HEADS // KV_HEADS)
            scores = torch.stack([q[row, head] @ k[j, group] for j in seen])
            scores = scores * (DIM**-0.5 if variant.scale is None else variant.scale)
            if variant.softcap is not None:
                scores = torch.tanh(scores / variant.softcap) * variant.softcap
            weights = scores.exp()
            total = weights.sum() + (0.0 if variant.sinks is None else variant.sinks[head].exp())
            out[row, head] = sum(w / total * v[j, group] for w, j in zip(weights, seen, strict=True))
    return out


VARIANTS = st.builds(
    AttentionVariant,
    scale=st.sampled_from([None, 0.2]),
    window=st.sampled_from([None, 1, 3, 9]),
    chunk=st.sampled_from([None, 4, 5]),
    softcap=st.sampled_from([None, 0.7]),
    sinks=st.sampled_from([None, torch.linspace(-1, 1, HEADS)]),
)


@settings(max_examples=40, deadline=None)
@given(
    variant=VARIANTS,
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_variants_equal_a_loop_over_what_each_row_sees(
    variant: AttentionVariant, lengths: list[tuple[int, int]], seed: int
) -> None:
    """REQ-H2: packed prompts, fresh and continued, and decode rows give the sum over exactly the tokens that each row sees."""
    generator = torch.Generator().manual_seed(seed)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, torch.float32, CPU)
    attention = TorchAttention(shape, reason="test")
    totals = [rows + context for rows, context in lengths]
    blocks = [-(-total // BLOCK) for total in totals]
    order = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in blocks]
    k_cache = torch.randn(sum(blocks) + 1, BLOCK, KV_HEADS, DIM, generator=generator)
    v_cache = torch.randn(sum(blocks) + 1, BLOCK, KV_HEADS, VALUE_DIM, generator=generator)
    q = torch.randn(sum(rows for rows, _ in lengths), HEADS, DIM, generator=generator)
    layout = BatchLayout(
        np.array([rows for rows, _ in lengths], dtype=np.int32),
        np.array([context for _, context in lengths], dtype=np.int32),
        [np.array(table, dtype=np.int32) for table in tables],
    )
    out = torch.full((len(q), HEADS, VALUE_DIM), torch.nan)
    attention.prefill(q, k_cache, v_cache, out, attention.plan_prefill(layout), variant)
    state = attention.decode_state(batch_size=len(lengths), max_context=24)
    padded = torch.zeros(len(lengths), state.max_blocks, dtype=torch.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = torch.tensor(table)
    last_rows = torch.tensor([rows for rows, _ in lengths]).cumsum(0) - 1
    decoded = attention.decode(
        q[last_rows], k_cache, v_cache, state, padded, torch.tensor(totals, dtype=torch.int32), variant
    )
    start = 0
    for row, ((rows, context), table) in enumerate(zip(lengths, tables, strict=True)):
        k, v = (cache[table].flatten(0, 1) for cache in (k_cache, v_cache))
        expected = one_by_one(q[start : start + rows], k, v, variant, first=context)
        torch.testing.assert_close(out[start : start + rows], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(decoded[row], expected[-1], rtol=1e-4, atol=1e-5)
        start += rows


@pytest.mark.parametrize(("change", "plain"), [({}, True), ({"window": 4}, False), ({"scale": 0.1}, False)])
def test_a_variant_knows_whether_it_is_plain(change: dict[str, float], plain: bool) -> None:
    """Fused kernels serve plain attention only, so anything else must not pass for it."""
    assert AttentionVariant(**change).is_plain is plain  # type: ignore[arg-type]
