"""What a graph tells about itself, as values: its steps, what they cost, and what could be better.

Plain data and plain text. Tables for terminals, pages and traces are made from it above, in `tools/`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from breakgraph.replay_program import StepKind
from breakgraph.streams import StreamUse

__all__ = ["Advice", "Explanation", "StepExplained", "StepTime", "Times", "Traffic", "duration", "plural", "short_name"]

_NAMES = 3


@attrs.frozen
class Traffic:
    """Bytes that a break may touch, from the tensors of its call; what it reads through `self` or globals is not known.

    Attributes:
        read: Of the tensors that it receives.
        written: Of those declared in `writes=` or returned in place, and of its bridges.
        copied: Of its bridges: fresh results that are copied at every replay.
    """

    read: int = 0
    written: int = 0
    copied: int = 0


@attrs.frozen
class StepTime:
    """Times of one step, microseconds, medians over the runs; places are those of one replay, counted from its start.

    Attributes:
        host_us: Until the call that runs it returns.
        device_us: What the device takes for it where the host is far enough ahead; of a step that waits, with that.
        host_at_us: Where its call begins.
        host_end_us: Where its call returns.
        device_at_us: Where the device begins it, as far as events tell: not before the one before has ended.
        device_end_us: Where the device ends it.
        waits: The host waits for the device in it.
    """

    host_us: float
    device_us: float
    host_at_us: float
    host_end_us: float
    device_at_us: float
    device_end_us: float
    waits: bool = False


@attrs.frozen
class Times:
    """Times of whole replays, microseconds, medians, without anything between the steps.

    Attributes:
        runs: How many were measured.
        host_us: Until `replay` returns.
        device_us: From the first step's begin to the last one's end on the device.
        device: Its name.
    """

    runs: int
    host_us: float
    device_us: float
    device: str


@attrs.frozen
class StepExplained:
    """One step.

    Attributes:
        index: Place in the replay.
        kind: Segment, break, hoisted break.
        name: Name of the break; of a segment how much it holds.
        line: Where the capture met it.
        why: Of a segment, why it ends where it does.
        kernels: Count by name: of a segment from the graph, of a break where it was measured; None where unknown.
        traffic: Bytes of a break.
        streams: Forks, joins, waits and events of a segment.
        notes: The same in words, each with its line.
        live: Live data that a break binds.
        returns: What becomes of each thing that a break returns, such as `return: bridge`.
        time: Where it was measured.
    """

    index: int
    kind: StepKind
    name: str
    line: str
    why: str = ""
    kernels: Mapping[str, int] | None = None
    traffic: Traffic = attrs.field(factory=Traffic)
    streams: StreamUse = attrs.field(factory=StreamUse)
    notes: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    returns: str = ""
    time: StepTime | None = None

    @property
    def launches(self) -> int | None:
        """Count of its kernels; None where unknown."""
        return None if self.kernels is None else sum(self.kernels.values())

    @property
    def label(self) -> str:
        """A short name: of a break its own, of a segment its place."""
        return f"segment {self.index}" if self.kind is StepKind.SEGMENT else self.name

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = attrs.asdict(self)
        return {**found, "kind": self.kind.value, "launches": self.launches}


@attrs.frozen
class Advice:
    """What could be better.

    Attributes:
        text: What and how.
        steps: Places of the steps that it is about.
        saves_us: Host time that it would save in a replay, microseconds; None where nothing was measured.
    """

    text: str
    steps: tuple[int, ...]
    saves_us: float | None = None

    def __str__(self) -> str:
        return (
            self.text if self.saves_us is None else f"{self.text} (about {self.saves_us:.1f} us of host time a replay)"
        )


@attrs.frozen
class Explanation:
    """A graph in words and numbers; `str()` is a table.

    Attributes:
        name: Of the graph.
        steps: In the order of a replay.
        live_names: Live data that a replay needs.
        padded_rows: Captured length of the token axis.
        totals: Counts and bytes of the graph, by name.
        advice: What could be better.
        times: Of whole replays, where they were measured.
        small: Segments with fewer kernels are marked.
    """

    name: str
    steps: tuple[StepExplained, ...] = ()
    live_names: tuple[str, ...] = ()
    padded_rows: int | None = None
    totals: Mapping[str, float] = attrs.field(factory=dict)
    advice: tuple[Advice, ...] = ()
    times: Times | None = None
    small: int = 4

    @property
    def segments(self) -> tuple[StepExplained, ...]:
        """The segments that hold work."""
        return tuple(step for step in self.steps if step.kind is StepKind.SEGMENT and step.launches != 0)

    @property
    def breaks(self) -> tuple[StepExplained, ...]:
        """Breaks, hoisted ones first."""
        return tuple(step for step in self.steps if step.kind is not StepKind.SEGMENT)

    @property
    def kernels(self) -> Mapping[str, int]:
        """Kernels of all segments, by name, the most frequent first."""
        total: Counter[str] = Counter()
        for step in self.segments:
            total.update(step.kernels or {})
        return dict(total.most_common())

    @property
    def unbound_live(self) -> tuple[str, ...]:
        """Live data that no break binds."""
        bound = {name for step in self.steps for name in step.live}
        return tuple(name for name in self.live_names if name not in bound)

    def share(self, step: StepExplained) -> float | None:
        """Share of the whole, 0 to 1: of the device time where it was measured, else of the segments' kernels.

        Args:
            step: One of `steps`.
        """
        device_us, launches = self._whole
        if step.time is not None:
            return step.time.device_us / device_us if device_us else None
        return step.launches / launches if step.launches and launches and step.kind is StepKind.SEGMENT else None

    @functools.cached_property
    def _whole(self) -> tuple[float, int]:
        """Device time of all steps, kernels of all segments."""
        times = [step.time.device_us for step in self.steps if step.time is not None]
        return sum(times), sum(step.launches or 0 for step in self.segments)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "live_names": list(self.live_names),
            "unbound_live": list(self.unbound_live),
            "padded_rows": self.padded_rows,
            "totals": dict(self.totals),
            "kernels": dict(self.kernels),
            "times": None if self.times is None else attrs.asdict(self.times),
            "steps": [{**step.as_dict(), "share": self.share(step)} for step in self.steps],
            "advice": [attrs.asdict(advice) for advice in self.advice],
        }

    def __str__(self) -> str:
        if not self.steps:
            return f"{self.name}: nothing captured"
        launches = sum(step.launches or 0 for step in self.segments)
        lines = [
            f"{self.name}: {plural(len(self.segments), 'segment')}, {plural(len(self.breaks), 'break')}, "
            f"{plural(launches, 'kernel')} in segments, "
            f"live data {list(self.live_names) or 'none'}, padded rows {self.padded_rows}, "
            f"{int(self.totals.get('bridge_bytes', 0))} bridge bytes"
        ]
        if self.times is not None:
            lines.append(
                f"  a replay: {duration(self.times.host_us)} of the host, {duration(self.times.device_us)} on "
                f"{self.times.device}, medians of {self.times.runs}"
            )
        if self.unbound_live:
            lines.append(
                f"  live data {list(self.unbound_live)} is bound by no break: only breaks that ask current_replay() see it"
            )
        seen: dict[tuple[tuple[str, int], ...], int] = {}
        for step in self.steps:
            lines.extend(self._step_lines(step, seen))
        if held := int(self.totals.get("live_bytes", 0)):
            lines.append(f"  {held} bytes of the pool are held by tensors: results, or what a model keeps")
        lines.extend(f"  * {advice}" for advice in self.advice)
        return "\n".join(lines)

    def _step_lines(self, step: StepExplained, seen: dict[tuple[tuple[str, int], ...], int]) -> Iterable[str]:
        parts = [f"live {list(step.live)}" if step.live else "", step.returns]
        detail = "; ".join(part for part in parts if part)
        mark = " [small]" if step.kind is StepKind.SEGMENT and 0 < (step.launches or 0) < self.small else ""
        time, share = "", self.share(step)
        if step.time is not None:
            waits = ", waits for the device" if step.time.waits else ""
            time = f"  {duration(step.time.host_us)} host, {duration(step.time.device_us)} device{waits}"
        if share is not None:
            time += f"  {share:.1%}"
        what = f"{step.name}{f' [{detail}]' if detail else ''}{mark}"
        yield f"  {step.index:3d}  {step.kind.value:13s}  {what}{time}  ({step.line})"
        pad = " " * 22
        if step.kernels:
            same = tuple(sorted(step.kernels.items()))
            if same in seen:
                yield f"{pad}kernels as in step {seen[same]}"
            else:
                seen[same] = step.index
                yield f"{pad}kernels: {_most(step.kernels)}"
        if step.traffic != Traffic():
            copied = f", of them {step.traffic.copied} copied back" if step.traffic.copied else ""
            yield f"{pad}bytes: {step.traffic.read} received, {step.traffic.written} written{copied}"
        if step.why:
            yield f"{pad}ends: {step.why}"
        yield from (f"{pad}{note}" for note in step.notes)


def _most(kernels: Mapping[str, int]) -> str:
    short: Counter[str] = Counter()
    for name, count in kernels.items():
        short[short_name(name)] += count
    ranked = short.most_common()
    shown = ", ".join(f"{count} x {name}" for name, count in ranked[:_NAMES])
    rest = sum(count for _, count in ranked[_NAMES:])
    return shown + (f", {rest} more" if rest else "")


def duration(microseconds: float) -> str:
    """A time for people: microseconds, or milliseconds from ten of them on.

    Args:
        microseconds: The time.
    """
    return f"{microseconds:.1f} us" if microseconds < 10_000 else f"{microseconds / 1000:.1f} ms"


def plural(count: int, noun: str) -> str:
    """A count and its noun, such as `1 break` and `2 breaks`.

    Args:
        count: The count.
        noun: For one.
    """
    return f"{count} {noun}" + ("" if count == 1 else "s")


def short_name(name: str, *, most: int = 60) -> str:
    """A demangled name without the arguments of its template, which fill lines.

    Args:
        name: Of a kernel.
        most: Characters.
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = bare.partition("(")[0].partition("<")[0] or bare
    return head if len(head) <= most else head[: most - 3] + "..."
