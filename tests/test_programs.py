"""Property: any program of elementwise, matmul, view, in-place and break steps replays equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from breakgraph import eager_on_graph
from breakgraph.testing import assert_replay_matches_eager

SIZE = 4


@eager_on_graph
def _sync_scale(x: torch.Tensor) -> torch.Tensor:
    return x * (0.5 + 0.1 * float(torch.tanh(x.sum()).item()))


@eager_on_graph
def _sync_inplace(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(0.9 if x.sum().item() > 0 else 1.1)


@eager_on_graph
def _sync_none(x: torch.Tensor) -> None:
    x.add_(float(torch.tanh(x.mean()).item()))


@eager_on_graph
def _sync_tuple(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return x.clone(), {"half": x * 0.5, "view": x[:1]}


@eager_on_graph
def _sync_parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * float(torch.tanh(x.mean()).item())).split(1, dim=1)


@eager_on_graph(rows=("x", "return"))
def _rows(x: torch.Tensor) -> torch.Tensor:
    # Contiguous: the stride order of a single row says nothing about that of eight, and a sum depends on it.
    return (torch.tanh(x) * 1.5).contiguous()


def _break_none(x: torch.Tensor) -> torch.Tensor:
    y = x + 0
    _sync_none(y)
    return y


def _break_tuple(x: torch.Tensor) -> torch.Tensor:
    whole, rest = _sync_tuple(x)
    return whole + rest["half"] * rest["view"].sum()


def _inplace_on_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:].mul_(0.5)
    y.t()[0].add_(1)
    return y


STEPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add": lambda x: x + 0.25,
    "tanh": torch.tanh,
    "matmul": lambda x: torch.tanh(x @ x),
    "transpose": lambda x: x.t(),
    "flip and clone": lambda x: x.flip(0),
    "reshape": lambda x: x.reshape(2, -1).reshape(SIZE, SIZE),
    "softmax": lambda x: torch.softmax(x, -1),
    "in-place add": lambda x: x.add_(0.5),
    "in-place on a view": _inplace_on_view,
    "expand": lambda x: x[:1].expand(SIZE, SIZE) * 0.5,
    "cat": lambda x: torch.cat([x[2:], x[:2]]),
    "break": _sync_scale,
    "break in place": _sync_inplace,
    "break writes": _break_none,
    "break tuple": _break_tuple,
    "break rows": _rows,
    "break parts": lambda x: torch.cat([part.sum(0, keepdim=True) + part for part in _sync_parts(x)], dim=1),
}


def _program(names: list[str]) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        start = x * 1.0
        y = start
        for name in names:
            y = STEPS[name](y)
        return y + 0, start

    return forward


def _example(seed: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def example_(round_: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed * 100 + round_))}

    return example_


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), max_size=12), seed=st.integers(0, 1000), valid=st.integers(0, SIZE)
)
@example(names=["transpose", "break rows", "break tuple", "break"], seed=0, valid=1)  # a bridge with other strides
@example(names=["break", "break in place", "transpose", "break in place", "break rows"], seed=1, valid=2)
def test_any_program_replays_equal_to_eager(names: list[str], seed: int, valid: int) -> None:
    """Poisoned before each replay, on new inputs and row counts, the result has eager's bits, in-place effects too."""
    assert_replay_matches_eager(
        _program(names),
        example=_example(seed),
        valid_rows=lambda round_: (valid + round_) % (SIZE + 1),
        backend="emulated",
    )
