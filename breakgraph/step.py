"""The two values between the halves of a step: what `prepare` hands to `launch`, and what `launch` returns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.gates import Refusal
from breakgraph.graph_builder import CapturedKey
from breakgraph.staging import Staged
from breakgraph.static_buffers import Extent
from breakgraph.statistics import Reason

__all__ = ["NOTHING", "Prepared", "Result"]

K = TypeVar("K", bound=Hashable)

NOTHING: Mapping[str, Any] = MappingProxyType({})


@attrs.define(eq=False)
class Prepared(Generic[K]):
    """A step whose host work is done; hand it to `launch` of the same runner.

    At most two may wait: the third `prepare` takes the staging slot of the first.

    Attributes:
        key: Key of the graph; None for an eager step.
        extent: Real sizes.
        live: Live data.
        refusal: Why it will run eagerly; None for a replay.
    """

    key: K | None
    extent: Extent
    live: Mapping[str, Any]
    refusal: Refusal | None
    captured: CapturedKey[K] | None = None
    staged: Staged | None = None
    inputs: Mapping[str, torch.Tensor] = NOTHING

    @property
    def replays(self) -> bool:
        """Whether `launch` will replay a graph."""
        return self.captured is not None


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
