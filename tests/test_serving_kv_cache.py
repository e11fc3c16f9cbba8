"""The paged cache: no block lost, none handed out twice, slots where they belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.serving.kv_cache import NULL_BLOCK, BlockAllocator, KVCache, blocks_for, slots_of


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
    shape = {"block_size": 8, "num_layers": 3, "num_kv_heads": 2, "head_dim": 4, "dtype": torch.float32}
    cache = KVCache(5, device=torch.device("cpu"), **shape)
    assert len(cache.layers) == 3
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert all(tensor.shape == (5, 8, 2, 4) and not tensor.any() for tensor in tensors)
    assert sum(tensor.nbytes for tensor in tensors) == 5 * KVCache.block_bytes(**shape)
