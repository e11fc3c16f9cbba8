"""Mixture of experts inside graphs: serving on the emulated backend, and the bits of the eager twin on both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from breakgraph.break_function import eager_on_graph
from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture
from breakgraph.models.attention import BatchLayout, make_attention
from breakgraph.models.config import DecoderConfig, ExpertsConfig, RopeConfig
from breakgraph.models.experts import ExpertsChoice, SparseMLP
from breakgraph.models.ops import make_ops
from breakgraph.models.weights import load_model, random_model
from breakgraph.replay_context import eager_step
from breakgraph.serving import LLM, SamplingParams, SamplingPaths
from tests.serving_reference import Reference
from tests.test_models_experts import KINDS, with_kind
from tests.tiny_models import SPARSE_FAMILIES, PagedModel, tiny_config, tiny_hf

OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 32,
    "block_size": 4,
    "prefill_sizes": [4, 16],
    "contexts": [32],
    "sampling": SamplingPaths.GREEDY,
    "seed": 1,
}
PROMPTS = [[5, 9, 3], [7] * 20, [3, 4, 5, 6, 7, 8, 9], [60]]

# Real widths, two layers. Mixtral 8x7B has 8 experts of 14336, of which 2; Qwen3-30B-A3B has 128 of 768, of which 8.
MIXTRAL = DecoderConfig(
    "mixtral", 1000, 4096, 14336, 2, 32, 8, 128, 1024, rope=RopeConfig(theta=1e6), experts=ExpertsConfig(8, 2, 14336)
)
QWEN3_MOE = DecoderConfig(
    "qwen3_moe", 1000, 2048, 6144, 2, 32, 4, 128, 1024, qk_norm=True, experts=ExpertsConfig(128, 8, 768)
)
LARGE = [pytest.param(config, id=config.model_type) for config in (MIXTRAL, QWEN3_MOE)]


# ---- serving -------------------------------------------------------------------------------------------------------


def _generated(hf: Any, prompt: Sequence[int], *, max_tokens: int) -> Reference:
    """What transformers generates, and how far each token was ahead of the next best."""
    answer = hf.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(answer.logits).topk(2).values
    return Reference(tuple(answer.sequences[0, len(prompt) :].tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))


@pytest.mark.parametrize(("family", "kind"), [("mixtral", "grouped"), ("qwen3_moe", "dense")])
def test_served_tokens_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    """Prefill and decode all replayed, padded or not, each step compared with its eager twin: transformers' tokens."""
    hf = tiny_hf(family, tmp_path, num_hidden_layers=2, **({"mlp_only_layers": [0]} if family == "qwen3_moe" else {}))
    llm = LLM(with_kind(load_model(tmp_path, max_positions=64), kind), verify="always", **OPTIONS)
    lengths = (6, 3, 6, 6)  # three are left, in a graph of four rows
    answers = llm.generate(PROMPTS, [SamplingParams(max_tokens=count) for count in lengths])
    for prompt, count, answer in zip(PROMPTS, lengths, answers, strict=True):
        reference = _generated(hf, prompt, max_tokens=count)
        assert len(answer.token_ids) == len(reference.token_ids)
        assert reference.agrees(answer.token_ids)
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
    assert (statistics.prefill_replays, statistics.decode_replays) == (
        statistics.prefill.steps,
        statistics.decode.steps,
    )
    assert statistics.breaks == 2 * statistics.prefill.steps  # attention; experts lie in segments


def test_what_was_chosen_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """How experts are computed, and why, is said once when an engine starts."""
    model = random_model(DecoderConfig.from_transformers(tiny_config("mixtral")))
    with caplog.at_level("INFO", logger="breakgraph.serving"):
        LLM(model, graphs="off", **OPTIONS).start()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("experts:")]
    assert said == ["experts: dense (torch has no grouped matrix product that a graph of cpu could hold)"]


# ---- graphs against their eager twins ------------------------------------------------------------------------------


class _Prefill:
    """A prefill graph of a fixed number of rows, and the eager step of the same shape."""

    def __init__(self, paged: PagedModel, rows: int, *, backend: str, breaks: dict[str, int]) -> None:
        self.paged, self.rows = paged, rows
        self.device = paged.decoder.device
        self.caches = [cache for pair in paged.kv for cache in pair]
        width, dtype = paged.decoder.config.hidden_size, paged.decoder.dtype
        self.hidden = torch.zeros(rows, width, device=self.device, dtype=dtype)
        self.positions, self.slots = (torch.zeros(rows, dtype=torch.int64, device=self.device) for _ in range(2))
        batch = self.fill([(rows, 0, list(range(1, 1 + -(-rows // paged.block_size))))])
        self.graph = BreakableCUDAGraph(name=f"prefill[{rows}]")
        with (
            torch.no_grad(),
            BreakableCUDAGraphCapture(
                self.graph, live={"batch": batch}, state=self.caches, backend=backend, expect_breaks=breaks
            ),
        ):
            self.out = self.forward(batch)

    def fill(self, chunks: Sequence[tuple[int, int, Sequence[int]]], *, rest: float = 0.0) -> object:
        """Random hidden states of (rows, tokens before, block table), `rest` behind them; returns the plan."""
        count = sum(rows for rows, _, _ in chunks)
        self.hidden.fill_(rest)[:count].normal_()
        self.positions.zero_()
        self.slots.zero_()
        positions = [p for rows, before, _ in chunks for p in range(before, before + rows)]
        slots = [s for rows, before, table in chunks for s in self.paged.slots(table, before, before + rows)]
        self.positions[:count].copy_(torch.tensor(positions))
        self.slots[:count].copy_(torch.tensor(slots))
        layout = BatchLayout(
            np.array([rows for rows, _, _ in chunks], dtype=np.int32),
            np.array([before for _, before, _ in chunks], dtype=np.int32),
            [np.array(table, dtype=np.int32) for _, _, table in chunks],
        )
        return self.paged.attention.plan_prefill(layout)

    def forward(self, batch: object) -> torch.Tensor:
        """The decoder's body over the rows."""

        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            self.paged.attention.prefill(q, k_cache, v_cache, out, batch)
            return out

        # The fused norms of CUDA overwrite what they are given.
        return self.paged.decoder(
            self.hidden.clone(), positions=self.positions, slots=self.slots, kv=self.paged.kv, attend=attend
        )

    def check(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> torch.Tensor:
        """One replay equals the eager step, and so does one with NaN in the padding; returns the real rows."""
        count = sum(rows for rows, _, _ in chunks)
        batch = self.fill(chunks)
        with torch.no_grad(), eager_step(live={"batch": batch}, valid_rows=count, padded_rows=self.rows):
            expected = self.forward(batch).clone()
        for rest in (0.0, float("nan")):
            self.hidden[count:] = rest
            self.graph.replay(live={"batch": batch}, valid_rows=count)
            assert torch.equal(self.out[:count], expected[:count])
        return expected[:count]


def _chunks(rows: int, block_size: int) -> Iterator[list[tuple[int, int, list[int]]]]:
    """Steps of a graph of `rows` rows: full, half full, one row, two requests of which one goes on."""
    need = -(-rows // block_size)
    table, other = list(range(1, need + 2)), list(range(need + 2, 2 * need + 3))
    yield [(rows, 0, table)]
    yield [(rows // 2 + 1, 0, table)]
    yield [(1, 0, other)]
    yield [(rows // 3, 0, other), (rows // 4, rows // 2 + 1, table)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_prefill_replays_the_bits_of_its_eager_twin(family: str, kind: str) -> None:
    """Full and padded steps of a small graph; NaN in padding changes no bit of a real row."""
    model = random_model(DecoderConfig.from_transformers(tiny_config(family)), seed=3)
    prefill = _Prefill(PagedModel(with_kind(model, kind)), 16, backend="emulated", breaks={"attention": 3})
    for chunks in _chunks(16, 4):
        assert prefill.check(chunks).abs().sum() > 0


class _WaitingMLP(SparseMLP):
    """An implementation that asks the device which experts were hit: it cannot be captured, so it is a break."""

    @eager_on_graph(name="experts", rows=("x", "padding", "return"))
    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        result = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, places = torch.where(ids == expert)
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[expert])
            result[rows] += out * weights[rows, places].unsqueeze(1)
        return result


def test_experts_that_wait_for_the_device_are_a_break(backend: str, device: torch.device) -> None:
    """The same decoder with an implementation that syncs: a break in each layer, which sees the real rows only."""
    model = random_model(
        DecoderConfig.from_transformers(tiny_config("mixtral")), device=device, dtype=torch.float32, seed=3
    )
    paged, plain = PagedModel(model), PagedModel(with_kind(model, "dense"))
    for layer in model.decoder.layers:
        layer.mlp.__class__ = _WaitingMLP
    breaks = {"attention": 3, "experts": 3}
    waiting = _Prefill(paged, 16, backend=backend, breaks=breaks)
    captured = _Prefill(plain, 16, backend=backend, breaks={"attention": 3})
    for chunks in _chunks(16, 4):
        torch.manual_seed(1)
        got = waiting.check(chunks)
        torch.manual_seed(1)
        torch.testing.assert_close(got, captured.check(chunks), atol=1e-4, rtol=1e-4)


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def _large(config: DecoderConfig, kind: str = "auto") -> PagedModel:
    model = random_model(config, device="cuda", dtype=torch.bfloat16, seed=1)
    attention = make_attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda",
        kind="torch",
    )
    return PagedModel(model if kind == "auto" else with_kind(model, kind), block_size=16, attention=attention)


def _grouped_here() -> bool:
    return torch.cuda.get_device_capability()[0] in (9, 10)


@pytest.mark.gpu
@pytest.mark.parametrize("config", LARGE)
def test_large_prefill_replays_the_bits_of_its_eager_twin(config: DecoderConfig) -> None:
    """Real widths in bfloat16, grouped on the device: replays equal eager steps at every fill, NaN in padding or not."""
    paged = _large(config)
    assert paged.decoder.experts is not None
    assert paged.decoder.experts.kind == ("grouped" if _grouped_here() else "dense"), paged.decoder.experts.reason
    prefill = _Prefill(paged, 200, backend="cuda", breaks={"attention": 2})
    for chunks in _chunks(200, 16):
        assert torch.isfinite(prefill.check(chunks)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config", LARGE)
def test_large_decode_follows_the_routing(config: DecoderConfig) -> None:
    """A whole decode graph: other tokens at each step, other experts; what padding rows hold changes no real row."""
    paged = _large(config)
    rows, real, device = 8, 5, torch.device("cuda")
    tables = [[1 + 2 * row, 2 + 2 * row] for row in range(real)]
    for table in tables:
        paged.prefill([([3, 1, 4, 1, 5], 0, table)])
    state = paged.attention.decode_state(batch_size=rows, max_context=32)
    ids, positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
    slots = torch.full((rows,), 20 * 16, dtype=torch.int64, device=device)  # padding rows share a block of their own
    host_tables, lens = np.zeros((rows, state.max_blocks), dtype=np.int32), np.ones(rows, dtype=np.int32)
    host_tables[:, 0] = 20
    host_tables[:real, :2] = tables
    block_tables = torch.from_numpy(host_tables).to(device)
    seq_lens = torch.from_numpy(lens).to(device)

    def forward() -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return paged.attention.decode(q, k_cache, v_cache, state, block_tables, seq_lens)

        hidden = paged.decoder(paged.decoder.embed(ids), positions=positions, slots=slots, kv=paged.kv, attend=attend)
        return paged.decoder.logits(hidden)

    graph = BreakableCUDAGraph(name="decode[8]")
    caches = [cache for pair in paged.kv for cache in pair]
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, state=caches, backend="cuda", expect_breaks=0):
        logits = forward()
    for step in range(4):
        context = 5 + step
        ids[:real].random_(1000)
        positions[:real] = context
        seq_lens[:real] = context + 1
        slots[:real] = torch.tensor([paged.slots(table, context, context + 1)[0] for table in tables], device=device)
        with torch.no_grad():
            expected = forward().clone()
        for token in (0, 7, 900):
            ids[real:] = token
            graph.replay()
            assert torch.equal(logits[:real], expected[:real])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", LARGE)
@pytest.mark.parametrize("rows", [1, 8, 300, 4096])
def test_experts_on_a_gpu_do_not_wait_and_agree(config: DecoderConfig, rows: int, kind: str) -> None:
    """No way to compute experts synchronises; each is near a float32 computation, and gives the same bits twice."""
    if kind == "grouped" and not _grouped_here():
        pytest.skip("torch's grouped product waits for this GPU")
    experts, device = config.experts, torch.device("cuda")
    assert experts is not None
    experts = attrs.evolve(experts, inner_size=min(experts.inner_size, 2048))
    make: Callable[[torch.dtype, str], SparseMLP] = lambda dtype, kind: SparseMLP(  # noqa: E731
        experts,
        hidden_size=config.hidden_size,
        choice=ExpertsChoice(kind, "test"),
        ops=make_ops(device, dtype),
        device=device,
        dtype=dtype,
    )
    mlp, exact = make(torch.bfloat16, kind), make(torch.float32, "dense")
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        parameter.normal_(0.0, 0.02)
    exact.load_state_dict(mlp.state_dict())
    x = torch.randn(rows, config.hidden_size, device=device, dtype=torch.bfloat16)
    padding = torch.arange(rows, device=device) >= max(rows - 3, 1)
    # A router that rounds to bfloat16 may choose another expert at a near tie: the choice of `mlp` is given to both.
    ids, weights = mlp.route(x)
    exact.route = lambda _: (ids, weights)  # type: ignore[method-assign]
    mlp(x, padding)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = mlp(x, padding), mlp(x, padding)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
    assert not first[padding].any()
    want = exact(x.float(), padding)
    assert (first.float() - want).norm() <= 2e-2 * want.norm()


@pytest.mark.gpu
def test_serving_experts_on_a_gpu() -> None:
    """The whole loop in bfloat16, with FlashInfer where it is: every step is a replay and equals its eager twin."""
    config = DecoderConfig(
        "qwen3_moe",
        1000,
        256,
        512,
        3,
        4,
        2,
        64,
        512,
        qk_norm=True,
        experts=ExpertsConfig(16, 4, 128, dense_layers=(1,)),
    )
    llm = LLM(
        random_model(config, device="cuda", seed=5),
        verify="always",
        max_batch_size=4,
        max_num_tokens=128,
        seed=1,
        num_blocks=200,
    )
    llm.generate([[5, 9, 2], [7] * 200, list(range(1, 50)), [60], [3, 1, 4, 1, 5]], SamplingParams(max_tokens=20))
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
