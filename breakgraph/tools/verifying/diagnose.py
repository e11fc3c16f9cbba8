"""Why does a replay differ from eager? Causes are told apart by running again in other ways.

The order matters: what makes runs differ from themselves comes first, since everything after it compares runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from breakgraph.break_function import BreakSpec
from breakgraph.divergence import NO_ALLOCATION, Divergence, PoisonedAllocations, first_eager_divergence
from breakgraph.errors import MovedBufferError
from breakgraph.replay_context import MarkedCall, ReplayContext, observed_calls
from breakgraph.replay_program import Step, StepKind
from breakgraph.step_observer import Run, StepObserver
from breakgraph.structure import flatten, storage_address
from breakgraph.tools.verifying.case import Case, plain_attributes
from breakgraph.tools.verifying.report import Cause, Diagnosis
from breakgraph.tools.verifying.tape import Differs, TapeDifference, tape_difference
from breakgraph.verification import Outcome, difference, live_leaves

__all__ = ["diagnose"]

_TIMES = 3


def diagnose(case: Case, divergence: Divergence | None, *, expected: Outcome) -> Diagnosis:
    """Find the likely cause.

    Args:
        case: The step.
        divergence: Where it differs; None where it did not when that was looked for.
        expected: What eager computed.
    """
    tried: list[str] = []
    for name, experiment in _EXPERIMENTS:
        found = experiment(case, divergence, expected)
        if found is not None:
            return attrs.evolve(found, tried=tuple(tried))
        tried.append(name)
    return Diagnosis(Cause.UNKNOWN, "no experiment told", tried=tuple(tried))


_Found = Diagnosis | None


def _eager_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """Eager differs from itself: it draws, races, or begins from a state that nobody puts back."""
    with PoisonedAllocations(only=NO_ALLOCATION):  # what is not written must not look like chance
        first, *again = [case.outcome_of_eager() for _ in range(_TIMES)]
    unequal = next((text for one in again if (text := difference(one, first)) is not None), None)
    if unequal is None:
        return None
    now = case.tape()
    declared = {storage_address(item) for item in case.keeper.state if isinstance(item, torch.Tensor)}
    written = next((e for e in now if any(storage_address(t) not in declared for t in e.written)), None)
    if written is not None:
        return Diagnosis(
            Cause.UNDECLARED_STATE,
            f"{written.name} writes {_named(written.written[0], case)}, and eager twice in a row differs: {unequal}",
            written.line,
        )
    if (calm := _awaited_eager_is_stable(case)) is not None:
        return Diagnosis(Cause.UNJOINED_STREAM, f"eager differs from itself ({unequal}), and not where {calm}")
    drawn = next((entry for entry in now if entry.draws), None)
    if drawn is None:
        return Diagnosis(Cause.NON_DETERMINISTIC, f"eager differs from itself: {unequal}")
    return Diagnosis(
        Cause.NON_DETERMINISTIC, f"{drawn.name} draws random numbers that are not put back: {unequal}", drawn.line
    )


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


def _replay_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """The replay differs from itself, or only where the device is not awaited."""
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


def _has_moved(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """A watched tensor lies elsewhere."""
    if case.watch is None:
        return None
    try:
        case.watch.check()
    except MovedBufferError as error:
        return Diagnosis(Cause.MOVED_BUFFER, error.what)
    return None


def _reads_unwritten(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """The result depends on memory that was allocated without values, in eager as in the replay."""

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
    with case.graph.observed(tails):
        case.outcome_of_replay()
    if tails.found is not None:
        step, name = tails.found
        return Diagnosis(
            Cause.UNWRITTEN_ROWS,
            f"break '{case.graph.steps[step].name}' leaves rows of {name} as it found them, and they are read later",
            line or case.graph.steps[step].line,
            step=step,
        )

    def poisoned() -> object:
        with PoisonedAllocations(only=guilty):
            return case.eager_run()

    def zeroed() -> object:
        with PoisonedAllocations(only=NO_ALLOCATION):
            return case.eager_run()

    first = first_eager_divergence(case.graph, keeper=case.keeper, one=poisoned, other=zeroed)
    return Diagnosis(
        Cause.UNWRITTEN_ROWS,
        f"with zeros and with NaN in what is allocated there without values, eager differs: {unequal}",
        line,
        step=None if first is None else first.step,
    )


class _Tails(StepObserver):
    """Looks for the first break that fills the real rows of an argument and leaves the others as poison.

    Attributes:
        found: Place of the break and name of the argument.
    """

    def __init__(self) -> None:
        self.found: tuple[int, str] | None = None

    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """Look behind a break."""
        call = step.call
        if call is None:
            return run

        def looked_at() -> Any:
            status = run()
            valid, spec = call.context.valid_rows, call.spec
            if self.found is None:
                names = list(spec.signature.parameters) if spec.signature is not None else []
                for place, value in enumerate(call.bound.args):
                    name = names[place] if place < len(names) else str(place)
                    if name not in spec.live and name not in spec.writes and _left_poison(value, valid):
                        self.found = (index, f"argument '{name}'")
                        break
            return status

        return looked_at


def _left_poison(value: Any, valid: int | None) -> bool:
    if not isinstance(value, torch.Tensor) or not value.dim() or not value.is_floating_point() or not value.numel():
        return False
    poison = value.isnan().reshape(value.shape[0], -1).all(dim=1)
    return bool(poison.any()) and not bool(poison.all()) and (valid is None or bool(poison[valid:].any()))


def _tapes_differ(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """The forward does something else in this step than in the one that was captured."""
    found = tape_difference(case.at_capture, case.tape())
    if found is None or (divergence is not None and found.section > divergence.section):
        return None
    if found.kind is Differs.TENSORS:
        return _other_tensor(case, found)
    if found.kind in (Differs.OPERATORS, Differs.LAYOUTS):
        return Diagnosis(Cause.MISSING_BREAK, f"at the capture {found.then}, now {found.now}", found.line)
    name = _attribute_with(case, found)
    from_live = "" if name else _live_with(case, found)
    held = f" ({name or from_live})" if name or from_live else ""
    return Diagnosis(Cause.FROZEN_VALUE, f"{found.then} at the capture, with {found.now} now{held}", found.line)


def _other_tensor(case: Case, found: TapeDifference) -> Diagnosis:
    now = found.tensors[-1]
    if case.live is not None:
        for path, leaf in live_leaves(case.live()):
            if isinstance(leaf, torch.Tensor) and storage_address(leaf) == storage_address(now):
                return Diagnosis(
                    Cause.STALE_INPUT,
                    f"{found.then}, live data {path[0][1]!r} of the capture; now it is {found.now}",
                    found.line,
                )
    name = _named(now, case)
    cause = Cause.STALE_INPUT if name == "a tensor from outside" else Cause.MOVED_BUFFER
    return Diagnosis(cause, f"{found.then} at the capture; {name} is {found.now} now", found.line)


def _attribute_with(case: Case, found: TapeDifference) -> str:
    """The attribute that had the one value and has the other."""
    now = plain_attributes(case.modules)
    changed = {name: (then, now[name]) for name, then in case.attributes.items() if name in now and now[name] != then}
    exact = [name for name, values in changed.items() if values == found.values]
    if exact:
        return exact[0]
    return f"changed since: {', '.join(changed)}" if changed else ""


def _live_with(case: Case, found: TapeDifference) -> str:
    if case.live is None or not found.values:
        return ""
    for path, leaf in live_leaves(case.live()):
        if isinstance(leaf, int | float) and leaf == found.values[-1]:
            return f"live data {path[0][1]!r}"
    return ""


def _named(tensor: torch.Tensor, case: Case) -> str:
    address = storage_address(tensor)
    for root in case.modules:
        for path, module in root.named_modules():
            tables: Iterator[tuple[str, Any]] = iter(
                [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
            )
            for name, value in tables:
                for _, leaf in flatten(value)[0] if isinstance(value, list | tuple | dict) else [("", value)]:
                    if isinstance(leaf, torch.Tensor) and storage_address(leaf) == address:
                        return ".".join(part for part in (type(root).__name__, path, name) if part)
    return "a tensor from outside"


def _break_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """A break that got the same did something else."""
    if divergence is None or divergence.kind is StepKind.SEGMENT:
        return None
    step = case.graph.steps[divergence.step]
    if divergence.tensor.startswith("argument"):
        return Diagnosis(
            Cause.FROZEN_VALUE,
            f"{divergence.tensor} is no live data, so each replay passes that of the capture: {divergence.difference}",
            step.line,
        )
    spec = step.call.spec if step.call is not None else None
    where = _definition(spec) if spec is not None else ""
    return Diagnosis(
        Cause.HIDDEN_INPUT, f"with equal arguments, {divergence.tensor} differs: {divergence.difference}", where
    )


def _definition(spec: BreakSpec) -> str:
    code = getattr(spec.function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _writes_undeclared(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """A segment changes a tensor from outside that nobody puts back."""
    declared = {storage_address(item) for item in case.keeper.state if isinstance(item, torch.Tensor)}
    for entry in case.tape():
        for tensor in entry.written:
            if storage_address(tensor) not in declared:
                return Diagnosis(
                    Cause.UNDECLARED_STATE,
                    f"{entry.name} writes {_named(tensor, case)}, which is not in state=",
                    entry.line,
                )
    return None


_EXPERIMENTS: tuple[tuple[str, Callable[[Case, Divergence | None, Outcome], _Found]], ...] = (
    ("eager repeats itself", _eager_differs),
    ("nothing unwritten is read", _reads_unwritten),
    ("replays repeat themselves", _replay_differs),
    ("watched tensors lie where they did", _has_moved),
    ("the forward does the same as at the capture", _tapes_differ),
    ("breaks do the same", _break_differs),
    ("nothing undeclared is written", _writes_undeclared),
)
