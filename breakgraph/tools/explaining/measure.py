"""How long each step of a graph takes, on the host and on the device."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.capture import BreakableCUDAGraph
from breakgraph.errors import ConfigError, NoGraphError
from breakgraph.explanation import StepTime, Times
from breakgraph.replay_program import Step, StepKind
from breakgraph.step_observer import Run, StepObserver

__all__ = ["Measured", "measure"]

_CYCLES_PER_US = 2000  # a delay only has to be long enough; clocks are below 2 GHz
_LONGEST_DELAY_US = 200_000.0


@attrs.frozen
class Measured:
    """What was measured of a graph.

    Attributes:
        steps: Times by place of the step.
        whole: Times of whole replays, with nothing between the steps.
        kernels: Kernels that each break launched, by name, by place of the step; empty where nothing could tell.
        note: Why kernels of breaks are not known; empty where they are.
    """

    steps: Mapping[int, StepTime]
    whole: Times
    kernels: Mapping[int, Mapping[str, int]]
    note: str = ""


def measure(
    graph: BreakableCUDAGraph,
    *,
    live: Mapping[str, Any] | None = None,
    valid_rows: int | None = None,
    replay: Callable[[], Any] | None = None,
    runs: int = 20,
) -> Measured:
    """Replay a graph and take the time of each step.

    Three kinds of replays: plain ones, for the whole; ones with a clock around each step and an event behind it, for the host
    and the picture; on CUDA, ones behind a delay that lets the host get ahead, for what the device takes for a step. One more
    runs under torch's profiler, which tells the kernels that breaks launch.

    Args:
        graph: A sealed graph. It is replayed for real: its breaks run, and what it writes outside is written.
        live: Live data of each replay.
        valid_rows: Real rows of each replay.
        replay: Replays the graph once, in place of the two above: such as the `replay` of `runner.rehearsal(key)`.
        runs: Replays of each kind, after one or two that are not counted.

    Returns:
        Medians.

    Raises:
        ConfigError: `runs` is below 1.
        NoGraphError: Nothing was captured.

    Cost: about 3 * `runs` replays and as many host syncs.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise ConfigError(
            f"measure(runs={runs!r}); expected a whole number, 1 or more.",
            why="Times are medians over the runs.",
            fix="Pass runs=20.",
        )
    if not isinstance(graph, BreakableCUDAGraph):
        raise ConfigError(
            f"measure() got a {type(graph).__name__}; expected a BreakableCUDAGraph.",
            why="Its replays are measured.",
            fix="Pass the graph; of a runner one of runner.graphs, with replay= of runner.rehearsal(key).",
        )
    if graph.pool is None or not graph.sealed:
        raise NoGraphError(
            f"{graph.name} was to be measured, and it holds no captured graph.",
            why="There is nothing to run.",
            fix="Capture it first: with BreakableCUDAGraphCapture(graph): ...",
        )
    session = _Session(graph, replay or (lambda: graph.replay(live, valid_rows=valid_rows)), runs=runs)
    before = graph.stats().replays
    session.replay()
    if graph.stats().replays != before + 1:
        raise ConfigError(
            f"measure(replay=...): it replayed {graph.name} {graph.stats().replays - before} times; expected once.",
            why="Its time is that of one replay.",
            fix="Pass a function that replays this graph once, or leave it out.",
        )
    whole, steps = session.whole(), session.steps()
    kernels, note = session.kernels_of_breaks()
    return Measured(steps, whole, kernels, note)


class _Session:
    """One measurement.

    Args:
        graph: The graph.
        replay: Replays it.
        runs: Replays of each kind.
    """

    def __init__(self, graph: BreakableCUDAGraph, replay: Callable[[], Any], *, runs: int) -> None:
        assert graph.pool is not None
        self.graph = graph
        self.replay = replay
        self.runs = runs
        self.device = graph.pool.device
        self.on_cuda = self.device.type == "cuda"

    def whole(self) -> Times:
        """Whole replays, with nothing between the steps."""
        spans = [self._spans() for _ in range(self.runs + 2)][2:]
        name = torch.cuda.get_device_name(self.device) if self.on_cuda else "the CPU"
        return Times(
            runs=self.runs,
            host_us=statistics.median(host for host, _ in spans),
            device_us=statistics.median(device for _, device in spans),
            device=name,
        )

    def _spans(self) -> tuple[float, float]:
        """Host and device time of one replay, from an idle device on."""
        if not self.on_cuda:
            begin = time.perf_counter()
            self.replay()
            taken = (time.perf_counter() - begin) * 1e6
            return taken, taken
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            first, last = _event(), _event()
            first.record()
            begin = time.perf_counter()
            self.replay()
            host = (time.perf_counter() - begin) * 1e6
            last.record()
            last.synchronize()
            return host, first.elapsed_time(last) * 1e3

    def steps(self) -> dict[int, StepTime]:
        """Times of each step."""
        clocks = [self._clocked() for _ in range(self.runs + 1)][1:]
        picture = sorted(clocks, key=lambda clock: clock.total)[len(clocks) // 2]
        if not self.on_cuda:
            return {
                index: StepTime(
                    host_us=_median(clocks, index),
                    device_us=_median(clocks, index),
                    host_at_us=picture.host[index][0],
                    host_end_us=picture.host[index][1],
                    device_at_us=picture.host[index][0],
                    device_end_us=picture.host[index][1],
                )
                for index in range(len(self.graph.steps))
            }
        delay = min(_LONGEST_DELAY_US, 2 * max(clock.total for clock in clocks) + 100)
        usual = {index: _median(clocks, index) for index in range(len(self.graph.steps))}
        waiting = self._waiting(delay, usual)
        behind = [self._clocked(delay, waiting) for _ in range(self.runs + 1)][1:]
        return {
            index: StepTime(
                host_us=usual[index],
                device_us=statistics.median(clock.marks[index][1] - clock.marks[index][0] for clock in behind),
                host_at_us=picture.host[index][0],
                host_end_us=picture.host[index][1],
                # The event before it may have fired long before the host came to launch this step.
                device_at_us=max(picture.marks[index][0], picture.host[index][0]),
                device_end_us=max(picture.marks[index][1], picture.host[index][0]),
                waits=index in waiting,
            )
            for index in range(len(self.graph.steps))
        }

    def _waiting(self, delay: float, usual: Mapping[int, float]) -> set[int]:
        """Steps in which the host waits for the device.

        The first that waits uses the delay up. So the device is delayed again behind each one that is known, until no other
        shows.
        """
        known: set[int] = set()
        while True:
            clock = self._clocked(delay, known)
            late = (i for i in usual if i not in known and clock.host[i][1] - clock.host[i][0] > usual[i] + delay / 2)
            found = next(late, None)
            if found is None:
                return known
            known.add(found)

    def _clocked(self, delay: float = 0.0, waiting: Collection[int] = ()) -> _Clock:
        again = {index + 1: delay for index in waiting}
        clock = _Clock(len(self.graph.steps), on_cuda=self.on_cuda, delays=again)
        with self.graph.observed(clock):
            if not self.on_cuda:
                clock.start = time.perf_counter()
                self.replay()
                return clock
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                if delay:
                    torch.cuda._sleep(int(delay * _CYCLES_PER_US))
                clock.first.record()
                clock.start = time.perf_counter()
                self.replay()
                torch.cuda.synchronize()
        clock.read()
        return clock

    def kernels_of_breaks(self) -> tuple[dict[int, dict[str, int]], str]:
        """What breaks launch, by torch's profiler; host syncs around each keep them apart."""
        breaks = [index for index, step in enumerate(self.graph.steps) if step.kind is not StepKind.SEGMENT]
        if not breaks:
            return {}, ""
        if not self.on_cuda:
            counts = _Operators()
            with self.graph.observed(counts):
                self.replay()
            return counts.found, ""
        marks = _Marks()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self.graph.observed(marks), torch.profiler.profile(activities=activities, acc_events=True) as profile:
            self.replay()
            torch.cuda.synchronize(self.device)
        results = profile.profiler.kineto_results if profile.profiler is not None else None
        events = [] if results is None else list(results.events())
        ranges = {
            int(event.name().rpartition(" ")[2]): (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.name().startswith(_MARK) and event.device_type() == torch._C._autograd.DeviceType.CPU
        }
        found: dict[int, Counter[str]] = {index: Counter() for index in breaks}
        seen = 0
        for event in events:
            if event.device_type() != torch._C._autograd.DeviceType.CUDA or event.name().startswith(_MARK):
                continue
            seen += 1
            for index in breaks:
                begin, end = ranges.get(index, (0, 0))
                if begin <= event.start_ns() < end:
                    found[index][event.name().strip()] += 1
        if not seen:
            return {}, "kernels of breaks are not known: torch's profiler saw no kernel"
        return {index: dict(names) for index, names in found.items()}, ""


class _Clock(StepObserver):
    """Host times around each step, and events around it.

    Args:
        steps: How many there are.
        on_cuda: Events are recorded.
        delays: Microseconds by which the device is delayed before a step.

    Attributes:
        start: Of the replay, seconds.
        first: Recorded before the replay.
        host: Begin and end of each step, microseconds after the start.
        marks: When the device reached the begin and the end of each step, microseconds after the first event.
    """

    def __init__(self, steps: int, *, on_cuda: bool, delays: Mapping[int, float]) -> None:
        self.start = 0.0
        self.host: list[tuple[float, float]] = [(0.0, 0.0)] * steps
        self.marks: list[tuple[float, float]] = []
        self._delays = {index: delay for index, delay in delays.items() if index < steps}
        self._events = [_event() for _ in range(steps)] if on_cuda else []
        self._begins = {index: _event() for index in self._delays}
        self._first = _event() if on_cuda else None

    @property
    def first(self) -> torch.cuda.Event:
        """The event before all; on CUDA only."""
        assert self._first is not None
        return self._first

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Take the time of a step."""
        if not self._events:
            return lambda: self._timed(index, run)
        # The end of one step is the begin of the next, but for a delay between them: each event costs the host a microsecond.
        behind, before = self._events[index], self._begins.get(index)
        delay = int(self._delays.get(index, 0.0) * _CYCLES_PER_US)

        def timed() -> Any:
            if before is not None:
                torch.cuda._sleep(delay)
                before.record()
            status = self._timed(index, run)
            behind.record()
            return status

        return timed

    def _timed(self, index: int, run: Run) -> Any:
        begin = time.perf_counter()
        status = run()
        end = time.perf_counter()
        self.host[index] = ((begin - self.start) * 1e6, (end - self.start) * 1e6)
        return status

    @property
    def total(self) -> float:
        """Microseconds from the start to the end of the last step."""
        return self.host[-1][1] if self.host else 0.0

    def read(self) -> None:
        """Ask the events; the device has to be idle."""
        at = [self.first.elapsed_time(event) * 1e3 for event in self._events]
        begins = {index: self.first.elapsed_time(event) * 1e3 for index, event in self._begins.items()}
        self.marks = [(begins.get(index, at[index - 1] if index else 0.0), end) for index, end in enumerate(at)]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _median(clocks: list[_Clock], index: int) -> float:
    return statistics.median(clock.host[index][1] - clock.host[index][0] for clock in clocks)


class _Operators(StepObserver):
    """Counts the operators that breaks call.

    Attributes:
        found: Count by name, by place of the break.
    """

    def __init__(self) -> None:
        self.found: dict[int, dict[str, int]] = {}

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Count for a break."""
        if step.kind is StepKind.SEGMENT:
            return run

        def counted() -> Any:
            with _Counting() as counting:
                status = run()
            self.found[index] = dict(counting.names)
            return status

        return counted


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


_MARK = "breakgraph step"


class _Marks(StepObserver):
    """A range of the profiler around each break, with the device idle before and behind it."""

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Mark a break."""
        if step.kind is StepKind.SEGMENT:
            return run

        def marked() -> Any:
            torch.cuda.synchronize()
            with _range(f"{_MARK} {index}"):
                status = run()
                torch.cuda.synchronize()
            return status

        return marked


@contextmanager
def _range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        yield
