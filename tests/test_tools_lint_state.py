"""`lint` and Python state: containers of plain values under any name, lambdas, writes that go round `__setattr__`."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from breakgraph.tools import Kind, LintReport, Severity, lint
from tests.lint_faults import x

_COUNTS = {"n": 0}
_LENGTHS = np.zeros(2)


def _kinds(report: LintReport) -> list[Kind]:
    return [finding.kind for finding in report.failures]


def _global_dict(h: torch.Tensor) -> torch.Tensor:
    _COUNTS["n"] += 1
    return h + 1


def _global_array(h: torch.Tensor) -> torch.Tensor:
    _LENGTHS[0] += 1
    return h + 1


def _by_default(h: torch.Tensor, counts: dict[str, int] = {"n": 0}) -> torch.Tensor:  # noqa: B006
    counts["n"] += 1
    return h + 1


def _closure() -> Callable[[torch.Tensor], torch.Tensor]:
    counts = {"n": 0}

    def forward(h: torch.Tensor) -> torch.Tensor:
        counts["n"] += 1
        return h + 1

    return forward


class _Holding(nn.Module):
    def __init__(self, use: Callable[[Any], None]) -> None:
        super().__init__()
        self.counts = {"n": 0}
        self.lengths = np.zeros(2)
        self.nested = {"lengths": np.zeros(2)}
        self.all = [{"n": 0}]
        self.n = 0
        self._use = use

    def table(self) -> dict[str, int]:
        return self.counts

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self._use(self)
        return h + 1

    def values(self) -> list[Any]:
        return [dict(self.counts), self.lengths.tolist(), self.nested["lengths"].tolist(), dict(self.all[0]), self.n]


def _alias(m: _Holding) -> None:
    counts = m.counts
    counts["n"] += 1


def _alias_in_one_line(m: _Holding) -> None:
    counts = m.counts; counts["n"] += 1  # noqa: E702  # fmt: skip


def _by_its_method(m: _Holding) -> None:
    m.counts.__setitem__("n", m.counts["n"] + 1)


def _alias_of_an_array(m: _Holding) -> None:
    lengths = m.lengths
    lengths[0] += 4


def _in_place(m: _Holding) -> None:
    lengths = m.lengths
    lengths += 4


def _nested(m: _Holding) -> None:
    lengths = m.nested["lengths"]
    lengths[0] += 1


def _of_a_loop(m: _Holding) -> None:
    for counts in m.all:
        counts["n"] += 1


def _returned(m: _Holding) -> None:
    counts = m.table()
    counts["n"] += 1


def _count(counts: dict[str, int]) -> None:
    counts["n"] += 1


def _handed_on(m: _Holding) -> None:
    _count(m.counts)


def _around_the_class(m: _Holding) -> None:
    object.__setattr__(m, "n", m.n + 1)


HOLDING = [
    _alias,
    _alias_in_one_line,
    _by_its_method,
    _alias_of_an_array,
    _in_place,
    _nested,
    _of_a_loop,
    _returned,
    _handed_on,
    _around_the_class,
]


@pytest.mark.parametrize("use", HOLDING, ids=lambda use: use.__name__)
def test_state_is_found_under_any_name_and_put_back(use: Callable[[Any], None]) -> None:
    """A dict or an array of plain values that a module holds is found once, and is as before, however it is reached."""
    module = _Holding(use)
    before = module.values()
    assert _kinds(lint(module, x())) == [Kind.ATTRIBUTE]
    assert module.values() == before


@pytest.mark.parametrize("forward", [_global_dict, _global_array, _by_default, _closure()])
def test_state_of_a_function_is_found_and_put_back(forward: Callable[..., Any]) -> None:
    """The same in a global, a default argument and a variable of an enclosing function."""
    for _ in range(2):  # had the first not put it back, nothing would differ; so look at the values as well
        assert _kinds(lint(forward, x())) == [Kind.ATTRIBUTE]
    assert (_COUNTS, _LENGTHS.tolist()) == ({"n": 0}, [0, 0])
    default = forward.__defaults__  # type: ignore[attr-defined]
    assert default in (None, ({"n": 0},))


def _fill(table: dict[str, int], values: Any) -> None:
    table["n"] = 1
    values[0] += 1


class _OfItsOwn(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        table: dict[str, int] = {}
        values = np.zeros(2)
        _fill(table, values)
        values += 1
        self.table = {}
        held = self.table
        held["a"] = 1

        def with_default(counts: dict[str, int] = {"n": 0}) -> None:  # noqa: B006
            counts["n"] += 1

        with_default()
        inner = lambda: table.update(b=2)  # noqa: E731
        inner()
        return h + len(table)


def test_containers_that_a_run_makes_itself_are_no_state() -> None:
    """A dict and an array made in the forward may be changed under any name, also where an attribute holds the dict anew."""
    assert lint(_OfItsOwn(), x()).failures == ()


class _Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.p = nn.Parameter(torch.zeros(3))


class _Setting(_Parent):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        super().__setattr__("n", self.n + 1)
        return h + 1


class _Replacing(_Parent):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.p.data = h[0] * 2
        return h + self.p


def test_writes_round_the_class_are_found() -> None:
    """`super().__setattr__` and `parameter.data = ...` are writes like any other."""
    assert _kinds(lint(_Setting(), x())) == [Kind.ATTRIBUTE]
    module = _Replacing()
    data = module.p.data_ptr()
    (finding,) = [each for each in lint(module, x()).failures if each.kind is Kind.ATTRIBUTE]
    assert finding.what == "self.p.data is assigned"
    assert (module.p.data_ptr(), module.p.tolist()) == (data, [0, 0, 0])


def test_a_value_of_a_thread_is_read_and_one_that_cannot_be_is_said() -> None:
    """The counter of a `threading.local` fails; behind a property nobody claims that the value is as before."""
    local = threading.local()
    local.n = 0

    def forward(h: torch.Tensor) -> torch.Tensor:
        local.n += 1
        return h + 1

    assert _kinds(lint(forward, x())) == [Kind.ATTRIBUTE]
    assert local.n == 0

    class Odd:
        n = property(lambda self: 0, lambda self, value: None)

    def setting(h: torch.Tensor) -> torch.Tensor:
        odd.n = 1
        return h + 1

    odd = Odd()
    (finding,) = lint(setting, x()).findings
    assert "cannot be read" in finding.why


def test_the_random_numbers_of_the_system_are_found() -> None:
    """`os.urandom` draws on the host."""
    assert _kinds(lint(lambda h: h * os.urandom(1)[0], x())) == [Kind.RANDOM]


# Lambdas and comprehensions.


def _timed(function: Callable[..., Any], _: float) -> Callable[..., Any]:
    return function


class _Acting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = 2.0
        torch.manual_seed(0); self.act = lambda h: h * self.s  # noqa: E702  # fmt: skip

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.act(h)  # type: ignore[no-any-return]


def test_a_lambda_is_judged_by_its_own_expressions() -> None:
    """What the statement around a lambda does when it is defined is no work of the lambda."""
    generator = iter(range(3))
    seeded = torch.manual_seed(0) and (lambda h: h * 2)
    timed = _timed(lambda h: h * 2, time.time())
    tagged = ((lambda h: h * 2), next(generator))
    for forward in (seeded, timed, tagged[0], _Acting()):
        assert lint(forward, x()).findings == ()
    print(lint(lambda h: h.sum(), x()))
    for name, forward in {"a": lambda h, n: h * 2}.items():
        assert name == "a"
        assert lint(forward, x(), 3).findings == ()


def test_what_a_lambda_or_a_comprehension_does_itself_is_found() -> None:
    """Of two lambdas in a line the one that ran is judged, and a comprehension in the frame of its own."""
    state = {"n": 0}
    clean, counting = (lambda h: h * 2), (lambda h: h * state.setdefault("m", 1))  # fmt: skip
    assert lint(clean, x()).findings == ()
    assert _kinds(lint(counting, x())) == [] and state == {"n": 0}  # noqa: PT018
    clock, same = (lambda h: h * time.time()), (lambda h: h * 2)  # fmt: skip
    assert _kinds(lint(clock, x())) == [Kind.HOST_CODE]
    assert lint(same, x()).findings == ()
    assert _kinds(lint(lambda h: h * sum(time.time() for _ in range(2)), x())) == [Kind.HOST_CODE]
    assert _kinds(lint(lambda h: h * sum([time.time() for _ in range(2)]), x())) == [Kind.HOST_CODE]
    assert _kinds(lint(functools.partial(lambda f, h: h * len([f for _ in range(2)]), time), x())) == []
    assert _kinds(
        lint(
            lambda h: (
                h
                * time.time()
            ),
            x(),
        )
    ) == [Kind.HOST_CODE]  # fmt: skip


def test_a_lambda_of_several_lines_is_counted_once() -> None:
    """Its first line is passed twice in one call."""
    forward = lambda h: (  # noqa: E731
        h.sum()
        * time.time()
    )  # fmt: skip
    (finding,) = lint(forward, x()).findings
    assert finding.times == 1


def test_a_check_that_says_something_before_it_raises_is_a_note() -> None:
    """Whatever stands before the `raise`, the branch only decides whether to raise."""

    def forward(h: torch.Tensor, length: int) -> torch.Tensor:
        if length > 8:
            print("too long", length)
            raise ValueError(length)
        return h + 1

    (finding,) = lint(forward, x(), 3).findings
    assert finding.severity is Severity.NOTE


def test_generated_code_is_said_not_to_be_seen() -> None:
    """A function that a program wrote has no lines to read, and the report says that it ran."""
    namespace: dict[str, Any] = {}
    exec(
        compile("def step(h):\n    seen.append(1)\n    return h * 2\nseen = []", "<made by a test>", "exec"), namespace
    )
    step = namespace["step"]
    assert lint(lambda h: step(h), x()).unseen == ("step in <made by a test>: generated code",)
