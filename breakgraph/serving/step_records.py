"""Where the host was in each step: schedule, prepare, launch, wait, process.

A step is scheduled, prepared and launched in one call of the engine, and waited for and processed in the next one, when the step
behind it is on the device already.
"""

from __future__ import annotations

import time
from collections import deque

import attrs

__all__ = ["PARTS", "Laps", "StepRecord", "StepRecords"]

PARTS = ("schedule", "prepare", "launch", "wait", "process")
_KEPT = 1024


@attrs.frozen(kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        phase: "prefill" or "decode".
        requests: In the step.
        tokens: Computed by the step.
        schedule: Seconds to choose its requests.
        prepare: Seconds of host work for it: indices, checks, planning, staging.
        launch: Seconds to put it on the device; on a CPU that is its computation.
        wait: Seconds that the host waited for its tokens.
        process: Seconds to hand its tokens out.
    """

    phase: str
    requests: int
    tokens: int
    schedule: float
    prepare: float
    launch: float
    wait: float
    process: float


class Laps:
    """A clock that is read between parts of a step: each part lasts from the last reading to its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """The next part begins now."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> float:
        """Ends a part.

        Args:
            part: Its name.

        Returns:
            Its seconds.
        """
        now = time.perf_counter()
        seconds = now - self._last
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        self._last = now
        return seconds


class StepRecords:
    """The newest steps, and the seconds of all.

    Attributes:
        recent: The newest 1,024 steps that were read, oldest first.
        totals: Seconds of all steps by part.
    """

    def __init__(self) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=_KEPT)
        self.totals = dict.fromkeys(PARTS, 0.0)

    def add(self, laps: Laps, *, phase: str, requests: int, tokens: int) -> None:
        """Notes a step that has been read.

        Args:
            laps: Its parts.
            phase: "prefill" or "decode".
            requests: In the step.
            tokens: Computed by the step.
        """
        parts = {part: laps.seconds.get(part, 0.0) for part in PARTS}
        for part, seconds in parts.items():
            self.totals[part] += seconds
        self.recent.append(StepRecord(phase=phase, requests=requests, tokens=tokens, **parts))
