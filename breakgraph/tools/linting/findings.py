"""From what runs showed to findings: one for each kind and line, with its severity, reason and mend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from breakgraph.tools.linting.places import Place
from breakgraph.tools.linting.report import Finding, Kind, Severity
from breakgraph.tools.linting.runs import Run
from breakgraph.tools.linting.state import Change, KeptTensor
from breakgraph.tools.linting.texts import (
    AT_FIRST_ONLY,
    DEFAULT_GENERATOR,
    FIXES,
    GUARD,
    IDEMPOTENT,
    OWN_GENERATOR,
    PRINTED,
    UNREADABLE,
    WHYS,
)
from breakgraph.tools.linting.watch import Sighting

__all__ = ["findings_of"]

_UNSEEN = "a cache of a decorator, or C++,"


def findings_of(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """The findings, by file and line.

    Args:
        runs: Two runs with the same inputs, and one with stand-ins where there are any.
    """
    found: dict[tuple[Kind, str, int], Finding] = {}
    for finding in (*_from_sightings(runs), *_from_state(runs)):
        key = (finding.kind, finding.path, finding.lineno)
        other = found.get(key)
        if other is None or (other.severity is Severity.NOTE and finding.severity is Severity.FAILS):
            found[key] = finding
    for _, path, lineno in [key for key in found if key[0] in (Kind.KEPT_TENSOR, Kind.WORKSPACE)]:
        state = found.get((Kind.ATTRIBUTE, path, lineno))
        if state is not None and state.severity is Severity.NOTE:  # the second run found what the first one kept
            del found[Kind.ATTRIBUTE, path, lineno]
    return tuple(sorted(found.values(), key=lambda f: (f.path, f.lineno, f.kind.value)))


def _from_sightings(runs: Sequence[Run]) -> Iterator[Finding]:
    seen: dict[Sighting, None] = dict.fromkeys(sighting for run in runs for sighting in run.sightings)
    for sighting in seen:
        times = [run.sightings.get(sighting, 0) for run in runs]
        why, fix = _reasons(sighting)
        if times[0] and not any(times[1:]):
            why = f"{why} {AT_FIRST_ONLY}"
        count = 1 if _has_no_count(sighting) else max(times)
        yield _finding(sighting.kind, sighting.severity, sighting.place, sighting.what, why, fix, times=count)


def _has_no_count(sighting: Sighting) -> bool:
    """Whether it was seen more often than it stands for: loops ask for lengths, and lambdas come by their first line again."""
    if sighting.kind in (Kind.HOST_CODE, Kind.RANDOM):
        return sighting.place.function.endswith(">")
    return sighting.kind is Kind.HOST_BRANCH and "host data" in sighting.what


def _reasons(sighting: Sighting) -> tuple[str, str]:
    if sighting.kind is Kind.RANDOM and sighting.own_generator:
        return OWN_GENERATOR
    if sighting.kind is Kind.RANDOM and sighting.severity is Severity.NOTE:
        return DEFAULT_GENERATOR
    if sighting.kind is Kind.HOST_CODE and sighting.severity is Severity.NOTE:
        return PRINTED
    if sighting.kind is Kind.HOST_BRANCH and sighting.severity is Severity.NOTE:
        return GUARD
    return WHYS[sighting.kind], FIXES[sighting.kind]


def _from_state(runs: Sequence[Run]) -> Iterator[Finding]:
    for index, run in enumerate(runs):
        kept = {tensor.address: tensor for tensor in run.kept}
        assigned: set[int] = set()
        only_first = index == 0 and not any(later.kept for later in runs[1:])
        for change in run.changes.all.values():
            held = [kept[address] for address in change.tensors if address in kept]
            assigned.update(tensor.address for tensor in held)
            for tensor in held:  # at the line that keeps it; where several do, at the one that made it
                place = tensor.place if tensor.place in change.places else list(change.places)[-1]
                yield _kept(tensor, place, only_first=only_first)
            if not held:
                yield from _changed(change, index=index)
        for tensor in run.kept:
            if tensor.address not in assigned:
                yield _kept(tensor, tensor.place, only_first=only_first)


def _changed(change: Change, *, index: int) -> Iterator[Finding]:
    lasting = change.is_lasting
    # The first run may build what the second finds: only a change in the second is one that every step makes.
    fails = (index > 0 and lasting) or change.has_stand_in
    severity = Severity.FAILS if fails else Severity.NOTE
    why, fix = (WHYS[Kind.ATTRIBUTE], FIXES[Kind.ATTRIBUTE]) if fails else IDEMPOTENT
    if not fails and not change.is_readable:
        why, fix = UNREADABLE
    if not fails and lasting:
        why = f"{WHYS[Kind.ATTRIBUTE]} {AT_FIRST_ONLY}"
    for place, label in change.places.items():
        yield _finding(Kind.ATTRIBUTE, severity, place, label, why, fix)


def _kept(tensor: KeptTensor, place: Place, *, only_first: bool) -> Finding:
    kind = Kind.WORKSPACE if tensor.is_allocated else Kind.KEPT_TENSOR
    made = "" if tensor.place == place else f", made at {tensor.place},"
    what = f"a tensor of shape {tensor.shape}{made} is held by {tensor.holder or _UNSEEN} after the forward"
    why = f"{WHYS[kind]} {AT_FIRST_ONLY}" if only_first else WHYS[kind]
    return _finding(kind, Severity.FAILS, place, what, why, FIXES[kind])


def _finding(kind: Kind, severity: Severity, place: Place, what: str, why: str, fix: str, *, times: int = 1) -> Finding:
    return Finding(
        kind,
        severity=severity,
        path=place.path,
        lineno=place.lineno,
        function=place.function,
        module=place.module,
        what=what,
        why=why,
        fix=fix,
        times=times,
    )
