"""What a step is made of: its live data, what `prepare` hands to `launch`, and what `launch` returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.errors import ConfigError, LiveDataError, ReplayError
from breakgraph.gates import Refusal
from breakgraph.graph_builder import GraphBuilder
from breakgraph.staging import Staged
from breakgraph.static_buffers import Extent
from breakgraph.statistics import Reason
from breakgraph.work import CapturedKey

__all__ = ["NOTHING", "LiveNames", "Prepared", "Result"]

K = TypeVar("K", bound=Hashable)

NOTHING: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen
class LiveNames:
    """The names of live data that a forward takes.

    Attributes:
        needed: Those without a default.
        known: All of them; None where its signature does not tell.
    """

    needed: frozenset[str]
    known: frozenset[str] | None

    @classmethod
    def of(cls, forward: Callable[..., Any], *, inputs: Collection[str]) -> LiveNames:
        """Read them off a signature.

        Args:
            forward: What the runner runs.
            inputs: Names of its declared inputs, which are no live data.

        Returns:
            The names.

        Raises:
            ConfigError: It has no parameter for a declared input.
        """
        try:
            # Not through a wrapper to what it wraps: the wrapper may add arguments of its own.
            body = forward.forward if isinstance(forward, torch.nn.Module) else forward
            signature = inspect.signature(body, follow_wrapped=False)
        except (TypeError, ValueError):  # written in C
            return cls(frozenset(), None)
        taken = [p for p in signature.parameters.values() if p.name not in inputs]
        lacking = [name for name in inputs if name not in signature.parameters]
        if lacking and not any(p.kind is p.VAR_KEYWORD for p in taken):
            raise ConfigError(
                f"forward{signature} has no parameter for the declared inputs {lacking}.",
                why="It receives every declared input by keyword.",
                fix="Add the parameters, or take these inputs out of inputs=.",
            )
        named = [p for p in taken if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken)
        return cls(
            needed=frozenset(p.name for p in named if p.default is p.empty),
            known=None if open_ended else frozenset(p.name for p in named),
        )

    def taken(self, live: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Copy the live data of a step, since the caller may refill its mapping before the launch, and check it.

        Args:
            live: Live data by name.

        Returns:
            The copy. About 0.4 us.

        Raises:
            LiveDataError: It is no mapping, or names are missing or unknown.
        """
        if live is None:
            live = NOTHING
        elif type(live) is not dict and not isinstance(live, Mapping):
            raise LiveDataError(
                f"live data of a step is a {type(live).__name__}; expected a mapping of names to values.",
                why="forward and breaks receive live data by name.",
                fix='Pass live={"name": value}, or nothing.',
            )
        live = dict(live)
        missing = self.needed - live.keys()
        unknown = frozenset() if self.known is None else live.keys() - self.known
        if missing or unknown:
            fault = f"is missing {sorted(missing)}" if missing else f"has unknown names {sorted(unknown, key=str)}"
            raise LiveDataError(
                f"live data of a step {fault}; forward takes {sorted(self.known or self.needed) or 'none'}.",
                why="forward receives inputs and live data by keyword, in a replay's breaks as in an eager step.",
                fix="Pass live={...} with exactly the names that forward has besides its declared inputs.",
            )
        return live


@attrs.define(eq=False)
class Prepared(Generic[K]):
    """A step whose host work is done; hand it to `launch` of the same runner.

    At most two may wait: the third `prepare` takes the staging slot of the first.

    Attributes:
        key: Key of the graph; None for an eager step.
        extent: Real sizes.
        live: Live data: a copy of the caller's mapping.
        refusal: Why it will run eagerly; None for a replay.
        builder: Whose graphs and static buffers it is for.
        captured: The graph.
        staged: Its inputs, on their way into the static buffers.
        inputs: Its inputs, of an eager step.
        padding_turn: Which padding request it was padded with; None where none was needed.
        launched: Whether it was launched already.
    """

    key: K | None
    extent: Extent
    live: Mapping[str, Any]
    refusal: Refusal | None
    builder: GraphBuilder[K]
    captured: CapturedKey[K] | None = None
    staged: Staged | None = None
    inputs: Mapping[str, torch.Tensor] = NOTHING
    padding_turn: int | None = None
    launched: bool = False

    @property
    def replays(self) -> bool:
        """Whether `launch` will replay a graph."""
        return self.captured is not None

    def check(self, builder: GraphBuilder[K], *, padding_turn: int) -> None:
        """Refuse a step that was launched, is not for these graphs, or was padded with a request that is no longer held.

        Args:
            builder: That of the runner that is to launch it.
            padding_turn: The runner's present one.

        Raises:
            ReplayError: It was launched, is of another runner, from before `clear()`, or its padding request was given back.
        """
        if self.launched:
            raise ReplayError(
                "a prepared step was launched twice.",
                why="What the step writes (tokens, cache, counters) would go on from its own result.",
                fix="Prepare each step once and launch it once.",
            )
        if self.builder is not builder and (self.captured is not None or self.builder.work is not builder.work):
            raise ReplayError(
                "a step was launched that another runner prepared, or this one before clear().",
                why="Its inputs would go into static buffers that its graph does not read.",
                fix="Launch a step with the runner that prepared it, before clear(); prepare it again otherwise.",
            )
        if self.padding_turn is not None and self.padding_turn != padding_turn:
            raise ReplayError(
                "a step was launched whose padding request was given back after it had been prepared.",
                why="Its padding rows would write to storage that a live request may own by now.",
                fix="Launch prepared steps before suspend_dummies() or release_dummies(), or prepare them again.",
            )


@attrs.define(eq=False)
class Result(Generic[K]):
    """What a step returned.

    Attributes:
        output: What `forward` returned, real rows only. Of a replay: views that are valid until the runner's next
            launch, unless `copy=True`.
        replayed: Whether a graph was replayed.
        key: Key of the graph; None for an eager step.
        reason: Why the step ran eagerly; None for a replay.
        detail: The reason in words.
    """

    output: Any
    replayed: bool
    key: K | None
    reason: Reason | None
    detail: str = ""
