"""The paged cache: no block lost, none handed out twice, slots where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.attention import KVShape
from breakgraph.serving.block_tables import BlockTables
from breakgraph.serving.kv_cache import NULL_BLOCK, BlockAllocator, KVCache, blocks_for, slots_of
from breakgraph.serving.padding import PaddingRequest
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling_params import SamplingParams

CPU = torch.device("cpu")


@given(
    num_blocks=st.integers(2, 40),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=200),
)
def test_no_block_is_lost_or_held_twice(num_blocks: int, moves: list[tuple[bool, int]]) -> None:
    """After any sequence of allocations and frees, held and free blocks together are all blocks but the null block."""
    allocator = BlockAllocator(num_blocks)
    held: list[list[int]] = []
    for takes, amount in moves:
        if takes:
            free_before = allocator.num_free
            blocks = allocator.allocate(amount)
            assert (blocks is None) == (amount > free_before)
            if blocks is None:
                assert allocator.num_free == free_before  # all or nothing
            else:
                assert len(blocks) == amount
                held.append(blocks)
        elif held:
            allocator.free(held.pop(amount % len(held)))
        flat = [block for blocks in held for block in blocks]
        assert len(flat) == len(set(flat))
        assert NULL_BLOCK not in flat
        assert allocator.num_free + len(flat) == num_blocks - 1 == allocator.num_usable
    for blocks in held:
        allocator.free(blocks)
    everything = allocator.allocate(num_blocks - 1)
    assert everything is not None
    assert sorted(everything) == list(range(1, num_blocks))


@pytest.mark.parametrize("wrong", [[0], [1, 1], [3], [9], [-1]])
def test_a_wrong_free_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    """The null block, a block twice, one that is not held and one that does not exist: InternalError, nothing freed."""
    allocator = BlockAllocator(4)
    held = allocator.allocate(2)
    assert held == [1, 2]
    with pytest.raises(InternalError, match="not all of them are held"):
        allocator.free([*wrong])
    assert allocator.num_free == 1
    allocator.free(held)
    with pytest.raises(InternalError):
        allocator.free(held)


def test_a_cache_without_usable_blocks_is_refused() -> None:
    """One block is the null block; a cache of one could store nothing."""
    with pytest.raises(ConfigError, match="at least 2"):
        BlockAllocator(1)


@given(
    start=st.integers(0, 60),
    count=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_slots_follow_the_block_table(start: int, count: int, block_size: int, seed: int) -> None:
    """The slot of position p is block[p // size] * size + p % size, for any start, count and order of blocks."""
    needed = blocks_for(start + count, block_size=block_size)
    assert (needed - 1) * block_size < start + count <= needed * block_size
    blocks = (np.random.default_rng(seed).permutation(needed) + 1).tolist()
    expected = [blocks[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
    slots = slots_of(blocks, start=start, count=count, block_size=block_size)
    assert slots.dtype == np.int64
    assert slots.tolist() == expected


def test_storage_has_the_declared_shape_and_size() -> None:
    """Every layer has keys and values of the declared shape, zeroed, and block_bytes counts them exactly."""
    shapes = (KVShape(2, 4, 4), KVShape(2, 4, 4), KVShape(1, 6, 3))
    cache = KVCache(5, block_size=8, shapes=shapes, dtype=torch.float32, device=CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert [tuple(tensor.shape[2:]) for tensor in tensors] == [(2, 4)] * 4 + [(1, 6), (1, 3)]
    assert all(tensor.shape[:2] == (5, 8) and not tensor.any() for tensor in tensors)
    expected = 5 * KVCache.block_bytes(block_size=8, shapes=shapes, dtype=torch.float32)
    assert sum(tensor.nbytes for tensor in tensors) == expected


# Moving blocks.


@given(num_blocks=st.integers(2, 40), takes=st.lists(st.integers(0, 6), max_size=12), data=st.data())
def test_compact_leaves_no_gap_and_loses_no_block(num_blocks: int, takes: list[int], data: st.DataObject) -> None:
    """REQ-C5: held blocks become the lowest ones, none is moved onto another, and what is free is all the rest."""
    allocator = BlockAllocator(num_blocks)
    held = [blocks for count in takes if (blocks := allocator.allocate(count)) is not None]
    for blocks in [blocks for blocks in held if data.draw(st.booleans())]:
        allocator.free(blocks)
        held.remove(blocks)
    before = [block for blocks in held for block in blocks]
    moves = allocator.gaps()
    assert allocator.num_free == num_blocks - 1 - len(before)
    allocator.compact()
    after = [moves.get(block, block) for block in before]
    assert sorted(after) == list(range(1, len(before) + 1))
    assert not set(moves) & set(moves.values())
    assert set(moves) <= set(before)
    assert not set(moves.values()) & set(before)
    allocator.free(after)  # held under the new names
    assert allocator.num_free == num_blocks - 1
    assert allocator.gaps() == {}


def test_moved_blocks_carry_their_data() -> None:
    """REQ-C5: a move copies whole blocks in every layer, keys and values, and touches no other block."""
    cache = KVCache(8, block_size=2, shapes=(KVShape(1, 3, 3), KVShape(2, 3, 5)), dtype=torch.float32, device=CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer]
    for tensor in tensors:
        tensor.copy_(torch.rand_like(tensor))
    before = [tensor.clone() for tensor in tensors]
    cache.move({7: 1, 5: 2})
    cache.move({})
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[1, 2]], old[[7, 5]])
        assert torch.equal(tensor[[0, 3, 4, 5, 6, 7]], old[[0, 3, 4, 5, 6, 7]])


def test_the_padding_request_holds_one_block_at_a_time() -> None:
    """REQ-C3, REQ-C4, FAULT-P10: it takes a block like any request, none when there is none, and gives back what it took."""
    allocator = BlockAllocator(3)
    padding = PaddingRequest(allocator, block_size=4, max_blocks=2)
    rows = padding.allocate(draft_len=0)
    assert rows is not None
    assert {name: value.tolist() for name, value in rows.items()} == {
        "rows": [0],
        "positions": [0],
        "slots": [4],
        "block_tables": [[1, NULL_BLOCK]],
        "seq_lens": [1],
    }
    assert (allocator.num_free, padding.block) == (1, 1)
    with pytest.raises(InternalError, match="while block 1 is held"):
        padding.allocate(draft_len=0)
    padding.release(draft_len=0)
    assert (allocator.num_free, padding.block) == (2, NULL_BLOCK)
    taken = allocator.allocate(2)
    assert padding.allocate(draft_len=0) is None
    assert padding.block == NULL_BLOCK
    assert taken is not None
    allocator.free(taken)
    assert padding.allocate(draft_len=0) is not None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_kept_tables_are_those_that_would_be_made_anew(data: st.DataObject) -> None:
    """REQ-C5, FAULT-P4: after any growth, move, and change of rows, a step's tables hold the blocks of its requests and no other.

    Lists grow in place or are replaced by others, of the same length too, as a move of blocks does.
    """
    tables = BlockTables(4, max_blocks=6)
    requests = {row: _request(row, blocks=[]) for row in (1, 2, 3)}
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.sampled_from([1, 2, 3]))
        request = requests[row]
        what = data.draw(st.sampled_from(["grow", "move", "leave"]))
        if what == "grow" and len(request.blocks) < 6:
            request.blocks.append(data.draw(st.integers(1, 99)))
        elif what == "move":
            request.blocks = [block + 100 for block in request.blocks]
        else:
            requests[row] = _request(row, blocks=data.draw(st.lists(st.integers(1, 99), max_size=6)))
        step = data.draw(st.permutations([r for r in requests.values() if data.draw(st.booleans())]))
        taken = tables.take(step, rows=np.array([r.row for r in step], dtype=np.int64))
        width = max((len(r.blocks) for r in step), default=0)
        assert taken.tolist() == [r.blocks + [NULL_BLOCK] * (width - len(r.blocks)) for r in step]
        taken.fill(-1)  # the caller's own


def _request(row: int, *, blocks: list[int]) -> Request:
    request = Request(prompt_ids=(1,), params=SamplingParams(), seed=0, max_new_tokens=1)
    request.row, request.blocks = row, blocks
    return request
