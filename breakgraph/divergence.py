"""Where a replay and its eager twin part: the first step whose output differs, found with one run of each.

Both meet the same breaks in the same order. What a break receives is the work of the segment before it, what it leaves is
its own; so both are noted at every break, as fingerprints, and the first that differs names the step. To halve the range by
running a part of the graph was rejected: values also pass a break beside its arguments, and only whole runs carry these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from breakgraph.glances import Glances, Place, PoisonedAllocations, Replayed, Seen, When, argument_leaves, run_eagerly
from breakgraph.graph import BreakableCUDAGraph
from breakgraph.replay_program import Step, StepKind
from breakgraph.verification import Compared, Outcome, StateKeeper, difference, leaf_difference, same_value

__all__ = ["NEXT_BREAK", "Divergence", "first_divergence", "first_eager_divergence", "step_in_words"]

_STATE_BYTES = 64 << 20
NEXT_BREAK = "the next break"
"""Of a `Divergence`: what differs is which break is called next."""


@attrs.frozen
class Divergence:
    """The first step of a replay whose output differs from that of the eager twin.

    Attributes:
        step: Its place in `graph.steps`.
        section: How many breaks, in the order of the capture, come before what differs.
        kind: Whether a segment or a break made the difference.
        where: The step in words.
        tensor: What differs: an argument of a break, what a break returned or wrote, the result, the state.
        difference: How many elements, the place of the first, the replay's value against eager's; or both plain values.
    """

    step: int
    section: int
    kind: StepKind
    where: str
    tensor: str
    difference: str

    def __str__(self) -> str:
        return f"the first step that differs is {self.where}: {self.tensor}: {self.difference}"


def first_divergence(
    graph: BreakableCUDAGraph,
    *,
    keeper: StateKeeper,
    replay: Callable[[], Any],
    eager: Callable[[], Any],
    compared: Compared = Compared.ALL,
) -> Divergence | None:
    """Run a replay and its eager twin from the same state and find where they part.

    Args:
        graph: What `replay` replays.
        keeper: Saves and restores the state around each run.
        replay: Replays the graph once; returns its result.
        eager: Runs the twin in an `eager_step`; returns its result.
        compared: Whether the declared state is compared as well.

    Returns:
        The first difference; None where there is none. Cost: two runs, and two more where something differs.
    """
    breaks = _breaks(graph)
    numbers = {step.order: number for number, step in enumerate(breaks)}

    def replayed(glances: Glances) -> Outcome:
        glances.names = [step.name for step in breaks]
        with graph.observed(Replayed(glances, numbers)), PoisonedAllocations():
            return keeper.outcome(replay, compared=compared)

    def run_twin(glances: Glances) -> Outcome:
        with PoisonedAllocations():
            return run_eagerly(keeper, eager, glances, compared=compared)

    return _first(graph, breaks, replayed, run_twin, state=_small_state(keeper) if compared is Compared.ALL else ())


def first_eager_divergence(
    graph: BreakableCUDAGraph, *, keeper: StateKeeper, one: Callable[[], Any], other: Callable[[], Any]
) -> Divergence | None:
    """Where two eager runs part, in terms of the steps of a graph of the same forward.

    Args:
        graph: The graph.
        keeper: Saves and restores the state around each run.
        one: Runs the twin in an `eager_step`.
        other: Runs it in another way.
    """
    return _first(
        graph,
        _breaks(graph),
        lambda glances: run_eagerly(keeper, one, glances),
        lambda glances: run_eagerly(keeper, other, glances),
        state=_small_state(keeper),
    )


def _small_state(keeper: StateKeeper) -> tuple[torch.Tensor, ...]:
    """What of the declared state is looked at behind every break; a large cache would cost more than the forward."""
    return tuple(item for item in keeper.state if isinstance(item, torch.Tensor) and item.nbytes <= _STATE_BYTES)


def _breaks(graph: BreakableCUDAGraph) -> list[Step]:
    """In the order of the capture."""
    return sorted((step for step in graph.steps if step.call is not None), key=lambda step: step.order)


def _first(
    graph: BreakableCUDAGraph,
    breaks: list[Step],
    run_ours: Callable[[Glances], Outcome],
    run_theirs: Callable[[Glances], Outcome],
    *,
    state: tuple[torch.Tensor, ...],
) -> Divergence | None:
    hoisted = frozenset(number for number, step in enumerate(breaks) if step.kind is StepKind.HOISTED)
    theirs = Glances(state, hoisted=hoisted)
    expected = run_theirs(theirs)  # first, since it tells what nobody has written
    ours = Glances(state, hoisted=hoisted, unwritten=theirs.unwritten)
    replayed = run_ours(ours)
    place = _first_place(ours, theirs)
    if place is None:
        found = difference(replayed, expected)
        return None if found is None else _behind_all(graph, breaks, found)
    number, when, path = place
    if path is NEXT_BREAK:
        met = theirs.names[number] if number < len(theirs.names) else "none"
        text = f"the graph has break {breaks[number].name!r}" if number < len(breaks) else "the graph has no break"
        return _divergence(graph, breaks, number, "before", NEXT_BREAK, f"{text} where eager meets {met!r}")
    name, mine, other = breaks[number].name, ours.seen[number, when].get(path), theirs.seen[number, when].get(path)
    if not isinstance(mine, Seen) or not isinstance(other, Seen):
        text = f"{_in_short(mine)} against {_in_short(other)}"
        return _divergence(graph, breaks, number, "after", f"{path} of break '{name}'", text)
    again, twin = (Glances(state, hoisted=hoisted, unwritten=theirs.unwritten, kept=place) for _ in range(2))
    run_theirs(twin)
    run_ours(again)
    text = leaf_difference(again.copy, twin.copy, None) or "it differed in one run and not in the next"
    if path.startswith("state"):
        return _divergence(graph, breaks, number, when, path, text)
    if when == "before" and mine.address != other.address and _is_from_outside(graph, breaks[number], path):
        return _divergence(graph, breaks, number, "after", f"{path} of break '{name}'", text)
    what = f"{path} of break '{name}'" if when == "before" else f"what break '{name}' left in {path}"
    return _divergence(graph, breaks, number, when, what, text)


def _is_from_outside(graph: BreakableCUDAGraph, step: Step, path: str) -> bool:
    """Whether a break was bound to a tensor that neither a segment nor a break made: each replay passes that of the capture."""
    call, pool = step.call, graph.pool
    if call is None or pool is None:
        return False
    for at, leaf in argument_leaves(call.spec, tuple(call.bound.args), call.bound.kwargs):
        if at == path and isinstance(leaf, torch.Tensor):
            return not pool.backend.made_by_a_segment(leaf) and not pool.arena.holds(leaf)
    return False


def _in_short(value: Any) -> str:
    return "a tensor" if isinstance(value, Seen) else "nothing there" if value is None else repr(value)


def _first_place(ours: Glances, theirs: Glances) -> Place | None:
    for number in range(max(len(ours.names), len(theirs.names))):
        if ours.names[number : number + 1] != theirs.names[number : number + 1]:
            return number, "before", NEXT_BREAK
        for when in ("before", "after"):
            mine, other = ours.seen[number, when], theirs.seen[number, when]
            unequal = [path for path in {**mine, **other} if not _same(mine, other, path)]
            if unequal:
                # A tensor is the work of a segment, and comes first; another argument is baked into the break's own call.
                return number, when, next((path for path in unequal if isinstance(mine.get(path), Seen)), unequal[0])
    return None


def _same(mine: Mapping[str, Any], other: Mapping[str, Any], path: str) -> bool:
    if path not in mine or path not in other:
        return path.startswith("return")  # the contract of a break looks after what it returns
    one, twin = mine[path], other[path]
    if isinstance(one, Seen) and isinstance(twin, Seen):
        return one.equals(twin)
    return not isinstance(one, Seen) and not isinstance(twin, Seen) and same_value(one, twin)


def _divergence(
    graph: BreakableCUDAGraph, breaks: list[Step], number: int, when: When, tensor: str, text: str
) -> Divergence:
    """Name the step: the break itself, or the segment before it, where there is one."""
    steps = graph.steps
    if when == "after":
        culprit = breaks[number]
    else:
        end = breaks[number].order if number < len(breaks) else len(steps)
        start = breaks[number - 1].order if number else -1
        between = [step for step in steps if step.kind is StepKind.SEGMENT and start < step.order < end]
        if not between and number < len(breaks):
            culprit = breaks[number]
        else:
            culprit = between[-1] if between else max(steps, key=lambda step: step.order)
    return Divergence(
        step=steps.index(culprit),
        section=number,
        kind=culprit.kind,
        where=step_in_words(culprit, steps.index(culprit)),
        tensor=tensor,
        difference=text,
    )


def _behind_all(graph: BreakableCUDAGraph, breaks: list[Step], found: str) -> Divergence:
    what, _, text = found.partition(": ")
    return _divergence(graph, breaks, len(breaks), "before", f"the {what}", text or found)


def step_in_words(step: Step, index: int) -> str:
    """Name a step for people.

    Args:
        step: The step.
        index: Its place in `graph.steps`.
    """
    ends = f", which ends where {step.why}" if step.kind is StepKind.SEGMENT and "break" in step.why else ""
    name = f"'{step.name}'" if step.kind is not StepKind.SEGMENT else f"of {step.name}"
    return f"step {index}, {step.kind.value} {name} at {step.line}{ends}"
