"""Why a replay costs what it costs, and what merging, hoisting or writing in place would save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from breakgraph.explanation import Advice, StepExplained
from breakgraph.replay_program import StepKind

__all__ = ["advice_for"]

_WORTH_A_WORD = 1024
"""Bytes of a break's fresh results: fewer are copied in the time of an empty kernel."""


def advice_for(
    steps: Sequence[StepExplained], *, hoistable: Mapping[int, str], launch_us: float | None, small: int
) -> tuple[Advice, ...]:
    """Look for what costs more than it must.

    Args:
        steps: In the order of a replay.
        hoistable: Places of ordinary breaks that receive nothing that a segment or another break made, with what they receive.
        launch_us: Host time of a segment's launch, microseconds; None where it is not known.
        small: Segments with fewer kernels hardly pay for their launch.

    Returns:
        What was found, the largest group first; savings where times were measured.
    """
    found = [
        *_merging(steps, launch_us),
        *_hoisting(steps, hoistable),
        *_copies(steps),
        *_neighbours(steps),
        *_small(steps, small),
    ]
    return tuple(sorted(found, key=lambda advice: -(advice.saves_us or 0.0)))


def _merging(steps: Sequence[StepExplained], launch_us: float | None) -> Iterable[Advice]:
    """Two segments that are launched one behind the other could be one."""
    pairs = [(a, b) for a, b in pairwise(steps) if a.kind is b.kind is StepKind.SEGMENT]
    for hoisted in (False, True):
        group = [(a, b) for a, b in pairs if a.why.startswith("hoisted") is hoisted]
        if not group:
            continue
        why = (
            "a hoisted break is called between them: call it before the first of them"
            if hoisted
            else "break_graph() splits them: leave it out, where nothing needs the split"
        )
        yield Advice(
            f"merge {_places([b for _, b in group])} with the segment before, one launch less each: {why}",
            tuple(b.index for _, b in group),
            None if launch_us is None else launch_us * len(group),
        )


def _hoisting(steps: Sequence[StepExplained], hoistable: Mapping[int, str]) -> Iterable[Advice]:
    """A break that needs nothing of the forward need not stand between two segments."""
    by_name: dict[str, list[StepExplained]] = {}
    for step in steps:
        if step.index in hoistable and step.kind is StepKind.BREAK:
            by_name.setdefault(step.name, []).append(step)
    for name, group in by_name.items():
        yield Advice(
            f"hoist break '{name}' ({_places(group)}; hoist=True): it receives {hoistable[group[0].index]}, so where no other "
            f"step writes what it reads, its work{_took(group)} can be done before the first launch and not between two segments",
            tuple(step.index for step in group),
        )


def _copies(steps: Sequence[StepExplained]) -> Iterable[Advice]:
    """A fresh result is copied into its bridge at every replay."""
    for name, group in _by_name(step for step in steps if step.traffic.copied >= _WORTH_A_WORD):
        total = sum(step.traffic.copied for step in group)
        yield Advice(
            f"break '{name}' ({_places(group)}) returns fresh tensors, {total} bytes that each replay copies: let it write into "
            "an argument (where that has rows, named in rows= and writes=)",
            tuple(step.index for step in group),
        )


def _neighbours(steps: Sequence[StepExplained]) -> Iterable[Advice]:
    """Breaks with nothing between them could be one function."""
    group = [b for a, b in pairwise(steps) if a.kind is b.kind is StepKind.BREAK]
    if group:
        yield Advice(
            f"{_places(group)}: no device work lies between the break and the one before; one function would be called once",
            tuple(step.index for step in group),
        )


def _small(steps: Sequence[StepExplained], small: int) -> Iterable[Advice]:
    """A segment of a few kernels between two breaks costs a launch of its own."""
    group = [
        step
        for step in steps
        if step.kind is StepKind.SEGMENT and 0 < (step.launches or 0) < small and "break '" in step.why
    ]
    if group:
        yield Advice(
            f"{_places(group)}: fewer than {small} kernels before the next break; move their work, or the break's call",
            tuple(step.index for step in group),
        )


def _by_name(steps: Iterable[StepExplained]) -> Iterable[tuple[str, list[StepExplained]]]:
    ordered = sorted(steps, key=lambda step: (step.name, step.index))
    return ((name, list(group)) for name, group in groupby(ordered, key=lambda step: step.name))


def _places(steps: Sequence[StepExplained], *, most: int = 4) -> str:
    shown = ", ".join(str(step.index) for step in steps[:most])
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"step{'s' if len(steps) > 1 else ''} {shown}{more}"


def _took(steps: Iterable[StepExplained]) -> str:
    times = [step.time.host_us for step in steps if step.time is not None]
    return f", {sum(times):.1f} us of the host a replay," if times else ""
