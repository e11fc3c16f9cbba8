"""Gates: may this step use a graph? An ordered list, cheap tests first; each returns nothing or a reason.

Any reason means an eager step, counted under that reason. The order is: recording of statistics, rank
agreement, runner disabled, state of a request not ready, key unknown, the caller's own gates.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import attrs

from breakgraph.errors import ConfigError, NoGraphError
from breakgraph.statistics import Reason

__all__ = ["Gate", "Gates", "Refusal", "Rule"]

_LOG = logging.getLogger(__name__)


class Rule(enum.Enum):
    """What a gate protects."""

    HARD = "a graph would be wrong"
    SOFT = "a graph would be slow"


@attrs.frozen
class Gate:
    """One test of a step.

    Attributes:
        name: Under this name its refusals are counted, unless it has a reason of its own.
        check: Called with the key of the step (before rounding) and its live data; returns None or the text of
            the refusal. Runs at every step: keep it to a few microseconds and free of host syncs.
        reason: What its refusals are. Gates with `Reason.GATE` run last, all others before the key is looked up.
        rule: Soft gates can be overridden by `override=`, hard ones cannot.
    """

    name: str
    check: Callable[[Hashable, Mapping[str, object]], str | None]
    reason: Reason = attrs.field(default=Reason.GATE, kw_only=True)
    rule: Rule = attrs.field(default=Rule.HARD, kw_only=True)


@attrs.frozen
class Refusal:
    """Why a step runs eagerly.

    Attributes:
        reason: The reason.
        name: The name that it is counted under.
        detail: What in this step made it so.
    """

    reason: Reason
    name: str
    detail: str

    @classmethod
    def of(cls, reason: Reason, detail: str = "") -> Refusal:
        """Make the refusal of a reason of our own, counted under the reason's name."""
        return cls(reason, reason.name, detail or reason.value)

    def error(self, *, rows: int) -> NoGraphError:
        """The error of a step that would run eagerly where that is forbidden.

        Args:
            rows: Token rows of the step.
        """
        return NoGraphError(
            f"a step of {rows} tokens cannot use a graph ({self.name}): {self.detail}.",
            why='It would run eagerly, and fallback="error" forbids that.',
            fix='Capture its key, or pass fallback="allow".',
        )


class Gates:
    """The gates of a runner, in order.

    Args:
        gates: The caller's gates.
        override: Names of soft gates to leave out, with one warning in the log each.

    Raises:
        ConfigError: `override` names a hard gate or none at all.
    """

    def __init__(self, gates: Iterable[Gate], *, override: Iterable[str] = ()) -> None:
        given = tuple(gates)
        if odd := [gate for gate in given if not isinstance(gate, Gate)]:
            raise ConfigError(
                f"gates has {odd}; expected Gates.",
                why="A refusal is counted under the gate's name.",
                fix='Wrap a function: Gate("name", function).',
            )
        left_out = frozenset(override)
        for name in sorted(left_out):
            self._check_override(name, given)
        kept = [gate for gate in given if gate.name not in left_out]
        self._early = tuple(gate for gate in kept if gate.reason is not Reason.GATE)
        self._late = tuple(gate for gate in kept if gate.reason is Reason.GATE)
        self._suspended: list[Reason] = []
        self._launched_eagerly: list[Reason] = []

    @staticmethod
    def _check_override(name: str, gates: tuple[Gate, ...]) -> None:
        rules = {gate.rule for gate in gates if gate.name == name}
        if rules != {Rule.SOFT}:
            raise ConfigError(
                f"override names {name!r}, which is {'a hard gate' if rules else 'no gate of this runner'}.",
                why="A hard gate refuses steps for which a graph would compute something wrong.",
                fix=f"Only soft gates can be overridden: {[g.name for g in gates if g.rule is Rule.SOFT]}.",
            )
        _LOG.warning("gate %r is overridden: graphs are used where it says they are slow", name)

    def suspension(self) -> Refusal | None:
        """Why no step may use a graph now, whatever its key; None outside `suspend`."""
        return Refusal.of(self._suspended[-1]) if self._suspended else None

    def withdrawal(self) -> Refusal | None:
        """Why no step may be launched with a graph now, also one that was prepared for it; None otherwise."""
        if self._launched_eagerly:
            return Refusal.of(self._launched_eagerly[-1])
        return self.suspension()

    def before_key(self, key: Hashable, live: Mapping[str, object]) -> Refusal | None:
        """Run the gates that come before the key is looked up.

        Args:
            key: The key of the step, before rounding.
            live: Its live data.

        Returns:
            The first refusal, or None.
        """
        if self._suspended:
            return Refusal.of(self._suspended[-1])
        return _first(self._early, key, live) if self._early else None

    def after_key(self, key: Hashable, live: Mapping[str, object]) -> Refusal | None:
        """Run the caller's own gates, which come last.

        Args:
            key: The key of the step, before rounding.
            live: Its live data.

        Returns:
            The first refusal, or None.
        """
        return _first(self._late, key, live) if self._late else None

    @contextmanager
    def launch_eagerly(self, reason: Reason) -> Iterator[None]:
        """Prepare steps for their graphs inside, and launch none of these.

        Args:
            reason: What the steps are counted under.

        Yields:
            Nothing.
        """
        self._launched_eagerly.append(reason)
        try:
            yield
        finally:
            self._launched_eagerly.remove(reason)

    @contextmanager
    def suspend(self, reason: Reason) -> Iterator[None]:
        """Refuse every step inside.

        Args:
            reason: What the steps are counted under.

        Yields:
            Nothing.
        """
        self._suspended.append(reason)
        try:
            yield
        finally:
            self._suspended.remove(reason)


def _first(gates: tuple[Gate, ...], key: Hashable, live: Mapping[str, object]) -> Refusal | None:
    for gate in gates:
        detail = gate.check(key, live)
        if detail is not None:
            if not isinstance(detail, str):
                raise ConfigError(
                    f"gate {gate.name!r} returned {detail!r}; expected None or a text.",
                    why="None lets a graph serve the step; a text refuses it and is what people read.",
                    fix='Return None, or why not: lambda key, live: "too long" if ... else None.',
                )
            name = gate.name if gate.reason is Reason.GATE else gate.reason.name
            return Refusal(gate.reason, name, detail)
    return None
