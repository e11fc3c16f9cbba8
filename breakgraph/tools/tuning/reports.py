"""What a runner measured while it captured, as `tune` takes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

import attrs

from breakgraph.errors import ConfigError
from breakgraph.graph_key import GraphKey, PrefillKey
from breakgraph.statistics import CapturePhase, KeyReport

__all__ = ["MeasuredSteps", "from_reports"]


@attrs.frozen(kw_only=True)
class MeasuredSteps:
    """What steps and graphs took; each field is the argument of `tune` of that name.

    Attributes:
        step_times: Bucket to microseconds of a replay; None where none was timed.
        eager_times: Bucket to microseconds of an eager step of so many rows; None where none was timed.
        graph_bytes: Bucket to bytes that its graphs took beyond those of larger ones.
    """

    step_times: dict[int, float] | None
    eager_times: dict[int, float] | None
    graph_bytes: dict[int, int]


def from_reports(reports: Mapping[Hashable, KeyReport]) -> MeasuredSteps:
    """Turns the reports of a captured runner into what `tune` takes.

    A runner times its buckets with `measure="always"`, or "cuda" on a CUDA device; a decode runner times none. Where several
    keys share a bucket (extras, sampling paths), the slowest counts, and their bytes add up. Graphs share a pool, captured
    largest first: most of the memory is in the largest bucket's figure, so that a ladder with another largest bucket takes
    what only a new capture can say.

    Args:
        reports: `runner.statistics.reports`.

    Returns:
        The measurements.

    Raises:
        ConfigError: Nothing was captured, or a key is of no runner.
    """
    replay: dict[int, float] = {}
    eager: dict[int, float] = {}
    memory: defaultdict[int, int] = defaultdict(int)
    for key, report in reports.items():
        if CapturePhase.INSTANTIATE not in report.seconds and not report.memory_bytes:
            continue  # its capture failed
        bucket = _bucket(key)
        memory[bucket] += max(report.memory_bytes, 0)
        for times, seconds in ((replay, report.replay_seconds), (eager, report.eager_seconds)):
            if seconds is not None:
                times[bucket] = max(times.get(bucket, 0.0), seconds * 1e6)
    if not memory:
        raise ConfigError(
            "the reports are of no captured graph.",
            why="Times and bytes are those of its graphs.",
            fix="Pass runner.statistics.reports after runner.capture().",
        )
    return MeasuredSteps(step_times=replay or None, eager_times=eager or None, graph_bytes=dict(memory))


def _bucket(key: Hashable) -> int:
    if isinstance(key, PrefillKey):
        return key.tokens
    if isinstance(key, GraphKey):
        return key.batch_size
    raise ConfigError(
        f"{key!r} is the key of a report; expected a PrefillKey or a GraphKey.",
        why="It says which bucket was measured.",
        fix="Pass runner.statistics.reports of a PrefillRunner or a DecodeRunner.",
    )
