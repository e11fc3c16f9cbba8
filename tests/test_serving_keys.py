"""Every key that the serving loop can look up is captured, or in the set that was declared eager."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.graph_key import GraphKey, SampleType
from breakgraph.serving import LLM, FinishReason, SamplingParams
from breakgraph.serving.config import SamplingPaths
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.requests import Request
from breakgraph.serving.scheduler import DecodeBatch
from breakgraph.statistics import Reason
from tests.serving_reference import tiny_model

MOST, LONGEST, BLOCK = 11, 64, 4
ROOM = MOST * blocks_for(LONGEST, block_size=BLOCK) + 2


@pytest.fixture(scope="module")
def engines() -> dict[SamplingPaths, Engine]:
    """One engine for each choice of sampling paths; with 11 requests at most, buckets are 1, 2, 4, 8 and 11."""
    model = tiny_model()
    options: dict[str, Any] = {"max_batch_size": MOST, "max_seq_len": LONGEST, "block_size": BLOCK, "num_blocks": ROOM}
    return {
        paths: LLM(model, sampling=paths, contexts=[16], prefill_sizes=[8], verify="never", **options).engine
        for paths in SamplingPaths
    }


def looked_up(engine: Engine, batch: DecodeBatch) -> tuple[GraphKey, str]:
    """The key that a batch is looked up by, and the name of the reason for an eager step, or "" for a replay."""
    runner = engine.decode.runner
    keys: list[GraphKey] = []

    def prepare(inputs: object, *, key: GraphKey, live: object, **options: Any) -> Any:
        keys.append(key)
        return type(runner).prepare(runner, inputs, key=key, live=live, **options)  # type: ignore[arg-type]

    runner.prepare = prepare  # type: ignore[method-assign, assignment]
    try:
        before = runner.statistics.eager.copy()
        engine.decode.run(batch).wait()
    finally:
        del runner.prepare
    return keys[0], next(iter(runner.statistics.eager - before), "")


def batch_of(lengths: list[int], *, sampled: list[bool], reported: int | None = None) -> DecodeBatch:
    """Requests with blocks of their own; one, by its index, asks for log-probabilities."""
    requests, free = [], itertools.count(1)
    for row, (length, samples) in enumerate(zip(lengths, sampled, strict=True), start=1):
        params = SamplingParams(temperature=1.0 if samples else 0.0, logprobs=2 if row - 1 == reported else None)
        request = Request(prompt_ids=(1,) * (length - 1), params=params, seed=row, max_new_tokens=1)
        request.row = row
        request.blocks = list(itertools.islice(free, blocks_for(length, block_size=BLOCK)))
        requests.append(request)
    return DecodeBatch(tuple(requests), tuple(lengths))


@settings(max_examples=120, deadline=None)
@given(data=st.data(), paths=st.sampled_from(SamplingPaths), size=st.integers(1, MOST))
def test_every_key_of_the_loop_is_captured_or_declared_eager(
    engines: dict[SamplingPaths, Engine], data: st.DataObject, paths: SamplingPaths, size: int
) -> None:
    """FAULT-R3, REQ-A4: any batch size, length and mix of requests; eager are those of a path that is not captured."""
    engine = engines[paths]
    lengths = data.draw(st.lists(st.integers(2, LONGEST), min_size=size, max_size=size))
    sampled = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    reported = data.draw(st.none() | st.integers(0, size - 1))
    key, reason = looked_up(engine, batch_of(lengths, sampled=sampled, reported=reported))
    context = 16 if max(lengths) <= 16 else LONGEST
    if reported is not None:
        assert key == GraphKey(size, sample_type=SampleType.FULL, extra=(("context", context),))
        assert reason == ("" if paths is SamplingPaths.ALL else Reason.NO_GRAPH.name)
        return
    greedy = paths is not SamplingPaths.SAMPLED and not any(sampled)
    assert key == GraphKey(size, is_all_greedy_sample=greedy, extra=(("context", context),))
    declared_eager = paths is SamplingPaths.GREEDY and any(sampled)
    assert reason == (Reason.NO_GRAPH.name if declared_eager else "")


def test_all_batch_sizes_and_variants_replay(engines: dict[SamplingPaths, Engine]) -> None:
    """FAULT-R3, REQ-C1, REQ-C2: every size, greedy or not, in each context, replays the smallest bucket that holds it."""
    engine = engines[SamplingPaths.BOTH]
    replays = engine.decode.runner.statistics.replays_by_key
    for size, sampled, length in itertools.product(range(1, MOST + 1), (False, True), (5, 40)):
        before = replays.copy()
        _, reason = looked_up(engine, batch_of([length] * size, sampled=[sampled] * size))
        assert not reason
        (key,) = replays - before
        assert isinstance(key, GraphKey)
        assert key.batch_size == next(bucket for bucket in (1, 2, 4, 8, 11) if bucket >= size)
        assert (key.is_all_greedy_sample, dict(key.extra)["context"]) == (not sampled, 16 if length == 5 else LONGEST)
    assert engine.decode.padding_block != 0


def test_a_dropped_graph_costs_no_block_that_was_promised() -> None:
    """REQ-C4, FAULT-R5: with the graph of one size dropped, a request that needs every usable block still runs to its end."""
    options: dict[str, Any] = {
        "max_batch_size": 3,
        "max_seq_len": 32,
        "block_size": 4,
        "num_blocks": 9,
        "prefill_sizes": [8],
        "contexts": [16],
        "sampling": "greedy",
    }
    whole = LLM(tiny_model(), **options)
    whole.start()
    runner = whole.engine.decode.runner
    budget = max(runner.pool.backend.pool_bytes(), 1)
    for share in (0.9, 0.7, 0.5):
        llm = LLM(tiny_model(), graph_budget=int(budget * share), **options)
        llm.start()
        engine = llm.engine
        assert engine.decode.runner.dropped
        assert engine.free_blocks >= engine.usable_blocks
        request = engine.add([1] * 20, params=SamplingParams(max_tokens=engine.usable_blocks * 4 - 19, ignore_eos=True))
        while engine.has_work:
            engine.step()
        assert len(request.output_ids) == request.max_new_tokens


def test_a_move_that_fails_changes_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-C5, FAULT-E3: out of memory while blocks move reaches the caller; every block keeps its owner and its data."""
    options: dict[str, Any] = {"max_batch_size": 5, "max_seq_len": 64, "block_size": 4, "num_blocks": 40}
    llm = LLM(tiny_model(), prefill_sizes=[16], contexts=[16], **options)
    llm.start()
    engine, params = llm.engine, SamplingParams(max_tokens=12)
    expected = [answer.token_ids for answer in llm.generate([[3] * 9, [5] * 7], params)]
    first, second = (engine.add([token] * count, params=params) for token, count in ((4, 11), (3, 9)))
    third = engine.add([5] * 7, params=params)
    for _ in range(4):
        engine.step()
    engine.finish(first, reason=FinishReason.ABORT)
    engine.step()
    before = [list(request.blocks) for request in (second, third)]
    assert engine._allocator.gaps()
    with monkeypatch.context() as patched:
        patched.setattr(type(engine.state.cache), "move", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.defragment()
    assert [request.blocks for request in (second, third)] == before
    assert engine.defragment() > 0
    while engine.has_work:
        engine.step()
    assert [tuple(request.output_ids) for request in (second, third)] == expected
    assert engine.free_blocks == engine.usable_blocks


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory")
