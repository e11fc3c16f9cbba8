"""Attention of prefills in breaks and captured: the same tokens, every step a replay or counted."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from breakgraph.errors import ConfigError, InternalError, LiveDataError, MovedBufferError
from breakgraph.models.attention import (
    AttentionShape,
    AttentionVariant,
    BatchLayout,
    Placement,
    make_attention,
)
from breakgraph.models.attention_torch import TorchAttention
from breakgraph.models.weights import LoadedModel
from breakgraph.serving import LLM, SamplingParams
from breakgraph.serving.prefill_attention import MOST_CAPTURED_REQUESTS, choose
from tests.serving_reference import greedy_reference, tiny_model

OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 48,
    "block_size": 4,
    "prefill_sizes": [4, 16],
    "contexts": [16],
    "seed": 1,
}
PROMPTS = [[5, 9, 2], [7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9], [60], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
VARIANTS = {
    "plain": AttentionVariant(),
    "window": AttentionVariant(window=5),
    "all": AttentionVariant(scale=0.3, chunk=6, softcap=2.0, sinks=torch.linspace(-1, 1, 4)),
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """One model for all tests."""
    return tiny_model()


def _layout(chunks: list[tuple[int, int]], *, block_size: int) -> tuple[BatchLayout, int]:
    """Rows and cached tokens of each request, in blocks of their own; and how many blocks there are."""
    tables, first = [], 1
    for rows, context in chunks:
        count = -(-(rows + context) // block_size)
        tables.append(np.arange(first, first + count, dtype=np.int32)[::-1].copy())
        first += count
    query_lens = np.array([rows for rows, _ in chunks], dtype=np.int32)
    return BatchLayout(query_lens, np.array([context for _, context in chunks], dtype=np.int32), tables), first


@pytest.mark.parametrize("name", VARIANTS)
def test_captured_attention_equals_attention_in_a_break(name: str, device: torch.device) -> None:
    """Any batch in one state of 16 rows and 4 requests: the numbers of the break, and finite ones in the padding."""
    shape = AttentionShape(4, 2, 8, 4, torch.float32, device)
    attention = TorchAttention(shape, reason="test")
    variant = VARIANTS[name]
    if variant.sinks is not None:
        variant = AttentionVariant(
            scale=variant.scale, chunk=variant.chunk, softcap=variant.softcap, sinks=variant.sinks.to(device)
        )
    state = attention.prefill_state(rows=16, requests=4, max_context=32)
    for chunks in ([(16, 0)], [(1, 0)], [(3, 5), (1, 31), (7, 0), (2, 9)], [(9, 23)], [(5, 0), (11, 2)]):
        layout, blocks = _layout(chunks, block_size=4)
        k, v = torch.randn(2, blocks, 4, 2, 8, device=device)
        q = torch.randn(16, 4, 8, device=device)
        expected = torch.empty_like(q[: layout.rows])
        attention.attend(q[: layout.rows], k, v, expected, attention.plan_prefill(layout), variant)
        attention.plan_captured(state, layout)
        got = attention.prefill_captured(q, k, v, state, variant)
        torch.testing.assert_close(got[: layout.rows], expected, rtol=1e-4, atol=1e-5)
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("placement", [Placement.BREAK, Placement.CAPTURED])
def test_both_placements_give_the_tokens_of_a_plain_loop(model: LoadedModel, placement: Placement) -> None:
    """Chunked, packed and padded prompts through the engine, each step compared with its eager twin: all replayed, all right."""
    llm = LLM(model, placement=placement, verify="always", **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert greedy_reference(model, prompt, max_tokens=12).agrees(answer.token_ids)
    statistics = llm.statistics
    assert (statistics.eager, statistics.dropped) == ({}, {})
    runner = llm.engine.prefill.runner
    assert llm.engine.prefill.placement is placement
    breaks = len(model.decoder.variants) if placement is Placement.BREAK else 0
    assert {len(graph.breaks) for graph in runner.graphs.values()} == {breaks}
    assert {len(graph.segments) for graph in runner.graphs.values()} == {breaks + 1}


def test_steps_without_a_graph_run_the_same_attention(model: LoadedModel) -> None:
    """With captured attention a step above the largest bucket, and one with graphs suspended, are eager, counted and right."""
    llm = LLM(model, placement="captured", **{**OPTIONS, "prefill_sizes": [4]})
    references = [greedy_reference(model, prompt, max_tokens=6) for prompt in PROMPTS]
    for suspended in (False, True):
        if suspended:
            with llm.engine.prefill.runner.suspend():
                answers = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
        else:
            answers = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
        assert all(r.agrees(a.token_ids) for r, a in zip(references, answers, strict=True))
    counted = llm.statistics.eager
    assert counted.get("prefill: above_largest_bucket") or any("above" in str(name).lower() for name in counted), (
        counted
    )
    assert any("disabled" in str(name).lower() for name in counted), counted


def test_a_step_takes_no_more_requests_than_its_graph_has_room_for(model: LoadedModel) -> None:
    """A hundred prompts of one token: steps of 64, each replayed; a batch of 65 that comes otherwise is eager and counted."""
    options = {**OPTIONS, "max_batch_size": 100, "max_num_tokens": 128, "prefill_sizes": [128], "contexts": []}
    llm = LLM(model, placement="captured", **options)
    answers = llm.generate([[token % 61] for token in range(100)], SamplingParams(max_tokens=1))
    assert len(answers) == 100
    statistics = llm.statistics
    assert (statistics.prefill_replays, statistics.eager) == (2, {})
    assert llm.engine.prefill.most_requests == MOST_CAPTURED_REQUESTS == 64
    layout, blocks = _layout([(1, 0)] * 65, block_size=4)
    assert blocks <= llm.engine.sizes.num_blocks
    result = llm.engine.prefill.runner.run(
        {
            "ids": torch.arange(65) % 61,
            "positions": torch.zeros(65, dtype=torch.int64),
            "slots": torch.from_numpy(np.array([4 * int(t[0]) for t in layout.block_tables])),
        },
        size=65,
        live=llm.engine.prefill.live(layout),
        opt_out="65 requests",
    )
    assert not result.replayed
    assert torch.isfinite(result.output).all()


def test_more_requests_than_there_is_room_for_never_replay(model: LoadedModel) -> None:
    """Given to the runner directly, 65 requests are refused by its gate and right; no opt_out is needed."""
    options = {**OPTIONS, "max_batch_size": 100, "max_num_tokens": 128, "prefill_sizes": [128], "contexts": []}
    captured, plain = (LLM(model, placement=placement, **options).engine.prefill for placement in ("captured", "break"))
    layout, _ = _layout([(1, 0)] * 65, block_size=4)
    inputs = _inputs(layout)
    results = [step.runner.run(inputs, size=65, live=step.live(layout)) for step in (captured, plain)]
    assert [result.replayed for result in results] == [False, True]
    assert captured.runner.statistics.eager == {"requests": 1}
    torch.testing.assert_close(results[0].output, results[1].output, rtol=1e-4, atol=1e-5)


def _inputs(layout: BatchLayout, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of fresh prompts, for a model of 32 channels and blocks of 4."""
    rows = layout.query_lens.tolist()
    slots = [
        4 * int(table[at // 4]) + at % 4
        for table, count in zip(layout.block_tables, rows, strict=True)
        for at in range(count)
    ]
    return {
        "ids": torch.randint(61, (sum(rows),), generator=torch.Generator().manual_seed(seed)),
        "positions": torch.tensor([at for count in rows for at in range(count)]),
        "slots": torch.tensor(slots),
    }


@pytest.mark.parametrize("case", ["two replays", "suspended", "eager of a bucket's size"])
def test_a_step_keeps_its_plan_when_another_is_prepared_before_it_is_launched(model: LoadedModel, case: str) -> None:
    """FAULT-P7: A is prepared, then B of the same bucket, then both are launched: each computes its own rows."""
    llm = LLM(model, placement="captured", **OPTIONS)
    step = llm.engine.prefill
    layouts = [_layout([(16, 0)], block_size=4)[0], _layout([(7, 0), (9, 0)], block_size=4)[0]]
    inputs = [_inputs(layout, seed=number) for number, layout in enumerate(layouts)]
    alone = [
        step.runner.run(each, size=16, live=step.live(layout)).output.clone()
        for each, layout in zip(inputs, layouts, strict=True)
    ]

    def prepare(number: int, **options: Any) -> Any:
        return step.runner.prepare(inputs[number], size=16, live=step.live(layouts[number]), **options)

    first, second = prepare(0, opt_out="test" if case.startswith("eager") else None), prepare(1)
    if case == "suspended":
        with step.runner.suspend():
            got = [step.runner.launch(first).output.clone()]
    else:
        got = [step.runner.launch(first).output.clone()]
    got.append(step.runner.launch(second).output.clone())
    for result, expected in zip(got, alone, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_layouts_that_do_not_fit_themselves_are_refused(device: torch.device) -> None:
    """Short tables, fewer contexts than lengths, negative contexts: an error in both placements, no row over the null block."""
    attention = TorchAttention(AttentionShape(4, 2, 8, 4, torch.float32, device), reason="test")
    state = attention.prefill_state(rows=16, requests=4, max_context=32)

    def array(*values: int) -> Any:
        return np.array(values, dtype=np.int32)

    wrong = [
        BatchLayout(array(5), array(0), [array(1)]),
        BatchLayout(array(1), array(8), [array(1, 2)]),
        BatchLayout(array(2, 2), array(0), [array(1), array(2)]),
        BatchLayout(array(2, 2), array(0, 0), [array(1)]),
        BatchLayout(array(2), array(-1), [array(1)]),
    ]
    for layout in wrong:
        for plan in (attention.plan_prefill, lambda one: attention.plan_captured(state, one)):
            with pytest.raises(LiveDataError, match="no table names|room for"):
                plan(layout)


def test_a_module_in_training_is_refused_at_the_start() -> None:
    """Somebody calls train() after the model was loaded: dropout would be drawn once and repeated; start refuses it."""
    model = tiny_model()
    model.decoder.train()
    with pytest.raises(ConfigError, match="in training mode"):
        LLM(model, **OPTIONS).start()
    model.decoder.eval()
    LLM(model, **OPTIONS).start()


def test_autocast_around_the_engine_changes_nothing(model: LoadedModel) -> None:
    """Started and asked inside autocast: the dtype of the weights is used, all steps are replays, and the tokens are the same."""
    expected = LLM(model, **OPTIONS).generate(PROMPTS, SamplingParams(max_tokens=6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        llm = LLM(model, **OPTIONS)
        got = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert (llm.statistics.eager, llm.statistics.dropped) == ({}, {})


def test_replaced_weights_are_named_where_that_was_asked_for() -> None:
    """FAULT-L6: check_addresses="always": a parameter that is replaced after the start is an error with its name."""
    model = tiny_model()
    llm = LLM(model, check_addresses="always", **OPTIONS)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    model.decoder.norm = torch.nn.Parameter(model.decoder.norm.detach().clone(), requires_grad=False)
    with pytest.raises(MovedBufferError, match="norm"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))


def test_the_default_is_what_was_measured(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Plain torch: a break. An attention that is best captured: captured, or a break with the reason where it cannot be."""
    attention = make_attention(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, device="cpu", kind="torch"
    )
    assert LLM(model, **OPTIONS).config.placement is Placement.AUTO
    assert choose(attention, wanted=Placement.AUTO) is Placement.BREAK
    assert choose(attention, wanted=Placement.CAPTURED) is Placement.CAPTURED

    class Fused(TorchAttention):
        best_placement = Placement.CAPTURED
        refusal: str | None = None

        def no_capture(self) -> str | None:
            return self.refusal

    fused = Fused(attention.shape, reason="test")
    assert choose(fused, wanted=Placement.AUTO) is Placement.CAPTURED
    assert choose(fused, wanted=Placement.BREAK) is Placement.BREAK
    fused.refusal = "no kernel"
    with caplog.at_level(logging.INFO, logger="breakgraph"):
        assert choose(fused, wanted=Placement.AUTO) is Placement.BREAK
    assert "no kernel" in caplog.text
    with pytest.raises(ConfigError, match="no kernel"):
        choose(fused, wanted=Placement.CAPTURED)


def test_a_wrong_placement_is_refused(model: LoadedModel) -> None:
    """Another word is an error that lists those that exist."""
    with pytest.raises(ConfigError, match="placement is 'graph'; expected 'auto', 'break' or 'captured'"):
        LLM(model, placement="graph")


def test_a_captured_step_that_was_not_planned_is_our_bug(model: LoadedModel) -> None:
    """Attention without a plan would read the plan of another step; it raises instead."""
    llm = LLM(model, placement="captured", **OPTIONS)
    llm.start()
    layout, _ = _layout([(3, 0)], block_size=4)
    with pytest.raises(InternalError, match="not planned"):
        llm.engine.prefill.runner._graphs.builder.work.forward(
            ids=torch.zeros(4, dtype=torch.int64),
            positions=torch.zeros(4, dtype=torch.int64),
            slots=torch.zeros(4, dtype=torch.int64),
            **llm.engine.prefill.live(layout),
        )


# On a GPU, with FlashInfer's FA3.

SHAPES = [(9, 3, 64), (32, 8, 64), (32, 8, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_graph_with_captured_attention_serves_any_batch(shape: tuple[int, int, int]) -> None:
    """One graph of 512 rows: for 25 batches the bits of FlashInfer planned publicly; padding is finite; plans run ahead."""
    pytest.importorskip("flashinfer")
    from breakgraph.models.attention_flashinfer import FlashInferAttention
    from breakgraph.models.flashinfer_planner import Planning

    torch.manual_seed(0)
    whole = AttentionShape(*shape, 16, torch.bfloat16, torch.device("cuda"))
    ours, public = (FlashInferAttention(whole, reason="test", planning=p) for p in (Planning.THIN, Planning.PUBLIC))
    if ours.no_capture() is not None:
        pytest.skip(f"cannot be captured: {ours.no_capture()}")
    assert public.no_capture() is not None
    state = ours.prefill_state(rows=512, requests=64, max_context=1200)
    k, v = torch.randn(2, 2048, 16, shape[1], shape[2], device="cuda", dtype=torch.bfloat16)
    k[0].zero_(), v[0].zero_()
    q = torch.randn(512, shape[0], shape[2], device="cuda", dtype=torch.bfloat16)
    random = np.random.default_rng(0)
    batches = []
    for number in range(25):
        count = (1, 64, 2, 17, 5)[number % 5]
        rows = random.integers(1, 512 // count + 1, count)
        if number < 2:
            rows = np.array([512 // count] * count)
        contexts = random.integers(0, 1200 - rows) * random.integers(0, 2, count)
        tables = [random.integers(1, 2048, -(-int(n) // 16)).astype(np.int32) for n in rows + contexts]
        batches.append(BatchLayout(rows.astype(np.int32), contexts.astype(np.int32), tables))
    ours.plan_captured(state, batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.prefill_captured(q, k, v, state)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ours.prefill_captured(q, k, v, state)
    found = []
    torch.cuda._sleep(50_000_000)  # the device falls behind: plans are made ahead of it
    for number, layout in enumerate(batches):
        if number % 3 == 0:  # a plan of another kind in between must not disturb this one
            ours.plan_prefill(batches[-1])
        ours.plan_captured(state, layout)
        out.fill_(float("nan"))
        graph.replay()
        found.append(out.clone())
    for layout, got in zip(batches, found, strict=True):
        expected = torch.empty_like(q[: layout.rows])
        public.attend(q[: layout.rows], k, v, expected, public.plan_prefill(layout))
        assert torch.equal(got[: layout.rows], expected)
        assert torch.isfinite(got).all()


@pytest.mark.gpu
@pytest.mark.parametrize("placement", [Placement.BREAK, Placement.CAPTURED, Placement.AUTO])
def test_placements_on_a_gpu_equal_their_eager_twins(placement: Placement) -> None:
    """Each prefill step, padded or not, is compared with eager bit for bit; nothing is eager; AUTO is captured on Hopper."""
    pytest.importorskip("flashinfer")
    from breakgraph.models.config import DecoderConfig
    from breakgraph.models.weights import random_model

    config = DecoderConfig("llama", 1000, 256, 512, 4, 4, 2, 64, 512)
    model = random_model(config, device="cuda", dtype=torch.bfloat16, seed=5)
    llm = LLM(
        model,
        placement=placement,
        verify="always",
        measure="never",
        max_batch_size=4,
        max_num_tokens=128,
        num_blocks=200,
        seed=1,
    )
    prompts = [[5, 9, 2], [7] * 200, list(range(1, 50)), [60], [3, 1, 4, 1, 5] * 25]
    llm.generate(prompts, SamplingParams(max_tokens=20))
    statistics = llm.statistics
    assert (statistics.eager, statistics.dropped) == ({}, {})
    hopper = torch.cuda.get_device_capability()[0] == 9
    captured = placement is Placement.CAPTURED or (placement is Placement.AUTO and hopper)
    breaks = {len(graph.breaks) for graph in llm.engine.prefill.runner.graphs.values()}
    assert breaks == {0 if captured else 4}
