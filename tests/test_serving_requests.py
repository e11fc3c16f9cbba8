"""Sampling parameters: what is accepted, and that everything else says why not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from breakgraph.errors import ConfigError
from breakgraph.serving.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", 2**63),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", "1"),
        ("frequency_penalty", 2.01),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", True),
        ("presence_penalty", -2.01),
        ("presence_penalty", None),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", 2.0),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    """The message names the parameter and its value, why it matters and what to give."""
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert f"SamplingParams.{name} is {value!r}" in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_the_borders_are_accepted() -> None:
    """The least and the most of every range, and one stop string without a list around it."""
    SamplingParams(max_tokens=1, temperature=0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    params = SamplingParams(top_p=1e-9, min_p=1.0, seed=2**63 - 1, stop="end", stop_token_ids=[0])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (0,)
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", 5), ("stop", None), ("stop_token_ids", None), ("stop_token_ids", "a")]
)
def test_stops_of_another_type_are_refused(name: str, value: Any) -> None:
    """What is neither one stop nor several is a ConfigError, not a TypeError of tuple()."""
    with pytest.raises(ConfigError, match=f"SamplingParams.{name} is "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({5: 100.5}, r"logit_bias\[5\] is 100.5; expected a number in \[-100, 100\]"),
        ({1: 0.5, 5: float("nan")}, r"logit_bias\[5\] is nan"),
        ({5: float("-inf")}, r"logit_bias\[5\] is -inf"),
        ({5: "1"}, r"logit_bias\[5\] is '1'"),
        ({5: True}, r"logit_bias\[5\] is True"),
        ({-1: 1.0}, "logit_bias is .*; expected a mapping of token ids"),
        ({"50256": -100}, "logit_bias is .*; expected a mapping of token ids"),
        ({1: 1.0, "a": 1.0}, "logit_bias is "),
        ({1.0: 1.0}, "logit_bias is "),
        ({True: 1.0}, "logit_bias is "),
        ([(3, 1.0), (3, 2.0)], "logit_bias is "),
        ([3, 4], "logit_bias is "),
        ([(1, 2, 3)], "logit_bias is "),
        ("ab", "logit_bias is "),
        (None, "logit_bias is "),
        (7, "logit_bias is "),
    ],
)
def test_a_wrong_bias_is_refused_by_name(value: Any, message: str) -> None:
    """What is no mapping of tokens to numbers, or has a number out of range, is named with the token where there is one."""
    with pytest.raises(ConfigError, match=f"SamplingParams.{message}") as caught:
        SamplingParams(logit_bias=value)
    assert caught.value.why
    assert caught.value.fix


def test_a_bias_is_kept_apart_from_its_mapping() -> None:
    """Sorted pairs that can be hashed and compared, that a change of the mapping does not reach, and that `evolve` takes back."""
    given = {7: 1, 2: -0.5}
    params = SamplingParams(logit_bias=given)
    given[7] = 50
    assert params.logit_bias == ((2, -0.5), (7, 1))
    assert params == SamplingParams(logit_bias=[(7, 1), (2, -0.5)])
    assert hash(params) == hash(attrs.evolve(params, max_tokens=128))
    assert attrs.evolve(params, seed=3).logit_bias == params.logit_bias


def test_which_requests_need_their_logits() -> None:
    """Neutral values need nothing; each of the others does, and only penalties need the tokens that were used."""
    assert not SamplingParams(temperature=1.0, top_k=3, repetition_penalty=1, logit_bias={}).needs_logits
    for name, value in (("repetition_penalty", 1.1), ("frequency_penalty", -0.1), ("presence_penalty", 2)):
        params = SamplingParams(**{name: value})
        assert params.penalises
        assert params.needs_logits
    for wanted in ({"logit_bias": {0: 0.0}}, {"logprobs": 0}):
        params = SamplingParams(**wanted)
        assert not params.penalises
        assert params.needs_logits
    SamplingParams(repetition_penalty=1e-9, frequency_penalty=-2, presence_penalty=2.0, logprobs=20)
    SamplingParams(logit_bias={0: -100, 1: 100.0})
