"""`verify`: is a replay what eager computes, and if not, where and why not?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from breakgraph.addresses import AddressWatch
from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
from breakgraph.divergence import first_divergence, step_in_words
from breakgraph.errors import ConfigError
from breakgraph.replay_context import eager_step
from breakgraph.runner import GraphRunner
from breakgraph.structure import map_leaves
from breakgraph.tools.verifying.case import Case, PythonState, plain_attributes
from breakgraph.tools.verifying.diagnose import diagnose
from breakgraph.tools.verifying.report import Verification
from breakgraph.tools.verifying.tape import record
from breakgraph.verification import Compared, StateKeeper, difference

__all__ = ["verify", "verify_key"]


def verify(
    forward: Callable[..., Any],
    *,
    example: Callable[[int], Mapping[str, torch.Tensor]],
    live: Callable[[int], Mapping[str, Any]] | None = None,
    valid_rows: Callable[[int], int | None] | None = None,
    state: Sequence[Any] = (),
    generators: Sequence[torch.Generator] = (),
    modules: Sequence[torch.nn.Module] = (),
    backend: str = "auto",
    rounds: int = 3,
) -> Verification:
    """Capture a forward and compare replays with its eager twin, over the same buffers, with other inputs each time.

    Before each replay what segments computed is filled with NaN, so that it shows when something is read that this replay
    did not write. Where a replay differs, the first segment or break that does is found, and why, by running again:
    eager twice, the replay twice, with the device awaited behind each step, and with notes of every operator.

    Args:
        forward: Called as `forward(**inputs, **live)`; returns tensors.
        example: Round -> inputs by name, all of one shape. Round 0 is captured, the others are compared. What shall change
            between steps besides (weights, attributes), it may change.
        live: Round -> live data by name.
        valid_rows: Round -> real rows; None: every row.
        state: What forward changes and each run must begin with: tensors, or objects with `save()` and `restore(saved)`.
        generators: The caller's own random generators.
        modules: Modules whose parameters, buffers and plain attributes are watched, to name what changed. Where `forward` is a
            module, that one by default.
        backend: `"auto"`, `"cuda"` or `"emulated"`.
        rounds: Steps to compare; the first that differs ends it.

    Returns:
        What was found; `print()` shows it.

    Raises:
        ConfigError: An argument does not fit.
        BaseException: Whatever forward or the capture raised, unchanged.

    Cost: two forwards for the capture, two runs a round; some ten more where something differs.
    """
    _check(rounds)
    watched = tuple(modules) or _module_of(forward)
    with _ForwardRuns(forward, example=example, live=live, valid_rows=valid_rows) as runs:
        case = runs.capture(state=state, generators=generators, modules=watched, backend=backend)
        for number in range(1, rounds + 1):
            runs.begin(number)
            found = _compared(attrs.evolve(case, python=PythonState(watched)), number)
            if not found.ok:
                return found
    return Verification(case.graph.name, rounds)


def verify_key(
    runner: GraphRunner[Any], key: Any, *, modules: Sequence[torch.nn.Module] = (), rounds: int = 3
) -> Verification:
    """Compare a published graph of a runner with its eager twin, with new examples: of its key, and of a smaller one, in turn.

    Args:
        runner: The runner.
        key: One of `runner.graphs`.
        modules: Modules whose plain attributes are watched, to name what changed.
        rounds: Examples to compare; the first that differs ends it.

    Returns:
        What was found.

    Raises:
        ConfigError: There is no such graph, or `rounds` is below 1.

    Cost: two runs a round, one more for the first; some ten more where something differs.
    """
    _check(rounds)
    with runner.rehearsal(key) as first:
        name = first.graph.name
        at_capture = record(first.eager)
    attributes = plain_attributes(modules)
    for number in range(1, rounds + 1):
        with runner.rehearsal(key, fewer_rows=number % 2 == 0) as rehearsal:
            padded = rehearsal.rows != rehearsal.graph.padded_rows
            case = Case(
                graph=rehearsal.graph,
                # Rows of padding all write one null slot, in no order.
                compared=Compared.RESULT if padded else Compared.ALL,
                keeper=rehearsal.keeper,
                replay=rehearsal.replay,
                eager=rehearsal.eager,
                at_capture=at_capture,
                attributes=attributes,
                modules=tuple(modules),
                python=PythonState(modules),
            )
            found = _compared(case, number)
            if not found.ok:
                return found
    return Verification(name, rounds)


def _module_of(forward: Callable[..., Any]) -> tuple[torch.nn.Module, ...]:
    owner = forward if isinstance(forward, torch.nn.Module) else getattr(forward, "__self__", None)
    return (owner,) if isinstance(owner, torch.nn.Module) else ()


def _check(rounds: int) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(
            f"rounds is {rounds!r}; expected a whole number, 1 or more.",
            why="It is the number of steps that are compared.",
            fix="Pass rounds=3.",
        )


def _compared(case: Case, number: int) -> Verification:
    """One step: the replay, poisoned, against its eager twin."""
    replayed, expected = case.outcome_of_replay(), case.outcome_of_eager()
    text = difference(replayed, expected)
    if text is None:
        return Verification(case.graph.name, number)
    found = first_divergence(
        case.graph, keeper=case.keeper, replay=case.poisoned_replay, eager=case.eager_run, compared=case.compared
    )
    diagnosis = diagnose(case, found, expected=expected)
    step = diagnosis.step if diagnosis.step is not None else None if found is None else found.step
    blamed = "" if step is None else step_in_words(case.graph.steps[step], step)
    kinds = tuple(step.kind for step in case.graph.steps)
    return Verification(case.graph.name, number, found, diagnosis, text, blamed, kinds)


class _ForwardRuns:
    """A forward over static inputs, and the step that is at hand.

    Args:
        forward: The forward.
        example: Round -> inputs.
        live: Round -> live data.
        valid_rows: Round -> real rows.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        example: Callable[[int], Mapping[str, torch.Tensor]],
        live: Callable[[int], Mapping[str, Any]] | None,
        valid_rows: Callable[[int], int | None] | None,
    ) -> None:
        self._forward = forward
        self._example, self._live, self._valid_rows = example, live, valid_rows
        self._static: dict[str, torch.Tensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._data: dict[str, Any] = {}
        self._rows: int | None = None
        self._graph = BreakableCUDAGraph(name=getattr(forward, "__name__", type(forward).__name__))
        self._output: Any = None

    def __enter__(self) -> _ForwardRuns:
        self.begin(0)
        self._rows = None  # a capture has all rows
        self._static = {name: tensor.clone() for name, tensor in self._given.items()}
        return self

    def __exit__(self, *_: object) -> None:
        self._graph.reset()

    def begin(self, number: int) -> None:
        """Take the inputs of a round.

        Args:
            number: Of the round.
        """
        self._given = {name: tensor.clone() for name, tensor in self._example(number).items()}
        self._data = dict(self._live(number)) if self._live is not None else {}
        self._rows = self._valid_rows(number) if self._valid_rows is not None else None

    def capture(
        self,
        *,
        state: Sequence[Any],
        generators: Sequence[torch.Generator],
        modules: Sequence[torch.nn.Module],
        backend: str,
    ) -> Case:
        """Warm up, note what the forward does, and capture it."""
        pool = GraphPool(backend=backend)
        keeper = StateKeeper(state, generators=generators, device=pool.device)
        with torch.no_grad():
            with pool.on_capture_stream(), keeper.preserved():
                self.eager()
            python = PythonState(modules)
            tape = record(lambda: keeper.outcome(self.eager), within=self._static.values())
            python.restore()  # the capture is to find what this run found
            self._refill()
            capture = BreakableCUDAGraphCapture(
                self._graph, pool=pool, live=self._data, state=keeper.state, generators=generators
            )
            with capture:
                self._output = self._forward(**self._static, **self._data)
        return Case(
            graph=self._graph,
            keeper=keeper,
            replay=self.replay,
            eager=self.eager,
            at_capture=tape,
            attributes=plain_attributes(modules),
            modules=tuple(modules),
            live=lambda: self._data,
            within=tuple(self._static.values()),
            watch=AddressWatch(modules, tensors=self._static),
        )

    def replay(self) -> Any:
        """Replay the step at hand; returns its result's real rows."""
        with torch.no_grad():
            self._refill()
            self._graph.replay(self._data, valid_rows=self._rows)
        return self._cut(self._output)

    def eager(self) -> Any:
        """The eager twin: the same buffers, marked functions as in a replay."""
        with torch.no_grad():
            self._refill()
            padded = self._graph.padded_rows
            with eager_step(self._data, valid_rows=self._rows, padded_rows=padded):
                return self._cut(self._forward(**self._static, **self._data))

    def _refill(self) -> None:
        if self._given.keys() != self._static.keys():
            raise ConfigError(
                f"example() gave inputs {sorted(self._given)}; round 0 had {sorted(self._static)}.",
                why="A captured forward has the inputs of its capture.",
                fix="Return the same names for every round.",
            )
        for name, tensor in self._given.items():
            static = self._static[name]
            if static.shape != tensor.shape or static.dtype != tensor.dtype:
                raise ConfigError(
                    f"example() gave input {name!r} as {tuple(tensor.shape)} {tensor.dtype}; round 0 had "
                    f"{tuple(static.shape)} {static.dtype}.",
                    why="A captured forward has fixed shapes.",
                    fix="Return one shape and dtype for every round; fewer real rows are valid_rows=.",
                )
            static.copy_(tensor)

    def _cut(self, result: Any) -> Any:
        """Without rows of padding."""
        rows, padded = self._rows, self._graph.padded_rows

        def real(_: str, leaf: Any) -> Any:
            if rows is None or not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != padded:
                return leaf
            return leaf[:rows]

        return map_leaves(result, real)
