"""A group of ranks and the one way in which they talk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist

from breakgraph.errors import ConfigError, RankError

__all__ = ["WHY_TOGETHER", "RankGroup"]

WHY_TOGETHER = "Ranks meet in collectives of the model, so one that goes another way leaves the others waiting."
_WIDTH = 10


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
    _channels: Iterator[int] = attrs.field(factory=itertools.count, init=False, eq=False, repr=False)

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

    def channel(self) -> int:
        """A number for what talks through this group: the same on all ranks, which make their runners in one order."""
        return next(self._channels)

    def exchange(self, values: Sequence[int], *, what: str) -> list[list[int]]:
        """Give integers and get those of every rank. Cost: one gather of 80 bytes a rank, in which the host waits.

        Args:
            values: At most 10, of 64 bits.
            what: What for, for messages.

        Returns:
            By rank.

        Raises:
            RankError: A rank is gone or did not come within the time-out.
        """
        mine = torch.zeros(_WIDTH, dtype=torch.int64)
        mine[: len(values)] = torch.tensor(values)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with self._waiting_for(what):
            dist.all_gather(everyone, mine, group=self.group)
        return [one.tolist() for one in everyone]

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size} waited for the others for {what}, and at least one is gone or did not come in "
                "time.",
                why=WHY_TOGETHER,
                fix="Look at the ranks that ended or hang. Every rank takes part in every capture and every prepare(), an "
                "idle one with key=GraphKey(0) or size=0. This group cannot be used any more.",
            ) from error

    def texts(self, text: str) -> list[str]:
        """Give a text and get that of every rank; all must be here.

        Args:
            text: Any length.
        """
        everyone: list[str] = [""] * self.size
        with self._waiting_for("their texts"):
            dist.all_gather_object(everyone, text, group=self.group)
        return everyone
