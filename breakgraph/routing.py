"""Which graph serves a step, if any: gates, the look-up of its key, the vote of the ranks, and what padding rows need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.gates import Gates, Refusal
from breakgraph.graph_set import GraphSet
from breakgraph.policy import Policy
from breakgraph.rank_votes import Agreed, Standing, Vote, digest
from breakgraph.statistics import Reason
from breakgraph.work import CapturedKey

__all__ = ["Choice", "RouteRules", "Router"]

K = TypeVar("K", bound=Hashable)

Padding = Mapping[str, torch.Tensor] | None
Choice = tuple[CapturedKey[K], Padding]
"""The graph of a step, and the rows of one padding request where the rules of the inputs do not suffice."""


@attrs.frozen
class RouteRules(Generic[K]):
    """What a kind of runner decides about the key of a step.

    Attributes:
        name: The name of a key's graph, for messages.
        round_up: The key whose graph serves a step, or why none can.
        too_costly: Why an eager step is cheaper than the graph of the second key; None where it is not.
        padding: The rows of one padding request for a step of this graph.
        vote: What this rank says of a step that it can run.
        can_pad: Whether a step of this key could be padded now; of an idle rank, of any key.
        agreed_key: The key of a step in which every rank pads to the largest one; or why they cannot all have a graph.
    """

    name: Callable[[K], str]
    round_up: Callable[[K], K | Refusal]
    too_costly: Callable[[K, K], Refusal | None]
    padding: Callable[[K, CapturedKey[K]], Padding | Refusal]
    vote: Callable[[K], Vote]
    can_pad: Callable[[K], bool]
    agreed_key: Callable[[K, Agreed], K | Refusal]


class Router(Generic[K]):
    """Finds the graph of a step, alone or together with the other ranks.

    Args:
        rules: About keys.
        graphs: The runner's graphs.
        gates: The runner's gates.
        policy: How to decide.
    """

    def __init__(self, rules: RouteRules[K], *, graphs: GraphSet[K], gates: Gates, policy: Policy) -> None:
        self._rules = rules
        self._graphs = graphs
        self._gates = gates
        self._policy = policy
        self._routes: dict[K, CapturedKey[K]] = {}
        self._summary: tuple[int, int, bool] = (-1, 0, False)

    def forget(self) -> None:
        """Look every key up again: graphs were captured, or given back."""
        self._routes.clear()

    def drop(self, captured: CapturedKey[K], *, reason: str) -> None:
        """Take a graph out of service at run time.

        Args:
            captured: The graph.
            reason: Why.
        """
        self._routes = {key: route for key, route in self._routes.items() if route is not captured}
        self._graphs.drop(captured, reason=reason)

    def refusal(self, key: K, live: Mapping[str, Any]) -> Refusal | None:
        """Why this rank would run a step eagerly, were it alone: gates and key; None where a graph may serve.

        Args:
            key: The key of the step, before rounding.
            live: Its live data.
        """
        if (refusal := self._gates.suspension()) is not None:
            return refusal
        if not self._policy.enabled:
            return Refusal.of(Reason.DISABLED)
        if (refusal := self._gates.before_key(key, live)) is not None:
            return refusal
        found = self._route(key) if self._policy.ranks is None else self._known(key)
        if isinstance(found, Refusal):
            return found
        return self._gates.after_key(key, live)

    def choose(self, key: K, *, refusal: Refusal | None) -> Choice[K] | Refusal:
        """Find the graph of a step; with ranks, after a vote in which each takes part whatever its own refusal.

        Args:
            key: The key of the step, before rounding.
            refusal: What `refusal` returned.

        Returns:
            The graph with the rows of a padding request, or why the step runs eagerly.

        Raises:
            RankError: The ranks are not together.
        """
        ranks = self._policy.ranks
        if ranks is None:
            return self._padded(key, self._route(key)) if refusal is None else refusal
        try:
            mine = self._ballot(key, refusal)
        except Exception:
            ranks.fail(planned=False)
            raise
        agreed = ranks.vote(mine)
        if isinstance(agreed, Refusal):
            return refusal or attrs.evolve(agreed, detail=f"{agreed.detail}; this rank: {self._rules.name(key)}")
        together = self._rules.agreed_key(key, agreed)
        if isinstance(together, Refusal):
            return together
        found = self._route(together)
        if not isinstance(found, Refusal):
            stuck = agreed.unpadded(self._rules.vote(found.target.key).size)
            found = found if stuck is None else stuck
        return self._padded(key, found)

    def fail(self, *, planned: bool = False) -> None:
        """Tell the other ranks that this one raised before its step.

        Args:
            planned: Whether it has voted already; then they listen only where steps are confirmed.
        """
        ranks = self._policy.ranks
        if ranks is not None and (not planned or self._confirms):
            ranks.fail(planned=planned)

    def confirmed(self, *, refusal: Refusal | None) -> Refusal | None:
        """Compare, after planning, whether every rank can still do what it voted for.

        Args:
            refusal: Why this rank cannot.

        Returns:
            Why this rank runs eagerly.

        Raises:
            RankError: A rank raised while it planned.
        """
        ranks = self._policy.ranks
        if ranks is None or not self._confirms:
            return refusal
        others = ranks.confirm(refusal is None)
        return others if refusal is None else refusal

    def withdrawn(self, captured: CapturedKey[K]) -> Refusal | None:
        """Why a graph that was chosen for a step may not be used now.

        Args:
            captured: The graph.
        """
        key = captured.target.key
        if self._graphs.captured.get(key) is not captured:
            why = self._graphs.dropped.get(key, "captured again since")
            return Refusal.of(Reason.DROPPED, f"{self._rules.name(key)}: {why}")
        return self._gates.withdrawal()

    def _padded(self, key: K, found: CapturedKey[K] | Refusal) -> Choice[K] | Refusal:
        if isinstance(found, Refusal):
            return found
        padding = self._rules.padding(key, found)
        return padding if isinstance(padding, Refusal) else (found, padding)

    def _route(self, key: K) -> CapturedKey[K] | Refusal:
        captured = self._routes.get(key)
        if captured is None:
            found = self._find(key)
            if isinstance(found, Refusal):
                return found
            rounded, captured = found
            if (refusal := self._rules.too_costly(key, rounded)) is not None:
                return refusal
            self._routes[key] = captured
        return captured

    def _find(self, key: K) -> tuple[K, CapturedKey[K]] | Refusal:
        rounded = self._rules.round_up(key)
        if isinstance(rounded, Refusal):
            return rounded
        if (captured := self._graphs.captured.get(rounded)) is not None:
            return rounded, captured
        name, dropped = self._rules.name(rounded), self._graphs.dropped
        if rounded in dropped:
            return Refusal.of(Reason.DROPPED, f"{name}: {dropped[rounded]}")
        if rounded in self._graphs.keys:
            return Refusal.of(Reason.NOT_CAPTURED_YET, f"{name} was not captured yet")
        return Refusal.of(Reason.NO_GRAPH, f"{rounded} is not among the keys of this runner")

    # With ranks.

    def _known(self, key: K) -> object | Refusal:
        """What `_route` says of a key, but for the cost, which is the group's: that of its largest size."""
        if not self._rules.vote(key).is_idle:
            return self._find(key)
        return self._graphs.captured or Refusal.of(Reason.NOT_CAPTURED_YET)

    def _ballot(self, key: K, refusal: Refusal | None) -> Vote:
        if refusal is not None:
            return Vote(standing=Standing.CANNOT)
        return attrs.evolve(self._rules.vote(key), can_pad=self._rules.can_pad(key), graphs=self._summarised()[1])

    @property
    def _confirms(self) -> bool:
        """Whether planning can fail, or find another plan, on one rank alone: the same on all ranks of a runner."""
        return self._graphs.builder.work.plan is not None or self._summarised()[2]

    def _summarised(self) -> tuple[int, int, bool]:
        """Version of the graphs, a digest of their keys, and whether one of them holds a plan."""
        graphs = self._graphs
        if self._summary[0] != graphs.version:
            keys = tuple(sorted(digest(key) for key in graphs.captured))
            planned = any(captured.signatures for captured in graphs.captured.values())
            self._summary = (graphs.version, digest(keys), planned)
        return self._summary
