"""Where a replay and its eager twin part: the first step whose output differs, found with one run of each.

Both meet the same breaks in the same order. What a break receives is the work of the segment before it, what it leaves is
its own; so both are noted at every break, as fingerprints, and the first that differs names the step. To halve the range by
running a part of the graph was rejected: values also pass a break beside its arguments, and only whole runs carry these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.emulated_rules import UNINITIALISED, fill_with_poison
from breakgraph.break_function import BreakSpec
from breakgraph.call_site import user_line
from breakgraph.copy_back import LeafKind
from breakgraph.fingerprints import fingerprint
from breakgraph.graph import BreakableCUDAGraph
from breakgraph.replay_context import MarkedCall, ReplayContext, current_frame, observed_calls
from breakgraph.replay_program import BreakCall, Step, StepKind
from breakgraph.step_observer import Run, StepObserver
from breakgraph.structure import flatten
from breakgraph.verification import Compared, Outcome, StateKeeper, difference, leaf_difference

__all__ = [
    "NO_ALLOCATION",
    "Divergence",
    "PoisonedAllocations",
    "first_divergence",
    "first_eager_divergence",
    "step_in_words",
]

NO_ALLOCATION = -1
"""Of `PoisonedAllocations`: no allocation gets poison, all get zeros."""
_PLAIN = (int, float, bool, complex, str, bytes, type(None))
_STATE_BYTES = 64 << 20


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

    def replayed(glances: _Glances) -> Outcome:
        glances.names = [step.name for step in breaks]
        with graph.observed(_Replayed(glances, numbers)):
            return keeper.outcome(replay, compared=compared)

    def run_eagerly(glances: _Glances) -> Outcome:
        with PoisonedAllocations():
            return _run_eagerly(keeper, eager, glances, compared=compared)

    return _first(graph, breaks, replayed, run_eagerly, state=_small_state(keeper) if compared is Compared.ALL else ())


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
        lambda glances: _run_eagerly(keeper, one, glances),
        lambda glances: _run_eagerly(keeper, other, glances),
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
    run_ours: Callable[[_Glances], Outcome],
    run_theirs: Callable[[_Glances], Outcome],
    *,
    state: tuple[torch.Tensor, ...],
) -> Divergence | None:
    ours, theirs = _Glances(state), _Glances(state)
    replayed, expected = run_ours(ours), run_theirs(theirs)
    place = _first_place(ours, theirs, names=ours.names)
    if place is None:
        found = difference(replayed, expected)
        return None if found is None else _behind_all(graph, breaks, found)
    number, when, path = place
    if path is _OTHER_BREAK:
        met = theirs.names[number] if number < len(theirs.names) else "none"
        text = f"the graph has break {breaks[number].name!r}" if number < len(breaks) else "the graph has no break"
        return _divergence(graph, breaks, number, "before", "the next break", f"{text} where eager meets {met!r}")
    ours, theirs = (_Glances(state, kept=(number, when, path)) for _ in range(2))
    run_ours(ours)
    run_theirs(theirs)
    text = leaf_difference(ours.copy, theirs.copy, None) or "it differed in one run and not in the next"
    name = breaks[number].name
    what = f"{path} of break '{name}'" if when == "before" else f"what break '{name}' left in {path}"
    own = (
        "after" if not isinstance(theirs.copy, torch.Tensor) else when
    )  # a plain argument is baked into the break's own call
    return _divergence(graph, breaks, number, own, path if path.startswith("state") else what, text)


_OTHER_BREAK = "another break"
_UNWRITTEN = "not written yet"
_When = str  # "before" or "after" a break


class _Glances:
    """What one run shows at its breaks, in order.

    Args:
        state: Tensors that are looked at besides the arguments.
        kept: The one place of which a copy is kept, and nothing else is looked at.

    Attributes:
        is_eager: The run is the eager twin, in which what is not written is poison.
        names: Of the breaks.
        seen: (number of the break, "before" or "after") -> path -> fingerprint or plain value.
        copy: What lies at `kept`.
    """

    def __init__(self, state: tuple[torch.Tensor, ...], *, kept: tuple[int, _When, str] | None = None) -> None:
        self.is_eager = False
        self.names: list[str] = []
        self.seen: dict[tuple[int, _When], dict[str, Any]] = {}
        self.copy: Any = None
        self._state = state
        self._kept = kept

    def look(self, number: int, when: _When, leaves: Iterable[tuple[str, Any]], context: ReplayContext) -> None:
        """Note what a break receives or leaves.

        Args:
            number: Of the break, in the order of the capture.
            when: "before" or "after" it.
            leaves: Paths and leaves.
            context: Row counts of the step.
        """
        state = ((f"state[{index}]", tensor) for index, tensor in enumerate(self._state))
        if self._kept is not None:
            if (number, when) == self._kept[:2]:
                for path, leaf in (*leaves, *state):
                    if path == self._kept[2]:
                        self.copy = _real_rows(leaf, context).clone() if isinstance(leaf, torch.Tensor) else leaf
            return
        found = self.seen.setdefault((number, when), {})
        for path, leaf in (*leaves, *state):
            if isinstance(leaf, torch.Tensor):
                rows = _real_rows(leaf, context)
                # What nobody has written yet may hold anything: a break is about to fill it.
                unwritten = when == "before" and self.is_eager and _is_poison(rows)
                found[path] = _UNWRITTEN if unwritten else (tuple(rows.shape), rows.dtype, fingerprint(rows))
            elif isinstance(leaf, _PLAIN):
                found[path] = leaf


def _is_poison(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype is torch.bool or tensor.layout is not torch.strided:
        return False
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == -1).all())


def _real_rows(tensor: torch.Tensor, context: ReplayContext) -> torch.Tensor:
    """Without rows of padding, where the first axis is as long as the captured rows: their values are nobody's."""
    valid, padded = context.valid_rows, context.padded_rows
    if valid is None or valid == padded or not tensor.dim() or tensor.shape[0] != padded:
        return tensor
    return tensor[:valid]


class _Replayed(StepObserver):
    """Looks at the breaks of a replay.

    Args:
        glances: Where it is noted.
        numbers: Order of a step in the capture -> number of the break.
    """

    def __init__(self, glances: _Glances, numbers: Mapping[int, int]) -> None:
        self._glances = glances
        self._numbers = numbers

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Look before and after a break."""
        call = step.call
        if call is None:
            return run
        number = self._numbers[step.order]

        def looked_at() -> Any:
            self._glances.look(number, "before", _received(call), call.context)
            status = run()
            self._glances.look(number, "after", (*_received(call), *_left(call)), call.context)
            return status

        return looked_at


def _run_eagerly(
    keeper: StateKeeper, eager: Callable[[], Any], glances: _Glances, *, compared: Compared = Compared.ALL
) -> Outcome:
    glances.is_eager = True

    def around(call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any], context: ReplayContext) -> Any:
        assert isinstance(call, BreakSpec)
        number = len(glances.names)
        glances.names.append(call.name)
        given = list(_arguments(call, args, kwargs))
        glances.look(number, "before", given, context)
        result = call.call(args, kwargs)
        returned = [(f"return{path}", leaf) for path, leaf in flatten(result)[0]]
        glances.look(number, "after", (*given, *returned), context)
        return result

    with observed_calls(around):
        return keeper.outcome(eager, compared=compared)


class PoisonedAllocations(TorchDispatchMode):
    """Fills what a forward allocates without values: with NaN (integers: -1 bits), or zeros.

    Args:
        only: The number of the one allocation that gets poison, where the others get zeros; None: all of them get it.

    Attributes:
        lines: Where each allocation was asked for.
    """

    def __init__(self, *, only: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self._only = only

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in UNINITIALISED and current_frame() is not None:
            if self._only is None or self._only == len(self.lines):
                fill_with_poison(result)
            else:
                result.zero_()
            self.lines.append(user_line())
        return result


def _received(call: BreakCall) -> Iterable[tuple[str, Any]]:
    bound = call.arguments()
    return _arguments(call.spec, tuple(bound.args), bound.kwargs)


def _arguments(spec: BreakSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Leaves of a call's arguments under the names of the parameters, live data aside."""
    parameters = list(spec.signature.parameters) if spec.signature is not None else []
    named = [(parameters[i] if i < len(parameters) else f"argument {i}", value) for i, value in enumerate(args)]
    for name, value in (*named, *kwargs.items()):
        if name not in spec.live and not isinstance(value, torch.nn.Module):
            for path, leaf in flatten(value)[0]:
                yield f"argument {name}{path}" if not name.startswith("argument ") else name + path, leaf


def _left(call: BreakCall) -> Iterable[tuple[str, Any]]:
    context = call.context
    rows = context.valid_rows if context.valid_rows is not None and call.rows is not None else None
    rows = None if rows is None or call.rows is None or rows >= call.rows else rows
    for leaf in call.contract.leaves:
        value = leaf.captured if leaf.kind is LeafKind.VALUE else leaf.expected(rows)
        yield f"return{leaf.path}", value


def _first_place(ours: _Glances, theirs: _Glances, *, names: list[str]) -> tuple[int, _When, str] | None:
    for number in range(max(len(names), len(theirs.names))):
        if names[number : number + 1] != theirs.names[number : number + 1]:
            return number, "before", _OTHER_BREAK
        for when in ("before", "after"):
            mine, other = ours.seen[number, when], theirs.seen[number, when]
            unequal = [path for path in mine if path in other and not _same(mine[path], other[path])]
            if unequal:
                # A tensor is the work of a segment, and comes first; a plain argument is baked into the break's own call.
                return number, when, next((path for path in unequal if isinstance(mine[path], tuple)), unequal[0])
    return None


def _same(one: Any, other: Any) -> bool:
    if one is _UNWRITTEN or other is _UNWRITTEN:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        if one[:2] != other[:2]:
            return False
        return one[2] is other[2] or (one[2] is not None and other[2] is not None and bool(one[2] == other[2]))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _divergence(
    graph: BreakableCUDAGraph, breaks: list[Step], number: int, when: _When, tensor: str, text: str
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
