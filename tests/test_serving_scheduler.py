"""Scheduling: who runs when, in which rows and blocks, and that nothing is lost on the way."""

from __future__ import annotations

from collections import deque

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.serving.kv_cache import BlockAllocator, blocks_for
from breakgraph.serving.requests import Request, RequestState
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import DecodeBatch, Drain, PrefillBatch, Scheduler


def _request(prompt: int, *, new: int = 4) -> Request:
    return Request(
        prompt_ids=tuple(range(1, prompt + 1)), params=SamplingParams(max_tokens=new), seed=0, max_new_tokens=new
    )


def _scheduler(
    blocks: int = 64, *, rows: int = 4, tokens: int = 16, length: int = 64, prefill_burst: int = 1
) -> tuple[Scheduler, BlockAllocator]:
    allocator = BlockAllocator(blocks)
    scheduler = Scheduler(
        allocator,
        block_size=4,
        max_batch_size=rows,
        max_num_tokens=tokens,
        max_seq_len=length,
        prefill_burst=prefill_burst,
    )
    return scheduler, allocator


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    """40 tokens with a budget of 16 are 16, 16 and 8; only the last chunk samples a token."""
    scheduler, _ = _scheduler()
    scheduler.add(_request(40))
    parts = [scheduler.schedule(drained=False) for _ in range(3)]
    chunks = [part.chunks[0] for part in parts if isinstance(part, PrefillBatch)]
    assert [(c.start, c.count, c.completes) for c in chunks] == [(0, 16, False), (16, 16, False), (32, 8, True)]
    assert isinstance(scheduler.schedule(drained=False), DecodeBatch)


def test_short_prompts_share_a_step_and_the_last_is_cut() -> None:
    """Prompts fill a step in order of arrival up to the budget; the rest of the cut one comes first in the next."""
    scheduler, _ = _scheduler()
    for prompt in (5, 6, 9):
        scheduler.add(_request(prompt, new=1))
    first = scheduler.schedule(drained=False)
    assert isinstance(first, PrefillBatch)
    assert [c.count for c in first.chunks] == [5, 6, 5]
    assert first.num_tokens == 16
    assert [r.state for r in first.sampled] == [RequestState.DECODE] * 2
    second = scheduler.schedule(drained=False)
    assert isinstance(second, PrefillBatch)
    assert [(c.start, c.count) for c in second.chunks] == [(5, 4)]


def test_prefill_and_decode_take_turns() -> None:
    """While one request decodes, a long prompt is computed in chunks between its steps: neither waits for the other."""
    scheduler, _ = _scheduler(tokens=8)
    scheduler.add(_request(3, new=20))
    scheduler.schedule(drained=False)
    scheduler.add(_request(30))
    kinds = [type(scheduler.schedule(drained=False)) for _ in range(6)]
    assert kinds == [DecodeBatch, PrefillBatch, DecodeBatch, PrefillBatch, DecodeBatch, PrefillBatch]


def test_a_burst_of_prefills_stands_before_a_decode() -> None:
    """With `prefill_burst`, so many chunks are computed before the next token of the others, and no more."""
    scheduler, _ = _scheduler(tokens=8, prefill_burst=3)
    scheduler.add(_request(3, new=20))
    scheduler.schedule(drained=False)
    scheduler.add(_request(60))
    kinds = [type(scheduler.schedule(drained=False)) for _ in range(7)]
    assert kinds == [PrefillBatch] * 2 + [DecodeBatch] + [PrefillBatch] * 3 + [DecodeBatch]


def test_the_last_token_is_not_launched_twice() -> None:
    """A request whose last token is in flight is not in the next step, though the host has not read the token."""
    scheduler, _ = _scheduler()
    scheduler.add(_request(3, new=2))
    assert isinstance(scheduler.schedule(drained=False), PrefillBatch)
    assert isinstance(scheduler.schedule(drained=False), DecodeBatch)
    assert scheduler.schedule(drained=False) is None
    assert not scheduler.has_unfinished


def test_rows_and_blocks_stay_until_released() -> None:
    """A finished request keeps its row and blocks, so that a step in flight can still write to them."""
    scheduler, allocator = _scheduler(rows=1)
    request, other = _request(5), _request(5)
    scheduler.add(request)
    scheduler.add(other)
    scheduler.schedule(drained=False)
    with pytest.raises(InternalError, match="before it was finished"):
        scheduler.release(request)
    free = allocator.num_free
    scheduler.finish(request)
    assert scheduler.schedule(drained=False) is None  # the only row is still taken
    assert allocator.num_free == free
    scheduler.release(request)
    scheduler.release(request)  # holds nothing any more: left alone
    assert allocator.num_free == allocator.num_usable
    step = scheduler.schedule(drained=False)
    assert isinstance(step, PrefillBatch)
    assert step.chunks[0].request is other


def test_a_request_that_can_never_fit_is_refused() -> None:
    """No tokens, too many for the model's length, or more blocks than exist: ConfigError at once, not a hang later."""
    scheduler, _ = _scheduler(blocks=6, length=32)
    with pytest.raises(ConfigError, match="no tokens"):
        scheduler.add(_request(0))
    with pytest.raises(ConfigError, match="has 32 tokens; at most 31 fit"):
        scheduler.add(_request(32))
    with pytest.raises(ConfigError, match="6 blocks; the cache has 5"):
        scheduler.add(_request(11, new=11))
    scheduler.add(_request(11, new=10))


def test_preemption_waits_for_a_drained_device() -> None:
    """Without a free block the youngest request starts again from all its tokens, once none of them is in flight."""
    scheduler, allocator = _scheduler(blocks=7)
    old, young = _request(8, new=8), _request(7, new=9)
    scheduler.add(old)
    scheduler.add(young)
    scheduler.schedule(drained=False)
    step = scheduler.schedule(drained=False)
    while isinstance(step, DecodeBatch):
        assert step.requests == (old, young)
        step = scheduler.schedule(drained=False)
    assert isinstance(step, Drain)
    assert allocator.num_free == 0
    assert scheduler.preemptions == 0
    old.output_ids += range(old.launched)
    young.output_ids += range(young.launched)
    step = scheduler.schedule(drained=True)
    assert isinstance(step, DecodeBatch)
    assert step.requests == (old,)
    assert scheduler.preemptions == 1
    assert (young.state, young.blocks, young.row, young.computed) == (RequestState.WAITING, [], None, 0)
    scheduler.finish(old)
    scheduler.release(old)
    again = scheduler.schedule(drained=True)
    assert isinstance(again, PrefillBatch)
    assert [(c.request, c.start, c.count) for c in again.chunks] == [(young, 0, 7 + len(young.output_ids))]


@attrs.frozen
class _Launched:
    sampled: tuple[Request, ...]
    used: tuple[Request, ...]
    releases: list[Request] = attrs.field(factory=list)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 14)), min_size=1, max_size=12),
    blocks=st.integers(12, 40),
    rows=st.integers(1, 5),
    budget=st.integers(1, 20),
    together=st.integers(1, 4),
)
def test_every_request_ends_and_nothing_is_lost(
    sizes: list[tuple[int, int, int]], blocks: int, rows: int, budget: int, together: int
) -> None:
    """Any mix of prompts, lengths and early stops ends with exactly its tokens and all blocks and rows back.

    At no step do two requests share a block or a row, with the host one step ahead and preemptions where blocks run
    out.
    """
    scheduler, allocator = _scheduler(blocks=blocks, rows=rows, tokens=budget, length=42)
    arriving = deque((_request(prompt, new=new), stop) for prompt, new, stop in sizes)
    stops = {id(request): stop for request, stop in arriving}
    everyone = [request for request, _ in arriving]
    in_flight: _Launched | None = None
    for _ in range(3000):
        for _ in range(min(together, len(arriving))):
            scheduler.add(arriving.popleft()[0])
        step = scheduler.schedule(drained=in_flight is None)
        previous, in_flight = in_flight, None
        if isinstance(step, Drain):
            assert previous is not None, "a drained device must give a step or nothing"
        elif step is not None:
            in_flight = _check_step(step, budget=budget, rows=rows)
        if previous is not None:
            _read(scheduler, previous, stops=stops, later=in_flight)
        if not arriving and not scheduler.has_unfinished and in_flight is None:
            break
    else:
        pytest.fail("the requests did not end")
    for request in everyone:
        assert len(request.output_ids) == min(request.max_new_tokens, stops[id(request)])
        assert request.blocks == []
        assert request.row is None
    assert allocator.num_free == allocator.num_usable


def _check_step(step: PrefillBatch | DecodeBatch, *, budget: int, rows: int) -> _Launched:
    if isinstance(step, PrefillBatch):
        used = tuple(chunk.request for chunk in step.chunks)
        assert 0 < step.num_tokens <= budget
        for chunk in step.chunks:
            assert (
                chunk.request.known_ids(chunk.start, count=chunk.count).tolist()
                == [
                    *chunk.request.prompt_ids,
                    *chunk.request.output_ids,
                ][chunk.start : chunk.start + chunk.count]
            )
    else:
        used = step.requests
        assert [r.length - 1 for r in used] == list(step.lengths)
    assert len(used) <= rows
    assert len({request.row for request in used}) == len(used)
    assert all(request.row is not None and 1 <= request.row <= rows for request in used)
    held = [block for request in used for block in request.blocks]
    assert len(held) == len(set(held))
    for request in used:
        assert len(request.blocks) >= blocks_for(request.computed, block_size=4)
    return _Launched(step.sampled, used)


def _read(scheduler: Scheduler, step: _Launched, *, stops: dict[int, int], later: _Launched | None) -> None:
    """Reads a step's tokens as the engine does: token k of a request is k; ends at its stop or at its length."""
    for request in step.releases:
        scheduler.release(request)
    for request in step.sampled:
        if request.state is RequestState.FINISHED:
            continue
        request.output_ids.append(len(request.output_ids))
        if len(request.output_ids) in (request.max_new_tokens, stops[id(request)]):
            scheduler.finish(request)
            if later is not None and request in later.used:
                later.releases.append(request)
            else:
                scheduler.release(request)
