"""From which real size on is a padded replay cheaper than an eager step? Measured, for each bucket."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import attrs

__all__ = ["Times", "least_sizes", "median_seconds"]

_MARGIN = 0.9
_LEAST_GAIN = 100e-6
"""An eager step must be a tenth cheaper, and by 100 us: times repeat within a few per cent, a host-bound step within tens
of microseconds, and the gate should not hang on that."""


@attrs.frozen
class Times:
    """Measured seconds of one bucket.

    Attributes:
        eager: An eager step of as many rows as the bucket has, not padded.
        replay: A replay of its graph, which costs the same for any real size.
    """

    eager: float
    replay: float


def median_seconds(run: Callable[[], object], *, idle: Callable[[], None], runs: int) -> float:
    """Time of a call from an idle device to an idle device.

    Args:
        run: What is timed.
        idle: Waits for the device.
        runs: How often, after one run that does not count.

    Returns:
        The median, seconds.
    """
    seconds = []
    for _ in range(runs + 1):
        idle()
        begin = time.perf_counter()
        run()
        idle()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def least_sizes(times: Mapping[int, Times]) -> dict[int, int]:
    """Find for each bucket the least real size for which its replay is not clearly more expensive than an eager step.

    Eager time between two buckets is taken as linear, and below the smallest as that of the smallest: there an eager step
    is bound by the host.

    Args:
        times: Bucket -> its times.

    Returns:
        Bucket -> the least size; 0 where every size that rounds up to it is served best by its graph, and the bucket plus
        one where none is.
    """
    found: dict[int, int] = {}
    below, eager_below = 0, 0.0
    for bucket, measured in sorted(times.items()):
        if not below:
            eager_below = measured.eager
        enough = min(_MARGIN * measured.replay, measured.replay - _LEAST_GAIN)
        if min(eager_below, measured.eager) >= enough:
            found[bucket] = 0
        elif measured.eager < enough:
            # Where eager were cheaper for the full bucket and not below it, times would be noise: leave the whole bucket.
            found[bucket] = bucket + 1
        else:
            slope = (measured.eager - eager_below) / (bucket - below)
            found[bucket] = min(bucket, below + max(1, math.ceil((enough - eager_below) / slope)))
        below, eager_below = bucket, measured.eager
    return found
