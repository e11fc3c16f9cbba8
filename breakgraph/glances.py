"""What one run of a forward shows at its breaks: fingerprints of what each receives and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.emulated_rules import UNINITIALISED
from breakgraph.break_function import BreakSpec
from breakgraph.call_site import user_line
from breakgraph.copy_back import LeafKind
from breakgraph.fingerprints import fingerprint, is_marked, mark
from breakgraph.replay_context import MarkedCall, ReplayContext, current_frame, observed_calls
from breakgraph.replay_program import BreakCall, Step
from breakgraph.step_observer import Run, StepObserver
from breakgraph.structure import flatten, storage_address
from breakgraph.verification import Compared, Outcome, StateKeeper

__all__ = [
    "NO_ALLOCATION",
    "Glances",
    "Place",
    "PoisonedAllocations",
    "Replayed",
    "Seen",
    "When",
    "argument_leaves",
    "run_eagerly",
]

NO_ALLOCATION = -1
"""Of `PoisonedAllocations`: no allocation is marked, all get zeros."""
When = str
""""before" or "after" a break."""
Place = tuple[int, When, str]
"""Number of a break, in the order of the capture; before or after it; the path of what is looked at."""


@attrs.frozen(eq=False)
class Seen:
    """A tensor at a glance."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: torch.Tensor | None
    address: int

    def equals(self, other: Seen) -> bool:
        """Bit for bit, as far as fingerprints tell."""
        if (self.shape, self.dtype) != (other.shape, other.dtype) or self.bits is None or other.bits is None:
            return (self.shape, self.dtype) == (other.shape, other.dtype)
        return bool(self.bits == other.bits)


class Glances:
    """What one run shows at its breaks, in order.

    Args:
        state: Tensors that are looked at besides the arguments; not at hoisted breaks, which run at another time in a replay.
        hoisted: Numbers of these.
        unwritten: Elements that nobody has written, by place: they are not compared. The eager twin fills it in.
        kept: The one place of which a copy is kept, and nothing else is looked at.

    Attributes:
        names: Of the breaks.
        seen: (number of the break, "before" or "after") -> path -> tensor or other leaf.
        copy: What lies at `kept`.
    """

    def __init__(
        self,
        state: tuple[torch.Tensor, ...],
        *,
        hoisted: frozenset[int],
        unwritten: Mapping[Place, torch.Tensor] | None = None,
        kept: Place | None = None,
    ) -> None:
        self.names: list[str] = []
        self.seen: dict[tuple[int, When], dict[str, Any]] = {}
        self.copy: Any = None
        self.unwritten: dict[Place, torch.Tensor] = dict(unwritten or {})
        self._finds = unwritten is None
        self._state = state
        self._hoisted = hoisted
        self._kept = kept

    def look(self, number: int, when: When, leaves: Iterable[tuple[str, Any]], context: ReplayContext) -> None:
        """Note what a break receives or leaves.

        Args:
            number: Of the break, in the order of the capture.
            when: "before" or "after" it.
            leaves: Paths and leaves.
            context: Row counts of the step.
        """
        if self._kept is not None and (number, when) != self._kept[:2]:
            return
        state = () if number in self._hoisted else ((f"state[{at}]", one) for at, one in enumerate(self._state))
        found = self.seen.setdefault((number, when), {})
        for path, leaf in (*leaves, *state):
            if not isinstance(leaf, torch.Tensor):
                found[path] = leaf
            elif self._kept is None:
                rows = self._written(_real_rows(leaf, context), (number, when, path))
                found[path] = Seen(tuple(rows.shape), rows.dtype, fingerprint(rows), storage_address(leaf))
            elif path == self._kept[2]:
                self.copy = self._written(_real_rows(leaf, context), self._kept).clone()

    def _written(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """The tensor with zeros where the eager twin shows that nobody has written."""
        if self._finds:
            marked = is_marked(tensor)
            if marked is not None and bool(marked.any()):
                self.unwritten[place] = marked
        marked = self.unwritten.get(place)
        return tensor if marked is None or marked.shape != tensor.shape else tensor.masked_fill(marked, 0)


def _real_rows(tensor: torch.Tensor, context: ReplayContext) -> torch.Tensor:
    """Without rows of padding, where the first axis is as long as the captured rows: their values are nobody's."""
    valid, padded = context.valid_rows, context.padded_rows
    if valid is None or valid == padded or not tensor.dim() or tensor.shape[0] != padded:
        return tensor
    return tensor[:valid]


class Replayed(StepObserver):
    """Looks at the breaks of a replay.

    Args:
        glances: Where it is noted.
        numbers: Order of a step in the capture -> number of the break.
    """

    def __init__(self, glances: Glances, numbers: Mapping[int, int]) -> None:
        self._glances = glances
        self._numbers = numbers

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Look before and after a break."""
        call = step.call
        if call is None:
            return run
        number = self._numbers[step.order]

        def looked_at() -> Any:
            self._glances.look(number, "before", received(call), call.context)
            status = run()
            self._glances.look(number, "after", (*received(call), *_left(call)), call.context)
            return status

        return looked_at


def run_eagerly(
    keeper: StateKeeper, eager: Callable[[], Any], glances: Glances, *, compared: Compared = Compared.ALL
) -> Outcome:
    """Run an eager twin and look at its breaks.

    Args:
        keeper: Saves and restores the state around the run.
        eager: Runs the twin in an `eager_step`.
        glances: Where it is noted.
        compared: Whether the state that it leaves is wanted.
    """

    def around(call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any], context: ReplayContext) -> Any:
        assert isinstance(call, BreakSpec)
        number = len(glances.names)
        glances.names.append(call.name)
        given = list(argument_leaves(call, args, kwargs))
        glances.look(number, "before", given, context)
        result = call.call(args, kwargs)
        returned = [(f"return{path}", leaf) for path, leaf in flatten(result)[0]]
        glances.look(number, "after", (*given, *returned), context)
        return result

    with observed_calls(around):
        return keeper.outcome(eager, compared=compared)


class PoisonedAllocations(TorchDispatchMode):
    """Fills what a forward allocates without values: with a NaN of its own (integers: ones), or zeros.

    Args:
        only: The number of the one allocation that is marked, where the others get zeros; None: all of them are.

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
        if func.overloadpacket in UNINITIALISED and current_frame() is not None and isinstance(result, torch.Tensor):
            if self._only is None or self._only == len(self.lines):
                mark(result)
            elif not result.is_quantized:
                result.zero_()
            self.lines.append(user_line())
        return result


def received(call: BreakCall) -> Iterable[tuple[str, Any]]:
    bound = call.arguments()
    return argument_leaves(call.spec, tuple(bound.args), bound.kwargs)


def argument_leaves(spec: BreakSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
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
