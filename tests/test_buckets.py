"""Ladders and rounding."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError

SIZES = st.lists(st.integers(min_value=1, max_value=400), max_size=8)


def test_sizes_are_sorted_and_unique() -> None:
    """A ladder given in any order is ascending and without duplicates."""
    assert Buckets.of([64, 16, 64, 512]).sizes == (16, 64, 512)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "8"])
def test_what_is_no_size_is_refused(bad: object) -> None:
    """A bucket that is not an integer >= 1 is a ConfigError that shows it."""
    with pytest.raises(ConfigError, match="is not a bucket"):
        Buckets.of([4, bad])  # type: ignore[list-item]


@given(sizes=SIZES, size=st.integers(min_value=0, max_value=500))
def test_rounding_finds_the_smallest_bucket(sizes: list[int], size: int) -> None:
    """REQ-C1: the smallest bucket >= size, None above the largest; checked against a scan."""
    expected = min((bucket for bucket in sizes if bucket >= size), default=None)
    assert Buckets.of(sizes).round_up(size) == expected


def test_decode_default_ladder() -> None:
    """REQ-G3: 1, 2, 4, then every 8 to 128, then every 64, ending at the limit."""
    sizes = Buckets.decode(max_batch_size=300, max_num_tokens=8192).sizes
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-5:] == (120, 128, 192, 256, 300)


@given(
    max_batch_size=st.integers(min_value=0, max_value=300),
    max_num_tokens=st.integers(min_value=0, max_value=600),
    tokens_per_request=st.integers(min_value=1, max_value=4),
)
def test_default_decode_ladder_serves_every_batch(
    max_batch_size: int, max_num_tokens: int, tokens_per_request: int
) -> None:
    """REQ-G1, FAULT-R3: every batch size that run time can look up has a bucket, and no bucket exceeds the limit."""
    limit = min(max_batch_size, max_num_tokens // tokens_per_request)
    buckets = Buckets.decode(
        max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, tokens_per_request=tokens_per_request
    )
    assert buckets.largest == max(limit, 0)
    assert all(buckets.round_up(size) is not None for size in range(1, limit + 1))


def test_decode_entries_above_the_limit_are_clamped_once(caplog: pytest.LogCaptureFixture) -> None:
    """REQ-G1: with padding, all entries above the limit become one bucket, the limit, and a log line says so."""
    with caplog.at_level(logging.INFO):
        buckets = Buckets.decode(max_batch_size=20, max_num_tokens=1000, sizes=[8, 16, 32, 64])
    assert buckets.sizes == (8, 16, 20)
    assert "clamped to 20" in caplog.text


def test_decode_entries_above_the_limit_are_dropped_without_padding() -> None:
    """REQ-G1: without padding only exact sizes are looked up, so entries above the limit are of no use."""
    assert Buckets.decode(max_batch_size=20, max_num_tokens=1000, sizes=[8, 32], padding=False).sizes == (8,)


def test_decode_limit_below_one_gives_no_buckets() -> None:
    """REQ-G1: when not even one request fits, there are no buckets and everything rounds to None."""
    buckets = Buckets.decode(max_batch_size=8, max_num_tokens=3, tokens_per_request=4)
    assert buckets.sizes == ()
    assert buckets.largest == 0
    assert buckets.round_up(1) is None


def test_far_ceiling_is_not_added() -> None:
    """REQ-G2, FAULT-R4: buckets [128, 256, 13914] under a ceiling of 65536: 14000 has no bucket."""
    buckets = Buckets.prefill(max_batch_size=64, max_seq_len=1025, max_num_tokens=65536, sizes=[128, 256, 13914])
    assert buckets.sizes == (128, 256, 13914)
    assert buckets.round_up(14000) is None


def test_near_ceiling_is_clamped_to() -> None:
    """REQ-G2, FAULT-R4: bucket [128] under a ceiling of 127: 100 tokens run in 127, and 128 is unrecordable."""
    buckets = Buckets.prefill(max_batch_size=1, max_seq_len=128, max_num_tokens=4096, sizes=[128])
    assert buckets.sizes == (127,)
    assert buckets.round_up(100) == 127
    assert buckets.unrecordable == (128,)


def test_prefill_entries_above_the_token_limit_are_clamped() -> None:
    """REQ-G2: entries above max_num_tokens become that limit; they are not called unrecordable."""
    buckets = Buckets.prefill(max_batch_size=8, max_seq_len=1024, max_num_tokens=600, sizes=[256, 1024])
    assert buckets.sizes == (256, 600)
    assert buckets.unrecordable == ()


@given(max_num_tokens=st.integers(min_value=1, max_value=2048))
def test_default_prefill_ladder_serves_every_step(max_num_tokens: int) -> None:
    """FAULT-R3: with the default ladder every token count up to the limit has a bucket with at most half padding."""
    buckets = Buckets.prefill(max_batch_size=8, max_seq_len=4096, max_num_tokens=max_num_tokens)
    for size in range(16, max_num_tokens + 1, 7):
        bucket = buckets.round_up(size)
        assert bucket is not None
        assert size <= bucket <= max_num_tokens
        assert bucket < 1.5 * size + 1


@pytest.mark.parametrize("limits", [{"max_batch_size": -1}, {"max_num_tokens": -1}, {"tokens_per_request": 0}])
def test_limits_out_of_range_are_refused(limits: dict[str, int]) -> None:
    """A limit below its least value is a ConfigError that names it."""
    given_limits = {"max_batch_size": 8, "max_num_tokens": 64, **limits}
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Buckets.decode(**given_limits)
