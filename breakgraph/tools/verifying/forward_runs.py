"""A forward over static inputs, captured and run as often as one likes: what `verify` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from breakgraph.addresses import AddressWatch
from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
from breakgraph.errors import ConfigError
from breakgraph.replay_context import eager_step
from breakgraph.structure import map_leaves
from breakgraph.tools.verifying.case import Case, PythonState, plain_attributes
from breakgraph.tools.verifying.tape import record
from breakgraph.verification import StateKeeper

__all__ = ["ForwardRuns"]


class ForwardRuns:
    """A forward over static inputs, and the step that is at hand.

    Args:
        forward: The forward.
        example: Round -> inputs.
        live: Round -> live data.
        valid_rows: Round -> real rows.

    Attributes:
        repeats: Whether every round had the inputs of the capture.
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
        self._first: dict[str, torch.Tensor] = {}
        self.repeats = True

    def __enter__(self) -> ForwardRuns:
        self.begin(0)
        self._rows = None  # a capture has all rows
        self._static = {name: tensor.clone() for name, tensor in self._given.items()}
        self._first = self._given
        return self

    def __exit__(self, *_: object) -> None:
        self._graph.reset()

    def begin(self, number: int) -> None:
        """Take the inputs of a round.

        Args:
            number: Of the round.
        """
        given, data = self._example(number), {} if self._live is None else self._live(number)
        _check_step(given, data, number=number)
        self._given = {name: tensor.clone() for name, tensor in given.items()}
        self._data = dict(data)
        if self._first:
            self.repeats &= all(
                name in self._first and torch.equal(self._first[name], tensor) for name, tensor in self._given.items()
            )
        self._rows = self._valid_rows(number) if self._valid_rows is not None else None

    @property
    def padded(self) -> bool:
        """Whether the step at hand has fewer rows than were captured."""
        return self._rows is not None and self._rows != self._graph.padded_rows

    def capture(
        self,
        *,
        pool: GraphPool,
        keeper: StateKeeper,
        generators: Sequence[torch.Generator],
        modules: Sequence[torch.nn.Module],
    ) -> Case:
        """Warm up, note what the forward does, and capture it.

        Args:
            pool: Where the graph goes.
            keeper: Saves and restores the state.
            generators: The caller's own.
            modules: Whose attributes and tensors have names.
        """
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
            check=AddressWatch(modules, tensors=self._static).check,
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


def _check_step(given: object, data: object, *, number: int) -> None:
    tensors = isinstance(given, Mapping) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
        for name, value in given.items()
    )
    if not tensors or not isinstance(given, Mapping):
        raise ConfigError(
            f"example({number}) gave {_kinds(given)}; expected a mapping from names to dense tensors.",
            why="They are the inputs of the forward, by name, and are copied into its static buffers.",
            fix='Return {"x": tensor}; what is no tensor is live data: live=.',
        )
    if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
        raise ConfigError(
            f"live({number}) gave {_kinds(data)}; expected a mapping from names to values.",
            why="Breaks and the forward receive live data by name.",
            fix='Return {"lengths": lengths}.',
        )
    if both := sorted(given.keys() & data.keys()):
        raise ConfigError(
            f"{both} are inputs and live data; expected one of the two.",
            why="The forward gets each name once.",
            fix="Rename one of them.",
        )


def _kinds(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {type(item).__name__}" for name, item in value.items()) + "}"
    return f"a {type(value).__name__}"
