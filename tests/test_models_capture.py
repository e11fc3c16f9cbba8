"""The decoder inside graphs: prefill with attention in breaks, decode whole, on both backends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture
from breakgraph.models.attention import BatchLayout
from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import random_model
from breakgraph.replay_context import eager_step
from tests.tiny_models import PagedModel

CONFIG = DecoderConfig("qwen3", 97, 48, 80, 3, 6, 2, 8, 128, qk_norm=True, qkv_bias=True)


def _paged(device: torch.device) -> PagedModel:
    return PagedModel(random_model(CONFIG, device=device, dtype=torch.float32, seed=3))


def _layout(chunks: Sequence[tuple[int, int, Sequence[int]]]) -> BatchLayout:
    return BatchLayout(
        np.array([rows for rows, _, _ in chunks], dtype=np.int32),
        np.array([context for _, context, _ in chunks], dtype=np.int32),
        [np.array(table, dtype=np.int32) for _, _, table in chunks],
    )


def test_prefill_graph_serves_any_batch(backend: str, device: torch.device) -> None:
    """One graph of 16 rows, captured on one prompt, serves other layouts: the bits of the eager step, tail and all."""
    paged = _paged(device)
    attention, decoder = paged.attention, paged.decoder
    ids, positions, slots = (torch.zeros(16, dtype=torch.int64, device=device) for _ in range(3))

    def forward(batch: object) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            attention.prefill(q, k_cache, v_cache, out, batch)
            return out

        return decoder(decoder.embed(ids), positions=positions, slots=slots, kv=paged.kv, attend=attend)

    first = attention.plan_prefill(_layout([(16, 0, [1, 2, 3, 4])]))
    graph = BreakableCUDAGraph(name="prefill[16]")
    caches = [cache for pair in paged.kv for cache in pair]
    with (
        torch.no_grad(),
        BreakableCUDAGraphCapture(
            graph, live={"batch": first}, state=caches, backend=backend, expect_breaks={"attention": 3}
        ),
    ):
        hidden = forward(first)

    generator = torch.Generator().manual_seed(0)
    for chunks in ([(9, 0, [5, 6, 7]), (4, 0, [8])], [(7, 9, [5, 6, 7, 9])], [(16, 4, [8, 10, 11, 12, 13])]):
        rows = sum(count for count, _, _ in chunks)
        ids[:rows].copy_(torch.randint(0, 97, (rows,), generator=generator))
        positions.zero_()
        slots.zero_()
        positions[:rows].copy_(torch.tensor([p for n, c, _ in chunks for p in range(c, c + n)]))
        slots[:rows].copy_(torch.tensor([s for n, c, table in chunks for s in paged.slots(table, c, c + n)]))
        batch = attention.plan_prefill(_layout(chunks))
        before = [cache.clone() for cache in caches]
        with torch.no_grad(), eager_step(live={"batch": batch}, valid_rows=rows, padded_rows=16):
            expected = forward(batch).clone()
        written = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        graph.replay(live={"batch": batch}, valid_rows=rows)
        assert torch.equal(hidden[:rows], expected[:rows])
        for cache, want in zip(caches, written, strict=True):
            assert torch.equal(cache[1:], want[1:])  # rows of padding race for slot 0 on CUDA


def test_decode_graph_follows_tables_and_lengths(backend: str, device: torch.device) -> None:
    """A whole decode graph reads tables, lengths and slots that change from step to step; padding rows stay finite."""
    paged = _paged(device)
    attention, decoder = paged.attention, paged.decoder
    tables = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
    for table in tables:
        paged.prefill([([3, 1, 4, 1, 5], 0, table)])
    state = attention.decode_state(batch_size=3, max_context=40)
    ids, positions, slots = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(3))
    block_tables = torch.zeros(3, state.max_blocks, dtype=torch.int32, device=device)
    seq_lens = torch.ones(3, dtype=torch.int32, device=device)

    def forward() -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return attention.decode(q, k_cache, v_cache, state, block_tables, seq_lens)

        hidden = decoder(decoder.embed(ids), positions=positions, slots=slots, kv=paged.kv, attend=attend)
        return decoder.logits(hidden)

    graph = BreakableCUDAGraph(name="decode[3]")
    caches = [cache for pair in paged.kv for cache in pair]
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, state=caches, backend=backend, expect_breaks=0):
        logits = forward()

    host_tables, host_lens = block_tables.cpu().numpy().copy(), np.ones(3, dtype=np.int32)
    for step, (token, context) in enumerate([(9, 5), (2, 6), (6, 7), (5, 8)]):
        order = tables if step % 2 else tables[::-1]
        for row, table in enumerate(order):
            host_tables[row, : len(table)] = table
            host_tables[row, len(table) :] = 0
            host_lens[row] = context + 1
            slots[row] = paged.slots(table, context, context + 1)[0]
        ids[:2] = torch.tensor([token, token + step], device=device)
        positions[:2] = context
        block_tables.copy_(torch.from_numpy(host_tables))
        seq_lens.copy_(torch.from_numpy(host_lens))
        attention.plan_decode(state, block_tables=host_tables, seq_lens=host_lens)
        with torch.no_grad():
            expected = forward().clone()
        graph.replay()
        assert torch.equal(logits[:2], expected[:2])
        assert torch.isfinite(logits).all()
