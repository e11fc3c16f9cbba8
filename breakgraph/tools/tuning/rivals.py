"""Ladders that people write without looking at their sizes: what a tuned one is compared with."""

from __future__ import annotations

from collections.abc import Iterable

from breakgraph.buckets import Buckets

__all__ = ["doubling", "doubling_above", "every", "usual_ladders"]


def doubling(largest: int) -> Buckets:
    """1, 2, 4, 8 and so on; the last bucket is the largest size.

    Args:
        largest: Rows of the largest step.
    """
    return _ended((1 << power for power in range(largest.bit_length() + 1)), largest=largest)


def every(rows: int, *, largest: int) -> Buckets:
    """Every multiple of a number of rows; the last bucket is the largest size.

    Args:
        rows: Between two buckets.
        largest: Rows of the largest step.
    """
    return _ended(range(rows, largest + rows, rows), largest=largest)


def doubling_above(start: int, *, rows: int, largest: int) -> Buckets:
    """Every multiple of a number of rows up to a size, twice that, twice that again; the last bucket is the largest size.

    This is what serving engines shipped before they went over to steps of equal width above 128.

    Args:
        start: Where doubling begins, a multiple of `rows`.
        rows: Between two buckets up to there.
        largest: Rows of the largest step.
    """
    powers = (start << power for power in range(largest.bit_length() + 1))
    return _ended((*range(rows, start, rows), *powers), largest=largest)


def usual_ladders(largest: int) -> dict[str, Buckets]:
    """The ladders that `tune` compares with, by name, each up to the largest size.

    Args:
        largest: Rows of the largest step.
    """
    return {
        "doubling": doubling(largest),
        "every 8 to 128, then doubling": doubling_above(128, rows=8, largest=largest),
        "every 64": every(64, largest=largest),
        "every 8": every(8, largest=largest),
    }


def _ended(sizes: Iterable[int], *, largest: int) -> Buckets:
    # Not rounded up to the ladder's next step: a graph of rows that no step has would only make a rival look worse.
    return Buckets.of((*(size for size in sizes if size < largest), largest))
