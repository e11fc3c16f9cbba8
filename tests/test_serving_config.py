"""Sizes that follow from options, model and device: everything that a step can ask for has a bucket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError
from breakgraph.models.arguments import as_dtype
from breakgraph.policy import Verify
from breakgraph.serving.config import (
    EngineConfig,
    Graphs,
    SamplingPaths,
    Sizes,
    engine_config,
    sequence_limit,
    token_limit,
)
from breakgraph.serving.decode_keys import decode_keys
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
    for paths, ends in ((SamplingPaths.BOTH, 2), (SamplingPaths.ALL, 3), (SamplingPaths.GREEDY, 1)):
        keys = decode_keys(sizes, paths=paths)
        assert len(keys) == len(set(keys)) == len(sizes.decode.sizes) * ends * len(sizes.contexts)
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


@pytest.mark.parametrize(
    ("given", "meant"),
    [("on", Graphs.ON), (True, Graphs.ON), (Graphs.ON, Graphs.ON), ("off", Graphs.OFF), (False, Graphs.OFF)],
)
def test_graphs_may_be_said_in_words_and_bools(given: Any, meant: Graphs) -> None:
    """Whatever spelling turns graphs on or off is the member of the enum afterwards, so that no test of it is missed."""
    assert EngineConfig(graphs=given).graphs is meant


def test_choices_may_be_said_in_words() -> None:
    """Sampling and verify take the values of their enums as strings."""
    assert EngineConfig(sampling="greedy").sampling is SamplingPaths.GREEDY
    assert EngineConfig(sampling=SamplingPaths.BOTH).sampling is SamplingPaths.BOTH
    assert EngineConfig(verify="always").verify is Verify.ALWAYS
    assert EngineConfig(attention="torch").attention == "torch"


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"graphs": "nope"}, "graphs is 'nope'; expected 'on', 'off', True or False"),
    ({"graphs": None}, "graphs is None"),
    ({"graphs": 1}, "graphs is 1"),
    ({"graphs": SamplingPaths.BOTH}, "graphs is <SamplingPaths.BOTH"),
    ({"sampling": "argmax"}, "sampling is 'argmax'; expected 'both', 'greedy', 'sampled' or 'all'"),
    ({"sampling": True}, "sampling is True"),
    ({"verify": "sometimes"}, "verify is 'sometimes'; expected 'first', 'always' or 'never'"),
    ({"verify": False}, "verify is False"),
    ({"attention": "flash"}, "attention is 'flash'; expected 'auto', 'torch' or 'flashinfer'"),
    ({"attention": []}, r"attention is \[\]"),
    ({"memory_fraction": "x"}, r"memory_fraction is 'x'; expected a number in \(0, 1\]"),
    ({"memory_fraction": float("nan")}, "memory_fraction is nan"),
    ({"memory_fraction": None}, "memory_fraction is None"),
    ({"prefill_sizes": 16}, "prefill_sizes is 16; expected integers of at least 1"),
    ({"prefill_sizes": "16"}, "prefill_sizes is '16'"),
    ({"prefill_sizes": [16, 0]}, r"prefill_sizes is \(16, 0\)"),
    ({"contexts": [1.5]}, r"contexts is \(1.5,\)"),
    ({"seed": "a"}, "seed is 'a'; expected an integer of at least 0 or None"),
    ({"seed": -1}, "seed is -1"),
    ({"max_batch_size": None}, "max_batch_size is None; expected an integer of at least 1"),
    ({"block_size": "16"}, "block_size is '16'"),
    ({"max_num_tokens": 0}, "max_num_tokens is 0; expected an integer of at least 1 or None"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=lambda value: str(value)[:30])
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """Every value out of range or of another type is a ConfigError with the name, the value and what was expected."""
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig(**options)
    assert caught.value.why
    assert next(iter(options)) in caught.value.fix


@pytest.mark.parametrize(
    ("name", "meant"), [("max_batchsize", "max_batch_size"), ("memory_fracton", "memory_fraction"), ("graph", "graphs")]
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    """A misspelt option is a ConfigError that says which one it is near to."""
    with pytest.raises(ConfigError, match=f"there is no option {name}") as caught:
        engine_config({name: 4})
    assert f"Did you mean {meant}?" in caught.value.fix


def test_an_option_like_no_other_gets_the_list() -> None:
    """Where nothing is near, the message lists what there is."""
    with pytest.raises(ConfigError, match="there is no option zzz") as caught:
        engine_config({"zzz": 4})
    assert "max_batch_size" in caught.value.fix


@pytest.mark.parametrize("given", [torch.float32, "float32", "torch.float32"])
def test_a_dtype_may_be_said_by_name(given: Any) -> None:
    """Torch's dtypes are taken as they are or by name."""
    assert as_dtype(given) is torch.float32


@pytest.mark.parametrize("given", ["fp32", "int8", torch.int8, torch.float8_e4m3fn, 32, "nn"])
def test_another_dtype_is_refused(given: Any) -> None:
    """What weights cannot be held in is a ConfigError that lists what they can."""
    with pytest.raises(ConfigError, match="dtype is .*; expected bfloat16, float16, float32 or float64"):
        as_dtype(given)
