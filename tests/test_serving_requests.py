"""Sampling parameters: what is accepted, and that everything else says why not."""

from __future__ import annotations

from typing import Any

import pytest

from breakgraph.errors import ConfigError
from breakgraph.serving.requests import SamplingParams


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
