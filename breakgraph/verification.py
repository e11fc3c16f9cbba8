"""Is a replay what eager computes? Saved state, bitwise comparison, and the verdict on a graph.

A graph is published only when one replay with fresh inputs equals its eager twin: the same forward, marked
functions behaving as in a replay, at the same padded shapes, over the same static buffers. Declared state and
generators are the same before both runs, and what each run leaves in the state is compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch

from breakgraph.structure import flatten, map_leaves

__all__ = ["Outcome", "StateKeeper", "Tolerance", "Verdict", "difference", "judge"]

R = TypeVar("R")


@attrs.frozen
class Tolerance:
    """How far a replay may be from eager where eager is not equal to itself.

    Attributes:
        rtol: Relative.
        atol: Absolute.
    """

    rtol: float
    atol: float


@attrs.frozen
class Outcome:
    """What one run returned and what it left in the declared state: own copies."""

    result: Any
    state: list[Any]


@attrs.frozen
class Verdict:
    """What came of a verification.

    Attributes:
        mismatch: What differs; None when the graph is proven.
        tolerated: Whether eager differed from itself and the tolerance was applied.
    """

    mismatch: str | None
    tolerated: bool = False


class StateKeeper:
    """Saves and restores what a forward mutates: declared state, and random generators.

    Args:
        state: Tensors, and objects with `save()` and `restore(saved)`.
        generators: The caller's own generators; the default ones of the host and of the device are kept as well.
        device: Device of the runner.
    """

    def __init__(self, state: Iterable[Any], *, generators: Iterable[torch.Generator], device: torch.device) -> None:
        self.state = tuple({id(item): item for item in state}.values())
        defaults = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            defaults.append(torch.cuda.default_generators[device.index or 0])
        self.generators = (*defaults, *generators)

    def save(self) -> list[Any]:
        """Copy the declared state. Costs its size in memory.

        Returns:
            One copy per item.
        """
        return [item.detach().clone() if isinstance(item, torch.Tensor) else item.save() for item in self.state]

    def restore(self, saved: list[Any]) -> None:
        """Put the declared state back.

        Args:
            saved: What `save` returned.
        """
        with torch.inference_mode():  # the one mode in which normal and inference tensors may both be written
            for item, copy in zip(self.state, saved, strict=True):
                if isinstance(item, torch.Tensor):
                    item.copy_(copy)
                else:
                    item.restore(copy)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put state and generators back at the end, whatever happens inside.

        Yields:
            Nothing.
        """
        saved = self.save()
        seeds = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            self.restore(saved)
            for generator, seed in zip(self.generators, seeds, strict=True):
                generator.set_state(seed)

    def outcome(self, run: Callable[[], Any]) -> Outcome:
        """Run something from the present state and put the state back.

        Args:
            run: Returns a structure of tensors.

        Returns:
            Copies of its result and of the state that it left.
        """
        with self.preserved():
            result = own(run())
            return Outcome(result, self.save())


def own(result: R) -> R:
    """A copy of a structure with copies of its tensors."""
    return map_leaves(result, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def judge(
    keeper: StateKeeper, *, replay: Callable[[], Any], eager: Callable[[], Any], tolerance: Tolerance | None
) -> Verdict:
    """Compare a replay with its eager twin, bit for bit.

    Where they differ, eager runs once more: only if it differs from itself does the tolerance apply.

    Args:
        keeper: The state to save and restore around each run.
        replay: Replays the graph.
        eager: Runs the eager twin on the same inputs.
        tolerance: Declared tolerance.

    Returns:
        The verdict.
    """
    replayed, expected = keeper.outcome(replay), keeper.outcome(eager)
    mismatch = difference(replayed, expected)
    if mismatch is None:
        return Verdict(None)
    unstable = difference(keeper.outcome(eager), expected)
    if unstable is None:
        return Verdict(f"the replay differs from eager: {mismatch}")
    if tolerance is None:
        return Verdict(
            f"the replay differs from eager: {mismatch}; eager differs from itself too, and no tolerance= is set"
        )
    mismatch = difference(replayed, expected, tolerance=tolerance)
    return Verdict(
        None if mismatch is None else f"the replay differs from eager by more than {tolerance}: {mismatch}", True
    )


def difference(left: Outcome, right: Outcome, *, tolerance: Tolerance | None = None) -> str | None:
    """Say where two outcomes differ.

    Args:
        left: One outcome.
        right: The other.
        tolerance: None means bit for bit; NaNs of equal bits are equal.

    Returns:
        The first difference in words, or None.
    """
    for what, ours, theirs in (("result", left.result, right.result), ("state", left.state, right.state)):
        found, nodes = flatten(ours)
        others, other_nodes = flatten(theirs)
        if nodes != other_nodes or [path for path, _ in found] != [path for path, _ in others]:
            return f"{what} has another structure"
        for (path, one), (_, other) in zip(found, others, strict=True):
            if text := _leaf_difference(one, other, tolerance):
                return f"{what}{path}: {text}"
    return None


def _leaf_difference(one: Any, other: Any, tolerance: Tolerance | None) -> str | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = one is other or (type(one) is type(other) and bool(one == other))
        return None if same else f"{one!r} against {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(one.shape)} {one.dtype} against {tuple(other.shape)} {other.dtype}"
    if torch.equal(_bits(one), _bits(other)):
        return None
    if tolerance is not None and torch.allclose(one, other, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return None
    unequal = (_bits(one) != _bits(other)).view(one.numel(), -1).any(dim=1).nonzero().flatten()
    first = int(unequal[0])
    values = f"{one.flatten()[first].item()} against {other.flatten()[first].item()}"
    return f"{unequal.numel()} of {one.numel()} elements differ, the first at flat index {first}: {values}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
