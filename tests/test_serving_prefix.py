"""Prefix reuse: the blocks of equal beginnings are computed once, found as long as they are there, and never written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.weights import LoadedModel
from breakgraph.serving import LLM, EngineConfig, FinishReason, Graphs, PrefixReuse, SamplingParams
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import BlockAllocator
from breakgraph.serving.prefix_cache import PrefixCache, block_digest
from breakgraph.serving.requests import Request, RequestState
from breakgraph.serving.scheduler import DecodeBatch, Drain, PrefillBatch, Scheduler
from tests.serving_reference import Reference, greedy_reference, tiny_model

BLOCK = 4
OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 64,
    "block_size": BLOCK,
    "prefill_sizes": [4, 16],
    "contexts": [16],
    "seed": 1,
}
LONG = [(7 * i * i + 3 * i + 5) % 61 for i in range(30)]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """One model for all tests."""
    return tiny_model()


@pytest.fixture
def eager(model: LoadedModel) -> LLM:
    """A fresh engine without graphs: nothing in its cache."""
    return LLM(model, graphs=Graphs.OFF, **OPTIONS)


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.free_blocks == engine.usable_blocks


def _run(engine: Engine, prompt: Sequence[int], *, tokens: int = 4, stop: Sequence[int] = ()) -> Request:
    """One request alone, from its arrival to its end."""
    request = engine.add(prompt, params=SamplingParams(max_tokens=tokens, stop_token_ids=stop))
    _drain(engine)
    return request


def _computed(engine: Engine) -> int:
    return engine.statistics().prefill.tokens


# What is found.


@pytest.mark.parametrize("graphs", Graphs)
def test_a_second_request_computes_only_the_rest(model: LoadedModel, graphs: Graphs) -> None:
    """Of 30 known tokens the seven full blocks are taken over and two tokens computed; the answer is that of the prompt alone.

    The counts are in the request, in the completion and in the statistics.
    """
    llm = LLM(model, graphs=graphs, **OPTIONS)
    params = SamplingParams(max_tokens=6)
    reference = greedy_reference(model, LONG, max_tokens=6)
    first = llm.generate([LONG], params)[0]
    before = _computed(llm.engine)
    second = llm.generate([LONG], params)[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 28)
    assert _computed(llm.engine) - before == 2
    assert reference.agrees(first.token_ids)
    assert reference.agrees(second.token_ids)
    statistics = llm.statistics
    assert (statistics.prompt_tokens, statistics.cached_tokens) == (60, 28)
    assert statistics.as_dict()["cached_tokens"] == 28
    assert "28 prompt tokens from the cache" in statistics.summary()
    assert (statistics.eager == {}) == (graphs is Graphs.ON)


@pytest.mark.parametrize(("same", "found"), [(3, 0), (4, 4), (13, 12), (29, 28)])
def test_prompts_that_part_share_the_full_blocks_before(model: LoadedModel, eager: LLM, same: int, found: int) -> None:
    """A prompt that differs from token ``same`` on takes the full blocks before it and no other; both answers are right."""
    other = [*LONG[:same], *((token + 1) % 61 for token in LONG[same:])]
    _run(eager.engine, LONG)
    request = _run(eager.engine, other, tokens=6)
    assert request.cached_tokens == found
    assert greedy_reference(model, other, max_tokens=6).agrees(request.output_ids)


def test_tokens_behind_another_beginning_are_not_found(model: LoadedModel, eager: LLM) -> None:
    """The digest of a block depends on all tokens before it: the same tokens at the same place behind others are computed."""
    ids = np.arange(BLOCK, dtype=np.int64)
    digests = {block_digest(ids, parent=None), block_digest(ids, parent=bytes(15) + b"\x01")}
    digests |= {block_digest(ids + 1, parent=None), block_digest(ids[::-1].copy(), parent=None)}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {16}
    _run(eager.engine, LONG)
    other = [(LONG[0] + 1) % 61, *LONG[1:]]
    request = _run(eager.engine, other, tokens=6)
    assert request.cached_tokens == 0
    assert greedy_reference(model, other, max_tokens=6).agrees(request.output_ids)


@pytest.mark.parametrize(("block", "length", "found"), [(4, 16, 12), (4, 17, 16), (4, 4, 0), (1, 16, 15), (1, 1, 0)])
def test_at_least_one_token_is_computed(model: LoadedModel, block: int, length: int, found: int) -> None:
    """A prompt that is in the cache to its last token still computes what gives its logits, in a block of its own."""
    llm = LLM(model, graphs=Graphs.OFF, **{**OPTIONS, "block_size": block})
    prompt = LONG[:length]
    _run(llm.engine, prompt)
    before = _computed(llm.engine)
    request = _run(llm.engine, prompt, tokens=6)
    assert request.cached_tokens == found
    assert _computed(llm.engine) - before == length - found > 0
    assert greedy_reference(model, prompt, max_tokens=6).agrees(request.output_ids)


@pytest.mark.parametrize("stops", [False, True])
def test_the_next_turn_finds_the_answer(model: LoadedModel, eager: LLM, stops: bool) -> None:
    """Prompt and answer as the next prompt: all full blocks are found but for a last token that was never computed.

    A stop token was computed, in the step that ran ahead, so the block that it fills is found; the last token of a full
    length was not.
    """
    prompt = LONG[:9]
    answer = greedy_reference(model, prompt, max_tokens=11).token_ids
    end = next(i for i in range(11) if answer[i] not in answer[:i] and (9 + i + 1) % BLOCK == 0)
    stop = [answer[end]] if stops else []
    first = _run(eager.engine, prompt, tokens=end + 1 + stops, stop=stop)
    assert first.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
    turn = [*prompt, *first.output_ids]
    assert len(turn) % BLOCK == 0
    second = _run(eager.engine, [*turn, 8, 1, 3], tokens=6)
    assert second.cached_tokens == (len(turn) if stops else len(turn) - BLOCK)
    assert greedy_reference(model, [*turn, 8, 1, 3], max_tokens=6).agrees(second.output_ids)


def test_what_runs_is_found_too(model: LoadedModel, eager: LLM) -> None:
    """A prompt whose first chunk was launched a step before is taken over as far as that, with nothing read yet.

    So is the answer of a request that goes on, up to its last full block.
    """
    engine = eager.engine
    first = engine.add(LONG, params=SamplingParams(max_tokens=20))
    engine.step()
    second = engine.add(LONG, params=SamplingParams(max_tokens=6))
    engine.step()
    assert second.state is not RequestState.WAITING
    assert second.cached_tokens == 16
    assert second.blocks[:4] == first.blocks[:4]
    while len(first.output_ids) < 12:
        engine.step()
    third = engine.add([*LONG, *first.output_ids], params=SamplingParams(max_tokens=3))
    _drain(engine)
    assert third.cached_tokens == 40
    for request, count in ((first, 20), (second, 6), (third, 3)):
        assert greedy_reference(model, request.prompt_ids, max_tokens=count).agrees(request.output_ids)


def test_equal_prompts_of_one_step_are_computed_twice(model: LoadedModel, eager: LLM) -> None:
    """Nothing is launched when both are admitted, so each has blocks of its own; the first keeps the digests, none is lost."""
    engine = eager.engine
    both = [engine.add(LONG[:8], params=SamplingParams(max_tokens=4)) for _ in range(2)]
    engine.step()
    assert [request.cached_tokens for request in both] == [0, 0]
    assert not set(both[0].blocks) & set(both[1].blocks)
    assert [both[0].prefix.twins, both[1].prefix.twins] == [False, True]
    kept = both[0].blocks[:2]
    _drain(engine)
    third = engine.add([*LONG[:8], 1], params=SamplingParams(max_tokens=4))
    engine.step()
    assert third.blocks[:2] == kept
    _drain(engine)
    reference = greedy_reference(model, LONG[:8], max_tokens=4)
    assert all(reference.agrees(request.output_ids) for request in both)


def test_off_finds_nothing_and_hashes_nothing(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix_reuse off every prompt is computed whole, and no digest is taken."""
    monkeypatch.setattr("breakgraph.serving.prefix_cache.block_digest", _must_not_run)
    llm = LLM(model, graphs=Graphs.OFF, prefix_reuse="off", **OPTIONS)
    requests = [_run(llm.engine, LONG, tokens=8) for _ in range(2)]
    assert _computed(llm.engine) == 60
    assert [request.cached_tokens for request in requests] == [0, 0]
    assert llm.engine._allocator.num_published == 0
    assert llm.statistics.cached_tokens == 0
    with pytest.raises(AssertionError, match="must not run"):  # and with it on, this is what is called
        _run(LLM(model, graphs=Graphs.OFF, **OPTIONS).engine, LONG)


def _must_not_run(*_: object, **__: object) -> bytes:
    raise AssertionError("must not run")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("on", PrefixReuse.ON),
        (True, PrefixReuse.ON),
        ("off", PrefixReuse.OFF),
        (False, PrefixReuse.OFF),
        (PrefixReuse.OFF, PrefixReuse.OFF),
    ],
)
def test_reuse_may_be_said_in_words_and_bools(given: Any, meant: PrefixReuse) -> None:
    """Whatever spelling turns reuse on or off is the member of the enum afterwards; anything else is refused by name."""
    assert EngineConfig(prefix_reuse=given).prefix_reuse is meant
    assert EngineConfig().prefix_reuse is PrefixReuse.ON
    with pytest.raises(ConfigError, match="prefix_reuse is 'prefix'; expected 'on', 'off', True or False"):
        EngineConfig(prefix_reuse="prefix")


# What holds a block.


def test_shared_blocks_are_not_written_and_stay_for_the_other(model: LoadedModel, eager: LLM) -> None:
    """Two requests share five blocks. No byte of them changes, also after one has ended and a third has come."""
    engine = eager.engine
    _run(engine, LONG[:20])
    first = engine.add([*LONG[:20], 1], params=SamplingParams(max_tokens=3))
    second = engine.add([*LONG[:20], 2], params=SamplingParams(max_tokens=25))
    engine.step()
    shared = first.blocks[:5]
    assert second.blocks[:5] == shared
    tensors = [tensor for layer in engine.state.cache.layers for tensor in layer]
    before = [tensor[shared].clone() for tensor in tensors]
    while first.finish_reason is None or first.blocks:
        engine.step()
    third = engine.add(LONG[::-1], params=SamplingParams(max_tokens=10))
    while third.finish_reason is None:
        engine.step()
        assert not set(third.blocks) & set(shared)
    assert second.finish_reason is None
    assert all(torch.equal(tensor[shared], old) for tensor, old in zip(tensors, before, strict=True))
    _drain(engine)
    for request in (first, second, third):
        reference = greedy_reference(model, request.prompt_ids, max_tokens=request.max_new_tokens)
        assert reference.agrees(request.output_ids)


def test_idle_blocks_are_used_last_deep_ones_first() -> None:
    """Blocks that were never published go first, then the chain that was released first, each from its end to its beginning."""
    allocator = BlockAllocator(9)
    cache = PrefixCache(allocator, block_size=2, reuse=PrefixReuse.ON)
    chains = {}
    for name, tokens in {"old": range(6), "new": range(10, 14)}.items():
        request = _request(tuple(tokens))
        _hold(request, allocator=allocator, block_size=2)
        cache.publish(request)
        chains[name] = (request, request.blocks)
    for request, _ in chains.values():
        cache.release(request)
    assert (allocator.num_free, allocator.num_published) == (8, 5)
    old, new = chains["old"][1], chains["new"][1]
    unpublished = sorted(set(range(1, 9)) - {*old, *new})
    order = [block for _ in range(8) for block in allocator.allocate(1) or []]
    assert sorted(order[:3]) == unpublished
    assert order[3:] == [*reversed(old), *reversed(new)]
    assert allocator.num_published == 0


def test_a_used_chain_is_the_last_to_go() -> None:
    """A chain that was held again goes after one that was released in between: least recently used, not first in."""
    allocator = BlockAllocator(5)
    cache = PrefixCache(allocator, block_size=2, reuse=PrefixReuse.ON)
    requests = [_request((1, 2, 3, 4)), _request((5, 6, 7, 8))]
    for request in requests:
        _hold(request, allocator=allocator, block_size=2)
        cache.publish(request)
    blocks = [request.blocks for request in requests]
    for request in requests:
        cache.release(request)
    again = _request((1, 2, 3, 4, 9))
    again.blocks = cache.find(again)
    assert again.blocks == blocks[0]
    assert allocator.count_idle(again.blocks) == 2
    allocator.hold(again.blocks)
    cache.admit(again, shared=2)
    cache.release(again)
    assert allocator.allocate(4) == [*reversed(blocks[1]), *reversed(blocks[0])]


def test_a_twin_keeps_what_it_stands_on() -> None:
    """Behind another's first block: when the later one is released, that block is used after those that follow on it."""
    allocator = BlockAllocator(7)
    cache = PrefixCache(allocator, block_size=2, reuse=PrefixReuse.ON)
    short, long = _request((1, 2)), _request((1, 2, 3, 4, 5, 6))
    for request in (short, long):
        _hold(request, allocator=allocator, block_size=2)
        cache.publish(request)
    assert long.prefix.twins
    kept, (twin, *rest) = short.blocks, long.blocks
    cache.release(short)
    cache.release(long)
    assert allocator.num_published == 3
    order = allocator.allocate(6)
    assert order is not None
    assert twin in order[:3]
    assert order[3:] == [*reversed(rest), *kept]


def test_wrong_uses_are_refused_and_change_nothing() -> None:
    """Sharing what is not published, publishing what is free, shared or published, writing into a shared block: InternalError."""
    allocator = BlockAllocator(6)
    blocks = allocator.allocate(2)
    assert blocks is not None
    assert allocator.publish(blocks[0], digest=b"a")
    with pytest.raises(InternalError, match="not all of them are published"):
        allocator.hold(blocks)
    with pytest.raises(InternalError, match="for a second time"):
        allocator.publish(blocks[0], digest=b"b")
    with pytest.raises(InternalError, match="0 holders"):
        allocator.publish(5, digest=b"b")
    with pytest.raises(InternalError, match="0 holders"):
        allocator.publish(0, digest=b"b")
    assert (allocator.num_free, allocator.num_published, allocator.find(b"b")) == (3, 1, None)
    assert not allocator.publish(blocks[1], digest=b"a")
    assert allocator.find(b"a") == blocks[0]
    allocator.free(blocks)
    assert (allocator.num_free, allocator.count_idle(blocks)) == (5, 1)
    high = allocator.allocate(4)
    assert high is not None
    assert blocks[0] not in high
    with pytest.raises(InternalError, match="can still be found"):
        allocator.compact()
    cache = PrefixCache(allocator, block_size=2, reuse=PrefixReuse.ON)
    request = _request((1, 2, 3))
    cache.admit(request, shared=1)
    cache.check_write(request, start=2)
    with pytest.raises(InternalError, match="in a block that others may read"):
        cache.check_write(request, start=1)


# Room.


def _scheduler(
    blocks: int, *, tokens: int = 64, reuse: PrefixReuse = PrefixReuse.ON
) -> tuple[Scheduler, BlockAllocator]:
    allocator = BlockAllocator(blocks)
    scheduler = Scheduler(
        allocator, block_size=BLOCK, max_batch_size=4, max_num_tokens=tokens, max_seq_len=64, prefix_reuse=reuse
    )
    return scheduler, allocator


def _request(tokens: Sequence[int], *, new: int = 4) -> Request:
    return Request(prompt_ids=tuple(tokens), params=SamplingParams(max_tokens=new), seed=0, max_new_tokens=new)


def _hold(request: Request, *, allocator: BlockAllocator, block_size: int) -> None:
    """The blocks of a prompt that was computed."""
    request.blocks = allocator.allocate(-(-len(request.prompt_ids) // block_size)) or []
    request.computed = len(request.prompt_ids)


def _step(scheduler: Scheduler) -> PrefillBatch | DecodeBatch | Drain | None:
    """Schedules, launches and reads a step: token k of a request is 100 + k."""
    step = scheduler.schedule(drained=True)
    if isinstance(step, (PrefillBatch, DecodeBatch)):
        scheduler.launched(step)
        for request in step.sampled:
            request.output_ids.append(100 + len(request.output_ids))
    return step


def _end(scheduler: Scheduler, request: Request) -> None:
    scheduler.finish(request)
    scheduler.release(request)


def test_admission_counts_idle_blocks_as_free() -> None:
    """With every block idle a prompt is admitted, and takes the place of the oldest; its own idle blocks do not count twice."""
    scheduler, allocator = _scheduler(6)
    first = _request(range(20), new=1)
    scheduler.add(first)
    _step(scheduler)
    _end(scheduler, first)
    assert (allocator.num_free, allocator.num_published) == (5, 5)
    whole = _request(range(20), new=1)
    scheduler.add(whole)
    step = _step(scheduler)
    assert isinstance(step, PrefillBatch)
    assert [(c.start, c.count) for c in step.chunks] == [(16, 4)]
    assert allocator.num_free == 0
    other = _request(range(30, 34), new=1)
    scheduler.add(other)
    assert _step(scheduler) is None  # four of its blocks were idle, and none is free now
    _end(scheduler, whole)
    step = _step(scheduler)
    assert isinstance(step, PrefillBatch)
    assert step.sampled == (other,)
    assert allocator.num_free == 4


def test_shared_blocks_let_more_requests_in() -> None:
    """The rule that one block per running request stays free is one about free blocks: what others hold costs nothing."""
    admitted = {}
    for reuse in PrefixReuse:
        scheduler, allocator = _scheduler(8, reuse=reuse)
        scheduler.add(_request(range(17), new=8))
        _step(scheduler)
        assert allocator.num_free == 2
        second = _request([*range(16), 40], new=8)
        scheduler.add(second)
        _step(scheduler)
        _step(scheduler)
        admitted[reuse] = second.state is RequestState.DECODE
    assert admitted == {PrefixReuse.ON: True, PrefixReuse.OFF: False}


def test_the_spare_blocks_of_running_requests_stay_free() -> None:
    """A waiting request whose own idle blocks are all that is free is not admitted beside one that will need a block."""
    scheduler, allocator = _scheduler(6)
    first = _request(range(12), new=1)
    scheduler.add(first)
    _step(scheduler)
    _end(scheduler, first)
    running = _request(range(50, 55), new=8)
    scheduler.add(running)
    _step(scheduler)
    assert (allocator.num_free, allocator.num_published) == (3, 4)
    again = _request(range(12), new=1)  # two idle blocks, one new: as many as are free
    scheduler.add(again)
    assert isinstance(_step(scheduler), DecodeBatch)
    assert isinstance(_step(scheduler), DecodeBatch)
    assert (again.state, allocator.num_free) == (RequestState.WAITING, 3)
    _end(scheduler, running)
    step = _step(scheduler)
    assert isinstance(step, PrefillBatch)
    assert [(c.request, c.start) for c in step.chunks] == [(again, 8)]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """What was not overwritten meanwhile, prompt and output, is taken over when it starts again; counted as found only once."""
    scheduler, allocator = _scheduler(8)
    old, young = _request(range(8), new=12), _request(range(20, 27), new=9)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.preemptions:
        assert isinstance(_step(scheduler), (PrefillBatch, DecodeBatch))
    assert (young.blocks, young.computed, young.prefix.published) == ([], 0, 0)
    assert len(young.output_ids) > 0
    known = young.known
    while len(old.output_ids) < 12:
        _step(scheduler)
    _end(scheduler, old)
    step = _step(scheduler)
    assert isinstance(step, PrefillBatch)
    (chunk,) = step.chunks
    assert chunk.request is young
    assert 7 < chunk.start < known == chunk.start + chunk.count  # an output block among them
    assert chunk.request.known_ids(0, count=known).tolist() == [*young.prompt_ids, *young.output_ids[: known - 7]]
    assert young.cached_tokens == scheduler.prefixes.cached_tokens == 0
    while len(young.output_ids) < 9:
        _step(scheduler)
    _end(scheduler, young)
    assert allocator.num_free == allocator.num_usable


def test_a_block_that_was_full_at_a_preemption_is_found() -> None:
    """A request that is preempted where it needs a further block leaves its last full one, of output, to be found too."""
    scheduler, _ = _scheduler(8)
    old, young = _request(range(8), new=8), _request(range(20, 28), new=8)
    scheduler.add(old)
    scheduler.add(young)
    while not scheduler.preemptions:
        _step(scheduler)
    assert young.known == 13
    while len(old.output_ids) < 8:
        _step(scheduler)
    _end(scheduler, old)
    step = _step(scheduler)
    assert isinstance(step, PrefillBatch)
    assert [(c.request, c.start, c.count) for c in step.chunks] == [(young, 12, 1)]


def test_a_step_that_would_write_a_published_block_is_not_formed() -> None:
    """Were the counts of a request ever wrong, its next chunk would be an InternalError and not a write to shared blocks."""
    scheduler, _ = _scheduler(32, tokens=8)
    request = _request(range(20))
    scheduler.add(request)
    _step(scheduler)
    request.computed -= 1
    with pytest.raises(InternalError, match="position 7 was to be written"):
        scheduler.schedule(drained=True)


def test_pressure_and_preemption_change_no_answer(model: LoadedModel) -> None:
    """In a cache that is too small, chains are evicted and requests start again while others share; all answers are right."""
    llm = LLM(model, graphs=Graphs.OFF, **OPTIONS, num_blocks=17)
    prompts = [[*LONG[:12], row, row + 1] for row in range(4)] + [LONG[:25], [9] * 17, LONG[:25]]
    references = [greedy_reference(model, prompt, max_tokens=20) for prompt in prompts]
    found = 0
    for _ in range(2):
        for answer, reference in zip(llm.generate(prompts, SamplingParams(max_tokens=20)), references, strict=True):
            assert reference.agrees(answer.token_ids)
            found += answer.cached_tokens
    statistics = llm.statistics
    assert statistics.preemptions > 0
    assert statistics.cached_tokens == found > 0
    assert 0 < llm.engine._allocator.num_published <= 16  # more digests were published than there are blocks
    assert llm.engine.free_blocks == llm.engine.usable_blocks


# What cannot be trusted.


@pytest.mark.parametrize(("fails", "found"), [(0, 0), (1, 16)])
def test_a_failed_prefill_publishes_nothing_of_its_own(
    model: LoadedModel, eager: LLM, monkeypatch: pytest.MonkeyPatch, fails: int, found: int
) -> None:
    """Chunk number ``fails`` is not launched: its blocks are not found when its request has ended; those before are, rightly."""
    engine = eager.engine
    launch, calls = engine.prefill.launch, []

    def broken(batch: PrefillBatch) -> Any:
        calls.append(batch)
        if len(calls) == fails + 1:
            raise RuntimeError("out of luck")
        return launch(batch)

    monkeypatch.setattr(engine.prefill, "launch", broken)
    request = engine.add(LONG, params=SamplingParams(max_tokens=4))
    for _ in range(fails):
        engine.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    assert request.computed > found  # it was counted as launched
    engine.finish(request, reason=FinishReason.ABORT)
    _drain(engine)
    again = _run(engine, LONG, tokens=6)
    assert again.cached_tokens == found
    assert greedy_reference(model, LONG, max_tokens=6).agrees(again.output_ids)


def test_a_failed_decode_publishes_nothing_of_its_own(
    model: LoadedModel, eager: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that would have filled a block of the answer failed: the block is not found, though its tokens are known."""
    engine = eager.engine
    request = engine.add(LONG[:14], params=SamplingParams(max_tokens=20))
    while request.computed < 15:
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.decode, "launch", _must_not_run)
        with pytest.raises(AssertionError, match="must not run"):
            engine.step()
    assert request.computed == 16
    request.output_ids.extend(greedy_reference(model, LONG[:14], max_tokens=4).token_ids[len(request.output_ids) :])
    engine.finish(request, reason=FinishReason.ABORT)
    _drain(engine)
    turn = [*LONG[:14], *request.output_ids]
    again = _run(engine, turn, tokens=6)
    assert again.cached_tokens == 12
    assert greedy_reference(model, turn, max_tokens=6).agrees(again.output_ids)


def test_reset_forgets_everything(model: LoadedModel, eager: LLM) -> None:
    """After an exception and a reset no block is found, held or not, and all come back."""
    engine = eager.engine
    _run(engine, LONG)
    request = engine.add([*LONG, 1, 2, 3], params=SamplingParams(max_tokens=20))
    engine.step()
    assert request.cached_tokens == 28
    assert engine._allocator.num_published >= 7
    engine.reset()
    assert engine._allocator.num_published == 0
    assert engine.free_blocks == engine.usable_blocks
    again = _run(engine, LONG, tokens=6)
    assert again.cached_tokens == 0
    assert greedy_reference(model, LONG, max_tokens=6).agrees(again.output_ids)


# Moving.


@pytest.mark.parametrize("graphs", Graphs)
def test_moved_blocks_stay_shared_and_are_still_found(model: LoadedModel, graphs: Graphs) -> None:
    """Blocks that two requests hold move once, for both; their digests follow; what lay where they went is not found.

    With a step in flight and, with graphs, a padding request in between. All answers are right.
    """
    llm = LLM(model, graphs=graphs, **OPTIONS, num_blocks=40)
    llm.start()
    engine = llm.engine
    allocator = engine._allocator
    low = [engine.add([row] * 9, params=SamplingParams(max_tokens=2)) for row in (50, 51, 52)]
    engine.step()
    first = engine.add(LONG, params=SamplingParams(max_tokens=25))
    while first.launched < 3:
        engine.step()
    second = engine.add([*LONG[:20], 1], params=SamplingParams(max_tokens=25))
    while second.launched < 2:
        engine.step()
    assert [request.blocks for request in low] == [[]] * 3
    assert second.blocks[:5] == first.blocks[:5]
    before, own = list(first.blocks), list(second.blocks)
    moves = allocator.gaps()
    assert set(moves) & set(first.blocks[:5])
    assert engine.defragment() >= 5
    assert first.blocks != before
    assert second.blocks != own
    assert second.blocks[:5] == first.blocks[:5]
    held = {*first.blocks, *second.blocks}
    assert max(held) <= len(held) + 1  # and the padding request's
    third = engine.add(LONG, params=SamplingParams(max_tokens=5))
    while third.state is RequestState.WAITING:
        engine.step()
    assert third.blocks[:7] == first.blocks[:7]
    assert third.cached_tokens == 28
    _drain(engine)
    for request in (first, second, third, *(_run(engine, [row] * 9, tokens=5) for row in (50, 51, 52))):
        reference = greedy_reference(model, request.prompt_ids, max_tokens=request.max_new_tokens)
        assert reference.agrees(request.output_ids)


# Sweeps.


@attrs.define
class _Model:
    """What an allocator should be: who holds which blocks, and what is published, in order of last use."""

    total: int
    holders: list[list[int]] = attrs.field(factory=list)
    published: dict[bytes, int] = attrs.field(factory=dict)
    last_use: list[int] = attrs.field(factory=list)

    @property
    def held(self) -> set[int]:
        return {block for blocks in self.holders for block in blocks}

    @property
    def idle(self) -> list[int]:
        return [block for block in self.last_use if block in self.published.values() and block not in self.held]

    def drop(self, block: int) -> None:
        self.published = {digest: other for digest, other in self.published.items() if other != block}


@settings(max_examples=200, deadline=None)
@given(data=st.data(), total=st.integers(1, 14))
def test_the_allocator_is_its_model(data: st.DataObject, total: int) -> None:
    """After any allocations, releases, shares, publications, moves and losses of memory, every count and every block is right.

    No block is both free and held, none is lost, the oldest idle one is evicted first and only when nothing else is free.
    """
    allocator, plain = BlockAllocator(total + 1), _Model(total)
    number = 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(
            st.sampled_from(["take", "take", "free", "free", "publish", "publish", "share", "forget", "move"])
        )
        if what == "take":
            _take(allocator, plain, count=data.draw(st.integers(0, 4)))
        elif what == "free" and plain.holders:
            blocks = plain.holders.pop(data.draw(st.integers(0, len(plain.holders) - 1)))
            allocator.free(blocks)
            plain.last_use = [b for b in plain.last_use if b not in set(blocks) - plain.held]
            plain.last_use += [block for block in reversed(blocks) if block not in plain.held]
        elif what == "publish":
            once = [b for b in sorted(plain.held) if sum(b in blocks for blocks in plain.holders) == 1]
            once = [block for block in once if block not in plain.published.values()]
            if once:
                number += data.draw(st.integers(0, 1))
                block, digest = data.draw(st.sampled_from(once)), bytes([number])
                assert allocator.publish(block, digest=digest) == (digest not in plain.published)
                plain.published.setdefault(digest, block)
        elif what == "share" and plain.published:
            chosen = data.draw(st.lists(st.sampled_from(sorted(plain.published)), unique=True))
            blocks = [allocator.find(digest) for digest in chosen]
            assert blocks == [plain.published[digest] for digest in chosen]
            assert allocator.count_idle(blocks) == len(set(blocks) - plain.held)
            allocator.hold(blocks)
            plain.holders.append(blocks)
        elif what == "forget":
            blocks = data.draw(st.none() | st.lists(st.integers(1, total), unique=True))
            allocator.forget(blocks)
            for block in range(1, total + 1) if blocks is None else blocks:
                plain.drop(block)
        elif what == "move":
            _move(allocator, plain)
        assert allocator.num_free == total - len(plain.held)
        assert allocator.num_published == len(plain.published)
        assert all(allocator.find(digest) == block for digest, block in plain.published.items())
        assert list(allocator._idle) == plain.idle
        assert not set(allocator._free) & (plain.held | set(plain.idle))
        assert len(allocator._free) == total - len(plain.held) - len(plain.idle) == len(set(allocator._free))
    for blocks in plain.holders:
        allocator.free(blocks)
    everything = allocator.allocate(total)
    assert everything is not None
    assert sorted(everything) == list(range(1, total + 1))


def _take(allocator: BlockAllocator, plain: _Model, *, count: int) -> None:
    idle, free = plain.idle, plain.total - len(plain.held) - len(plain.idle)
    blocks = allocator.allocate(count)
    if count > free + len(idle):
        assert blocks is None
        return
    assert blocks is not None
    assert len(set(blocks)) == count
    assert not set(blocks) & plain.held
    assert [block for block in blocks if block in idle] == idle[: max(count - free, 0)]
    for block in blocks:
        plain.drop(block)
    plain.holders.append(blocks)


def _move(allocator: BlockAllocator, plain: _Model) -> None:
    moves = allocator.gaps()
    assert set(moves) <= plain.held
    assert not set(moves.values()) & plain.held
    allocator.forget(moves.values())
    for block in moves.values():
        plain.drop(block)
    allocator.compact()
    # What is moved keeps its digest; its old place has none, whatever is said of its use.
    plain.published = {digest: moves.get(block, block) for digest, block in plain.published.items()}
    plain.holders = [[moves.get(block, block) for block in blocks] for blocks in plain.holders]
    assert plain.held == set(range(1, len(plain.held) + 1))


@given(prompt=st.lists(st.integers(0, 99), max_size=9), output=st.lists(st.integers(0, 99), max_size=9), data=st.data())
def test_known_ids_are_slices_of_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    """Any range of known tokens is the int64 array of them, across the end of the prompt too; it cannot change the prompt."""
    request = _request(prompt)
    request.output_ids += output
    start = data.draw(st.integers(0, request.known))
    count = data.draw(st.integers(0, request.known - start))
    ids = request.known_ids(start, count=count)
    assert ids.dtype == np.int64
    assert ids.tolist() == [*prompt, *output][start : start + count]
    assert request.known == len(prompt) + len(output)
    if count and start + count <= len(prompt):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 1


@attrs.frozen
class _Sweep:
    llm: LLM
    references: dict[tuple[int, ...], Reference]


@pytest.fixture(scope="module", params=[Graphs.ON, Graphs.OFF])
def sweep(request: pytest.FixtureRequest, model: LoadedModel) -> _Sweep:
    """A small cache, and 16 tokens behind each of some prompts with common beginnings."""
    llm = LLM(model, graphs=request.param, **OPTIONS, num_blocks=24)
    llm.start()
    prompts = [LONG[:n] for n in (1, 8, 13, 30)]
    prompts += [[*LONG[:n], n, *LONG[n : n + more]] for n, more in ((8, 3), (8, 12), (16, 0), (16, 9), (20, 8))]
    prompts += [[*prompts[1], *greedy_reference(model, prompts[1], max_tokens=12).token_ids]]
    return _Sweep(llm, {tuple(p): greedy_reference(model, p, max_tokens=16) for p in prompts})


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 14), st.integers(0, 9), st.integers(1, 16), st.integers(0, 40)),
        min_size=1,
        max_size=9,
    ),
    moves=st.sets(st.integers(0, 40), max_size=4),
)
def test_any_mix_of_shared_beginnings_gives_the_right_tokens(
    sweep: _Sweep, arrivals: list[tuple[int, int, int, int]], moves: set[int]
) -> None:
    """Requests with common beginnings come, go and are given up while blocks move; the cache lives from example to example.

    Each answer agrees with that of its prompt alone. At every step, what can be found is held by no padding request and is not
    the null block, and a request's published blocks are those of its own tokens. At the end all blocks are back.
    """
    engine, prompts = sweep.llm.engine, list(sweep.references)
    waiting = sorted(arrivals)
    running: dict[Request, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            _, which, length, abort = waiting.pop(0)
            running[engine.add(prompts[which], params=SamplingParams(max_tokens=length))] = abort
        engine.step()
        step += 1
        if step in moves:
            engine.defragment()
        for request, abort in running.items():
            if step == abort:
                engine.finish(request, reason=FinishReason.ABORT)
        _check_published(engine, list(running))
        assert step < 500
    for request in running:
        assert sweep.references[request.prompt_ids].agrees(request.output_ids)
        assert request.blocks == []
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_ids) == request.max_new_tokens
    assert engine.free_blocks == engine.usable_blocks
    assert sweep.llm.statistics.dropped == {}


def _check_published(engine: Engine, requests: Sequence[Request]) -> None:
    allocator = engine._allocator
    assert not allocator._digests.keys() & {0, engine.decode.padding_block}
    holders = [0] * engine.sizes.num_blocks
    for request in requests:
        parent = None
        for index, block in enumerate(request.blocks):
            holders[block] += 1
            if index < request.prefix.published:
                parent = block_digest(request.known_ids(index * BLOCK, count=BLOCK), parent=parent)
                assert allocator._digests.get(block, parent) == parent
            else:
                assert block not in allocator._digests
    if engine.decode.padding_block:
        holders[engine.decode.padding_block] += 1
    assert allocator._holders == holders
