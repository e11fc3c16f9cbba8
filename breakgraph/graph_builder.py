"""How a runner makes the graph of one key: warm-up, capture into shared memory, and the proof against eager."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
from breakgraph.output_arena import OutputArena, OutputViews
from breakgraph.replay_context import eager_step
from breakgraph.staging import InputStage, Layout
from breakgraph.static_buffers import Extent, InputSet
from breakgraph.verification import StateKeeper, Tolerance, Verdict, judge

__all__ = ["CapturedKey", "Example", "GraphBuilder", "Target", "Work"]

K = TypeVar("K", bound=Hashable)


@attrs.frozen
class Example:
    """Inputs and live data for one warm-up, capture or verification.

    Attributes:
        inputs: One tensor per copied input, with all rows of the key (no padding).
        live: Live data for these rows.
    """

    inputs: Mapping[str, torch.Tensor]
    live: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Work(Generic[K]):
    """What a runner runs.

    Attributes:
        forward: Called as `forward(**inputs, **live)`; returns tensors with the row axis in front.
        example: Returns inputs and live data for a key, other values at each call: the second call of a key
            is what its graph is verified with, and equal inputs would prove little.
        state: What forward mutates: tensors, or objects with `save()` and `restore(saved)`.
        generators: The caller's own random generators that forward draws from.
        plan: Host work of a step, called as `plan(key, live, padded_rows)` before it is launched; None: nothing.
        hooks: Called as `hook(key, live)` after the copy-in and before each replay.
        expect_breaks: Number of breaks, or names and counts, that each graph must have.
    """

    forward: Callable[..., Any]
    example: Callable[[K], Example]
    state: Sequence[Any] = ()
    generators: Sequence[torch.Generator] = ()
    plan: Callable[[K, Mapping[str, Any], int], None] | None = None
    hooks: Sequence[Callable[[K, Mapping[str, Any]], None]] = ()
    expect_breaks: int | Mapping[str, int] | None = None


@attrs.frozen(eq=False)
class Target(Generic[K]):
    """A key to capture: its name for messages, its padded sizes, and where its inputs lie."""

    key: K
    where: str
    extent: Extent
    layout: Layout


@attrs.define(eq=False)
class CapturedKey(Generic[K]):
    """A captured graph with its memory.

    Attributes:
        target: The key.
        graph: Segments and breaks.
        outputs: Where its results lie.
        example: What it was captured with, until it is proven.
        addresses_checked: Whether a replay was preceded by the check of addresses.
    """

    target: Target[K]
    graph: BreakableCUDAGraph
    outputs: OutputViews
    example: Example | None = None
    addresses_checked: bool = False


class GraphBuilder(Generic[K]):
    """Makes and proves the graphs of one runner; owns their pool, static buffers and output memory.

    Args:
        work: What to run.
        inputs: Declared inputs.
        tolerance: Used where eager differs from itself.
    """

    def __init__(self, work: Work[K], *, inputs: InputSet, tolerance: Tolerance | None) -> None:
        self.work = work
        self.inputs = inputs
        self.tolerance = tolerance
        self.stage = InputStage(inputs)
        self._outputs = OutputArena(inputs.device)
        # Device-fed tensors are written by the steps themselves, so they are state whether or not it says so.
        self._keeper = StateKeeper(
            (*work.state, *inputs.device_fed.values()), generators=work.generators, device=inputs.device
        )
        backend = "cuda" if inputs.device.type == "cuda" else "emulated"
        self.pool = GraphPool(backend=backend, device=inputs.device)

    def warm_up(self, target: Target[K]) -> None:
        """Run a key eagerly and note what it returns; state and generators are put back.

        Args:
            target: The key.
        """
        with self.pool.on_capture_stream(), torch.no_grad(), self._keeper.preserved():
            example = self._load(target)
            self._outputs.measure(
                target.key, self._eager(target, example.live), extent=target.extent, where=target.where
            )

    def capture(self, target: Target[K]) -> CapturedKey[K]:
        """Capture a key that was warmed up.

        Args:
            target: The key.

        Returns:
            The graph, not yet proven.
        """
        outputs = self._outputs.views(target.key, extent=target.extent, where=target.where)
        graph = BreakableCUDAGraph(name=target.where)
        with torch.no_grad():
            example = self._load(target)
            capture = BreakableCUDAGraphCapture(
                graph,
                pool=self.pool,
                live=example.live,
                state=self._keeper.state,
                generators=self.work.generators,
                padded_rows=target.extent.tokens,
                expect_breaks=self.work.expect_breaks,
            )
            buffers = self.stage.buffers(target.layout)
            with capture:
                outputs.fill(self.work.forward(**buffers, **example.live))
        return CapturedKey(target, graph, outputs, example)

    def verify(self, captured: CapturedKey[K]) -> tuple[Verdict, bool]:
        """Prove a graph with a second example; state and generators are put back.

        Args:
            captured: The graph.

        Returns:
            The verdict, and whether the second example had other inputs than the one of the capture.
        """
        target = captured.target
        example = self.work.example(target.key)
        first, captured.example = captured.example, None

        def replay() -> Any:
            self._load(target, example)
            for hook in self.work.hooks:
                hook(target.key, example.live)
            captured.graph.replay(example.live, valid_rows=target.extent.tokens)
            return captured.outputs.narrow(target.extent)

        def eager() -> Any:
            self._load(target, example)
            return self._eager(target, example.live)

        with self.pool.on_capture_stream(), torch.no_grad():
            verdict = judge(self._keeper, replay=replay, eager=eager, tolerance=self.tolerance)
        return verdict, first is not None and not _same_inputs(first.inputs, example.inputs)

    def run_proven(
        self, captured: CapturedKey[K], *, live: Mapping[str, Any], real: Extent, load: Callable[[], None]
    ) -> tuple[Any, str | None]:
        """Compare the replay of a step with its eager twin, then run the one that may be trusted.

        Args:
            captured: The graph.
            live: Live data of the step.
            real: Real sizes of the step.
            load: Puts the step's inputs into the static buffers and runs the hooks.

        Returns:
            The result's real rows, and what differs: then the result is eager's.
        """

        def replay() -> Any:
            load()
            captured.graph.replay(live, valid_rows=real.tokens)
            return captured.outputs.narrow(real)

        def eager() -> Any:
            load()
            return captured.outputs.cut(self._eager(captured.target, live, valid_rows=real.tokens), real)

        with torch.no_grad():
            verdict = judge(self._keeper, replay=replay, eager=eager, tolerance=self.tolerance)
            return (replay() if verdict.mismatch is None else eager()), verdict.mismatch

    def run_unpadded(self, inputs: Mapping[str, torch.Tensor], live: Mapping[str, Any], *, extent: Extent) -> Any:
        """Run a step eagerly on its own tensors, without padding.

        Args:
            inputs: One tensor per declared input.
            live: Live data.
            extent: Real sizes of the step.

        Returns:
            What forward returned.
        """
        with torch.no_grad(), eager_step(live, valid_rows=extent.tokens, padded_rows=extent.tokens):
            return self.work.forward(**inputs, **live)

    def plan(self, key: K, live: Mapping[str, Any], *, padded_rows: int) -> None:
        """Do the caller's host work of a step.

        Args:
            key: Key of the graph; of an eager step, the key before rounding.
            live: Live data of the step.
            padded_rows: Token rows that the step computes.
        """
        if self.work.plan is not None:
            self.work.plan(key, live, padded_rows)

    def _load(self, target: Target[K], example: Example | None = None) -> Example:
        """Plan an example and copy it into the static buffers; a new one unless one is given."""
        example = self.work.example(target.key) if example is None else example
        try:
            self.inputs.check(example.inputs, target.extent, where=f"the example of {target.where}")
        except ValueError as error:
            error.add_note("an example has all rows of its key: warm-up and capture run without padding")
            raise
        self.plan(target.key, example.live, padded_rows=target.extent.tokens)
        self.stage.commit(self.stage.stage(example.inputs, target.layout))
        return example

    def _eager(self, target: Target[K], live: Mapping[str, Any], *, valid_rows: int | None = None) -> Any:
        """The eager twin: static buffers, padded shapes, marked functions as in a replay."""
        rows = target.extent.tokens
        with eager_step(live, valid_rows=rows if valid_rows is None else valid_rows, padded_rows=rows):
            return self.work.forward(**self.stage.buffers(target.layout), **live)


def _same_inputs(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
