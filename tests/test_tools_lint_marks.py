"""What `lint` says of the lines to mark: whole statements, the right names, host data of the inputs only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from breakgraph.tools import lint
from breakgraph.tools.linting.report import Suggestion
from tests.lint_faults import x


def _marks(forward: Callable[..., Any], *inputs: Any) -> tuple[Suggestion, ...]:
    return lint(forward, x(), *inputs).suggestions


def _lines(forward: Callable[..., Any], mark: Suggestion) -> tuple[int, int]:
    first = forward.__code__.co_firstlineno
    return mark.first - first, mark.last - first


def _like_a_builtin(h: torch.Tensor) -> torch.Tensor:
    input = h * 2
    s = input.max().item()
    y = input / s
    z = y + 1
    return z * 2


def _named_by_statements(h: torch.Tensor) -> torch.Tensor:
    import math as m

    def twice(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    s = h.max().item()
    y = twice(h) * s * m.pi
    z = y + 1
    return z * 2


@pytest.mark.parametrize(
    ("forward", "reads"), [(_like_a_builtin, {"input"}), (_named_by_statements, {"h", "twice", "m"})]
)
def test_every_variable_of_the_function_that_is_read_is_named(forward: Callable[..., Any], reads: set[str]) -> None:
    """A local that is named like a builtin, an inner function and an import are variables like any other."""
    (mark,) = _marks(forward)
    assert set(mark.reads) == reads
    assert mark.example is not None


def test_the_variables_of_an_enclosing_function_are_named() -> None:
    """What the lines read from around the function has to reach the new one."""
    scale = torch.ones(())

    def forward(h: torch.Tensor) -> torch.Tensor:
        s = h.max().item()
        y = h * s * scale
        z = y + 1
        return z * 2

    (mark,) = _marks(forward)
    assert set(mark.reads) == {"h", "scale"}


def test_a_block_begins_where_host_data_is_computed_and_live_names_inputs() -> None:
    """An accumulator is no live data: it is computed in the block, from its first value on."""

    def forward(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        h = h * 3
        total = 0
        for n in lengths:
            total = total + n
        h = h / total
        g = h * 2
        g = g + 1
        k = g * 2
        k = k + h
        k = k * 2
        return k + 3

    (mark,) = _marks(forward, [1, 2])
    assert _lines(forward, mark)[0] == 2
    assert mark.live == ("lengths",)
    assert "total" not in mark.reads


def _helper(h: torch.Tensor, total: int) -> torch.Tensor:
    g = h * 2
    g = g + 1
    g = g[:total] + 1
    return g * 2


def test_a_number_that_a_caller_computed_is_not_proposed_as_live() -> None:
    """A parameter that holds a sum of inputs is no input: the lines get no example, and where to compute it is said."""
    marks = _marks(lambda h, n: _helper(h, n + 1), 1)
    mark = next(each for each in marks if each.function == "_helper")
    assert mark.live == ()
    assert (mark.example is None) or "total" not in mark.example


def test_an_array_made_into_a_tensor_is_host_data_of_the_inputs() -> None:
    """`torch.from_numpy(array)` reads the array, so a replay must be handed another one."""

    def forward(h: torch.Tensor, pos: Any) -> torch.Tensor:
        h = h * 2
        p = torch.from_numpy(pos)
        h = h * p[:, None]
        g = h + 1
        g = g * 2
        return g + 3

    marks = _marks(forward, np.arange(4.0))
    assert [mark.live for mark in marks] == [("pos",)]


def _in_elif(h: torch.Tensor, n: int) -> torch.Tensor:
    y = h * 2
    if h.shape[0] == 1:
        y = y * 1
    elif n > 1:
        y = y * 2
    else:
        y = y * 3
    y = y + 1
    y = y + 2
    y = y + 3
    return y + 4


def _with_break(h: torch.Tensor, n: int) -> torch.Tensor:
    y = h * 2
    for i in range(4):
        if i == n:
            break
        y = y + 1
    y = y + 1
    y = y + 2
    y = y + 3
    return y + 4


def _in_case(h: torch.Tensor, n: int) -> torch.Tensor:
    y = h * 2
    match n:
        case 0:
            y = y * 2
        case _:
            y = y * 3
    y = y + 2
    y = y + 3
    y = y + 4
    return y + 4


@pytest.mark.parametrize(("forward", "lines"), [(_in_elif, (2, 7)), (_with_break, (2, 5)), (_in_case, (2, 6))])
def test_a_block_is_made_of_whole_statements(forward: Callable[..., Any], lines: tuple[int, int]) -> None:
    """An `elif` comes with its `if`, a `break` with its loop, a `case` with its `match`."""
    (mark,) = _marks(forward, 2)
    assert _lines(forward, mark) == lines


def test_lines_that_change_a_list_of_the_function_get_no_example() -> None:
    """A break that is handed a list may not be handed that very one, so the lines cannot be moved as they are."""

    def forward(h: torch.Tensor) -> torch.Tensor:
        found: list[float] = []
        g = h * 2
        found.append(g.max().item())
        g = g + 1
        g = g * 2
        g = g - 1
        return g + len(found)

    (mark,) = _marks(forward)
    assert mark.example is None
    assert "found" in mark.reads


def test_the_variable_of_a_loop_is_none_of_its_surroundings() -> None:
    """Inside of another loop the inner loop's variable has a value from the round before, which nothing reads."""

    def forward(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        place = 0
        for scale in (1.0, 2.0):
            h = h * scale
            place += 1
            for n in lengths:
                h = h + h[:n].sum(0)
            h = torch.relu(h)
            h = h + 1
        return h + place

    (mark,) = _marks(forward, [1, 2])
    assert (mark.reads, mark.assigns, mark.live) == (("lengths", "h"), ("h",), ("lengths",))
    assert mark.example is not None


def test_what_was_taken_out_of_an_input_is_taken_out_in_the_block() -> None:
    """An item of an input is no live data under the name of a local, so the block begins where it is read."""

    def forward(h: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
        h = h * 2
        n = options["n"]
        h = h + n
        h = h * 2
        g = h + 1
        g = g * 2
        return g * 3

    (mark,) = _marks(forward, {"n": 2})
    assert mark.live == ("options",)
    assert _lines(forward, mark)[0] == 2


def test_two_blocks_of_a_function_have_names_of_their_own() -> None:
    """Both examples can stand in one file."""

    def forward(h: torch.Tensor) -> torch.Tensor:
        a = h.max().item()
        b = h * a
        c = b + 1
        c = c * 2
        d = c.max().item()
        e = c * d
        f = e + 1
        f = f * 2
        f = f * 2
        return f + 1

    first, second = _marks(forward)
    assert "forward_step_1(h)" in str(first.example)
    assert "forward_step_2(c)" in str(second.example)


def test_a_lambda_and_a_constant_list_get_the_right_advice() -> None:
    """A lambda is to be a function first, and a table made from constants does not depend on the data."""
    (mark,) = _marks(lambda h: h * h.max().item())
    assert "Write it as a function" in mark.text

    def forward(h: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0])
        return table  # noqa: RET504

    (mark,) = _marks(forward)
    assert "depends on the data" not in mark.text
