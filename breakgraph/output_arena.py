"""Fixed memory for what a forward returns: one arena for all keys of a runner, sized by the largest.

Results are copied into it inside the capture. Keeping the tensors of each capture instead was rejected: 64
decode graphs with float32 logits would hold hundreds of megabytes of their pool. A result is valid until the
runner's next replay.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch

from breakgraph.errors import CaptureError
from breakgraph.static_buffers import Extent
from breakgraph.structure import flatten, map_leaves

__all__ = ["OutputArena", "OutputViews"]

_ALIGNMENT = 256


@attrs.frozen
class _Leaf:
    """One returned tensor as the warm-up saw it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class _Measured:
    """The returned structure of one key: its tensors by path, and its container types."""

    leaves: dict[str, _Leaf]
    nodes: dict[str, type]
    nbytes: int


class OutputViews:
    """Where the results of one key lie.

    Args:
        measured: What the warm-up returned.
        by_request: Paths of the leaves that have a row for each request; the others have one for each token.
        extent: Padded sizes of the key.
        arena: Memory for at least these bytes.
        where: Name of the key, for messages.
    """

    def __init__(
        self, measured: _Measured, *, by_request: frozenset[str], extent: Extent, arena: torch.Tensor, where: str
    ) -> None:
        self._measured = measured
        self._by_request = by_request
        self._where = where
        self._extent = extent
        self._views: dict[str, torch.Tensor] = {}
        self._result: Any = None
        with torch.inference_mode(mode=False):
            for path, leaf in measured.leaves.items():
                flat = arena[leaf.start : leaf.start + leaf.nbytes]
                self._views[path] = flat.view(leaf.dtype).view(leaf.shape)

    def fill(self, result: Any) -> None:
        """Copy a forward's result into the arena; called inside the capture.

        Args:
            result: What forward returned.

        Raises:
            CaptureError: It differs from what the warm-up returned.
        """
        found = _describe(result, extent=self._extent, where=self._where)
        if found != self._measured:
            raise CaptureError(
                f"forward of {self._where} returned {_summary(found)} at capture; "
                f"at warm-up it was {_summary(self._measured)}.",
                why="Results are copied into memory that was sized by the warm-up.",
                fix="Make the structure of the result depend on the key alone.",
            )
        for path, leaf in flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self._views[path].copy_(leaf)
        self._result = map_leaves(result, lambda path, leaf: self._views.get(path, leaf))

    def narrow(self, extent: Extent) -> Any:
        """The real rows of the last replay's result.

        Args:
            extent: Real sizes of the step.

        Returns:
            The structure that forward returned, with views of the arena. About 1 us for a single tensor.
        """
        return self.cut(self._result, extent)

    def cut(self, result: Any, extent: Extent) -> Any:
        """Cut a result of padded shape to its real rows.

        Args:
            result: A result of this key, padding included.
            extent: Real sizes of the step.

        Returns:
            The same structure, with views.
        """
        if isinstance(result, torch.Tensor):
            return self._cut("", result, extent)
        return map_leaves(result, lambda path, leaf: self._cut(path, leaf, extent))

    def _cut(self, path: str, leaf: Any, extent: Extent) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.narrow(0, 0, extent.requests if path in self._by_request else extent.tokens)


class OutputArena:
    """Measures what forwards return and holds the memory for it.

    Args:
        device: Device of the runner.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arena: torch.Tensor | None = None
        self._measured: dict[Any, _Measured] = {}
        self._by_request: dict[Any, frozenset[str]] = {}

    def measure(
        self, key: Any, result: Any, *, extent: Extent, where: str, other: tuple[Any, Extent] | None = None
    ) -> None:
        """Note what the eager warm-up of a key returned.

        Args:
            key: The key.
            result: What forward returned.
            extent: Padded sizes of the key.
            where: Name of the key, for messages.
            other: What forward returned for another token count, and its sizes: tells tokens from requests where a
                key has as many of one as of the other.

        Raises:
            CaptureError: A leaf is no tensor, lies elsewhere, or has no row axis in front.
        """
        for path, leaf in flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
                raise CaptureError(
                    f"forward of {where} returned a tensor on {leaf.device}{_at(path)}; expected {self._device}.",
                    why="Results of a graph lie in fixed memory on its device.",
                    fix="Return what the device computed, and copy it after the launch.",
                )
        measured = self._measured[key] = _describe(result, extent=extent, where=where)
        rows = {path: leaf.shape[0] for path, leaf in measured.leaves.items()}
        by_request = {path for path, count in rows.items() if count != extent.tokens}
        if other is not None:
            found, count = dict(flatten(other[0])[0]), other[1].requests
            by_request |= {path for path in rows if _is_by_request(found.get(path), requests=count)}
        self._by_request[key] = frozenset(by_request)

    def views(self, key: Any, *, extent: Extent, where: str) -> OutputViews:
        """Lay the results of a key out in the arena, which is allocated on the first call.

        Args:
            key: A measured key.
            extent: Padded sizes of the key.
            where: Name of the key, for messages.

        Returns:
            Its views. Each key starts at the arena's beginning: replays of a runner never overlap.
        """
        nbytes = max(measured.nbytes for measured in self._measured.values())
        if self._arena is None or self._arena.numel() < nbytes:
            # A second, larger one may come with a later capture window; older graphs go on with the first.
            with torch.inference_mode(mode=False):
                self._arena = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return OutputViews(
            self._measured[key], by_request=self._by_request[key], extent=extent, arena=self._arena, where=where
        )


def _describe(result: Any, *, extent: Extent, where: str) -> _Measured:
    leaves: dict[str, _Leaf] = {}
    end = 0
    found, nodes = flatten(result)
    for path, leaf in found:
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise CaptureError(
                f"forward of {where} returned a {type(leaf).__name__}{_at(path)}; expected tensors and None.",
                why="A replay runs no Python, so it would stay what it was at capture.",
                fix="Return tensors only; compute host values outside forward.",
            )
        if leaf.dim() == 0 or leaf.shape[0] not in (extent.tokens, extent.requests):
            raise CaptureError(
                f"forward of {where} returned shape {tuple(leaf.shape)}{_at(path)}; expected {extent.tokens} token "
                f"rows or {extent.requests} requests in front.",
                why="Results are cut to the real rows, so that padding never reaches a caller.",
                fix="Return tensors whose first axis is that of the tokens or of the requests.",
            )
        leaves[path] = _Leaf(tuple(leaf.shape), leaf.dtype, end)
        end += math.ceil(leaves[path].nbytes / _ALIGNMENT) * _ALIGNMENT
    return _Measured(leaves, nodes, end)


def _is_by_request(leaf: Any, *, requests: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == requests


def _at(path: str) -> str:
    return f" at '{path}'" if path else ""


def _summary(measured: _Measured) -> str:
    return str({path or "result": (leaf.shape, leaf.dtype) for path, leaf in measured.leaves.items()})
