"""The mark itself: what it accepts, what it refuses, and that it is nothing outside a step."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, break_graph, eager_on_graph
from breakgraph.break_function import spec_of
from breakgraph.errors import ConfigError


def test_outside_every_step_a_marked_function_is_a_plain_call() -> None:
    """Name, docstring, signature, result and identity of the argument are the function's own."""

    @eager_on_graph(live=("meta",))
    def attend(x: torch.Tensor, meta: int = 1) -> torch.Tensor:
        """Doc."""
        return x

    x = torch.ones(1)
    assert attend(x) is x
    assert (attend.__name__, attend.__doc__) == ("attend", "Doc.")
    assert list(inspect.signature(attend).parameters) == ["x", "meta"]
    break_graph()


def test_a_disabled_mark_is_no_mark() -> None:
    """enabled=False gives the function back, so its work is captured."""

    def work(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    marked = eager_on_graph(enabled=False)(work)
    assert marked is work
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        marked(torch.ones(1))
    assert graph.breaks == ()


def test_names_default_to_the_functions_own() -> None:
    """A function's name, a class's name for an object, and what the author gave."""

    class Planner:
        def __call__(self) -> None:
            return None

    assert spec_of(eager_on_graph(lambda: None)).name == "<lambda>"  # type: ignore[union-attr]
    assert spec_of(eager_on_graph(Planner())).name == "Planner"  # type: ignore[union-attr]
    assert spec_of(eager_on_graph(name="plan")(Planner())).name == "plan"  # type: ignore[union-attr]
    assert spec_of(len) is None


def _function(x: torch.Tensor, *rest: Any, meta: Any = None, **more: Any) -> None:
    return None


async def _coroutine() -> None:
    return None


def _generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"live": ("nope",)}, "names 'nope'"),
        ({"rows": ("nope",)}, "names 'nope'"),
        ({"rows": ("x",), "writes": ("nope",)}, "names 'nope'"),
        ({"live": ("rest",)}, "names 'rest'"),
        ({"rows": ("more",)}, "names 'more'"),
        ({"live": "meta"}, "a string"),
        ({"rows": "x"}, "a string"),
        ({"writes": ("x",)}, "not in rows"),
        ({"live": ("x",), "rows": ("x",)}, "both live and rows"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    """A misspelt option is an error when the function is decorated, with the parameters that there are."""
    with pytest.raises(ConfigError, match=message):
        eager_on_graph(**options)(_function)


@pytest.mark.parametrize("target", [_coroutine, _generator, 3])
def test_what_cannot_be_a_break_is_refused(target: Any) -> None:
    """A generator's or coroutine's body would run later, inside a segment."""
    with pytest.raises(ConfigError):
        eager_on_graph(target)


def test_defaults_keywords_and_star_arguments_survive_a_replay() -> None:
    """However a break is called, a replay calls it with the same arguments."""
    seen: list[Any] = []

    @eager_on_graph(live=("meta",))
    def record(x: torch.Tensor, *rest: int, scale: int = 3, meta: str = "m", **more: int) -> torch.Tensor:
        seen.append((rest, scale, meta, more))
        return x * scale

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        record(torch.ones(1), 1, 2, meta="first", other=9).mul_(1)
    graph.replay(live={"meta": "second"})
    assert seen == [((1, 2), 3, "first", {"other": 9}), ((1, 2), 3, "second", {"other": 9})]


def test_a_wrong_call_raises_pythons_own_error() -> None:
    """A TypeError for bad arguments is not replaced."""

    @eager_on_graph
    def one(x: torch.Tensor) -> torch.Tensor:
        return x

    with (
        pytest.raises(TypeError, match="takes 1 positional argument"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"),
    ):
        one(1, 2)  # type: ignore[call-arg, arg-type]


def test_partials_and_builtins_can_be_marked() -> None:
    """A partial has a signature, a builtin may have none; both are called as they were."""
    add = eager_on_graph(functools.partial(torch.add, other=2))
    builtin = eager_on_graph(torch.neg)
    graph = BreakableCUDAGraph()
    x = torch.ones(2)
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = builtin(add(x * 1)) * 1
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [-7.0, -7.0]


def test_return_targets_select_leaves() -> None:
    """`return` covers every leaf, `return[1]` one subtree, and [1] is not taken for [10]."""

    def result(x: torch.Tensor) -> Any:
        return x

    spec = spec_of(eager_on_graph(rows={"return[1]": 1, "return.a": 2})(result))
    assert spec is not None
    paths = ("[1]", "[1][0]", "[10]", "[0]", ".a", ".ab")
    assert [spec.return_axis(path) for path in paths] == [1, 1, None, None, 2, None]
    everywhere = spec_of(eager_on_graph(rows=("return",))(result))
    assert everywhere is not None
    assert everywhere.return_axis("[3].x") == 0
