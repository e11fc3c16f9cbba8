"""Ranks that must take the same path: votes before each step, and captures that succeed everywhere or nowhere.

With data-parallel attention every rank has a batch of its own, and they meet in collectives of the model (experts,
logits). A rank that replays 8 padded rows beside one that runs 5 rows eagerly would give the collectives other shapes, or
wait for ever. So the ranks vote on each step; with padding they first agree on the largest size, and unequal sizes share a
bucket.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import cache
from typing import NoReturn

import attrs
import torch
import torch.distributed as dist

from breakgraph.errors import CaptureError, ConfigError, RankError
from breakgraph.gates import Refusal
from breakgraph.statistics import Reason

__all__ = ["Agreed", "RankAgreement", "RankGroup", "Standing", "Vote", "digest"]

_WIDTH = 8
_WHY_TOGETHER = "Ranks meet in collectives of the model, so one that goes another way leaves the others waiting."


class _Talk(enum.IntEnum):
    """What a rank is doing when it speaks; part of every message, so that ranks in different places notice."""

    VOTE = 1
    CONFIRM = 2
    BARRIER = 3
    OUTCOME = 4
    VALUE = 5


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
    """

    standing: Standing = Standing.CAN
    size: int = 0
    samples: bool = False
    can_pad: bool = True
    extent: int = 0
    coordinates: int = 0

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


@attrs.frozen
class RankGroup:
    """Ranks and the one way in which they talk: each gives a few integers and gets everybody's.

    Barriers, votes and outcomes all go through one collective of one shape, and each message says which of them it is.
    Ranks in different places thus still meet and notice; with `barrier()` beside `all_gather()` they would hang.

    Attributes:
        group: A process group whose backend can gather CPU tensors (gloo). Its time-out bounds every wait: make it longer than
            that of the groups that the model's own collectives use, whose failures are reported through this one.
    """

    group: dist.ProcessGroup

    @classmethod
    def create(cls, ranks: Sequence[int] | None = None, *, timeout_seconds: float = 20.0) -> RankGroup:
        """Make a group of its own; every rank of the default group must call it.

        Args:
            ranks: Global ranks; None: all.
            timeout_seconds: The longest wait for another rank.

        Raises:
            ConfigError: `torch.distributed` is not initialised, or this rank is not among `ranks`.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "RankGroup.create() was called, and torch.distributed is not initialised.",
                why="The ranks of a group find each other through its default group.",
                fix="Call torch.distributed.init_process_group(...) first; start the ranks with torchrun.",
            )
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds), backend="gloo")
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"rank {dist.get_rank()} is not among the ranks {list(ranks or ())} of the group.",
                why="It would take no part in what they agree on.",
                fix="Give a RankGroup only to runners of its ranks.",
            )
        return cls(group)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group)

    def exchange(self, values: Sequence[int], *, what: str) -> list[list[int]]:
        """Give integers and get those of every rank. Cost: one gather of 64 bytes a rank, in which the host waits.

        Args:
            values: At most 8, of 64 bits.
            what: What for, for messages.

        Returns:
            By rank.

        Raises:
            RankError: A rank is gone or did not come within the time-out.
        """
        mine = torch.zeros(_WIDTH, dtype=torch.int64)
        mine[: len(values)] = torch.tensor(values)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} waited for the others for {what}, in vain: {error}",
                why=_WHY_TOGETHER,
                fix="Look at the ranks that ended or hang; every rank must take part in every capture and every step.",
            ) from error
        return [one.tolist() for one in everyone]

    def texts(self, text: str) -> list[str]:
        """Give a text and get that of every rank; all must be here.

        Args:
            text: Any length.
        """
        everyone: list[str] = [""] * self.size
        dist.all_gather_object(everyone, text, group=self.group)
        return everyone


@attrs.frozen
class RankAgreement:
    """How the ranks of a group stay on one path. Every rank gives its runners an agreement of the same options.

    Attributes:
        group: The ranks.
        pad: Whether unequal sizes pad to the largest; False: they run eagerly. Idle ranks pad in any case.
        may_differ: Fields of the key in which ranks may differ and still replay together, such as "is_all_greedy_sample":
            those that change nothing in the order and shapes of the model's collectives.
    """

    group: RankGroup
    pad: bool = attrs.field(default=True, kw_only=True)
    may_differ: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)

    # Steps.

    def vote(self, mine: Vote) -> Agreed | Refusal:
        """Vote on the next step.

        Args:
            mine: This rank's vote.

        Returns:
            What all agree on; or why all run eagerly, the same on every rank.

        Raises:
            RankError: A rank has raised, is gone, or is not at a step.
        """
        talk = self.group.exchange([_Talk.VOTE, *map(int, attrs.astuple(mine))], what="a vote on a step")
        self._same_talk(talk, _Talk.VOTE)
        votes = [Vote(standing=Standing(v[1]), size=v[2], samples=bool(v[3]), can_pad=bool(v[4]), extent=v[5],
                      coordinates=v[6]) for v in talk]  # fmt: skip
        return decide(votes, pad=self.pad, any_sample_type="sample_type" in self.may_differ)

    def fail(self) -> None:
        """Tell the others that this rank raised before its step; its own exception is not replaced."""
        self.group.exchange([_Talk.VOTE, Standing.FAILED], what="a vote on a step")

    def confirm(self, ok: bool) -> Refusal | None:
        """Ask whether all ranks can still do what they voted for, after planning.

        Args:
            ok: Whether this one can.

        Returns:
            Why all run eagerly; None where all can.
        """
        talk = self.group.exchange([_Talk.CONFIRM, ok], what="the confirmation of a step")
        self._same_talk(talk, _Talk.CONFIRM)
        if all(one[1] for one in talk):
            return None
        ranks = [rank for rank, one in enumerate(talk) if not one[1]]
        return Refusal.of(Reason.RANK_DISAGREEMENT, f"ranks {ranks} have another plan than their graphs hold")

    # Captures.

    def same_keys(self, keys: Sequence[Hashable]) -> None:
        """Refuse a capture for which the ranks have different keys, on every rank.

        Args:
            keys: This rank's, in the order of the capture.

        Raises:
            CaptureError: They differ.
        """
        talk = self.group.exchange([_Talk.VALUE, len(keys), digest(tuple(keys))], what="the keys of a capture")
        self._same_talk(talk, _Talk.VALUE)
        odd = [rank for rank, one in enumerate(talk) if one != talk[0]]
        if odd:
            raise CaptureError(
                f"ranks {odd} are to capture other keys than rank 0: {[one[1] for one in talk]} keys by rank, of rank "
                f"{self.group.rank} {list(keys)[:8]}.",
                why=_WHY_TOGETHER,
                fix="Give the runners of all ranks the same buckets and variants, and capture them in the same window.",
            )

    def barrier(self) -> None:
        """Wait for the others, inside a capture.

        Raises:
            RankError: Some have ended this capture already, or a rank is gone.
        """
        talk = self.group.exchange([_Talk.BARRIER], what="a barrier of a capture")
        ended = [rank for rank, one in enumerate(talk) if one[0] == _Talk.OUTCOME]
        if ended:
            raise RankError(
                f"rank {self.group.rank} is inside a capture that ranks {ended} have ended.",
                why=_WHY_TOGETHER,
                fix="Look at the error of these ranks; where they have none, their forward has fewer breaks.",
            )
        self._same_talk(talk, _Talk.BARRIER)

    def outcome(self, failure: str | None) -> str | None:
        """Compare how a phase of a key ended; ranks that are still inside it notice at their next barrier.

        Args:
            failure: Why this rank failed; None where it did not.

        Returns:
            Which ranks failed and why; None where none did.
        """
        while True:
            talk = self.group.exchange([_Talk.OUTCOME, failure is not None], what="the outcome of a capture")
            if all(one[0] == _Talk.OUTCOME for one in talk):
                break
            if any(one[0] not in (_Talk.OUTCOME, _Talk.BARRIER) for one in talk):
                self._same_talk(talk, _Talk.OUTCOME)
        failed = [rank for rank, one in enumerate(talk) if one[1]]
        if not failed:
            return None
        texts = self.group.texts(failure or "")
        return "\n".join(f"rank {rank} of {self.group.size}: {texts[rank]}" for rank in failed)

    def largest(self, value: int) -> int:
        """The largest value of all ranks.

        Args:
            value: This rank's.
        """
        talk = self.group.exchange([_Talk.VALUE, value], what="a value that all ranks use")
        self._same_talk(talk, _Talk.VALUE)
        return max(one[1] for one in talk)

    def _same_talk(self, talk: Sequence[Sequence[int]], kind: _Talk) -> None:
        if any(one[0] != kind for one in talk):
            self._refuse_talk(talk)
        failed = [rank for rank, one in enumerate(talk) if kind is _Talk.VOTE and one[1] == Standing.FAILED]
        if failed:
            raise RankError(
                f"ranks {failed} raised before a step that rank {self.group.rank} was to take with them.",
                why=_WHY_TOGETHER,
                fix="Look at their errors; no rank has run the step.",
            )

    def _refuse_talk(self, talk: Sequence[Sequence[int]]) -> NoReturn:
        places = {rank: _Talk(one[0]).name.lower() for rank, one in enumerate(talk)}
        raise RankError(
            f"the ranks are in different places: {places}.",
            why=_WHY_TOGETHER,
            fix="Call capture(), prepare() and the like on every rank, in the same order.",
        )


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
    busy = {rank: vote for rank, vote in enumerate(votes) if not vote.is_idle}
    checks: list[tuple[str, Callable[[Vote], int], bool]] = [
        ("sizes", lambda vote: vote.size, not pad),
        ("sampling in the graph", lambda vote: vote.samples, not any_sample_type),
        ("other coordinates of the key", lambda vote: vote.coordinates, True),
    ]
    for what, field, must_agree in checks:
        by_rank = {rank: int(field(vote)) for rank, vote in busy.items()}
        if must_agree and len(set(by_rank.values())) > 1:
            return Refusal.of(Reason.RANK_DISAGREEMENT, f"the ranks differ in {what}: {by_rank}")
    return Agreed(
        size=max((vote.size for vote in busy.values()), default=0),
        extent=max((vote.extent for vote in busy.values()), default=0),
        coordinates=next((vote.coordinates for vote in busy.values()), 0),
        votes=votes,
    )


@cache
def digest(value: Hashable) -> int:
    """A number of 63 bits, never 0, that is the same for equal values in every process; `hash()` of a string is not.

    Args:
        value: Something whose `repr` says all of it: numbers, strings, enums, dtypes, tuples, keys of graphs.
    """
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1 | 1
