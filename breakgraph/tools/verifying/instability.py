"""What makes runs of one step differ from one another: chance, a race, or a beginning that nobody puts back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from breakgraph.divergence import Divergence
from breakgraph.glances import NO_ALLOCATION, PoisonedAllocations
from breakgraph.replay_context import MarkedCall, ReplayContext, observed_calls
from breakgraph.replay_program import Step
from breakgraph.step_observer import Run, StepObserver
from breakgraph.structure import storage_address
from breakgraph.tools.verifying.case import Case
from breakgraph.tools.verifying.naming import OUTSIDE, tensor_name
from breakgraph.tools.verifying.report import Cause, Diagnosis
from breakgraph.tools.verifying.tape import Entry
from breakgraph.verification import Outcome, difference, same_snapshot, snapshot

__all__ = ["eager_differs", "replay_differs"]

_TIMES = 3
_MOST_BYTES = 1 << 30
"""Of tensors that are put back to see whether that is a cure."""


def eager_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> Diagnosis | None:
    """Eager differs from itself: it draws, races, or begins from a state that nobody puts back.

    Args:
        case: The step.
        divergence: Where the replay differs.
        expected: What eager computed.
    """
    before = snapshot(dict(case.live())) if case.live is not None else None
    with PoisonedAllocations(only=NO_ALLOCATION):  # what is not written must not look like chance
        first, *again = [case.outcome_of_eager() for _ in range(_TIMES)]
    unequal = next((text for one in again if (text := difference(one, first)) is not None), None)
    if unequal is None:
        return None
    if case.live is not None and before is not None and not same_snapshot(before, snapshot(dict(case.live()))):
        return Diagnosis(
            Cause.UNDECLARED_STATE, f"a run changes the live data, and the next begins with that: {unequal}"
        )
    tape = case.tape()
    if (state := _undeclared(case)) is not None:
        return state
    if (calm := _awaited_eager_is_stable(case)) is not None:
        return Diagnosis(Cause.UNJOINED_STREAM, f"eager differs from itself ({unequal}), and not where {calm}")
    kept = {id(generator) for generator in case.keeper.generators}
    drawn = next((e for e in tape if isinstance(e.draws, torch.Generator) and id(e.draws) not in kept), None)
    if drawn is None:
        return Diagnosis(Cause.NON_DETERMINISTIC, f"eager differs from itself: {unequal}")
    return Diagnosis(
        Cause.NON_DETERMINISTIC,
        f"{drawn.name} draws from a generator that is not in generators=: {unequal}",
        drawn.line,
        cure="Declare the generator: generators=(generator,).",
    )


def _undeclared(case: Case) -> Diagnosis | None:
    """A tensor from outside that the forward or a break of it writes, where putting it back makes eager repeat itself."""
    declared = {storage_address(item) for item in case.keeper.state if isinstance(item, torch.Tensor)}
    declared |= {storage_address(tensor) for tensor in case.within}
    written: dict[int, tuple[torch.Tensor, Entry]] = {}
    for entry in case.tape():
        for tensor in entry.written:
            if storage_address(tensor) not in declared:
                written.setdefault(storage_address(tensor), (tensor, entry))
    found = [(tensor, entry) for tensor, entry in written.values() if tensor.nbytes <= _MOST_BYTES]
    if not found or not _repeats(case, [tensor for tensor, _ in found]):
        return None
    guilty = next((pair for pair in found if len(found) == 1 or _repeats(case, [pair[0]])), found[0])
    tensor, entry = guilty
    name = tensor_name(tensor, case.modules)
    return Diagnosis(
        Cause.UNDECLARED_STATE,
        f"{entry.name} writes {name}; eager repeats itself where that is put back",
        entry.line,
        cure="" if name == OUTSIDE else f"Declare it: state=(model.{name.partition('.')[2]},).",
    )


def _repeats(case: Case, tensors: Iterable[torch.Tensor]) -> bool:
    """Whether eager repeats itself where these are put back before each run."""
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    runs = []
    for _ in range(_TIMES):
        with torch.inference_mode():
            for tensor, copy in saved:
                tensor.copy_(copy)
        runs.append(case.outcome_of_eager())
    return all(difference(run, runs[0]) is None for run in runs)


def _awaited_eager_is_stable(case: Case) -> str | None:
    """Whether eager repeats itself where the device is awaited around every break."""
    pool = case.graph.pool
    if pool is None or pool.device.type != "cuda":
        return None

    def around(call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any], context: ReplayContext) -> Any:
        torch.cuda.synchronize(pool.device)
        result = call.call(args, kwargs)
        torch.cuda.synchronize(pool.device)
        return result

    with observed_calls(around):
        runs = [case.outcome_of_eager() for _ in range(_TIMES)]
    return "the device is awaited around each break" if all(difference(run, runs[0]) is None for run in runs) else None


def replay_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> Diagnosis | None:
    """The replay differs from itself, or only where the device is not awaited.

    Args:
        case: The step.
        divergence: Where the replay differs.
        expected: What eager computed.
    """
    runs = [case.outcome_of_replay() for _ in range(_TIMES)]
    unstable = next((text for run in runs if (text := difference(run, runs[0])) is not None), None)
    wrong = [text for run in runs if (text := difference(run, expected)) is not None]
    if not wrong:
        return Diagnosis(
            Cause.HIDDEN_INPUT,
            "the difference was gone when the same step ran again: one run leaves something, in an attribute or a closure, that "
            "another one reads",
        )
    cured = _least_awaited(case, expected)
    if cured is not None:
        step = case.graph.steps[cured]
        return Diagnosis(
            Cause.UNJOINED_STREAM,
            f"{len(wrong)} of {_TIMES} replays differ, and none where the device is awaited behind step {cured}",
            step.line,
            step=cured,
        )
    if unstable is not None:
        return Diagnosis(Cause.NON_DETERMINISTIC, f"two replays of one step differ, two eager runs do not: {unstable}")
    return None


def _least_awaited(case: Case, expected: Outcome) -> int | None:
    """The step behind which the device has to be awaited for replays to equal eager, by bisection; None where that is no cure."""
    pool = case.graph.pool
    if pool is None or pool.device.type != "cuda":
        return None  # awaiting a CPU changes nothing but the time
    count = len(case.graph.steps)

    def cures(awaited: range) -> bool:
        with case.graph.observed(_Awaited(awaited, pool.device)):
            return all(difference(case.outcome_of_replay(), expected) is None for _ in range(_TIMES))

    if not cures(range(count)):
        return None
    low, high = 0, count - 1  # awaiting steps 0 to high cures; to low - 1 does not
    while low < high:
        middle = (low + high) // 2
        if cures(range(middle + 1)):
            high = middle
        else:
            low = middle + 1
    return high


class _Awaited(StepObserver):
    """Waits for the whole device behind some steps.

    Args:
        places: Of these steps.
        device: The device.
    """

    def __init__(self, places: range, device: torch.device) -> None:
        self._places = places
        self._device = device

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Run a step and wait."""
        if index not in self._places:
            return run

        def awaited() -> Any:
            status = run()
            torch.cuda.synchronize(self._device)
            return status

        return awaited
