"""Sizes that follow from options, model and device: everything that a step can ask for has a bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError
from breakgraph.serving.config import EngineConfig, SamplingPaths, Sizes, sequence_limit, token_limit
from breakgraph.serving.decode_step import decode_keys
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.prefill_step import example_layout


@given(
    batch=st.integers(1, 70),
    num_blocks=st.integers(2, 400),
    block_size=st.sampled_from([1, 4, 16]),
    max_positions=st.integers(2, 5000),
    device_type=st.sampled_from(["cpu", "cuda"]),
    plans=st.booleans(),
)
def test_every_size_that_a_step_can_have_has_a_bucket(
    batch: int, num_blocks: int, block_size: int, max_positions: int, device_type: str, plans: bool
) -> None:
    """FAULT-R3: with the default ladders no reachable prefill, batch or context is without a graph."""
    config = EngineConfig(max_batch_size=batch, block_size=block_size)
    sizes = Sizes.resolve(
        config, num_blocks=num_blocks, max_positions=max_positions, device_type=device_type, plans=plans
    )
    assert sizes.max_batch_size <= min(batch, num_blocks - 1)
    assert sizes.max_num_tokens <= token_limit(config, device_type=device_type)
    assert sizes.prefill.largest >= sizes.max_num_tokens
    assert sizes.decode.largest == sizes.max_batch_size
    assert sizes.prefill.unrecordable == () or sizes.prefill.largest <= sizes.max_batch_size * (sizes.max_seq_len - 1)
    assert (
        sizes.contexts[-1]
        == sizes.max_seq_len
        == sequence_limit(config, max_positions=max_positions, device_type=device_type)
    )
    assert list(sizes.contexts) == sorted(set(sizes.contexts))
    for length in {1, sizes.max_seq_len // 2 + 1, sizes.max_seq_len}:
        assert sizes.context(length) >= length
    keys = decode_keys(sizes, paths=SamplingPaths.BOTH)
    assert len(keys) == len(set(keys)) == len(sizes.decode.sizes) * 2 * len(sizes.contexts)
    for bucket in sizes.prefill.sizes:
        _check_example(bucket, sizes)


def _check_example(tokens: int, sizes: Sizes) -> None:
    """An example fills its bucket exactly, in blocks of the cache that no two of its prompts share."""
    layout = example_layout(tokens, sizes=sizes)
    assert layout.rows == tokens
    assert all(0 < count < sizes.max_seq_len for count in layout.query_lens)
    blocks = np.concatenate(layout.block_tables)
    assert len(set(blocks.tolist())) == len(blocks)
    assert blocks.min() >= 1
    assert blocks.max() < sizes.num_blocks
    for count, table in zip(layout.query_lens, layout.block_tables, strict=True):
        assert len(table) == blocks_for(int(count), block_size=sizes.block_size)


def test_the_ladders_can_be_chosen() -> None:
    """Prefill buckets and contexts as given, clamped to what is reachable; an attention that plans has one context."""
    config = EngineConfig(max_batch_size=2, max_num_tokens=64, prefill_sizes=[32, 8, 999], contexts=[64, 8, 5000])
    shape = {"num_blocks": 100, "max_positions": 128, "device_type": "cpu"}
    sizes = Sizes.resolve(config, **shape, plans=False)
    assert sizes.prefill.sizes == (8, 32, 64)
    assert sizes.contexts == (8, 64, 128)
    assert Sizes.resolve(config, **shape, plans=True).contexts == (128,)


def test_a_length_beyond_the_model_is_refused() -> None:
    """max_seq_len above the model's positions names both numbers; on a CPU the default is cut to 2048."""
    with pytest.raises(ConfigError, match="max_seq_len is 300; the model has 256 positions"):
        sequence_limit(EngineConfig(max_seq_len=300), max_positions=256, device_type="cpu")
    assert sequence_limit(EngineConfig(), max_positions=8192, device_type="cpu") == 2048
    assert sequence_limit(EngineConfig(), max_positions=8192, device_type="cuda") == 8192
