"""What `lint` says: findings with their lines, and the lines that belong into a marked function."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

__all__ = ["Finding", "Kind", "LintReport", "Severity", "Suggestion"]


class Kind(enum.Enum):
    """What was found; the value is its name for people."""

    HOST_SYNC = "host sync"
    DATA_DEPENDENT_SHAPE = "data-dependent shape"
    HOST_BRANCH = "host branch"
    HOST_DATA = "host data in device work"
    HOST_CODE = "host code"
    ATTRIBUTE = "Python state"
    KEPT_TENSOR = "kept tensor"
    WORKSPACE = "lazy workspace"
    RANDOM = "random numbers"
    AUTOCAST = "autocast"


class Severity(enum.Enum):
    """How bad it is."""

    FAILS = "fails"
    """The capture fails, or a replay gives other numbers than eager."""
    NOTE = "note"
    """Allowed, and worth knowing."""


@attrs.frozen
class Finding:
    """One thing that a graph cannot hold, or that is worth knowing.

    Attributes:
        kind: What it is.
        severity: How bad it is.
        path: The file.
        lineno: The line, from 1.
        function: The function that the line stands in, as `Class.method`.
        module: The module of the line.
        what: What was seen.
        why: Why it matters.
        fix: What to do.
        times: How often it was seen in one run.
    """

    kind: Kind
    severity: Severity
    path: str
    lineno: int
    function: str
    module: str
    what: str
    why: str
    fix: str
    times: int = 1

    @property
    def line(self) -> str:
        """The place as `file.py:12 in Class.method`."""
        return f"{self.path}:{self.lineno} in {self.function}"

    def __str__(self) -> str:
        times = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.line}: {self.severity.value}: {self.kind.value}: {self.what}{times}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return attrs.asdict(self, value_serializer=_plain)


@attrs.frozen
class Suggestion:
    """Lines that belong into a function marked with `@eager_on_graph`.

    Attributes:
        path: The file.
        function: The function that they stand in.
        first: The first of the lines.
        last: The last of them.
        reads: Names that the lines need from before.
        assigns: Names that they set and that are read afterwards.
        live: Those of the names read that are host data of the inputs, to be named in `live=`.
        text: What to do, in full.
        example: A mark and the head of a function, where the lines can be moved as they are.
    """

    path: str
    function: str
    first: int
    last: int
    reads: tuple[str, ...] = ()
    assigns: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    text: str = attrs.field(kw_only=True)
    example: str | None = attrs.field(default=None, kw_only=True)

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return attrs.asdict(self)


@attrs.frozen
class LintReport:
    """What `lint` found.

    Attributes:
        findings: One for each kind and line, by file and line.
        suggestions: Which lines to run as breaks.
        unseen: What could not be followed, in words: code without source, inputs without stand-ins.
        device: Where the work was. On CUDA torch itself was asked which operators wait.
    """

    findings: tuple[Finding, ...]
    suggestions: tuple[Suggestion, ...] = ()
    unseen: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings with which a capture fails or a replay gives other numbers."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.FAILS)

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that are allowed."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.NOTE)

    def __str__(self) -> str:
        """Findings with their reasons, what to mark, and a last line with the counts."""
        lines: list[str] = []
        said: set[tuple[str, str]] = set()
        for finding in self.findings:
            lines.append(str(finding))
            if (finding.why, finding.fix) not in said:  # the reasons of a kind are given once
                said.add((finding.why, finding.fix))
                lines += [f"    {finding.why}", f"    {finding.fix}"]
        for suggestion in self.suggestions:
            lines += ["", suggestion.text]
        if self.unseen:
            lines += ["", *(f"not seen: {text}" for text in self.unseen)]
        return "\n".join([*lines, "", self.summary()]).lstrip("\n")

    def summary(self) -> str:
        """One line with the counts."""
        if not self.findings:
            seen = "what was seen of this forward" if self.unseen else "this forward"
            return f"Nothing found in {seen} on {self.device}."
        return f"{_count(self.failures, 'failure')}, {_count(self.notes, 'note')} on {self.device}."

    def as_dict(self) -> Mapping[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.device,
            "failures": len(self.failures),
            "findings": [finding.as_dict() for finding in self.findings],
            "suggestions": [suggestion.as_dict() for suggestion in self.suggestions],
            "unseen": list(self.unseen),
        }


def _count(findings: tuple[Finding, ...], word: str) -> str:
    return f"{len(findings)} {word}{'' if len(findings) == 1 else 's'}"


def _plain(_: Any, __: Any, value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value
