"""Does a step read what nobody has written?"""

from __future__ import annotations

from typing import Any

import torch

from breakgraph.break_function import BreakSpec
from breakgraph.divergence import Divergence, first_eager_divergence
from breakgraph.fingerprints import is_marked
from breakgraph.glances import NO_ALLOCATION, PoisonedAllocations, argument_leaves
from breakgraph.replay_context import MarkedCall, ReplayContext, observed_calls
from breakgraph.tools.verifying.case import Case
from breakgraph.tools.verifying.report import Cause, Diagnosis
from breakgraph.verification import Outcome, difference

__all__ = ["reads_unwritten"]


def reads_unwritten(case: Case, divergence: Divergence | None, expected: Outcome) -> Diagnosis | None:
    """The result depends on memory that was allocated without values, in eager as in the replay.

    Args:
        case: The step.
        divergence: Where the replay differs.
        expected: What eager computed.
    """

    def run(only: int | None) -> Outcome:
        with PoisonedAllocations(only=only):
            return case.outcome_of_eager()

    clean = run(NO_ALLOCATION)
    unequal = difference(run(None), clean)
    if unequal is None:
        return None
    with PoisonedAllocations(only=NO_ALLOCATION) as allocations:
        case.outcome_of_eager()
    guilty = next((at for at in range(len(allocations.lines)) if difference(run(at), clean) is not None), None)
    line = "" if guilty is None else allocations.lines[guilty]
    tails = _Tails()
    with observed_calls(tails.around):
        run(guilty)
    if tails.found is not None:
        number, name = tails.found
        breaks = sorted((step for step in case.graph.steps if step.call is not None), key=lambda step: step.order)
        if number < len(breaks):
            step = breaks[number]
            return Diagnosis(
                Cause.UNWRITTEN_ROWS,
                f"break '{step.name}' leaves rows of {name} as it found them, and they are read later",
                line or step.line,
                step=case.graph.steps.index(step),
            )

    def marked() -> object:
        with PoisonedAllocations(only=guilty):
            return case.eager_run()

    def zeroed() -> object:
        with PoisonedAllocations(only=NO_ALLOCATION):
            return case.eager_run()

    # Marked elements are not compared where nobody has written them; what was computed from them is.
    first = first_eager_divergence(case.graph, keeper=case.keeper, one=marked, other=zeroed)
    return Diagnosis(
        Cause.UNWRITTEN_ROWS,
        f"with zeros and with NaN in what is allocated there without values, eager differs: {unequal}",
        line,
        step=None if first is None else first.step,
    )


class _Tails:
    """Looks for the first break that fills the rows which it got of an argument, and leaves the rest of its memory unwritten.

    Attributes:
        found: Number of the break and name of the argument.
    """

    def __init__(self) -> None:
        self.found: tuple[int, str] | None = None
        self._number = 0

    def around(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any], context: ReplayContext) -> Any:
        """Look before and after a break."""
        assert isinstance(call, BreakSpec)
        given = [
            (path, leaf)
            for path, leaf in argument_leaves(call, args, kwargs)
            if isinstance(leaf, torch.Tensor) and path.removeprefix("argument ") not in call.writes and _marks(leaf)
        ]
        result = call.call(args, kwargs)
        for path, leaf in given:
            if self.found is None and not _marks(leaf) and _marks(_whole(leaf)):
                self.found = (self._number, path.replace("argument ", "argument '", 1) + "'")
        self._number += 1
        return result


def _marks(tensor: torch.Tensor) -> bool:
    marked = is_marked(tensor)
    return marked is not None and bool(marked.any())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a view."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
