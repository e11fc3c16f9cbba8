"""What a runner runs, for one key: the caller's forward and examples, the key with its sizes, its captured graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.graph import BreakableCUDAGraph
from breakgraph.output_arena import OutputViews
from breakgraph.staging import Layout
from breakgraph.static_buffers import Extent
from breakgraph.verification import Snapshot

__all__ = ["CapturedKey", "Example", "Target", "Work"]

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
        expect_breaks: Number of breaks, or names and counts, that each graph must have.
    """

    forward: Callable[..., Any]
    example: Callable[[K], Example]
    state: Sequence[Any] = ()
    generators: Sequence[torch.Generator] = ()
    plan: Callable[[K, Mapping[str, Any], int], None] | None = None
    hooks: Sequence[Callable[[K, Mapping[str, Any]], None]] = ()
    expect_breaks: int | Mapping[str, int] | None = None


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
    """

    target: Target[K]
    graph: BreakableCUDAGraph
    outputs: OutputViews
    live: Mapping[str, Any]
    seen: tuple[Snapshot, Snapshot] | None = None
    addresses_checked: bool = False
