"""Why does a replay differ from eager? Causes are told apart by running again in other ways.

The order matters: what makes runs differ from themselves comes first, since everything after it compares runs. What could not be
tried is not said to be ruled out.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from breakgraph.break_function import BreakSpec
from breakgraph.divergence import NEXT_BREAK, Divergence
from breakgraph.errors import MovedBufferError
from breakgraph.replay_program import StepKind
from breakgraph.structure import storage_address
from breakgraph.tools.verifying.case import Case, plain_attributes
from breakgraph.tools.verifying.instability import eager_differs, replay_differs
from breakgraph.tools.verifying.naming import OUTSIDE, tensor_name
from breakgraph.tools.verifying.report import Cause, Diagnosis
from breakgraph.tools.verifying.tape import Differs, TapeDifference, tape_difference
from breakgraph.tools.verifying.unwritten import reads_unwritten
from breakgraph.verification import Outcome, live_leaves

__all__ = ["diagnose"]

_LIVE = "Name the parameter in live=, and pass this step's value in replay(live=...)."


def diagnose(case: Case, divergence: Divergence | None, *, expected: Outcome) -> Diagnosis:
    """Find the likely cause.

    Args:
        case: The step.
        divergence: Where it differs; None where it did not when that was looked for.
        expected: What eager computed.
    """
    tried: list[str] = []
    for name, experiment, needs in _EXPERIMENTS:
        if not needs(case):
            continue
        found = experiment(case, divergence, expected)
        if found is not None:
            return attrs.evolve(found, tried=tuple(tried))
        tried.append(name)
    return Diagnosis(Cause.UNKNOWN, "no experiment told", tried=tuple(tried))


_Found = Diagnosis | None


def _tapes_differ(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """The forward does something else in this step than in the one that was captured."""
    found = tape_difference(case.at_capture, case.tape())
    if found is None or (divergence is not None and found.section > divergence.section):
        if divergence is not None and divergence.tensor == NEXT_BREAK:
            return Diagnosis(Cause.MISSING_BREAK, f"Python calls another break: {divergence.difference}")
        return None
    if found.kind is Differs.TENSORS:
        diagnosis = _other_tensor(case, found)
    elif found.kind in (Differs.OPERATORS, Differs.LAYOUTS):
        diagnosis = Diagnosis(Cause.MISSING_BREAK, f"at the capture {found.then}, now {found.now}", found.line)
    else:
        name = _attribute_with(case, found) or _live_with(case, found)
        held = f" ({name})" if name else ""
        diagnosis = Diagnosis(
            Cause.FROZEN_VALUE, f"{found.then} at the capture, with {found.now} now{held}", found.line
        )
    # What is wrong may pass beside breaks, as a residual does, and be seen late: the tape knows where it was made.
    return attrs.evolve(diagnosis, step=_segment_of(case, found.section))


def _segment_of(case: Case, section: int) -> int | None:
    """Place of the segment behind so many breaks of the capture; of the last, where it was split."""
    breaks = sorted(step.order for step in case.graph.steps if step.call is not None)
    start = breaks[section - 1] if 0 < section <= len(breaks) else -1
    end = breaks[section] if section < len(breaks) else len(case.graph.steps)
    places = [
        index
        for index, step in enumerate(case.graph.steps)
        if step.kind is StepKind.SEGMENT and start < step.order < end
    ]
    return places[-1] if places else None


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
    name = tensor_name(now, case.modules)
    cause = Cause.STALE_INPUT if name == OUTSIDE else Cause.MOVED_BUFFER
    return Diagnosis(cause, f"{found.then} at the capture; {name} is {found.now} now", found.line)


def _attribute_with(case: Case, found: TapeDifference) -> str:
    """The attribute that had the one value and has the other."""
    now = plain_attributes(case.modules)
    changed = {name: (then, now[name]) for name, then in case.attributes.items() if name in now and now[name] != then}
    return next((name for name, values in changed.items() if values == found.values), "")


def _live_with(case: Case, found: TapeDifference) -> str:
    if case.live is None or not found.values:
        return ""
    for path, leaf in live_leaves(case.live()):
        if isinstance(leaf, int | float) and leaf == found.values[-1]:
            return f"as in live data {path[0][1]!r}"
    return ""


def _has_moved(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """A watched tensor lies elsewhere; which segment reads it is not known, since no operator was seen to."""
    assert case.check is not None
    try:
        case.check()
    except MovedBufferError as error:
        return Diagnosis(Cause.MOVED_BUFFER, error.what)
    return None


def _break_differs(case: Case, divergence: Divergence | None, expected: Outcome) -> _Found:
    """A break was handed what the capture handed it, or did something else with the same."""
    if divergence is None or divergence.kind is StepKind.SEGMENT:
        return None
    step = case.graph.steps[divergence.step]
    if divergence.tensor.startswith("argument"):
        cause = Cause.STALE_INPUT if "elements differ" in divergence.difference else Cause.FROZEN_VALUE
        return Diagnosis(
            cause,
            f"{divergence.tensor} is no live data, so each replay passes that of the capture: {divergence.difference}",
            step.line,
            cure=_LIVE,
        )
    where = _definition(step.call.spec) if step.call is not None else ""
    return Diagnosis(
        Cause.HIDDEN_INPUT, f"with equal arguments, {divergence.tensor} differs: {divergence.difference}", where
    )


def _definition(spec: BreakSpec) -> str:
    code = getattr(spec.function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _always(case: Case) -> bool:
    return True


def _replays(case: Case) -> bool:
    return not case.raises


def _checks(case: Case) -> bool:
    return case.check is not None


_EXPERIMENTS: tuple[tuple[str, Callable[[Case, Divergence | None, Outcome], _Found], Callable[[Case], bool]], ...] = (
    ("eager repeats itself", eager_differs, _always),
    ("nothing unwritten is read", reads_unwritten, _always),
    ("replays repeat themselves", replay_differs, _replays),
    ("the forward does the same as at the capture", _tapes_differ, _always),
    ("watched tensors lie where they did", _has_moved, _checks),
    ("breaks do the same", _break_differs, _replays),
)
