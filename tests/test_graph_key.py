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
from breakgraph.graph_key import GraphKey, PrefillKey, SampleType, UnequalRequests, cached_tokens, num_tokens

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
    """REQ-A6: a batch with one draft length and one context length has a key; the contexts count as requests."""
    key = GraphKey.for_batch([2, 2, 2], context_query_lens=[7], greedy=[True] * 4)
    assert key == GraphKey(4, draft_len=2, num_contexts=1, context_query_len=7, is_all_greedy_sample=True)
    assert GraphKey.for_batch([]) == GraphKey(0)


BATCH = {"draft_lens": [1, 1], "greedy": [True, True], "seq_lens": [90, 100], "short_threshold": 100}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({}, {"is_all_greedy_sample": True, "short_seq_len_mode": True}),
        ({"greedy": [True, False]}, {"short_seq_len_mode": True}),
        ({"greedy": ()}, {"short_seq_len_mode": True}),
        ({"seq_lens": [90, 101]}, {"is_all_greedy_sample": True}),
        ({"short_threshold": None}, {"is_all_greedy_sample": True}),
        ({"encoder_lens": [3, 9]}, {"is_all_greedy_sample": True, "short_seq_len_mode": True, "num_encoder_tokens": 9}),
        (
            {"adapters": [None, "lora"], "peft_cache_data_type": torch.float16},
            {
                "is_all_greedy_sample": True,
                "short_seq_len_mode": True,
                "use_lora_graph": True,
                "peft_cache_data_type": torch.float16,
            },
        ),
        (
            {"adapters": [None, None], "peft_cache_data_type": torch.float16},
            {"is_all_greedy_sample": True, "short_seq_len_mode": True},
        ),
    ],
)
def test_flags_are_those_of_this_batch(change: dict[str, Any], fields: dict[str, Any]) -> None:
    """REQ-A3, REQ-A4, REQ-A7, REQ-A8: flags come from the requests of the step, so none is left over from another."""
    assert GraphKey.for_batch(**{**BATCH, **change}) == GraphKey(2, draft_len=1, **fields)


@pytest.mark.parametrize("change", [{"greedy": [True]}, {"seq_lens": ()}, {"adapters": [None] * 3}])
def test_every_request_has_a_say(change: dict[str, Any]) -> None:
    """REQ-A4: a value that is missing for one request is refused: that request could need another graph."""
    with pytest.raises(ConfigError, match="for 2 requests"):
        GraphKey.for_batch(**{**BATCH, **change})


def test_the_least_cached_length_of_short_mode_is_within_it() -> None:
    """REQ-D9: the example of a short-sequence key, at the end of its step, is in short mode, one token more is not."""
    key = GraphKey(2, draft_len=1, short_seq_len_mode=True)
    after = cached_tokens(key, max_seq_len=500, short_threshold=100) + 2
    assert GraphKey.for_batch([1, 1], seq_lens=[after] * 2, short_threshold=100) == key
    assert GraphKey.for_batch([1, 1], seq_lens=[after + 1] * 2, short_threshold=100) != key


@pytest.mark.parametrize(
    ("draft_lens", "contexts", "what"), [([1, 2], [], "draft lengths"), ([1, 1], [4, 5], "context lengths")]
)
def test_requests_that_differ_have_no_key(draft_lens: list[int], contexts: list[int], what: str) -> None:
    """REQ-A2, REQ-A6: unequal lengths make the batch ineligible, in words, and never raise."""
    key = GraphKey.for_batch(draft_lens, context_query_lens=contexts)
    assert isinstance(key, UnequalRequests)
    assert key.variant.batch_size == len(draft_lens) + len(contexts)
    assert key.batch_size == len(draft_lens) + len(contexts)
    assert what in key.detail


def test_product_lists_all_variants() -> None:
    """REQ-D8: variants are the product of batch sizes and values of other fields."""
    keys = GraphKey.product([1, 8], draft_len=(0, 3), is_all_greedy_sample=(False, True))
    assert len(set(keys)) == 8
    assert GraphKey(8, draft_len=3, is_all_greedy_sample=True) in keys


def test_product_leaves_out_what_no_batch_can_be() -> None:
    """REQ-A6, FAULT-R6: two contexts in a batch of one, and a context length without contexts, would never be looked up."""
    keys = GraphKey.product([1, 2], num_contexts=(0, 2), context_query_len=(0, 5))
    assert keys == (GraphKey(1), GraphKey(2), GraphKey(2, num_contexts=2, context_query_len=5))


def test_product_refuses_an_unknown_field() -> None:
    """A misspelt variant is a ConfigError that lists the fields."""
    with pytest.raises(ConfigError, match="draft_length"):
        GraphKey.product([1], draft_length=(1,))


def test_numpy_values_make_the_same_key() -> None:
    """REQ-A1: counts and flags of numpy become Python's, so a key has one text and one type everywhere."""
    made = GraphKey.for_batch(
        np.array([2, 2]), greedy=np.array([True, True]), seq_lens=np.array([3, 4]), short_threshold=np.int64(8)
    )
    plain = GraphKey(2, draft_len=2, is_all_greedy_sample=True, short_seq_len_mode=True)
    assert made == plain
    assert repr(made) == repr(plain) == "GraphKey(2, draft_len=2, short_seq_len_mode=True, is_all_greedy_sample=True)"
    assert type(made.batch_size) is int
    assert type(made.is_all_greedy_sample) is bool
    with pytest.raises(ConfigError, match="use_lora_graph=None.*expected True or False"):
        GraphKey(2, use_lora_graph=None)  # type: ignore[arg-type]


def test_extra_pairs_may_come_from_an_iterator() -> None:
    """REQ-A9: pairs are kept, whatever they come from; what only looks like pairs is refused."""
    assert GraphKey(2, extra=zip(["mode"], ["a"], strict=True)).extra == (("mode", "a"),)  # type: ignore[arg-type]
    for odd in (("ab", "cd"), ((1, 2),), (("a", 1), (2, 1))):
        with pytest.raises(ConfigError, match="expected pairs of a name and a hashable value"):
            GraphKey(2, extra=odd)  # type: ignore[arg-type]


def test_product_wants_values() -> None:
    """REQ-D8: one value in place of several is refused with what to pass."""
    with pytest.raises(ConfigError, match=r"got \{'draft_len': 2\}; expected the values"):
        GraphKey.product([1], draft_len=2)  # type: ignore[arg-type]
