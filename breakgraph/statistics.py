"""What a runner counts: replays, eager runs by reason, padding, and the time of each phase of its capture."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable

import attrs

__all__ = ["MOST_SIZES", "CapturePhase", "KeyReport", "Reason", "RunnerStatistics"]

MOST_SIZES = 1 << 16
"""Most distinct sizes that a runner counts: some megabytes at worst, and far more than a step can have."""


class Reason(enum.Enum):
    """Why a step ran eagerly; the value is the text for people."""

    RECORDING_STATISTICS = "statistics of the model are being recorded"
    RANK_DISAGREEMENT = "another rank cannot use a graph for this step"
    DISABLED = "the runner is disabled"
    DEBUGGING = "debugging: eager in the buffers of the graph"
    NOT_READY = "the state of a request is not ready"
    UNEQUAL_REQUESTS = "the requests of the batch differ in what a graph has one value for"
    GATE = "a gate of the caller refused"
    NOT_CAPTURED_YET = "nothing was captured yet"
    ABOVE_LARGEST_BUCKET = "above the largest bucket"
    NO_GRAPH = "no graph was declared for this key"
    DROPPED = "the graph of this key was dropped"
    EAGER_IS_CHEAPER = "padding to the bucket costs more than an eager step"
    OTHER_PLAN = "the graph holds a plan that this step's live data does not have"
    OPT_OUT = "the caller asked for an eager step"
    NO_DUMMY = "no storage was free for a padding request"


class CapturePhase(enum.Enum):
    """The phases of a capture, in order; the value is the text for people."""

    WARM_UP = "warm-up"
    CAPTURE = "capture"
    INSTANTIATE = "instantiate"
    VERIFY = "verify"


@attrs.define
class KeyReport:
    """How the capture of one key went.

    Attributes:
        seconds: Time spent in each phase, seconds.
        fresh_inputs: Whether verification used other inputs than the capture; None when it did not run.
        fresh_live: The same of live data; None without any. The proof cannot see live data that is frozen in a
            segment when the example repeats it.
        tolerated: Whether eager differed from itself and the declared tolerance was applied.
        padded_rows: Real rows of the padded step that was verified too; None when there was none.
        padded_skipped: Why there was none.
        memory_bytes: Device memory that the graph took beyond what the ones before it had.
        executable_bytes: Of it, what the driver took for executables, in its steps of 2 MiB.
        eager_seconds: Measured time of an eager step of the whole bucket; None where it was not measured.
        replay_seconds: Of a replay.
        least_size: Real rows from which on the graph is used; below, eager is cheaper than padding.
    """

    seconds: dict[CapturePhase, float] = attrs.field(factory=dict)
    fresh_inputs: bool | None = None
    fresh_live: bool | None = None
    tolerated: bool = False
    padded_rows: int | None = None
    padded_skipped: str = ""
    memory_bytes: int = 0
    executable_bytes: int = 0
    eager_seconds: float | None = None
    replay_seconds: float | None = None
    least_size: int = 0


@attrs.define
class RunnerStatistics:
    """Counters of one runner.

    Attributes:
        replays: Steps that replayed a graph.
        eager: Steps that ran eagerly, by the name of the reason (of a caller's gate, by the gate's name).
        real_rows: Real rows of all replays.
        padded_rows: Rows of all replays, padding included.
        eager_rows: Rows of all eager steps.
        replays_by_key: Replays of each graph.
        compared: Steps that were compared with eager before their result was returned (`verify="always"`).
        sizes: Steps by their real size, replays and eager ones: what was rounded up to a bucket, or would have been. Tokens
            of a prefill step, requests of a decode step. At most `MOST_SIZES` of them; an idle rank's step has none.
        reports: How the capture of each key went.
    """

    replays: int = 0
    eager: Counter[str] = attrs.field(factory=Counter)
    real_rows: int = 0
    padded_rows: int = 0
    eager_rows: int = 0
    replays_by_key: Counter[Hashable] = attrs.field(factory=Counter)
    compared: int = 0
    sizes: Counter[int] = attrs.field(factory=Counter)
    reports: dict[Hashable, KeyReport] = attrs.field(factory=dict)

    def count_replay(self, key: Hashable, *, real: int, padded: int, size: int) -> None:
        """Count one replay of a graph.

        Args:
            key: The key of the graph.
            real: Real rows.
            padded: Rows of the graph.
            size: What was rounded up to the bucket.
        """
        self.replays += 1
        self.real_rows += real
        self.padded_rows += padded
        self.replays_by_key[key] += 1
        self._count_size(size)

    def count_eager(self, name: str, *, rows: int, size: int) -> None:
        """Count one eager step.

        Args:
            name: Name of the reason, or of the caller's gate.
            rows: Rows of the step.
            size: What would have been rounded up to a bucket.
        """
        self.eager[name] += 1
        self.eager_rows += rows
        self._count_size(size)

    def _count_size(self, size: int) -> None:
        sizes = self.sizes
        if size in sizes or (size and len(sizes) < MOST_SIZES):
            sizes[size] += 1

    @property
    def padding_waste(self) -> float:
        """The share of replayed rows that were padding, 0 to 1."""
        return 1.0 - self.real_rows / self.padded_rows if self.padded_rows else 0.0

    def seconds(self, phase: CapturePhase) -> float:
        """Add up the time that all keys spent in a phase.

        Args:
            phase: The phase.

        Returns:
            Seconds.
        """
        return sum(report.seconds.get(phase, 0.0) for report in self.reports.values())

    def reset(self) -> None:
        """Set the counters of steps to zero; reports of the capture stay."""
        self.replays = self.real_rows = self.padded_rows = self.eager_rows = self.compared = 0
        self.eager.clear()
        self.replays_by_key.clear()
        self.sizes.clear()
