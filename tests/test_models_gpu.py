"""FlashInfer's attention and fused steps against plain torch, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from breakgraph.errors import LiveDataError
from breakgraph.models.attention import Attention, BatchLayout, make_attention
from breakgraph.models.config import DecoderConfig
from breakgraph.models.llama import LlamaDecoder
from breakgraph.models.ops import FlashInferOps, TorchOps
from breakgraph.models.weights import random_model
from breakgraph.replay_context import eager_step
from tests.tiny_models import PagedModel

pytestmark = pytest.mark.gpu

BLOCK = 16
CLOSE = {"atol": 2e-2, "rtol": 2e-2}
# Query heads, key-value heads, head dimension: 135M, 1B, 8B, and a group that only the tensor-core kernel has.
SHAPES = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (14, 2, 64)]


@pytest.fixture(autouse=True)
def _flashinfer() -> Iterator[None]:
    pytest.importorskip("flashinfer")
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def _pair(shape: tuple[int, int, int]) -> tuple[Attention, Attention]:
    heads, kv_heads, head_dim = shape
    ours, reference = (
        make_attention(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=BLOCK,
            dtype=torch.bfloat16,
            device="cuda",
            kind=kind,
        )
        for kind in ("auto", "torch")
    )
    assert ours.kind == "flashinfer", ours.reason
    return ours, reference


class _Cache:
    """Random keys and values, and requests with scattered blocks."""

    def __init__(self, shape: tuple[int, int, int], lengths: Sequence[int], *, spare_blocks: int = 3) -> None:
        _, kv_heads, head_dim = shape
        needed = [-(-length // BLOCK) for length in lengths]
        blocks = 1 + sum(needed) + spare_blocks
        self.k, self.v = torch.randn(2, blocks, BLOCK, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        order = np.random.default_rng(0).permutation(np.arange(1, blocks)).astype(np.int32).tolist()
        self.tables = [np.array([order.pop() for _ in range(n)], dtype=np.int32) for n in needed]

    def host_tables(self, rows: int, columns: int) -> np.ndarray:
        tables = np.zeros((rows, columns), dtype=np.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = table
        return tables


def _layout(rows: Sequence[int], contexts: Sequence[int], tables: Sequence[np.ndarray]) -> BatchLayout:
    return BatchLayout(np.array(rows, dtype=np.int32), np.array(contexts, dtype=np.int32), tables)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "contexts"),
    [([128], [0]), ([1, 37, 16], [5, 0, 64]), ([200], [333]), ([3] * 40, [2] * 40)],
    ids=["fresh", "mixed", "chunk", "many"],
)
def test_prefill_equals_torch(shape: tuple[int, int, int], rows: list[int], contexts: list[int]) -> None:
    """Fresh prompts, chunks and many small requests: torch's numbers within bfloat16, and a zero tail."""
    ours, reference = _pair(shape)
    cache = _Cache(shape, [r + c for r, c in zip(rows, contexts, strict=True)])
    layout, total = _layout(rows, contexts, cache.tables), sum(rows)
    q = torch.randn(total + 5, shape[0], shape[2], device="cuda", dtype=torch.bfloat16)
    outputs = []
    for attention in (ours, reference):
        out = torch.full_like(q, float("nan"))
        batch = attention.plan_prefill(layout)
        with eager_step(live={"batch": batch}, valid_rows=total, padded_rows=total + 5):
            attention.prefill(q, cache.k, cache.v, out, batch)
        outputs.append(out)
    torch.testing.assert_close(outputs[0][:total], outputs[1][:total], **CLOSE)
    assert not outputs[0][total:].any()


def test_plans_ahead_of_the_device_do_not_disturb_each_other() -> None:
    """Twenty steps planned and launched without a wait in between give the numbers of steps done one by one."""
    shape = SHAPES[0]
    ours, reference = _pair(shape)
    lengths = [17 + 29 * step % 400 for step in range(20)]
    cache = _Cache(shape, lengths)
    queries = [torch.randn(n, shape[0], shape[2], device="cuda", dtype=torch.bfloat16) for n in lengths]
    torch.cuda._sleep(50_000_000)  # the device falls behind, so that every plan is made ahead of it
    outputs = []
    for q, table in zip(queries, cache.tables, strict=True):
        out = torch.empty_like(q)
        ours.prefill(q, cache.k, cache.v, out, ours.plan_prefill(_layout([len(q)], [0], [table])))
        outputs.append(out)
    for q, table, out in zip(queries, cache.tables, outputs, strict=True):
        expected = torch.empty_like(q)
        layout = _layout([len(q)], [0], [table])
        reference.prefill(q, cache.k, cache.v, expected, reference.plan_prefill(layout))
        torch.testing.assert_close(out, expected, **CLOSE)


def test_a_batch_whose_plan_is_gone_is_an_error() -> None:
    """Two plans later the planner has been reused: running the old batch is a LiveDataError, not wrong numbers."""
    ours, _ = _pair(SHAPES[0])
    cache = _Cache(SHAPES[0], [8])
    layout = _layout([8], [0], cache.tables)
    stale = ours.plan_prefill(layout)
    for _ in range(2):
        ours.plan_prefill(layout)
    q = torch.zeros(8, 9, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(LiveDataError, match="its planner has made plan 2"):
        ours.prefill(q, cache.k, cache.v, torch.empty_like(q), stale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("batch", [1, 5, 130])
def test_captured_decode_equals_torch(shape: tuple[int, int, int], batch: int) -> None:
    """One captured graph, planned anew for each step: torch's numbers for every mix of lengths; padding rows finite."""
    ours, reference = _pair(shape)
    longest = 700
    cache = _Cache(shape, [longest] * batch)
    rows = batch + 2  # two padding rows on the null block
    state, plain = (a.decode_state(batch_size=rows, max_context=longest) for a in (ours, reference))
    full = cache.host_tables(rows, state.max_blocks)
    q = torch.randn(rows, shape[0], shape[2], device="cuda", dtype=torch.bfloat16)
    tables = torch.from_numpy(full).cuda()
    lens = torch.ones(rows, dtype=torch.int32, device="cuda")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.decode(q, cache.k, cache.v, state, tables, lens)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.decode(q, cache.k, cache.v, state, tables, lens)

    random = np.random.default_rng(1)
    for step in range(4):
        host = np.ones(rows, dtype=np.int32)
        host[:batch] = random.integers(1, longest + 1, batch) if step else 1
        lens.copy_(torch.from_numpy(host))
        q.normal_()
        ours.plan_decode(state, block_tables=full, seq_lens=host)
        graph.replay()
        expected = reference.decode(q, cache.k, cache.v, plain, tables, lens)
        torch.testing.assert_close(out[:batch], expected[:batch], **CLOSE)
        assert torch.isfinite(out).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_planning_a_decode_does_not_wait_for_the_device() -> None:
    """No copy of a plan makes torch synchronise, so the host can plan while the step before is running."""
    ours, _ = _pair(SHAPES[2])
    state = ours.decode_state(batch_size=8, max_context=256)
    tables, lens = np.zeros((8, state.max_blocks), dtype=np.int32), np.full(8, 200, dtype=np.int32)
    ours.plan_decode(state, block_tables=tables, seq_lens=lens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours.plan_decode(state, block_tables=tables, seq_lens=lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fused_steps_equal_torch() -> None:
    """Norm, add and norm, rope and the gated activation agree with plain torch within bfloat16."""
    fused, plain = FlashInferOps(), TorchOps()
    x, residual = torch.randn(2, 33, 576, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(576, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5), **CLOSE)
    heads, head_weight = torch.randn(33, 9, 64, device="cuda", dtype=torch.bfloat16), weight[:64].contiguous()
    torch.testing.assert_close(
        fused.rms_norm(heads, head_weight, 1e-5), plain.rms_norm(heads, head_weight, 1e-5), **CLOSE
    )
    expected = plain.add_rms_norm(x, residual, weight, 1e-5)
    for got, want in zip(fused.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    gates = torch.randn(33, 3072, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(fused.silu_and_mul(gates), plain.silu_and_mul(gates), **CLOSE)
    angles = torch.rand(100, 32, device="cuda") * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 100, (33,), device="cuda")
    # Rows of a merged projection: q and k are strided views, as in the decoder.
    qkv = torch.randn(33, 15 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, _ = (part.unflatten(-1, (-1, 64)) for part in qkv.split((576, 192, 192), dim=-1))
    expected = plain.rope(q, k, positions, table)
    for got, want in zip(fused.rope(q, k, positions, table), expected, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("head_dim", "dense"), [(64, True), (128, True), (64, False), (80, True)])
def test_appended_keys_and_values_are_where_they_belong(head_dim: int, dense: bool) -> None:
    """Rows of a merged projection, in and out of order, over many pages: bit for bit what torch writes; the rest untouched.

    In a dense cache, in one whose keys and values lie beside each other, and for a head dimension that the kernel lacks.
    """
    blocks, heads = 300, 3
    qkv = torch.randn(70, 9 * head_dim, device="cuda", dtype=torch.bfloat16)
    _, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.chunk(3, dim=-1))
    slots = torch.randperm(blocks * BLOCK, device="cuda")[:70]
    both = torch.zeros(2, blocks, 2, BLOCK, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    fused, plain = FlashInferOps(), TorchOps()
    expected = (torch.zeros_like(both[0, :, 0]), torch.zeros_like(both[0, :, 0]))
    plain.append(k, v, expected, plain.places(slots, blocks=blocks))
    cache = (both[0, :, 0], both[0, :, 1])
    if dense:
        cache = (cache[0].contiguous(), cache[1].contiguous())
    for rows in (0, 70):
        places = fused.places(slots[:rows], blocks=blocks)
        fused.append(k[:rows], v[:rows], cache, places)
    assert expected[0].any()
    for got, want in zip(cache, expected, strict=True):
        assert torch.equal(got, want)
    assert not both[1].any()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decoder_with_flashinfer_equals_plain_torch(qk_norm: bool) -> None:
    """Prefill, a second chunk and a decode step of a small bfloat16 decoder: both ways give the same logits, nearly."""
    config = DecoderConfig("llama", 1000, 576, 1536, 4, 9, 3, 64, 512, qk_norm=qk_norm, qkv_bias=qk_norm)
    model = random_model(config, device="cuda", seed=1)
    assert isinstance(model.decoder.ops, FlashInferOps)
    plain = LlamaDecoder(model.config, device="cuda", ops=TorchOps())
    plain.load_state_dict(model.decoder.state_dict())
    ours, reference = _pair((9, 3, 64))
    fast = PagedModel(model, block_size=BLOCK, attention=ours)
    slow = PagedModel(model, block_size=BLOCK, attention=reference)
    slow.decoder = plain
    ids = torch.randint(0, 1000, (60,)).tolist()
    table = [4, 2, 9, 7]
    for run in (
        lambda paged: paged.prefill([(ids[:40], 0, table)], padding=8),
        lambda paged: paged.prefill([(ids[40:59], 40, table)], padding=5),
        lambda paged: paged.decode([ids[59], 0], [59, 0], [table, [0]])[:1],
    ):
        got, want = run(fast), run(slow)
        similarity = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        assert similarity.min() > 0.999
