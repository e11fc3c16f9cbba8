"""How ranks stay on one path: a vote before each step, and captures that succeed everywhere or nowhere.

With data-parallel attention every rank has a batch of its own, and they meet in collectives of the model (experts,
logits). A rank that replays 8 padded rows beside one that runs 5 rows eagerly would give the collectives other shapes, or
wait for ever. So the ranks vote on each step; with padding they first agree on the largest size, and unequal sizes share a
bucket.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import attrs

from breakgraph.errors import CaptureError, ConfigError, RankError
from breakgraph.gates import Refusal
from breakgraph.graph_key import GraphKey
from breakgraph.rank_group import WHY_TOGETHER, RankGroup
from breakgraph.rank_votes import Agreed, Standing, Vote, decide, digest, ranks_text
from breakgraph.statistics import Reason

__all__ = ["RankAgreement", "RankGroup"]


class _Talk(enum.IntEnum):
    """What a rank is doing when it speaks; part of every message, so that ranks in different places notice."""

    VOTE = 1
    CONFIRM = 2
    BARRIER = 3
    OUTCOME = 4
    KEYS = 5
    VALUE = 6


_PLACES = {
    _Talk.VOTE: "prepare()",
    _Talk.CONFIRM: "prepare(), after planning",
    _Talk.BARRIER: "a capture",
    _Talk.OUTCOME: "capture(), at the end of a phase",
    _Talk.KEYS: "the beginning of capture()",
    _Talk.VALUE: "the end of capture()",
}


def _names(value: Iterable[str] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class RankAgreement:
    """How the ranks of a group stay on one path. Every rank gives its runners an agreement of the same options.

    Attributes:
        group: The ranks.
        pad: Whether unequal sizes pad to the largest; False: they run eagerly. Idle ranks pad in any case.
        may_differ: Fields of the key in which ranks may differ and still replay together, such as "is_all_greedy_sample":
            those that change nothing in the order and shapes of the model's collectives.
        channel: Which runner of the group talks; a runner gives it to itself.
    """

    group: RankGroup
    pad: bool = attrs.field(default=True, kw_only=True)
    may_differ: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=_names)
    channel: int = attrs.field(default=-1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        known = {field.name for field in attrs.fields(GraphKey)} - {"batch_size", "num_encoder_tokens"}
        if odd := sorted(set(self.may_differ) - known):
            raise ConfigError(
                f"may_differ names {odd}; it can name {sorted(known)}.",
                why="Ranks that differ in another field of the key must run eagerly; sizes are a matter of pad=.",
                fix='Pass field names of GraphKey in a tuple, such as may_differ=("is_all_greedy_sample",).',
            )
        if not isinstance(self.group, RankGroup):
            raise ConfigError(
                f"RankAgreement got a {type(self.group).__name__}; expected a RankGroup.",
                why="Its ranks talk through one collective with a time-out.",
                fix="Pass RankGroup.create(), or RankGroup(process_group) for a gloo group of your own.",
            )

    def bound(self) -> RankAgreement:
        """The same for one runner, which others of the group cannot be taken for: make runners in one order on all ranks."""
        return attrs.evolve(self, channel=self.group.channel())

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
        talk = self._exchange(_Talk.VOTE, *mine.values, what="a vote on a step")
        self._refuse_failed(talk, "before")
        return decide(
            [Vote.of(values) for values in talk], pad=self.pad, any_sample_type="sample_type" in self.may_differ
        )

    def fail(self, *, planned: bool) -> None:
        """Tell the others that this rank raised; where they are gone, nothing takes the place of its own exception.

        Args:
            planned: Whether it has voted already.
        """
        kind = _Talk.CONFIRM if planned else _Talk.VOTE
        with contextlib.suppress(RankError):
            self._exchange(kind, Standing.FAILED, what="a step")

    def confirm(self, ok: bool) -> Refusal | None:
        """Ask whether all ranks can still do what they voted for, after planning.

        Args:
            ok: Whether this one can.

        Returns:
            Why all run eagerly; None where all can.

        Raises:
            RankError: A rank has raised while it planned, is gone, or is not there.
        """
        talk = self._exchange(_Talk.CONFIRM, Standing.CAN if ok else Standing.CANNOT, what="the confirmation of a step")
        self._refuse_failed(talk, "while planning")
        ranks = [rank for rank, one in enumerate(talk) if one[0] != Standing.CAN]
        if not ranks:
            return None
        return Refusal.of(Reason.RANK_DISAGREEMENT, f"{ranks_text(ranks)} planned what no graph of the group holds")

    # Captures.

    def same_start(self, keys: Mapping[Hashable, str], *, options: Mapping[str, object]) -> None:
        """Refuse a capture for which the ranks have different keys or options, on every rank.

        Args:
            keys: This rank's keys with their names, in the order of the capture.
            options: Of its runner, besides those of the agreement: what must be the same for ranks to stay on one path.

        Raises:
            CaptureError: They differ.
        """
        chosen = {**options, "pad": self.pad, "may_differ": self.may_differ}
        told = {digest(key): f"key {name}" for key, name in keys.items()}
        told |= {digest((name, str(value))): f"{name}={value!r}" for name, value in chosen.items()}
        talk = self._exchange(_Talk.KEYS, digest(tuple(told)), what="the keys of a capture")
        if all(one == talk[0] for one in talk):
            return
        sent = self.group.texts("\n".join(f"{number} {text}" for number, text in told.items()))
        everyone = [dict(line.split(" ", 1) for line in text.split("\n")) for text in sent]
        common = set.intersection(*map(set, everyone))
        own = [[text for number, text in one.items() if number not in common] for one in everyone]
        apart = "; ".join(f"only rank {rank}: {', '.join(texts)}" for rank, texts in enumerate(own) if texts)
        raise CaptureError(
            f"the ranks are to capture different things; {apart or 'the same keys in another order'}.",
            why=WHY_TOGETHER,
            fix="Give the runners of all ranks the same buckets, variants and options; clear() all of them where one has lost a "
            "graph at run time.",
        )

    def barrier(self) -> None:
        """Wait for the others, inside a capture.

        Raises:
            RankError: Some have ended this capture already, or a rank is gone.
        """
        self.anyone(flag=False)

    def anyone(self, flag: bool) -> bool:
        """Whether a flag is set on any rank, asked inside a capture where a rank would else take a branch alone.

        Args:
            flag: This rank's.

        Raises:
            RankError: Some have ended this capture already, or a rank is gone.
        """
        talk = self._exchange(_Talk.BARRIER, flag, what="a barrier of a capture", beside=(_Talk.OUTCOME,))
        ended = [rank for rank, one in enumerate(talk) if one is None]
        if ended:
            raise RankError(
                f"rank {self.group.rank} is inside a capture that {ranks_text(ended)} ended.",
                why=WHY_TOGETHER,
                fix="Look at the error of these ranks; where they have none, their forward has fewer breaks.",
            )
        return any(one[0] for one in talk)

    def outcome(self, failure: str | None) -> str | None:
        """Compare how a phase of a key ended; ranks that are still inside it notice at their next barrier.

        Args:
            failure: Why this rank failed; None where it did not.

        Returns:
            Which ranks failed and why; None where none did.

        Raises:
            RankError: A rank is gone or not in a capture.
        """
        while True:
            what = "the outcome of a capture"
            talk = self._exchange(_Talk.OUTCOME, failure is not None, what=what, beside=(_Talk.BARRIER,))
            if None not in talk:
                break
        if not any(one[0] for one in talk):
            return None
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(self.group.texts(failure or "")):
            if text:
                by_text.setdefault(text, []).append(rank)
        return "\n".join(f"{ranks_text(ranks)} of {self.group.size}: {text}" for text, ranks in by_text.items())

    def largest(self, value: int) -> int:
        """The largest value of all ranks.

        Args:
            value: This rank's.
        """
        talk = self._exchange(_Talk.VALUE, value, what="a value that all ranks use")
        return max(int(one[0]) for one in talk)

    def _exchange(self, kind: _Talk, *values: int, what: str, beside: tuple[_Talk, ...] = ()) -> list[Any]:
        """Everybody's values; None for a rank that is at one of the places `beside`.

        Raises:
            RankError: A rank is gone, somewhere else, or at another runner.
        """
        talk = self.group.exchange([kind, self.channel, *values], what=what)
        channels = [one[1] for one in talk]
        if len(set(channels)) > 1:
            told = ", ".join(f"rank {rank} at runner {channel}" for rank, channel in enumerate(channels))
            raise RankError(
                f"the ranks are at different runners: {told} (counted in the order in which this group's runners were made).",
                why=WHY_TOGETHER,
                fix="Make the runners of a group in one order on all ranks, and call them in one order. An idle rank calls the "
                "runner that the others call.",
            )
        if any(one[0] != kind and one[0] not in beside for one in talk):
            self._refuse_talk(talk)
        return [one[2 : 2 + len(values)] if one[0] == kind else None for one in talk]

    def _refuse_failed(self, talk: Sequence[Sequence[int]], when: str) -> None:
        failed = [rank for rank, one in enumerate(talk) if one[0] == Standing.FAILED]
        if failed:
            raise RankError(
                f"{ranks_text(failed)} raised {when} a step that rank {self.group.rank} was to take with them.",
                why=WHY_TOGETHER,
                fix="Look at their errors; no rank has run the step.",
            )

    def _refuse_talk(self, talk: Sequence[Sequence[int]]) -> NoReturn:
        places = ", ".join(f"rank {rank} in {_PLACES[_Talk(one[0])]}" for rank, one in enumerate(talk))
        raise RankError(
            f"the ranks are in different places: {places}.",
            why=WHY_TOGETHER,
            fix="Call capture(), prepare() and the like on every rank, in the same order.",
        )
