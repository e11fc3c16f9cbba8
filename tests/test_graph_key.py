"""Keys of graphs: values that are hashable, ordered, and made from a batch."""

from __future__ import annotations

import pickle
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError
from breakgraph.graph_key import GraphKey, PrefillKey, SampleType, UnequalRequests, num_tokens

COUNT = st.integers(min_value=0, max_value=9)
KEYS = st.builds(
    GraphKey,
    COUNT,
    draft_len=COUNT,
    short_seq_len_mode=st.booleans(),
    is_all_greedy_sample=st.booleans(),
    sample_type=st.sampled_from(SampleType),
    num_contexts=st.just(0),
    context_query_len=COUNT,
    num_encoder_tokens=COUNT,
    peft_cache_data_type=st.sampled_from([None, torch.float16, torch.bfloat16]),
    use_lora_graph=st.booleans(),
    extra=st.sampled_from([(), (("mode", 1),), (("mode", "wide"), ("window", None))]),
)

CHANGES = [
    {"batch_size": 9},
    {"draft_len": 3},
    {"short_seq_len_mode": True},
    {"is_all_greedy_sample": True},
    {"sample_type": SampleType.FULL},
    {"num_contexts": 1},
    {"context_query_len": 5},
    {"num_encoder_tokens": 7},
    {"peft_cache_data_type": torch.float16},
    {"use_lora_graph": True},
    {"extra": (("window", 128),)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_coordinate_makes_another_key(change: dict[str, object]) -> None:
    """REQ-A1 to REQ-A9: a key that differs in any one field is another key, with another place in a dict."""
    key = GraphKey(8)
    other = attrs.evolve(key, **change)
    assert other != key
    assert len({key: 0, other: 1}) == 2


@given(one=KEYS, other=KEYS)
def test_keys_are_values(one: GraphKey, other: GraphKey) -> None:
    """Equal keys hash alike; any two keys are ordered, one way only; a key survives pickling."""
    assert (one < other) + (other < one) + (one == other) == 1
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert hash(copy) == hash(one)


def test_order_of_extra_fields_does_not_matter() -> None:
    """REQ-A9: two callers that list their extra fields in another order mean the same graph."""
    assert PrefillKey(8, (("b", 1), ("a", 2))) == PrefillKey(8, (("a", 2), ("b", 1)))


def test_repeated_extra_names_are_refused() -> None:
    """REQ-A9: two values under one name are a ConfigError."""
    with pytest.raises(ConfigError, match="not unique"):
        GraphKey(8, extra=(("a", 1), ("a", 2)))


def test_negative_counts_are_refused() -> None:
    """A negative count is a ConfigError that shows the key."""
    with pytest.raises(ConfigError, match="draft_len=-1"):
        GraphKey(8, draft_len=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2.0}, "batch_size=2.0.* has a count that is no integer"),
        ({"batch_size": "2"}, "batch_size='2'.* no integer"),
        ({"batch_size": None}, "no integer"),
        ({"batch_size": 2, "draft_len": 1.0}, "draft_len=1.0.* no integer"),
        ({"batch_size": 1, "num_contexts": 3}, "more context requests than requests"),
        ({"batch_size": 1, "extra": (("a", [1]),)}, "expected pairs of a name and a hashable value"),
        ({"batch_size": 1, "extra": 5}, "extra is 5; expected pairs"),
        ({"batch_size": 1, "extra": ("a",)}, "expected pairs"),
        ({"batch_size": 1, "extra": None}, "extra is None; expected pairs"),
    ],
)
def test_keys_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    """FAULT-R3: counts are integers that fit each other, and extra is hashable: else a ConfigError when the key is made."""
    with pytest.raises(ConfigError, match=message):
        GraphKey(**options)


def test_counts_may_be_numpy_scalars() -> None:
    """An integer of another library is the same coordinate."""
    assert GraphKey(np.int64(3)) == GraphKey(3)
    assert hash(GraphKey(np.int64(3))) == hash(GraphKey(3))


@pytest.mark.parametrize(
    ("key", "beam_width", "expected"),
    [
        (GraphKey(8), 1, 8),
        (GraphKey(8, draft_len=3), 1, 32),
        (GraphKey(4), 2, 8),
        (GraphKey(5, num_contexts=2, context_query_len=16), 1, 2 * 16 + 3),
        (GraphKey(5, draft_len=1, num_contexts=2, context_query_len=16), 1, 2 * 16 + 3 * 2),
    ],
)
def test_num_tokens(key: GraphKey, beam_width: int, expected: int) -> None:
    """REQ-A2, REQ-A6: context rows have their query length, all others draft_len + 1 tokens per beam."""
    assert num_tokens(key, beam_width=beam_width) == expected


def test_key_of_a_batch_that_agrees() -> None:
    """REQ-A2, REQ-A6: requests with equal draft and context lengths give one key with the whole batch size."""
    key = GraphKey.for_batch([2, 2, 2], context_query_lens=[7], is_all_greedy_sample=True)
    assert key == GraphKey(4, draft_len=2, num_contexts=1, context_query_len=7, is_all_greedy_sample=True)


@pytest.mark.parametrize(
    ("draft_lens", "contexts", "what"), [([1, 2], [], "draft lengths"), ([1, 1], [4, 5], "context lengths")]
)
def test_requests_that_differ_have_no_key(draft_lens: list[int], contexts: list[int], what: str) -> None:
    """REQ-A2, REQ-A6: unequal lengths make the batch ineligible, in words, and never raise."""
    key = GraphKey.for_batch(draft_lens, context_query_lens=contexts)
    assert isinstance(key, UnequalRequests)
    assert key.batch_size == len(draft_lens) + len(contexts)
    assert what in key.detail


def test_product_lists_all_variants() -> None:
    """REQ-D8: variants are the product of batch sizes and values of other fields."""
    keys = GraphKey.product([1, 8], draft_len=(0, 3), is_all_greedy_sample=(False, True))
    assert len(set(keys)) == 8
    assert GraphKey(8, draft_len=3, is_all_greedy_sample=True) in keys


def test_product_refuses_an_unknown_field() -> None:
    """A misspelt variant is a ConfigError that lists the fields."""
    with pytest.raises(ConfigError, match="draft_length"):
        GraphKey.product([1], draft_length=(1,))
