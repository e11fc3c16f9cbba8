"""`BreakableCUDAGraph`: a sealed graph, its replay, and what it tells about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import attrs
import torch

from breakgraph.backends import Segment
from breakgraph.errors import CaptureIllegalError, LiveDataError, NoGraphError
from breakgraph.explanation import Explanation, StepTime
from breakgraph.graph_pool import GraphPool
from breakgraph.recorder import Recorder
from breakgraph.replay_context import (
    Frame,
    MarkedCall,
    ReplayContext,
    check_live,
    check_valid_rows,
    current_frame,
    install,
)
from breakgraph.replay_program import BreakCall, Modes, Step, StepKind
from breakgraph.step_explainer import explained
from breakgraph.step_observer import StepObserver
from breakgraph.structure import storage_address

__all__ = ["BreakableCUDAGraph", "GraphStats"]


@attrs.frozen
class GraphStats:
    """Counts and bytes of one graph.

    Attributes:
        segments: Non-empty segments.
        breaks: Calls of marked functions.
        replays: Replays begun.
        bridge_bytes: Bytes of bridges it uses; graphs of one pool share them.
        held_bytes: Bytes of break inputs that the graph keeps alive (static buffers, parameters, caches).
        capture_seconds: Wall time of the capture.
        pool_bytes: Bytes of the pool, which the graphs of a runner share.
        executable_bytes: Device memory that the driver took for the executables, in its steps of 2 MiB.
        live_bytes: Bytes of the pool that tensors hold now: results that callers keep, and what a model keeps.
    """

    segments: int
    breaks: int
    replays: int
    bridge_bytes: int
    held_bytes: int
    capture_seconds: float
    pool_bytes: int
    executable_bytes: int
    live_bytes: int


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ReplayFrame(Frame):
    """While a graph replays, all Python that runs is inside a break, so a marked function is a plain call."""

    def __init__(self, context: ReplayContext) -> None:
        self.context = context

    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call.call(args, kwargs)

    def on_split(self) -> None:
        return None


@attrs.define(eq=False)
class Program:
    """A sealed graph: everything that a replay needs. Only the stream that its launches are bound to may change."""

    steps: tuple[Step, ...]
    live_names: frozenset[str]
    modes: Modes
    frame: ReplayFrame
    capture_seconds: float
    executable_bytes: int
    has_breaks: bool
    runs: tuple[Callable[[], Any], ...] = ()
    bound_to: int | None = None

    @classmethod
    def seal(cls, recorder: Recorder, *, capture_seconds: float, executable_bytes: int) -> Program:
        """Freeze what a recorder holds; hoisted breaks move to the front, in their own order."""
        hoisted = [step for step in recorder.steps if step.kind is StepKind.HOISTED]
        ordered = (*hoisted, *(step for step in recorder.steps if step.kind is not StepKind.HOISTED))
        return cls(
            steps=ordered,
            live_names=frozenset(recorder.context.live),
            modes=recorder.modes,
            frame=ReplayFrame(recorder.replay_context),
            capture_seconds=capture_seconds,
            executable_bytes=executable_bytes,
            has_breaks=any(step.call is not None for step in ordered),
        )

    def bind(self, stream: int, observers: tuple[StepObserver, ...]) -> None:
        """Bind all launches to a stream, each wrapped by the observers."""
        runs = [step.bind() for step in self.steps]
        for observer in reversed(observers):
            runs = [observer.wrap(step, index=i, run=runs[i]) for i, step in enumerate(self.steps)]
        self.runs = tuple(runs)
        self.bound_to = stream

    def run(self) -> None:
        """Run the steps in order."""
        for run in self.runs:
            status = run()
            if status is not None and status[0]:
                raise RuntimeError(f"the launch of a segment failed: CUDA error {int(status[0])}")


class BreakableCUDAGraph:
    """A forward recorded as segments with breaks between them.

    Args:
        name: For messages and `explain()`, such as `prefill[512]`.
    """

    def __init__(self, *, name: str = "graph") -> None:
        self.name = name
        self._pool: GraphPool | None = None
        self._program: Program | None = None
        self._replays = 0
        self._observers: tuple[StepObserver, ...] = ()

    @property
    def sealed(self) -> bool:
        """True where a capture has succeeded and the graph was not reset since."""
        return self._program is not None

    @property
    def pool(self) -> GraphPool | None:
        """The pool of the capture: pass it to other captures so that they share memory."""
        return self._pool

    @property
    def steps(self) -> tuple[Step, ...]:
        """Segments and breaks in the order of a replay."""
        return () if self._program is None else self._program.steps

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Non-empty segments."""
        return tuple(step.segment for step in self.steps if step.segment is not None and step.segment.size)

    @property
    def breaks(self) -> tuple[BreakCall, ...]:
        """One for each call of a marked function."""
        return tuple(step.call for step in self.steps if step.call is not None)

    @property
    def padded_rows(self) -> int | None:
        """Captured length of the token axis; None where no break and no caller told it, or nothing is captured."""
        return None if self._program is None else self._program.frame.context.padded_rows

    @property
    def executable_bytes(self) -> int:
        """Device memory that the driver took for the executables, in its steps of 2 MiB."""
        return 0 if self._program is None else self._program.executable_bytes

    @property
    def instantiate_seconds(self) -> float:
        """Host time that the capture spent on making segments launchable."""
        return sum(segment.instantiate_seconds for segment in self.segments)

    def replay(
        self,
        live: Mapping[str, Any] | None = None,
        *,
        valid_rows: int | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Run the graph: launch segments and run breaks in order, on the current stream.

        Outputs are in the tensors that the capture's body made; they are valid until the next replay of this pool.

        Args:
            live: A value for every live name, no other names.
            valid_rows: Real rows; None means every row.
            before: Called when the pool is held and before the first step: the place to refill static buffers, since
                until then another replay may still read them.

        Raises:
            NoGraphError: Nothing was captured.
            LiveDataError: Names are missing or unknown, or `valid_rows` does not fit.
            ConcurrentReplayError: The pool is in use.
            CopyBackError: A break broke its contract.

        Cost: no host sync and no allocation of its own; about 2-3 us of host time a segment on an H200's host.
        """
        if self._pool is not None and (there := self._pool.backend.elsewhere()) is not None:
            with there:
                self.replay(live, valid_rows=valid_rows, before=before)
            return
        program = self._program
        if program is None:
            raise NoGraphError(
                f"{self.name} was replayed, and it holds no captured graph.",
                why="There is nothing to run.",
                fix="Capture it first: with BreakableCUDAGraphCapture(graph): ...",
            )
        check_live(live, where=self.name)
        live = _NOTHING if live is None else live
        context = program.frame.context
        if live.keys() != program.live_names:
            self._refuse_live(live, program.live_names)
        if valid_rows is not None:
            check_valid_rows(valid_rows, padded_rows=context.padded_rows, where=self.name)
        outer = current_frame()
        if outer is not None and outer.is_in_segment:
            raise CaptureIllegalError(
                f"{self.name} was replayed inside a segment of a capture.",
                why="A graph cannot hold another graph's breaks.",
                fix="Call it inside a function marked with @eager_on_graph, or capture the inner forward in place.",
            )
        pool = self._pool
        assert pool is not None
        pool.acquire(self)
        previous = install(program.frame)
        self._replays += 1
        try:
            context.live = live
            context.valid_rows = valid_rows
            context.next_step()
            pool.backend.replaying()
            if pool.poison:
                pool.backend.poison()
            if before is not None:
                before()
            if program.bound_to != pool.backend.replay_stream:
                program.bind(pool.backend.replay_stream, self._observers)
            modes = program.modes
            if not program.has_breaks or modes.in_force():  # launches run no Python that could ask for a mode
                program.run()
            elif modes.in_force_but_for_grad():
                with torch.set_grad_enabled(modes.grad):
                    program.run()
            else:
                with modes.entered():
                    program.run()
        finally:
            context.live = _NOTHING
            install(previous)
            pool.release()

    def _refuse_live(self, live: Mapping[str, Any], names: frozenset[str]) -> None:
        missing, unknown = sorted(names - live.keys()), sorted(live.keys() - names)
        faults = ([f"is missing {missing}"] if missing else []) + ([f"has unknown names {unknown}"] if unknown else [])
        fault = " and ".join(faults)
        raise LiveDataError(
            f"{self.name}: live data {fault}; this graph has {sorted(names) or 'none'}.",
            why="A break would see the step of the capture, or data that you meant for one would reach none.",
            fix="Pass live={...} with exactly these names, or declare the name in @eager_on_graph(live=...).",
        )

    def reset(self) -> None:
        """Give segments and held tensors back; the graph can be captured again. Cost: a host sync.

        The memory goes back to the pool, for its next capture; a pool that is dropped gives it to torch.

        Raises:
            ConcurrentReplayError: A replay or capture of the pool is running, in another thread or around this call.
        """
        if self._program is None or self._pool is None:
            return
        with self._pool.used_by(f"a reset of {self.name}"):
            program, self._program = self._program, None
            # The driver would let a running executable finish, but its bridges and blocks could be given away.
            self._pool.backend.synchronize()
            for step in program.steps:
                if step.segment is not None:
                    step.segment.reset()

    def stats(self) -> GraphStats:
        """Counts and bytes."""
        held: dict[int, int] = {}
        for call in self.breaks:
            for value in (*call.bound.args, *call.bound.kwargs.values()):
                if isinstance(value, torch.Tensor) and self._pool and not self._pool.backend.made_by_a_segment(value):
                    address = storage_address(value)
                    held[address] = value.untyped_storage().nbytes() if address else 0
        return GraphStats(
            segments=len(self.segments),
            breaks=len(self.breaks),
            replays=self._replays,
            bridge_bytes=sum(call.contract.bridge_bytes for call in self.breaks),
            held_bytes=sum(held.values()),
            capture_seconds=0.0 if self._program is None else self._program.capture_seconds,
            pool_bytes=0 if self._pool is None else self._pool.backend.pool_bytes(),
            executable_bytes=self.executable_bytes,
            live_bytes=0 if self._pool is None else sum(end - at for at, end in self._pool.backend.live_blocks()),
        )

    def explain(self, *, small: int = 4, times: Mapping[int, StepTime] | None = None) -> Explanation:
        """Its steps: kind, name, the line where the capture met each, kernels, bytes, streams, why segments end, and advice.

        `print()` shows a table; `breakgraph.tools.explain` measures times besides, and makes pages and traces of it.

        Args:
            small: Segments with fewer kernels are marked: a launch of their own costs more than it saves.
            times: Measured times by place of the step.

        Cost: on CUDA some microseconds for each kernel, whose names the driver is asked for.
        """
        if self._program is None or self._pool is None:
            return Explanation(self.name)
        return explained(
            self.name,
            self._program.steps,
            backend=self._pool.backend,
            live_names=tuple(sorted(self._program.live_names)),
            padded_rows=self._program.frame.context.padded_rows,
            totals=attrs.asdict(self.stats()),
            times=times or {},
            small=small,
        )

    @contextmanager
    def observed(self, *observers: StepObserver) -> Iterator[None]:
        """Let observers wrap the run of each step of the replays inside a `with` block.

        Args:
            observers: The first is the outermost. Those that were there before stay, outside of these.

        Yields:
            Nothing.
        """
        self._observers = (*self._observers, *observers)
        self._rebind()
        try:
            yield
        finally:  # blocks of other threads may end in another order
            ours = {id(observer) for observer in observers}
            self._observers = tuple(observer for observer in self._observers if id(observer) not in ours)
            self._rebind()

    def _rebind(self) -> None:
        if self._program is not None:
            self._program.bound_to = None

    def publish(self, program: Program, *, pool: GraphPool) -> None:
        """Take a sealed program; called by the capture."""
        self._pool = pool
        self._program = program
        self._replays = 0

    def __repr__(self) -> str:
        return f"BreakableCUDAGraph({self.name}, {len(self.segments)} segments, {len(self.breaks)} breaks)"
