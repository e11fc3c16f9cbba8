"""What ranks say of their next step, and the rule by which they come to the same end."""

from __future__ import annotations

import enum
import hashlib
import numbers
from collections.abc import Callable, Hashable, Sequence, Set
from functools import cache

import attrs
import numpy as np

from breakgraph.gates import Refusal
from breakgraph.statistics import Reason

__all__ = ["Agreed", "Standing", "Vote", "decide", "digest", "ranks_text"]


class Standing(enum.IntEnum):
    """What a rank says of its next step."""

    CAN = 0
    """A graph may serve it."""
    CANNOT = 1
    """It must run eagerly."""
    FAILED = 2
    """It raised; it will not run."""


@attrs.frozen(kw_only=True)
class Vote:
    """What one rank says of its next step.

    Attributes:
        standing: Whether a graph may serve it.
        size: Requests (decode) or tokens (prefill); 0: the rank is idle.
        samples: Whether its key has sampling in the graph (`SampleType.FAST`).
        can_pad: Whether it has what padding rows need.
        extent: Extent of cross-attention, rounded up like the size.
        coordinates: Digest of the rest of its key.
        graphs: Digest of the graphs that the rank has now.
    """

    standing: Standing = Standing.CAN
    size: int = 0
    samples: bool = False
    can_pad: bool = True
    extent: int = 0
    coordinates: int = 0
    graphs: int = 0

    @classmethod
    def of(cls, values: Sequence[int]) -> Vote:
        """Read a vote from the integers that `values` gives."""
        standing, size, samples, can_pad, extent, coordinates, graphs = values
        return cls(
            standing=Standing(standing),
            size=size,
            samples=bool(samples),
            can_pad=bool(can_pad),
            extent=extent,
            coordinates=coordinates,
            graphs=graphs,
        )

    @property
    def values(self) -> tuple[int, ...]:
        """The vote as integers."""
        return tuple(map(int, attrs.astuple(self)))

    @property
    def is_idle(self) -> bool:
        """An idle rank has no request: it answers FULL (nothing to sample) and goes with any key of the others."""
        return self.size == 0


@attrs.frozen
class Agreed:
    """What a group has agreed on.

    Attributes:
        size: The largest size, which every rank pads to.
        extent: The largest extent of cross-attention.
        coordinates: Digest of the rest of the key, 0 where all ranks are idle.
        votes: By rank.
    """

    size: int
    extent: int
    coordinates: int
    votes: Sequence[Vote]

    def unpadded(self, padded_size: int) -> Refusal | None:
        """Why the ranks cannot all pad to a bucket; None where they can.

        Args:
            padded_size: The bucket of the largest size.
        """
        stuck = [rank for rank, vote in enumerate(self.votes) if vote.size != padded_size and not vote.can_pad]
        if not stuck:
            return None
        return Refusal.of(Reason.RANK_DISAGREEMENT, f"ranks {stuck} have no storage for a padding request")


def decide(votes: Sequence[Vote], *, pad: bool, any_sample_type: bool = False) -> Agreed | Refusal:
    """Work out what a group does from its votes; every rank comes to the same end.

    Args:
        votes: By rank.
        pad: Whether unequal sizes pad to the largest.
        any_sample_type: Whether ranks with and without sampling in their graphs may replay together.

    Returns:
        What all agree on, or why all run eagerly.
    """
    cannot = [rank for rank, vote in enumerate(votes) if vote.standing is not Standing.CAN]
    if cannot:
        return Refusal.of(Reason.RANK_DISAGREEMENT, f"ranks {cannot} cannot use a graph for this step")
    if len({vote.graphs for vote in votes}) > 1:
        return Refusal.of(
            Reason.RANK_DISAGREEMENT,
            "the ranks hold other graphs: one has lost some, was cleared, or was interrupted in a capture; "
            "clear() and capture() on all ranks",
        )
    busy = {rank: vote for rank, vote in enumerate(votes) if not vote.is_idle}
    checks: list[tuple[str, Callable[[Vote], int], Callable[[int], str], bool]] = [
        ("sizes", lambda vote: vote.size, lambda size: f" has {size}", not pad),
        (
            "sampling in the graph",
            lambda vote: vote.samples,
            lambda yes: " FAST" if yes else " FULL",
            not any_sample_type,
        ),
        ("other fields of the key", lambda vote: vote.coordinates, lambda number: "", True),
    ]
    for what, field, show, must_agree in checks:
        groups: dict[int, list[int]] = {}
        for rank, vote in busy.items():
            groups.setdefault(int(field(vote)), []).append(rank)
        if must_agree and len(groups) > 1:
            values = ", ".join(f"{ranks_text(ranks)}{show(value)}" for value, ranks in groups.items())
            return Refusal.of(Reason.RANK_DISAGREEMENT, f"the ranks differ in {what}: {values}")
    return Agreed(
        size=max((vote.size for vote in busy.values()), default=0),
        extent=max((vote.extent for vote in busy.values()), default=0),
        coordinates=next((vote.coordinates for vote in busy.values()), 0),
        votes=votes,
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as words, such as "rank 1" and "ranks [1, 3]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


@cache
def digest(value: Hashable) -> int:
    """A number of 63 bits, never 0, that is the same for equal values in every process; `hash()` of a string is not.

    Args:
        value: Numbers, strings, enums, dtypes, and tuples and sets of these.
    """
    return int.from_bytes(hashlib.blake2b(_text(value).encode(), digest_size=8).digest(), "little") >> 1 | 1


def _text(value: object) -> str:
    """One text for equal values: True and 1 are equal, and so are numpy's; sets have no order."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bool | np.bool_ | numbers.Integral):
        return repr(int(value))
    if isinstance(value, float):
        return repr(int(value) if value.is_integer() else value)
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    if attrs.has(type(value)):  # a key
        return _text(attrs.astuple(value, recurse=False))  # type: ignore[arg-type]
    if isinstance(value, Set):
        return f"{{{','.join(sorted(map(_text, value)))}}}"
    return repr(value)
