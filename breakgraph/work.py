"""What a runner runs, for one key: the caller's forward and examples, the key with its sizes, its captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, cast

import attrs
import torch

from breakgraph.errors import ConfigError
from breakgraph.graph import BreakableCUDAGraph
from breakgraph.output_arena import OutputViews
from breakgraph.staging import Layout
from breakgraph.static_buffers import Extent
from breakgraph.swaps import LetsThrough
from breakgraph.verification import Snapshot, StateKeeper

__all__ = ["CapturedKey", "Example", "Planned", "Rehearsal", "Target", "Together", "Work", "signatures"]

K = TypeVar("K", bound=Hashable)


@attrs.frozen
class Example:
    """Inputs and live data for one warm-up, capture or verification.

    Attributes:
        inputs: One tensor per copied input, with all tokens of the key; in prefill with `max_requests` requests or
            fewer.
        live: Live data for these rows.
    """

    inputs: Mapping[str, torch.Tensor]
    live: Mapping[str, Any] = attrs.field(factory=dict)


class Together(Protocol):
    """What ranks need to move together during a capture."""

    def barrier(self) -> None:
        """Wait for the others; called before each capture and before each of its breaks."""
        ...

    def anyone(self, flag: bool) -> bool:
        """Whether a flag is set on any rank; called where a rank would otherwise take a branch alone.

        Args:
            flag: This rank's.
        """
        ...


@attrs.frozen(kw_only=True)
class Work(Generic[K]):
    """What a runner runs.

    Attributes:
        forward: Called as `forward(**inputs, **live)`; returns tensors with the row axis in front.
        example: Returns inputs and live data for a key, other values at each call: the second call of a key
            is what its graph is verified with, and equal inputs would prove little. It is called for keys of fewer
            rows as well, which show what padding does; where it raises for these, that proof is left out.
        state: What forward mutates: tensors, or objects with `save()` and `restore(saved)`.
        generators: The caller's own random generators that forward draws from.
        plan: Host work of a step, called as `plan(key, live, padded_rows)` before it is launched; None: nothing.
        hooks: Called as `hook(key, live)` after the copy-in and before each replay.
        around: Called as `around(key, live)`; entered around warm-up, capture, proof and every replay.
        expect_breaks: Number of breaks, or names and counts, that each graph must have.
        together: How ranks move together during a capture; None: there is one.
    """

    forward: Callable[..., Any]
    example: Callable[[K], Example]
    state: Sequence[Any] = ()
    generators: Sequence[torch.Generator] = ()
    plan: Callable[[K, Mapping[str, Any], int], None] | None = None
    hooks: Sequence[Callable[[K, Mapping[str, Any]], None]] = ()
    around: Callable[[K, Mapping[str, Any]], AbstractContextManager[Any]] | None = None
    expect_breaks: int | Mapping[str, int] | None = None
    together: Together | None = None

    def swapped_in(self, key: K, live: Mapping[str, Any]) -> AbstractContextManager[Any]:
        """What `around` returns for a step; nothing where there is none.

        Args:
            key: Key of the graph.
            live: Live data of the step.
        """
        if self.around is None:
            return _UNCHANGED
        entered = self.around(key, live)
        if not isinstance(entered, AbstractContextManager):
            raise ConfigError(
                f"around({key}, live) returned a {type(entered).__name__}; expected a context manager.",
                why="It is entered before a graph is made or replayed, and left afterwards whatever happens.",
                fix="Decorate it with contextlib.contextmanager, or return swapped(model, name=value).",
            )
        return LetsThrough(entered)


_UNCHANGED = nullcontext()


class Planned(Protocol):
    """Live data that carries what a graph has baked in: a plan, a kernel's choice, a number of pages."""

    def replay_signature(self) -> Hashable:
        """Equal for two steps that may use one graph: numbers, strings, or tuples of them.

        Asked for after `plan`. `example(key)` must give live data of one signature for a key: the capture's is the graph's.
        """
        ...


@cache
def _is_planned(kind: Hashable) -> bool:
    return callable(getattr(kind, "replay_signature", None))


def signatures(live: Mapping[str, Any]) -> dict[str, Hashable]:
    """The replay signatures of a step's live data, by name.

    Args:
        live: Live data, planned.

    Raises:
        ConfigError: One cannot be compared by value.
    """
    kinds = ((name, value, cast(Hashable, type(value))) for name, value in live.items())
    found = {name: value.replay_signature() for name, value, kind in kinds if _is_planned(kind)}
    for name, signature in found.items():
        try:
            hash(signature)
            comparable = (signature == signature) in (True, False) and not isinstance(signature, torch.Tensor)
        except (TypeError, RuntimeError, ValueError):
            comparable = False
        if not comparable:
            raise ConfigError(
                f"replay_signature() of live data {name!r} is a {type(signature).__name__}, which cannot be compared by value.",
                why="It is compared with that of every step.",
                fix="Return numbers, strings, or tuples of them, the same for steps that may use one graph.",
            )
    return found


@attrs.frozen(eq=False)
class Target(Generic[K]):
    """A key to capture: its name for messages, its padded sizes, and where its inputs lie."""

    key: K
    where: str
    extent: Extent
    layout: Layout


@attrs.frozen(eq=False)
class Rehearsal:
    """One example of a graph's key, to be run as often as one likes.

    Attributes:
        graph: The graph.
        rows: Real token rows.
        keeper: Saves and restores the declared state.
        replay: Replays it; returns views of the result's real rows.
        eager: Runs the eager twin in the same buffers; returns the result's real rows.
    """

    graph: BreakableCUDAGraph
    rows: int
    keeper: StateKeeper
    replay: Callable[[], Any]
    eager: Callable[[], Any]


@attrs.define(eq=False)
class CapturedKey(Generic[K]):
    """A captured graph with its memory.

    Attributes:
        target: The key.
        graph: Segments and breaks.
        outputs: Where its results lie.
        live: Live data of its capture, until it is published.
        seen: Copies of the inputs and the live data of its capture, until it is published.
        addresses_checked: Whether a replay was preceded by the check of addresses.
        signatures: Replay signatures of the live data of its capture.
        held: Tensors in plain attributes of the watched modules at capture: the graph may read them by address.
    """

    target: Target[K]
    graph: BreakableCUDAGraph
    outputs: OutputViews
    live: Mapping[str, Any]
    seen: tuple[Snapshot, Snapshot] | None = None
    addresses_checked: bool = False
    signatures: Mapping[str, Hashable] = attrs.field(factory=dict)
    held: Sequence[torch.Tensor] = ()

    def other_plan(self, live: Mapping[str, Any]) -> str | None:
        """How the plan of a step differs from the one that the graph holds; None where it does not.

        Args:
            live: Live data of the step.
        """
        now = signatures(live)
        if now == self.signatures:
            return None
        for name in (*self.signatures, *now):
            held, found = self.signatures.get(name), now.get(name)
            if held != found:
                return f"live data {name!r} has replay signature {found!r}; {self.target.where} holds {held!r}"
        return None
