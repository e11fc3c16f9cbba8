"""The output contract of a break, learnt at capture, and the copy of later outputs into what the next segment reads.

A segment reads addresses. So what a break returned at capture is frozen: every later result must have the same
structure, shapes, dtypes and devices, and fresh tensors are copied into *bridges*, buffers of ours at fixed
addresses. Never broadcast, never cast, never drop.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any

import attrs
import torch

from breakgraph.bound_call import RowViews
from breakgraph.break_function import BreakSpec
from breakgraph.bridge_arena import BridgeArena
from breakgraph.errors import CaptureError, CaptureIllegalError, CopyBackError
from breakgraph.structure import flatten, map_leaves, storage_address

__all__ = ["OutputContract", "learn"]


class LeafKind(enum.Enum):
    """What happens to one leaf of a break's result."""

    IN_PLACE = "in place"
    BRIDGE = "bridge"
    VALUE = "value"


@attrs.frozen(eq=False)
class Leaf:
    """One frozen leaf: the captured tensor or plain value, and its token axis if it has one."""

    path: str
    kind: LeafKind
    captured: Any
    axis: int | None = None

    def expected(self, rows: int | None) -> torch.Tensor:
        """The tensor a result must look like, cut to `rows` real rows."""
        tensor: torch.Tensor = self.captured
        return tensor if rows is None or self.axis is None else tensor.narrow(self.axis, 0, rows)


class OutputContract:
    """What a break returned at capture, and the copy of later results into it.

    Args:
        where: Name and step of the break, for messages.
        leaves: Frozen leaves in order.
        nodes: Container types by path.
        arena: Where the bridges lie.
    """

    __slots__ = ("_leaves", "_tails", "arena", "leaves", "nodes", "shared", "single", "where")

    def __init__(self, *, where: str, leaves: tuple[Leaf, ...], nodes: dict[str, type], arena: BridgeArena) -> None:
        self.where = where
        self.leaves = leaves
        self.nodes = nodes
        self.arena = arena
        # One tensor and nothing else is the common case and has a short path.
        self.single = len(leaves) == 1 and not nodes and leaves[0].kind is not LeafKind.VALUE
        rowed = [(leaf.captured, leaf.axis) for leaf in leaves if leaf.axis is not None]
        self._tails = RowViews(tuple(rowed))
        self._leaves = {leaf.path: leaf for leaf in leaves}
        first: dict[int, str] = {}
        bridged = [leaf for leaf in leaves if leaf.kind is LeafKind.BRIDGE]
        twins = [(leaf.path, first.setdefault(id(leaf.captured), leaf.path)) for leaf in bridged]
        self.shared = tuple((path, twin) for path, twin in twins if path != twin)

    @property
    def returns_none(self) -> bool:
        """The break returned None: nothing to copy and nothing to compare but that."""
        return not self.nodes and self.leaves[0].captured is None

    @property
    def bridge_bytes(self) -> int:
        """Bytes of the bridges of this break."""
        return sum(
            leaf.captured.numel() * leaf.captured.element_size() for leaf in self.leaves if leaf.kind is LeafKind.BRIDGE
        )

    @property
    def row_lengths(self) -> set[int]:
        """Captured lengths of the token axes of the result."""
        return {leaf.captured.shape[leaf.axis] for leaf in self.leaves if leaf.axis is not None}

    def copy_back(self, result: Any, *, rows: int | None) -> None:
        """Check a result and copy its fresh tensors into the bridges.

        Args:
            result: What the break returned.
            rows: Real rows, where fewer than captured; None means all.

        Raises:
            CopyBackError: The result differs from the contract; nothing was copied.

        Cost: one copy for each bridge (grouped into one call), one fill for the tails; no host sync.
        """
        if self.single and isinstance(result, torch.Tensor):
            leaf = self.leaves[0]
            target = self._check_tensor(leaf, result, rows=rows)
            if leaf.kind is LeafKind.BRIDGE:
                target.copy_(result.clone() if self.arena.holds(result) else result)
        else:
            self._copy_structure(result, rows=rows)
        if rows is not None:
            self._tails.zero_tails(rows)

    def _copy_structure(self, result: Any, *, rows: int | None) -> None:
        found, nodes = flatten(result)
        if nodes != self.nodes or {path for path, _ in found} != set(self._leaves):
            raise CopyBackError(
                f"{self.where} returned {_describe(found, nodes)}; at capture it was "
                f"{_describe([(leaf.path, leaf.captured) for leaf in self.leaves], self.nodes)}.",
                why="The next segment reads the captured buffers, so a leaf that is missing would keep its old value.",
                fix="Return the same structure on every call; hand host values to later breaks in current_replay().scratch.",
            )
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for path, value in found:
            leaf = self._leaves[path]
            if leaf.kind is LeafKind.VALUE:
                self._check_value(leaf, value)
                continue
            target = self._check_tensor(leaf, value, rows=rows)
            if leaf.kind is LeafKind.BRIDGE:
                sources.append(value.clone() if self.arena.holds(value) else value)
                targets.append(target)
        if self.shared:
            self._check_shared(dict(found))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _check_shared(self, found: dict[str, Any]) -> None:
        for path, twin in self.shared:
            if found[path] is not found[twin]:
                raise CopyBackError(
                    f"{self.where} returned two tensors at '{path}' and '{twin}'; at capture they were one.",
                    why="Both have the same bridge buffer, so one would overwrite the other.",
                    fix="Return the same tensor twice on every call, or two tensors on every call.",
                )

    def _check_tensor(self, leaf: Leaf, value: Any, *, rows: int | None) -> torch.Tensor:
        expected = leaf.expected(rows)
        if not isinstance(value, torch.Tensor):
            raise CopyBackError(
                f"{self.where} returned {type(value).__name__}{_at(leaf)}; at capture it was a tensor {_shape(expected)}.",
                why="The next segment reads that tensor's buffer, so it would keep the last step's numbers.",
                fix="Return a tensor of the captured shape on every call.",
            )
        if value.shape != expected.shape or value.dtype != expected.dtype or value.device != expected.device:
            kind = "its bridge buffer" if leaf.kind is LeafKind.BRIDGE else "the captured argument"
            hint = ' or mark the token axis with rows=("return",)' if leaf.axis is None else ""
            if rows is not None and leaf.axis is not None:
                kind = f"for {rows} real rows {kind}"
                hint = f"; return the {rows} real rows only, as the rows arguments have them"
            raise CopyBackError(
                f"{self.where} returned {_tensor(value)}{_at(leaf)}; {kind} is {_tensor(expected)}.",
                why="The next segment reads that buffer by address, so a replay would use broadcast, cast or stale values.",
                fix=f"Return the captured shape, dtype and device on every call{hint}.",
            )
        if leaf.kind is LeafKind.IN_PLACE and (
            value.numel() and (value.data_ptr() != expected.data_ptr() or not _same_strides(value, expected))
        ):
            raise CopyBackError(
                f"{self.where} returned a tensor{_at(leaf)} at {value.data_ptr():#x} with strides {value.stride()}; at capture "
                f"it was a view of its own argument, at {expected.data_ptr():#x} with strides {expected.stride()}.",
                why="The next segment reads the argument's memory, so the returned tensor would not be seen.",
                fix="Write into the argument on every call, or return a fresh tensor on every call.",
            )
        return expected

    def _check_value(self, leaf: Leaf, value: Any) -> None:
        if isinstance(value, torch.Tensor) or not _same_value(leaf.captured, value):
            raise CopyBackError(
                f"{self.where} returned {value!r}{_at(leaf)}; at capture it was {leaf.captured!r}.",
                why="The segments after it were recorded with the captured value and cannot see another.",
                fix="Return a tensor, keep the value the same, or hand it to a later break in current_replay().scratch.",
            )


def learn(
    result: Any,
    *,
    spec: BreakSpec,
    where: str,
    arguments: list[torch.Tensor],
    arena: BridgeArena,
    borrow: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[OutputContract, Any]:
    """Freeze a break's first result.

    Args:
        result: What the break returned at capture.
        spec: Options of the break.
        where: Name and step for messages.
        arguments: Every tensor the break received: a result that shares storage with one stays in place.
        arena: Where bridges come from.
        borrow: Gives a tensor that does not keep a segment's temporary alive.

    Returns:
        The contract, and what the model goes on with: `result` with bridges in place of its fresh tensors.

    Raises:
        CaptureError: A leaf cannot be frozen: a tensor on another device, an object without value equality.
    """
    found, nodes = flatten(result)
    storages: set[int] = set()
    if any(isinstance(value, torch.Tensor) for _, value in found):
        storages = {storage_address(tensor) for tensor in arguments if tensor.numel()} - {0}
    leaves: list[Leaf] = []
    bridges: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def freeze(path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            leaves.append(Leaf(path, LeafKind.VALUE, _freeze_value(value, path=path, where=where)))
            return value
        axis = spec.return_axis(path)
        if axis is not None:
            axis = _checked_axis(value, axis, path=path, where=where)
        _refuse_tensor(value, path=path, where=where, device=arena.device)
        if value.numel() and storage_address(value) in storages:
            leaves.append(Leaf(path, LeafKind.IN_PLACE, borrow(value).detach(), axis))
            return value
        if id(value) not in bridges:
            bridge = arena.take(value)
            with torch.no_grad():
                bridge.copy_(value)
            # The model's `y.t_()` later must not change the contract, so that has a tensor object of its own.
            bridges[id(value)] = (bridge, bridge.detach())
        bridge, ours = bridges[id(value)]
        leaves.append(Leaf(path, LeafKind.BRIDGE, ours, axis))
        return bridge

    model_value = map_leaves(result, freeze)
    _refuse_unknown_rows(spec, [leaf.path for leaf in leaves], where=where)
    return OutputContract(where=where, leaves=tuple(leaves), nodes=nodes, arena=arena), model_value


def _refuse_unknown_rows(spec: BreakSpec, paths: list[str], *, where: str) -> None:
    for target in spec.unmatched_returns(paths):
        raise CaptureError(
            f"{where} has rows={target!r}, and returned {[f'return{path}' for path in paths]}.",
            why="The option would do nothing, so rows of an earlier step would be left in the bridge.",
            fix="Name a leaf that is returned, or 'return' for all of them.",
        )


def _checked_axis(value: torch.Tensor, axis: int, *, path: str, where: str) -> int:
    if -value.dim() <= axis < value.dim():
        return axis % value.dim()
    raise CaptureError(
        f"{where} returned shape {tuple(value.shape)} at '{path or 'return'}'; rows= says its token axis is {axis}.",
        why="Its real rows are cut along that axis at every replay.",
        fix="Name the right axis, or mark only the returned tensors that have one, such as rows=('return[0]',).",
    )


def _refuse_tensor(value: torch.Tensor, *, path: str, where: str, device: torch.device) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or (value.numel() and not storage_address(value)):
        kind = type(value).__name__ if value.layout is torch.strided else str(value.layout)
        raise CaptureError(
            f"{where} returned a {kind} at '{path or 'return'}'; a plain dense tensor is needed.",
            why="The next segment reads plain memory, so what the subclass or layout adds would be lost.",
            fix="Return the plain tensors that it is made of.",
        )
    if value.device != device:
        raise CaptureError(
            f"{where} returned a tensor on {value.device} at '{path or 'return'}'; the graph is on {device}.",
            why="A segment cannot read it by address: its captured value would be used for ever.",
            fix="Move it to the graph's device inside the break, or keep it for later breaks in current_replay().scratch.",
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise CaptureIllegalError(
            f"{where} returned a tensor that requires grad at '{path or 'return'}'.",
            why="Copying it into a bridge would cut the autograd graph, and gradients would be lost silently.",
            fix="Capture under torch.no_grad() or torch.inference_mode(); graphs here are for inference.",
        )


def _freeze_value(value: Any, *, path: str, where: str) -> Any:
    """The value to compare with later; a copy where it is mutable, since the same object could change under us."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value
    if isinstance(value, enum.Enum | type | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return value
    try:
        own = type(value).__eq__ is not object.__eq__  # type: ignore[comparison-overlap]
        comparable = own and bool(value == copy.deepcopy(value))
    except Exception:
        comparable = False
    if not comparable:
        raise CaptureError(
            f"{where} returned a {type(value).__name__} at '{path or 'return'}': a value that cannot be compared.",
            why="A replay could not tell whether it changed, and the segments after it were recorded with this one.",
            fix="Keep it in current_replay().scratch for later breaks, or open it with attrs or a dataclass.",
        )
    return copy.deepcopy(value)


def _same_value(captured: Any, value: Any) -> bool:
    if captured is value:
        return True
    if type(captured) is not type(value):
        return False
    try:
        return bool(captured == value) or bool(captured != captured and value != value)
    except Exception:
        return False


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Strides of axes of length 1 say nothing: with one real row they are whatever the last operation left there."""
    return all(
        left == right for size, left, right in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1
    )


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))


def _tensor(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _at(leaf: Leaf) -> str:
    return f" at '{leaf.path}'" if leaf.path else ""


def _describe(leaves: list[tuple[str, Any]], nodes: dict[str, type]) -> str:
    if not nodes:
        value = leaves[0][1]
        return f"a tensor {_shape(value)}" if isinstance(value, torch.Tensor) else f"{value!r}"
    return f"a {nodes[''].__name__} with leaves {[path for path, _ in leaves]}"
