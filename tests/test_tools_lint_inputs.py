"""`lint` and its inputs: host data of numpy and of other containers, what is not followed, and what is put back between runs."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from breakgraph.cli import app
from breakgraph.errors import ConfigError
from breakgraph.tools import Kind, Severity, lint
from breakgraph.tools.linting.host_data import listening, stand_in_of
from tests.lint_faults import x


def _item(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: lens.max().item()]


def _as_type(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: (lens.max() + 1).astype(np.int64).item()]


def _to_list(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: lens[0].tolist() if lens[0].dtype.kind == "i" else 1]


def _of_shape(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: lens.shape[0]]


def _of_size(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: lens.size]


def _of_where(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: np.where(lens > 1)[0][0]]


def _of_concatenate(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: np.concatenate([lens, lens]).max()]


def _of_dot(h: torch.Tensor, lens: Any) -> torch.Tensor:
    return h[: np.dot(lens, lens)]


ARRAYS = [_item, _as_type, _to_list, _of_shape, _of_size, _of_where, _of_concatenate, _of_dot]


@pytest.mark.parametrize("forward", ARRAYS, ids=lambda each: each.__name__)
def test_numbers_of_an_array_are_followed(forward: Callable[..., Any]) -> None:
    """Whatever numpy's own scalars and functions do, the stand-ins do, and what comes out of them is host data."""
    report = lint(forward, x(), np.array([1, 2]))
    assert report.unseen == ()
    assert Kind.HOST_DATA in {finding.kind for finding in report.failures}


def _in_a_range(h: torch.Tensor, n: int) -> torch.Tensor:
    steps = range(n + 1)
    for _ in steps:
        h = h + 1
    return h


def _list_of_a_range(h: torch.Tensor, n: int) -> torch.Tensor:
    return h + len(list(range(n)))


def _repeated(h: torch.Tensor, n: int) -> torch.Tensor:
    return h + len([1] * n) + len(n * [1])


def _bits(h: torch.Tensor, n: int) -> torch.Tensor:
    return h[: n.bit_length()]


def _ordered(h: torch.Tensor, n: int) -> torch.Tensor:
    options = collections.OrderedDict(width=n)
    return h[: options["width"]]


@pytest.mark.parametrize("forward", [_in_a_range, _list_of_a_range, _repeated, _bits, _ordered])
def test_numbers_that_decide_a_length_are_followed(forward: Callable[..., Any]) -> None:
    """A range that has a name, a list that is repeated and the bits of a number are found."""
    assert lint(forward, x(), 2).failures


def _copied(h: torch.Tensor, lens: list[int]) -> torch.Tensor:
    return h + sum(1 for _ in lens.copy())


def _unpacked(h: torch.Tensor, lens: list[int]) -> torch.Tensor:
    return h + len([*lens])


def _added(h: torch.Tensor, lens: list[int]) -> torch.Tensor:
    return h + len(lens + [1])  # noqa: RUF005


@pytest.mark.parametrize("forward", [_copied, _unpacked, _added])
def test_copies_of_a_list_are_followed(forward: Callable[..., Any]) -> None:
    """`copy()`, `[*lens]` and a sum with another list are as long as the list is."""
    assert lint(forward, x(), [1, 2]).failures


class _Batch(collections.UserDict[str, Any]):
    """As a tokenizer's output."""


@pytest.mark.parametrize(
    "options",
    [collections.OrderedDict(n=2), collections.defaultdict(int, n=2), _Batch(n=2), {"inner": _Batch(n=2), "n": 2}],
    ids=["ordered", "default", "user", "nested"],
)
def test_dicts_of_any_class_are_followed(options: Any) -> None:
    """Values of a subclass of dict, or of a `UserDict`, have stand-ins, and the dict of the caller is as it was."""
    report = lint(lambda h, options: h[: options["n"]], x(), options)
    assert [finding.kind for finding in report.failures] == [Kind.HOST_DATA]
    assert report.unseen == ()
    assert type(options["n"]) is int


class _Plain:
    def __init__(self) -> None:
        self.n = 2


@pytest.mark.parametrize(
    "value",
    [collections.deque([1]), {1}, range(2), torch.Size([2]), slice(0, 2), 1j, _Plain()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_followed_is_said(value: Any) -> None:
    """Inputs of other kinds are named under what was not seen, and nobody claims that nothing is found in the forward."""
    report = lint(lambda h, _: h * 2, x(), value)
    assert report.unseen == (f"host data in inputs of type {type(value).__name__}: no stand-ins",)
    assert report.summary() == "Nothing found in what was seen of this forward on cpu."
    assert str(report).splitlines()[0].startswith("not seen: ")


def test_options_are_not_said_to_be_unseen() -> None:
    """A dtype, a string, a flag, an empty set and a function hold no host data."""
    values = (torch.float32, "a", True, None, set(), len, nn.Linear(1, 1))
    assert lint(lambda h, *_: h * 2, x(), *values).unseen == ()


# What is put back.


@dataclasses.dataclass
class _Meta:
    lengths: list[int]


def test_containers_of_the_inputs_are_put_back_between_runs() -> None:
    """A forward that takes things out of its inputs finds them in each run, and so does the caller."""
    values = {"longest": 2, "inner": {"a": 1}, "array": np.arange(3), "meta": _Meta([1, 2])}

    def forward(h: torch.Tensor, metadata: dict[str, Any]) -> torch.Tensor:
        metadata.pop("longest")
        metadata["inner"].pop("a")
        metadata["array"][0] += 1
        metadata["meta"].lengths.pop()
        return h * 2

    assert Kind.ATTRIBUTE in {finding.kind for finding in lint(forward, x(), values).findings}
    assert (values["longest"], values["inner"], values["meta"]) == (2, {"a": 1}, _Meta([1, 2]))
    assert values["array"].tolist() == [0, 1, 2]  # type: ignore[attr-defined]


class _Closed(collections.OrderedDict[str, Any]):
    """As a model's output, which lets nobody take anything out or put several things in."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("no")

    def pop(self, *_: Any) -> Any:
        raise TypeError("no")


def test_a_dict_that_refuses_keeps_its_items() -> None:
    """What is put back goes round the methods of a class of dict, in its order, and nothing is lost."""
    values = _Closed()
    values["a"], values["b"] = 1, 2

    def forward(h: torch.Tensor, values: _Closed) -> torch.Tensor:
        values["a"] = 3
        values["c"] = 4
        return h * 2

    lint(forward, x(), values)
    assert list(values.items()) == [("a", 1), ("b", 2)]


def test_a_resized_input_is_put_back() -> None:
    """Shape and values are as before."""
    h = x()
    lint(lambda t: t.resize_(2, 3).mul_(2) + 0, h)
    assert torch.equal(h, x())
    h = x().T
    lint(lambda t: t.resize_(20, 3).zero_() + 0, h)
    assert torch.equal(h, x().T)
    assert h.stride() == (1, 3)


def test_inputs_that_do_not_end_are_refused() -> None:
    """A list that holds itself and a very deep one get three parts, and no traceback of ours."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises(ConfigError, match="hold themselves"):
            lint(lambda h, _: h, x(), value)


class _Double(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_run() -> None:
    """A forward that is no Python has its operators watched."""
    assert lint(torch.jit.script(_Double()), x()).failures == ()


def test_a_split_at_places_of_a_tensor_is_found() -> None:
    """`tensor_split` reads the places on the host; numbers are no trouble."""
    assert [f.kind for f in lint(lambda h, cu: h.tensor_split(cu)[0] + 1, x(), torch.tensor([1, 2])).failures] == [
        Kind.HOST_SYNC
    ]
    assert lint(lambda h: h.tensor_split((1, 2))[0] + 1, x()).failures == ()


def test_threads_do_not_hear_each_other() -> None:
    """A listener hears what its own thread asks of host data, and nothing of another thread that began later."""
    heard: dict[str, list[str]] = {"first": [], "second": []}
    begun, asked = threading.Event(), threading.Event()

    def second() -> None:
        with listening(heard["second"].append):
            begun.set()
            asked.wait(10)

    thread = threading.Thread(target=second)
    with listening(heard["first"].append):
        thread.start()
        begun.wait(10)
        assert bool(stand_in_of(2))
        asked.set()
        thread.join()
    assert heard == {"first": ["a branch on"], "second": []}


def test_a_loop_over_host_data_has_no_count() -> None:
    """How often Python asks a list for its length says nothing about the loop."""

    def forward(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        for _ in lengths:
            h = h + 1
        return h

    (finding,) = lint(forward, x(), [1, 2]).findings
    assert (finding.times, finding.severity) == (1, Severity.FAILS)


# The command.


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import sys\ndef f():\n    sys.exit(0)\n", "ended the program with 0"),
        ("import sys\nsys.exit(0)\n", "ended the program with 0"),
        ("import sys\ndef f():\n    return (lambda: sys.exit(0)), ()\n", "ended the program with 0"),
        ("def f(a, b=1):\n    pass\n", "cannot be called without arguments: missing a required argument: 'a'"),
    ],
    ids=["function", "import", "forward", "arguments"],
)
def test_a_target_that_gives_no_answer_has_status_2(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that ends the program, or needs arguments, is refused in three lines, whatever status it wanted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "ending.py").write_text(body)
    commands = ("lint",) if "lambda" in body else ("lint", "verify", "explain")
    for command in commands:
        result = CliRunner().invoke(app, [command, "ending.py:f"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.strip().splitlines()) == 3
        assert said in result.stderr
