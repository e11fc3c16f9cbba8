"""What a runner runs, for one key: the caller's forward and examples, the key with its sizes, its captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import attrs
import torch

from breakgraph.errors import ConfigError
from breakgraph.graph import BreakableCUDAGraph
from breakgraph.output_arena import OutputViews
from breakgraph.staging import Layout
from breakgraph.static_buffers import Extent
from breakgraph.verification import Snapshot

__all__ = ["CapturedKey", "Example", "Planned", "Target", "Work", "signatures", "swapped"]

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
    """

    forward: Callable[..., Any]
    example: Callable[[K], Example]
    state: Sequence[Any] = ()
    generators: Sequence[torch.Generator] = ()
    plan: Callable[[K, Mapping[str, Any], int], None] | None = None
    hooks: Sequence[Callable[[K, Mapping[str, Any]], None]] = ()
    around: Callable[[K, Mapping[str, Any]], AbstractContextManager[Any]] | None = None
    expect_breaks: int | Mapping[str, int] | None = None

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
        return entered


_UNCHANGED = nullcontext()
_MISSING = object()


@runtime_checkable
class Planned(Protocol):
    """Live data that carries what a graph has baked in: a plan, a kernel's choice, a number of pages."""

    def replay_signature(self) -> Hashable:
        """Equal for two steps that may use one graph: numbers, strings, or tuples of them.

        `example(key)` must give live data of one signature for a key: that of the capture is the graph's.
        """
        ...


def signatures(live: Mapping[str, Any]) -> dict[str, Hashable]:
    """The replay signatures of a step's live data, by name.

    Args:
        live: Live data.
    """
    found = {name: value.replay_signature() for name, value in live.items() if isinstance(value, Planned)}
    for name, signature in found.items():
        try:
            hash(signature)
        except TypeError:
            raise ConfigError(
                f"replay_signature() of live data {name!r} is a {type(signature).__name__}, which is not hashable.",
                why="It is compared with that of every step, and must compare by value.",
                fix="Return numbers, strings, or tuples of them, the same for steps that may use one graph.",
            ) from None
    return found


@attrs.frozen(eq=False)
class Target(Generic[K]):
    """A key to capture: its name for messages, its padded sizes, and where its inputs lie."""

    key: K
    where: str
    extent: Extent
    layout: Layout


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
        for name, held in self.signatures.items():
            value = live.get(name)
            now = value.replay_signature() if isinstance(value, Planned) else None
            if now != held:
                return f"live data {name!r} has replay signature {now!r}; {self.target.where} holds {held!r}"
        return None


@contextmanager
def swapped(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside a `with` block, and put back what was there whatever happens inside.

    For `around=` of a runner: a static cache in place of the model's own one while graphs are made and replayed.

    Args:
        target: The object.
        **attributes: Name -> value. One that only the object's class has is taken off the object again.

    Yields:
        Nothing.

    Raises:
        ConfigError: The object has no such attribute.
    """
    with ExitStack() as stack:
        for name, value in attributes.items():
            found = getattr(target, name, _MISSING)
            if found is _MISSING:
                raise ConfigError(
                    f"swapped() got {name!r}, which this {type(target).__name__} does not have.",
                    why="Nothing would read it, so nothing would be swapped.",
                    fix="Name an attribute that the forward reads.",
                )
            own = getattr(type(target), name, _MISSING) is not found
            undo = partial(setattr, target, name, found) if own else partial(delattr, target, name)
            setattr(target, name, value)
            stack.callback(undo)
        yield
