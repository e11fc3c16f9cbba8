"""What a verification found: where a replay is wrong, why, and what to do."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from breakgraph.divergence import Divergence
from breakgraph.replay_program import StepKind

__all__ = ["Cause", "Diagnosis", "Verification"]


class Cause(enum.Enum):
    """Why a replay differs from eager; the value is the text for people."""

    MOVED_BUFFER = "moved buffer"
    STALE_INPUT = "stale input"
    FROZEN_VALUE = "frozen value"
    MISSING_BREAK = "missing break"
    UNWRITTEN_ROWS = "unwritten rows"
    UNJOINED_STREAM = "unjoined stream"
    NON_DETERMINISTIC = "not deterministic"
    UNDECLARED_STATE = "undeclared state"
    HIDDEN_INPUT = "hidden input of a break"
    UNKNOWN = "unknown"


_STORIES = {
    Cause.MOVED_BUFFER: (
        "A graph reads a parameter or buffer where it lay at the capture; another tensor lies in its place now.",
        "Change tensors in place (copy_), or capture again after the change.",
    ),
    Cause.STALE_INPUT: (
        "A segment reads the tensor of the capture, by address, and nobody copies this step's data there.",
        "Declare it as an input that is copied in, or read it in a break that binds it with live=.",
    ),
    Cause.FROZEN_VALUE: (
        "A segment holds the number that Python had at the capture; a replay runs no Python.",
        "Put the number into a tensor that is an input, or the step into a break.",
    ),
    Cause.MISSING_BREAK: (
        "Python chose other operators at the capture than it does for this step; a segment repeats those of the capture.",
        "Put the code that chooses into a function marked with @eager_on_graph.",
    ),
    Cause.UNWRITTEN_ROWS: (
        "Something is read that this replay has not written: what an earlier one left there counts as data.",
        "Declare the argument in writes=, so that its tail is zeroed, or write all of it.",
    ),
    Cause.UNJOINED_STREAM: (
        "Work on another stream or thread is not awaited before its result is read.",
        "Let the stream that reads wait for it: torch.cuda.current_stream().wait_stream(side).",
    ),
    Cause.NON_DETERMINISTIC: (
        "The same step twice gives two results, so a replay cannot be equal to eager.",
        "Use a deterministic kernel; draw from a torch.Generator that is declared in generators=; hand numbers that the host "
        "draws to the step as live data.",
    ),
    Cause.UNDECLARED_STATE: (
        "The forward changes something that is not declared, so each run begins from another state.",
        "Declare it: state=(cache,).",
    ),
    Cause.HIDDEN_INPUT: (
        "The break got what it gets in eager and did something else: it reads what is no argument of it.",
        "Pass what it needs as arguments, or as live data.",
    ),
    Cause.UNKNOWN: (
        "None of the known causes explains it.",
        "Run chosen segments kernel by kernel with breakgraph.tools.debugging, and compare.",
    ),
}


@attrs.frozen
class Diagnosis:
    """The likely cause of a difference.

    Attributes:
        cause: The kind.
        evidence: What was seen that speaks for it.
        line: The user's line, where it is known; else empty.
        step: Place of the step that it points to, where another one than the first that differs is to blame.
        tried: What was ruled out, in order.
        cure: What to do, where it is another thing than for the cause in general.
    """

    cause: Cause
    evidence: str
    line: str = ""
    step: int | None = None
    tried: tuple[str, ...] = ()
    cure: str = ""

    @property
    def why(self) -> str:
        """Why it matters."""
        return _STORIES[self.cause][0]

    @property
    def fix(self) -> str:
        """What to do."""
        return self.cure or _STORIES[self.cause][1]


@attrs.frozen
class Verification:
    """What came of verifying one graph.

    Attributes:
        name: Of the graph.
        rounds: Steps that were compared.
        divergence: The first step that differs; None where all are equal, or where it shows only unobserved.
        diagnosis: Its likely cause; None where all are equal.
        difference: The difference of the results in words; empty where they are equal.
        blamed: The step to blame, in words.
        kinds: Of all steps of the graph, in the order of a replay.
        notes: What makes the verdict weaker, such as inputs that were always those of the capture.
    """

    name: str
    rounds: int
    divergence: Divergence | None = None
    diagnosis: Diagnosis | None = None
    difference: str = ""
    blamed: str = ""
    kinds: tuple[StepKind, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True where every replay equals eager, bit for bit."""
        return self.diagnosis is None

    @property
    def step(self) -> int | None:
        """Place in `graph.steps` of the step to blame."""
        if self.diagnosis is not None and self.diagnosis.step is not None:
            return self.diagnosis.step
        return None if self.divergence is None else self.divergence.step

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = attrs.asdict(self)
        if self.divergence is not None:
            found["divergence"]["kind"] = self.divergence.kind.value
        if self.diagnosis is not None:
            found["diagnosis"].update(cause=self.diagnosis.cause.value, why=self.diagnosis.why, fix=self.diagnosis.fix)
        return {**found, "ok": self.ok, "step": self.step, "kinds": [kind.value for kind in self.kinds]}

    def __str__(self) -> str:
        if self.diagnosis is None:
            return "\n  ".join((f"{self.name}: {self.rounds} replays equal eager, bit for bit", *self.notes))
        lines = [f"{self.name}: a replay differs from eager, round {self.rounds}: {self.difference}"]
        if self.divergence is not None:
            lines.append(f"  {self.divergence}")
        at = f" at {self.diagnosis.line}" if self.diagnosis.line else ""
        if self.diagnosis.step is not None:
            lines.append(f"  to blame is {self.blamed}")
        lines.append(f"  likely cause: {self.diagnosis.cause.value}{at}: {self.diagnosis.evidence}")
        lines += [f"  {self.diagnosis.why}", f"  {self.diagnosis.fix}"]
        if self.diagnosis.tried:
            lines.append(f"  ruled out: {', '.join(self.diagnosis.tried)}")
        return "\n".join(lines)
