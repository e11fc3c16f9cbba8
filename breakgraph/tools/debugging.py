"""Replays made easy to look into: eager in the graph's place, kernel by kernel, awaited step by step, named in profiles."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from breakgraph.backends import Backend
from breakgraph.capture import BreakableCUDAGraph
from breakgraph.errors import ConfigError, add_note
from breakgraph.replay_program import Step, StepKind
from breakgraph.runner import GraphRunner
from breakgraph.step_observer import Run, StepObserver

__all__ = ["DebugMode", "debugging"]


class DebugMode(enum.Enum):
    """How replays run inside `debugging`."""

    EAGER = "eager"
    """Of a runner: everything eager through the same path, in the static buffers and at the padded shape of the graph."""
    SYNCHRONISE = "synchronise"
    """The device is awaited behind each step, so that an error of the device is raised at the step that made it."""
    NVTX = "nvtx"
    """Each step is a range, of NVTX on CUDA and of torch's profiler, named after it."""


@contextmanager
def debugging(
    subject: BreakableCUDAGraph | GraphRunner[Any],
    *,
    modes: Collection[DebugMode | str] = (),
    eager_segments: Collection[int] = (),
) -> Iterator[None]:
    """Look into the replays inside a `with` block; afterwards all is as before.

    Args:
        subject: A graph, or a runner: then all graphs that it has now.
        modes: `"eager"`, `"synchronise"`, `"nvtx"`, together as you like.
        eager_segments: Places in `graph.steps` of segments whose recorded kernels are launched one by one, in the order of the
            capture and on one stream, in place of the graph. What runs at the same time in the graph runs in turn: where that
            gives other numbers, a dependency is missing. With `"synchronise"` each kernel is awaited, and one that fails is
            named. Arguments stay those of the capture, since a segment has no Python to run.

    Yields:
        Nothing.

    Raises:
        ConfigError: An unknown mode, `"eager"` for a bare graph, which does not know its forward, or a place that is no
            segment.

    Cost: replays inside are slow; afterwards there is none.
    """
    graphs = [subject] if isinstance(subject, BreakableCUDAGraph) else None
    if graphs is None:
        if not isinstance(subject, GraphRunner):
            raise ConfigError(
                f"debugging() got a {type(subject).__name__}; expected a BreakableCUDAGraph or a runner.",
                why="Their replays are what it looks into.",
                fix="Pass the graph, or the PrefillRunner or DecodeRunner.",
            )
        graphs = list(subject.graphs.values())
    wanted = {_mode(mode) for mode in _listed(modes, name="modes", example="modes=('synchronise',)")}
    places = frozenset(map(_place, _listed(eager_segments, name="eager_segments", example="eager_segments=(0, 2)")))
    with ExitStack() as stack:
        if DebugMode.EAGER in wanted:
            if not isinstance(subject, GraphRunner):
                raise ConfigError(
                    f"debugging({subject.name}, modes=('eager',)): a bare graph does not know the forward it was captured from.",
                    why="Eager in its place is a run of that forward.",
                    fix="Run the forward in eager_step(live=...), use a runner, or name eager_segments=.",
                )
            stack.enter_context(subject.launch_eagerly())
        for graph in graphs:
            stack.enter_context(graph.observed(*_observers(graph, wanted, places)))
        yield


def _observers(graph: BreakableCUDAGraph, modes: set[DebugMode], places: frozenset[int]) -> Iterator[StepObserver]:
    backend = None if graph.pool is None else graph.pool.backend
    steps = graph.steps
    wrong = sorted(at for at in places if not 0 <= at < len(steps) or steps[at].kind is not StepKind.SEGMENT)
    if wrong:
        there = [index for index, step in enumerate(steps) if step.kind is StepKind.SEGMENT]
        raise ConfigError(
            f"eager_segments={sorted(places)}: {wrong} are no segments of {graph.name}; it has segments at {there}.",
            why="Only a segment holds recorded kernels; breaks are eager anyway.",
            fix="See graph.explain() for the places.",
        )
    if backend is None:
        return
    if DebugMode.NVTX in modes:
        yield _Ranges(backend)
    if DebugMode.SYNCHRONISE in modes:
        yield _Awaited(backend)
    if places:
        yield _OneByOne(places, awaited=backend.synchronize if DebugMode.SYNCHRONISE in modes else None)


def _mode(mode: DebugMode | str) -> DebugMode:
    try:
        return DebugMode("synchronise" if mode == "synchronize" else mode)
    except ValueError:
        raise ConfigError(
            f"modes has {mode!r}; expected some of {[known.value for known in DebugMode]}.",
            why="It decides how replays run.",
            fix="Pass modes=('synchronise',).",
        ) from None


def _listed(values: object, *, name: str, example: str) -> Iterable[Any]:
    if isinstance(values, DebugMode):
        return [values]
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(
            f"{name}={values!r}; expected several of them, in a list or tuple.",
            why="They can be combined.",
            fix=f"Write {example}.",
        )
    return values


def _place(value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(
        f"eager_segments has {value!r}; expected whole numbers.",
        why="They are places in graph.steps.",
        fix="See graph.explain() for the places.",
    )


def _where(step: Step, index: int) -> str:
    return f"step {index} ({step.kind.value} {step.name}, {step.line})"


class _Awaited(StepObserver):
    """Waits for the device behind each step.

    Args:
        backend: Waits.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Run it and wait."""

        def awaited() -> Any:
            status = run()
            try:
                self._backend.synchronize()
            except BaseException as error:
                add_note(error, f"found when the device was awaited behind {_where(step, index)}")
                raise
            return status

        return awaited


class _Ranges(StepObserver):
    """Names each step in profiles.

    Args:
        backend: Tells whether there is NVTX.
    """

    def __init__(self, backend: Backend) -> None:
        self._nvtx = backend.device.type == "cuda"

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Run it in a range."""
        label = f"breakgraph {index} {step.kind.value} {step.name}"

        def named() -> Any:
            with ExitStack() as stack:
                if self._nvtx:
                    torch.cuda.nvtx.range_push(label)
                    stack.callback(torch.cuda.nvtx.range_pop)
                stack.enter_context(torch.profiler.record_function(label))
                return run()

        return named


class _OneByOne(StepObserver):
    """Launches the kernels of chosen segments one by one.

    Args:
        places: Of these segments.
        awaited: Waits for the device, behind each kernel; None: nothing waits.
    """

    def __init__(self, places: frozenset[int], *, awaited: Callable[[], None] | None) -> None:
        self._places = places
        self._awaited = awaited

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Replace the launch of a chosen segment."""
        if index not in self._places or step.segment is None:
            return run
        pieces = step.segment.pieces()

        def one_by_one() -> None:
            for number, piece in enumerate(pieces):
                try:
                    piece.run()
                    if self._awaited is not None:
                        self._awaited()
                except BaseException as error:
                    at = f", {piece.line}" if piece.line else ""
                    add_note(error, f"raised by kernel {number} of {_where(step, index)}: {piece.name}{at}")
                    raise

        return one_by_one
