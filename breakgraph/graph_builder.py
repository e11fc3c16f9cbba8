"""How a runner makes the graph of one key: warm-up, capture into shared memory, and the proof against eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
from breakgraph.errors import CaptureError, ConfigError
from breakgraph.input_set import InputSet
from breakgraph.kept_tensors import kept_since
from breakgraph.output_arena import OutputArena
from breakgraph.padding_limit import Times, median_seconds
from breakgraph.replay_context import eager_step
from breakgraph.staging import InputStage, Staged
from breakgraph.static_buffers import Extent
from breakgraph.verification import StateKeeper, Tolerance, own, snapshot
from breakgraph.work import CapturedKey, Example, Rehearsal, Target, Work, signatures

__all__ = ["GraphBuilder"]

_LOG = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class GraphBuilder(Generic[K]):
    """Makes and proves the graphs of one runner; owns their pool, static buffers and output memory.

    Args:
        work: What to run.
        inputs: Declared inputs.
        tolerance: Used where eager differs from itself.
        extent: Real sizes of a step, from its key and its inputs.

    Attributes:
        kept: What a capture made in the pool and the model still holds. Every graph of the pool could overwrite it, and
            eager steps read it too, so none may serve.
    """

    def __init__(
        self,
        work: Work[K],
        *,
        inputs: InputSet,
        tolerance: Tolerance | None,
        extent: Callable[[K, Mapping[str, torch.Tensor]], Extent],
    ) -> None:
        self.work = work
        self.inputs = inputs
        self.tolerance = tolerance
        self.stage = InputStage(inputs)
        self._extent = extent
        self._outputs = OutputArena(inputs.device)
        self.keeper = StateKeeper(self.declared_state, generators=work.generators, device=inputs.device)
        self.kept: str | None = None
        backend = "cuda" if inputs.device.type == "cuda" else "emulated"
        self.pool = GraphPool(backend=backend, device=inputs.device)

    @property
    def declared_state(self) -> tuple[object, ...]:
        """What a capture and its proof put back; device-fed inputs are written by the steps, so they are state anyway."""
        return (*self.work.state, *self.inputs.device_fed.values())

    @property
    def nbytes(self) -> int:
        """Device memory that graphs hold: pool and bridges. Static inputs and results are sized by the largest key."""
        return self.pool.backend.pool_bytes() + self.pool.arena.nbytes

    def fresh(self) -> GraphBuilder[K]:
        """Another one for the same work, with a pool of its own."""
        return GraphBuilder(self.work, inputs=self.inputs, tolerance=self.tolerance, extent=self._extent)

    def generators_kept(self) -> AbstractContextManager[None]:
        """Put the default and the declared random generators back at the end of a `with` block."""
        return self.keeper.generators_kept()

    def warm_up(self, target: Target[K], *, other: K | None = None) -> None:
        """Run a key eagerly and note what it returns; state and generators are put back.

        Args:
            target: The key.
            other: A key with another number of tokens, where only that tells rows of tokens from rows of requests.
        """
        with self.pool.on_capture_stream(), torch.no_grad(), self.keeper.preserved():
            example, real = self.example(target.key)
            self._load(target, example)
            result = self.eager(target, example.live, real=real)
            second = None if other is None else self._at_other_size(target, other)
            self._outputs.measure(target.key, result, extent=target.extent, where=target.where, other=second)

    def capture(self, target: Target[K]) -> CapturedKey[K]:
        """Capture a key that was warmed up.

        Args:
            target: The key.

        Returns:
            The graph, not yet proven.
        """
        outputs = self._outputs.views(target.key, extent=target.extent, where=target.where)
        graph = BreakableCUDAGraph(name=target.where)
        before = set(self.pool.backend.live_blocks())
        with torch.no_grad():
            example, _ = self.example(target.key)
            self._load(target, example)
            seen = (snapshot(example.inputs, most_bytes=target.layout.nbytes), snapshot(example.live))
            capture = BreakableCUDAGraphCapture(
                graph,
                pool=self.pool,
                live=example.live,
                state=self.keeper.state,
                generators=self.work.generators,
                padded_rows=target.extent.tokens,
                expect_breaks=self.work.expect_breaks,
                barrier=None if self.work.together is None else self.work.together.barrier,
            )
            with self.work.swapped_in(target.key, example.live), capture:
                outputs.fill(self.work.forward(**self.stage.buffers(target.layout), **example.live))
        self._refuse_kept(graph, before=before)
        return CapturedKey(target, graph, outputs, example.live, seen, signatures=signatures(example.live))

    def _refuse_kept(self, graph: BreakableCUDAGraph, *, before: set[tuple[int, int]]) -> None:
        """Refuse a graph whose segments made a tensor that is still held: results were copied out, so a model keeps it."""
        kept = kept_since(before, live=self.pool.backend.live_blocks)
        if kept is None:
            return
        self.kept = f"{graph.name} made: {kept}"
        graph.reset()
        raise CaptureError(
            f"something keeps, after the capture, what a segment of {self.kept}.",
            why="Graphs of one pool share memory: replaying another one would overwrite it, and whoever reads it later "
            "would get its numbers, silently.",
            fix="Make it before the capture (in __init__, or on the first eager call for every size), or in a break.",
        )

    def replay(self, captured: CapturedKey[K], *, live: Mapping[str, Any], real: Extent, staged: Staged) -> Any:
        """Replay a graph on a staged step.

        Args:
            captured: The graph.
            live: Live data of the step.
            real: Real sizes of the step.
            staged: Its inputs.

        Returns:
            The result's real rows: views of the arena.
        """
        before = partial(self.commit, captured.target, live, staged)
        with self.work.swapped_in(captured.target.key, live):
            captured.graph.replay(live, valid_rows=real.tokens, before=before)
        return captured.outputs.narrow(real)

    @contextmanager
    def rehearsal(self, captured: CapturedKey[K], *, smaller: K | None = None) -> Iterator[Rehearsal]:
        """Runs that count for nothing: declared state and generators are put back at the end.

        Args:
            captured: The graph.
            smaller: A key of fewer rows that it serves, whose example is run; None: its own.

        Yields:
            What runs one example of its key, planning and staging included.
        """
        example, real = self.example(captured.target.key if smaller is None else smaller)
        with self.pool.on_capture_stream(), torch.no_grad(), self.keeper.preserved():
            yield Rehearsal(
                graph=captured.graph,
                rows=real.tokens,
                keeper=self.keeper,
                replay=partial(self.replay_example, captured, example, real),
                eager=partial(self.twin, captured, example, real),
            )

    def times(self, captured: CapturedKey[K], *, runs: int = 3) -> Times:
        """Measure an eager step and a replay, of all rows of a key, each with its planning; state is put back.

        Args:
            captured: The graph.
            runs: How often each is measured, after one run that is not; the median counts. Syncs the host each time.

        Returns:
            Both times.
        """
        key = captured.target.key
        example, real = self.example(key)
        eager, idle = partial(self._unpadded, key, example, real), self.pool.backend.synchronize
        # On the capture stream, where the pool launched last: that is the one `synchronize` waits for.
        with self.pool.on_capture_stream(), torch.no_grad(), self.keeper.preserved():
            replay = median_seconds(partial(self.replay_example, captured, example, real), idle=idle, runs=runs)
            return Times(eager=median_seconds(eager, idle=idle, runs=runs), replay=replay)

    def run_staged(self, captured: CapturedKey[K], *, live: Mapping[str, Any], real: Extent, staged: Staged) -> Any:
        """Run a step eagerly that was staged for a graph which may not be used any more.

        Args:
            captured: The graph.
            live: Live data of the step.
            real: Real sizes of the step.
            staged: Its inputs.

        Returns:
            The result's real rows, the caller's own.
        """
        with torch.no_grad(), self.pool.used_by(f"an eager step of {captured.target.where}"):
            self.commit(captured.target, live, staged)
            return own(captured.outputs.cut(self.eager(captured.target, live, real=real, around=False), real))

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
        """Do the caller's host work of a step: see `Work.plan`.

        Args:
            key: Key of the graph; of an eager step, the key before rounding.
            live: Live data of the step.
            padded_rows: Token rows that the step computes.
        """
        if self.work.plan is not None:
            self.work.plan(key, live, padded_rows)

    def commit(self, target: Target[K], live: Mapping[str, Any], staged: Staged) -> None:
        """Copy a staged step into the static buffers and run the hooks; only while the pool is held.

        Args:
            target: The key of the graph.
            live: Live data of the step.
            staged: Its inputs.
        """
        self.stage.commit(staged)
        for hook in self.work.hooks:
            hook(target.key, live)

    def example(self, key: K) -> tuple[Example, Extent]:
        """A new example and its real sizes, checked."""
        example = self.work.example(key)
        if not isinstance(example, Example):
            raise ConfigError(
                f"example({key}) returned a {type(example).__name__}; expected an Example.",
                why="It gives the inputs and the live data of a warm-up, a capture or a proof.",
                fix="Return Example(inputs={...}, live={...}).",
            )
        try:
            real = self._extent(key, example.inputs)
            self.inputs.check(example.inputs, real, where=f"the example of {key}")
        except ValueError as error:
            error.add_note("an example has all rows of its key: warm-up and capture run without padded tokens")
            raise
        return example, real

    def _at_other_size(self, target: Target[K], key: K) -> tuple[Any, Extent] | None:
        """What forward returns for another number of tokens."""
        try:
            example, real = self.example(key)
            return self._unpadded(key, example, real), real
        except Exception as error:
            if not self.inputs.has_requests:
                return None  # as documented, then: the first axis is that of the tokens
            raise CaptureError(
                f"{target.where} has as many tokens as requests, {target.extent.tokens}, and forward could not be run "
                f"for {key} to tell rows of one from rows of the other ({type(error).__name__}: {error}).",
                why="Results are cut to the real tokens, or to the real requests.",
                fix="Let example() make inputs for any key, or choose a max_requests that is no bucket.",
            ) from error

    def _unpadded(self, key: K, example: Example, real: Extent) -> Any:
        self.plan(key, example.live, padded_rows=real.tokens)
        with self.work.swapped_in(key, example.live):  # the model's own cache is not for examples
            return self.run_unpadded(self.inputs.ready(example.inputs, real), example.live, extent=real)

    def _load(self, target: Target[K], example: Example) -> None:
        """Plan an example and copy it into the static buffers."""
        self.plan(target.key, example.live, padded_rows=target.extent.tokens)
        self.stage.commit(self.stage.stage(example.inputs, target.layout))

    def replay_example(self, captured: CapturedKey[K], example: Example, real: Extent) -> Any:
        """Plan, stage and replay an example.

        Args:
            captured: The graph.
            example: Of its key, or of a smaller one.
            real: Its sizes.

        Returns:
            The result's real rows: views of the arena.
        """
        target = captured.target
        self.plan(target.key, example.live, padded_rows=target.extent.tokens)
        staged = self.stage.stage(example.inputs, target.layout)
        return self.replay(captured, live=example.live, real=real, staged=staged)

    def twin(self, captured: CapturedKey[K], example: Example, real: Extent) -> Any:
        """Plan and stage an example and run it eagerly, over the same static buffers and at the padded shape.

        Args:
            captured: The graph.
            example: Of its key, or of a smaller one.
            real: Its sizes.

        Returns:
            The result's real rows.
        """
        target = captured.target
        self.plan(target.key, example.live, padded_rows=target.extent.tokens)
        self.commit(target, example.live, self.stage.stage(example.inputs, target.layout))
        return captured.outputs.cut(self.eager(target, example.live, real=real), real)

    def eager(self, target: Target[K], live: Mapping[str, Any], *, real: Extent, around: bool = True) -> Any:
        """The eager twin: static buffers, padded shapes, marked functions as in a replay."""
        swapped = self.work.swapped_in(target.key, live) if around else nullcontext()
        with swapped, eager_step(live, valid_rows=real.tokens, padded_rows=target.extent.tokens):
            return self.work.forward(**self.stage.buffers(target.layout), **live)
