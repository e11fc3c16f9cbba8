"""Public helpers for tests of models that are captured: does a replay give eager's numbers?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
from breakgraph.copy_back import LeafKind
from breakgraph.replay_context import eager_step
from breakgraph.structure import flatten

__all__ = ["assert_memory_is_sound", "assert_replay_matches_eager", "assert_same_bits", "poison"]


def poison(graph: BreakableCUDAGraph) -> None:
    """Fill everything that the segments of the graph's pool computed with NaN (integers: -1 bits).

    A replay afterwards must give the same numbers: whatever it reads it must have written itself. Outputs of
    earlier replays are destroyed. Cost: a host sync and a fill of the pool.

    Args:
        graph: A sealed graph.
    """
    if graph.pool is not None:
        graph.pool.backend.poison()


def assert_memory_is_sound(graph: BreakableCUDAGraph) -> None:
    """Assert that no other tensor can write a graph's bridges.

    Each bridge lies in the arena of the graph's pool, overlaps no other bridge of the graph, and no live block of the
    pool. Cost: a look at the allocator.

    Args:
        graph: A sealed graph.

    Raises:
        AssertionError: With the break and the leaf.
    """
    if graph.pool is None:
        return
    live = graph.pool.backend.live_blocks()
    taken: list[tuple[int, int, str, int]] = []
    for call in graph.breaks:
        for leaf in call.contract.leaves:
            if leaf.kind is not LeafKind.BRIDGE or not leaf.captured.numel():
                continue
            bridge, what = leaf.captured, f"the bridge of {call.where}, leaf '{leaf.path or 'return'}',"
            start, end = _span(bridge)
            assert graph.pool.arena.holds(bridge), f"{what} lies at {start:#x}, outside the pool's arena"
            for other_start, other_end in live:
                assert end <= other_start or other_end <= start, f"{what} overlaps a live block at {other_start:#x}"
            for other_start, other_end, other, twin in taken:
                apart = end <= other_start or other_end <= start
                assert apart or twin == id(bridge), f"{what} overlaps {other}"
            taken.append((start, end, what, id(bridge)))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def assert_same_bits(got: Any, *, expected: Any, what: str = "result") -> None:
    """Assert that two results have the same structure and the same bits; equal NaNs are equal.

    Args:
        got: Any nesting of tensors and plain values.
        expected: What it must be.
        what: Name in the message.

    Raises:
        AssertionError: With the path of the first leaf that differs, and by how much.
    """
    got_leaves, got_nodes = flatten(got)
    expected_leaves, expected_nodes = flatten(expected)
    assert got_nodes == expected_nodes, f"{what}: structure {got_nodes} differs from {expected_nodes}"
    paths, wanted = [path for path, _ in got_leaves], [path for path, _ in expected_leaves]
    assert paths == wanted, f"{what}: leaves {paths} differ from {wanted}"
    for (path, left), (_, right) in zip(got_leaves, expected_leaves, strict=True):
        where = f"{what}{path}"
        if not isinstance(right, torch.Tensor):
            assert not isinstance(left, torch.Tensor), f"{where}: a tensor differs from {right!r}"
            assert left == right, f"{where}: {left!r} differs from {right!r}"
            continue
        assert isinstance(left, torch.Tensor), f"{where}: {left!r} differs from a tensor"
        assert left.shape == right.shape, f"{where}: shape {tuple(left.shape)} differs from {tuple(right.shape)}"
        assert left.dtype == right.dtype, f"{where}: dtype {left.dtype} differs from {right.dtype}"
        if left.numel():
            same = (left == right) | ((left != left) & (right != right))
            if left.is_floating_point():
                same &= (left.signbit() == right.signbit()) | (left != left)
            assert bool(same.all()), (
                f"{where}: {int((~same).sum())} of {same.numel()} elements differ, "
                f"the largest difference is {(left.double() - right.double()).abs().nan_to_num().max().item()}"
            )


def assert_replay_matches_eager(
    forward: Callable[..., Any],
    *,
    example: Callable[[int], Mapping[str, torch.Tensor]],
    live: Callable[[int], Mapping[str, Any]] | None = None,
    valid_rows: Callable[[int], int | None] | None = None,
    rounds: int = 3,
    backend: str = "auto",
    poisoned: bool = True,
) -> BreakableCUDAGraph:
    """Capture a forward and compare replays on new inputs with eager steps, bit for bit.

    Args:
        forward: Called as `forward(**inputs, **live)`.
        example: Round -> inputs by name, of fixed shapes; round 0 is captured. Called once for each round.
        live: Round -> live data.
        valid_rows: Round -> real rows, or None for all.
        rounds: How many replays to compare, round 0 among them.
        backend: As for `BreakableCUDAGraphCapture`.
        poisoned: Fill what segments computed with NaN before each replay.

    Returns:
        The graph, for a look at its steps.

    Raises:
        AssertionError: A replay differs, or `assert_memory_is_sound` fails.
    """
    pool = GraphPool(backend=backend, poison=poisoned)
    graph = BreakableCUDAGraph(name="forward")
    given = {name: tensor.clone() for name, tensor in example(0).items()}
    static = {name: tensor.clone() for name, tensor in given.items()}
    first = dict(live(0)) if live is not None else {}
    with torch.no_grad():
        with pool.on_capture_stream(), eager_step(first):
            forward(**static, **first)
        for name, tensor in given.items():
            _refill(static[name], tensor)  # the warm-up may have changed them in place
        with BreakableCUDAGraphCapture(graph, pool=pool, live=first):
            output = forward(**static, **first)
        assert_memory_is_sound(graph)
        for round_ in range(rounds):
            data = dict(live(round_)) if live is not None else {}
            rows = valid_rows(round_) if valid_rows is not None else None
            # Once a round: an example that draws random numbers gives others at each call.
            if round_:
                given = {name: tensor.clone() for name, tensor in example(round_).items()}
            fresh = {name: tensor.clone() for name, tensor in given.items()}
            with eager_step(data, valid_rows=rows):
                expected = forward(**fresh, **data)
            for name, tensor in given.items():
                _refill(static[name], tensor)
            graph.replay(live=data, valid_rows=rows)
            assert_same_bits(output, expected=expected, what=f"round {round_}: output")
            assert_same_bits(static, expected=fresh, what=f"round {round_}: inputs after the step")
    return graph


def _refill(static: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if static.shape != value.shape or static.dtype != value.dtype:
        raise AssertionError(
            f"example() changed an input from {tuple(static.shape)} {static.dtype} to "
            f"{tuple(value.shape)} {value.dtype}; a captured forward has fixed shapes"
        )
    return static.copy_(value)
