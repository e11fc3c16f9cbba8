"""Is a replay what eager computes? Saved state, bitwise comparison, and the verdict on a graph.

A graph is published only when one replay with fresh inputs equals its eager twin: the same forward, marked
functions behaving as in a replay, at the same padded shapes, over the same static buffers. Declared state and
generators are the same before both runs, and what each run leaves in the state is compared as well.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import numpy as np
import torch

from breakgraph.structure import flatten, map_leaves

__all__ = [
    "Compared",
    "Outcome",
    "Path",
    "Snapshot",
    "StateKeeper",
    "Tolerance",
    "Verdict",
    "difference",
    "judge",
    "leaf_difference",
    "live_leaves",
    "same_snapshot",
    "same_value",
    "snapshot",
]

_SNAPSHOT_BYTES = 1 << 20  # larger tensors of live data are compared by identity: they may be whole caches

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


class Compared(enum.Enum):
    """What of two runs is compared."""

    ALL = "result and state"
    RESULT = "result"
    """Padding rows all write one null slot, in no order, so a padded step's state need not repeat."""


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
        for item, copy in zip(self.state, saved, strict=True):
            if isinstance(item, torch.Tensor):
                with torch.inference_mode():  # the one mode in which normal and inference tensors may both be written
                    item.copy_(copy)
            else:  # in the mode of its `save()`: what it allocates here, breaks must be able to write
                item.restore(copy)

    @contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Put the generators back at the end, whatever happens inside.

        Yields:
            Nothing.
        """
        seeds = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            for generator, seed in zip(self.generators, seeds, strict=True):
                generator.set_state(seed)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put state and generators back at the end, whatever happens inside.

        Yields:
            Nothing.
        """
        saved = self.save()
        with self.generators_kept():
            try:
                yield
            finally:
                self.restore(saved)

    def outcome(self, run: Callable[[], Any], *, compared: Compared = Compared.ALL) -> Outcome:
        """Run something from the present state and put the state back.

        Args:
            run: Returns a structure of tensors.
            compared: Whether the state that it leaves is wanted.

        Returns:
            Copies of its result and of the state that it left.
        """
        with self.preserved():
            result = own(run())
            return Outcome(result, self.save() if compared is Compared.ALL else [])


def own(result: R) -> R:
    """A copy of a structure with copies of its tensors."""
    return map_leaves(result, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def judge(
    keeper: StateKeeper,
    *,
    replay: Callable[[], Any],
    eager: Callable[[], Any],
    tolerance: Tolerance | None,
    compared: Compared = Compared.ALL,
    anyone: Callable[[bool], bool] = bool,
) -> Verdict:
    """Compare a replay with its eager twin, bit for bit.

    Where they differ, eager runs once more: only if it differs from itself does the tolerance apply.

    Args:
        keeper: The state to save and restore around each run.
        replay: Replays the graph.
        eager: Runs the eager twin on the same inputs.
        tolerance: Declared tolerance.
        compared: What is compared.
        anyone: Whether a flag is set on any rank: all of them run eager once more, or none.

    Returns:
        The verdict.
    """
    replayed, expected = keeper.outcome(replay, compared=compared), keeper.outcome(eager, compared=compared)
    mismatch = difference(replayed, expected)
    if not anyone(mismatch is not None):
        return Verdict(None)
    unstable = difference(keeper.outcome(eager, compared=compared), expected)
    if mismatch is None:
        return Verdict(None)
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


Path = tuple[tuple[str, Any], ...]
"""Where a leaf of live data lies: pairs of "." and an attribute's name, or "[" and an item's key."""


def live_leaves(live: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Walk live data: its values, their attributes and items, and those of these.

    Args:
        live: Live data by name.

    Yields:
        The path of a leaf, such as `(("[", "meta"), (".", "table"))`, and the leaf.
    """
    for name, value in live.items():
        yield from _leaves(value, (("[", name),), depth=2)


def _leaves(value: Any, path: Path, *, depth: int) -> Iterator[tuple[Path, Any]]:
    children = _parts(value) if depth else None
    if children is None:
        yield path, value
        return
    for step, child in children:
        yield from _leaves(child, (*path, step), depth=depth - 1)


def _parts(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    if isinstance(value, (torch.Tensor, torch.nn.Module, np.ndarray, type, str, bytes, int, float, enum.Enum)):
        return None  # of a module, `modules=` watches everything
    if isinstance(value, Mapping):
        return [(("[", key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [(("[", index), child) for index, child in enumerate(value)]
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        names.update((name, None) for name, held in vars(kind).items() if isinstance(held, torch.Tensor))
    if attrs.has(type(value)):
        names.update(dict.fromkeys(field.name for field in attrs.fields(type(value))))
    elif dataclasses.is_dataclass(value):
        names.update(dict.fromkeys(field.name for field in dataclasses.fields(value)))
    return [((".", name), getattr(value, name, None)) for name in names] or None


Snapshot = Mapping[Path, Any]
"""Copies of leaves, for `same_snapshot`."""


def snapshot(values: Mapping[str, Any], *, most_bytes: int = _SNAPSHOT_BYTES) -> Snapshot:
    """Copy what can be compared later: were these inputs, or this live data, the same as those?

    Args:
        values: Inputs or live data by name.
        most_bytes: Larger tensors are kept as they are.

    Returns:
        Leaves by path, for `same_snapshot`.
    """
    found: dict[Path, Any] = {}
    for path, leaf in live_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.nbytes <= most_bytes:
            leaf = leaf.detach().clone()
        found[path] = leaf.copy() if isinstance(leaf, np.ndarray) else leaf
    return found


def same_snapshot(first: Snapshot, second: Snapshot) -> bool:
    """Whether two snapshots are equal; objects that are no tensor, array or plain value, by identity."""
    return first.keys() == second.keys() and all(_same_leaf(first[path], second[path]) for path in first)


def _same_leaf(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        strided = one.layout is torch.strided and other.layout is torch.strided
        return strided and one.dtype is other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return isinstance(one, (str, bytes, int, float)) and bool(one == other)


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
            if text := leaf_difference(one, other, tolerance):
                return f"{what}{path}: {text}"
    return None


def leaf_difference(one: Any, other: Any, tolerance: Tolerance | None) -> str | None:
    """Say how two leaves differ.

    Args:
        one: A tensor, an array or a plain value; objects without equality of their own are not compared.
        other: Another.
        tolerance: None means bit for bit.

    Returns:
        How many elements, the place of the first and both its values; None where nothing differs.
    """
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None if same_value(one, other) else f"{one!r} against {other!r}"
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return f"{tuple(one.shape)} {one.dtype} against {tuple(other.shape)} {other.dtype}"
    one, other = _strided(one), _strided(other)
    if torch.equal(_bits(one), _bits(other)):
        return None
    if tolerance is not None and torch.allclose(one, other, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return None
    unequal = (_bits(one) != _bits(other)).view(one.numel(), -1).any(dim=1).nonzero().flatten()
    first = int(unequal[0])
    values = f"{one.flatten()[first].item()} against {other.flatten()[first].item()}"
    place = [int(index) for index in np.unravel_index(first, tuple(one.shape))]
    return f"{unequal.numel()} of {one.numel()} elements differ, the first at {place}: {values}"


def same_value(one: Any, other: Any) -> bool:
    """Whether two leaves that are no tensors are equal.

    Plain values and arrays by value, NaN equal to NaN; what has no equality of its own cannot be compared, and counts as equal.

    Args:
        one: A leaf.
        other: Another.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
        return True
    if isinstance(one, float | complex) and one != one:
        return bool(other != other)
    try:
        equal: object = one == other
    except (RuntimeError, TypeError, ValueError):  # it compares tensors that it holds
        return True
    return equal if isinstance(equal, bool) else True


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """With plain memory: of a sparse or quantized tensor its values."""
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return tensor.dequantize() if tensor.is_quantized else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
