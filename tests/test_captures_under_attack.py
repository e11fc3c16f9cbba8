"""Faults found by attacking captures: each was a silent wrong result, lost state, or a foreign error."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph, eager_step
from breakgraph.errors import (
    CaptureError,
    CaptureIllegalError,
    ConcurrentReplayError,
    ConfigError,
    LiveDataError,
)
from breakgraph.replay_context import current_frame
from breakgraph.testing import assert_replay_matches_eager, assert_same_bits

Forward = Callable[[torch.Tensor], torch.Tensor]


def capture(forward: Forward, x: torch.Tensor, **options: Any) -> tuple[BreakableCUDAGraph, torch.Tensor]:
    """Capture a forward on the emulated backend."""
    graph = BreakableCUDAGraph()
    options.setdefault("backend", "emulated")
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, **options):
        out = forward(x)
    return graph, out


def check(forward: Forward) -> None:
    """Capture with one input, replay with another, compare with eager."""
    x = torch.full((4,), 1.0)
    graph, out = capture(forward, x)
    x.fill_(3.0)
    graph.replay()
    with torch.no_grad():
        assert_same_bits(out, expected=forward(torch.full((4,), 3.0)))


def test_a_list_that_grows_after_the_call_is_replayed_as_it_was() -> None:
    """FAULT-F2: the model appends to a list that it passed to a break; each replayed call gets what the call got."""

    @eager_on_graph
    def mix(states: list[torch.Tensor]) -> torch.Tensor:
        return sum(states, torch.zeros(4)) + len(states)

    @eager_on_graph
    def mix_dict(states: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(states.values(), torch.zeros(4)) + len(states)

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        named: dict[str, torch.Tensor] = {}
        for i in range(3):
            kept.append(x + i)
            named[str(i)] = x * i
            x = mix(kept) + mix_dict(named)
        return x * 1

    check(forward)


def test_iterators_and_changed_containers_are_refused() -> None:
    """An exhausted generator, and a list that the break pops from or appends to, would be wrong at every replay."""

    @eager_on_graph
    def total(parts: Any) -> torch.Tensor:
        return sum(parts, torch.zeros(4))

    @eager_on_graph
    def last(parts: list[torch.Tensor]) -> torch.Tensor:
        return parts.pop() * 2

    @eager_on_graph
    def log(x: torch.Tensor, lines: dict[str, float]) -> torch.Tensor:
        lines["max"] = float(x.max())
        return x * 1

    x = torch.ones(4)
    for iterator in (lambda p: iter(p), lambda p: zip(p, p, strict=True), lambda p: map(torch.neg, p)):
        with pytest.raises(CaptureError, match="an iterator"):
            capture(lambda x, iterator=iterator: total(iterator([x * 1])) + 0, x)
    for forward in (lambda x: last([x, x + 1]) + 0, lambda x: log(x + 1, {}) + 0):
        with pytest.raises(CaptureError, match="changed a list or dict"):
            capture(forward, x)


def test_the_defaults_of_a_decorated_function_are_its_own() -> None:
    """A decorator that wraps with other defaults, or passes arguments of its own, is called as it was."""

    def with_scale(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: torch.Tensor, scale: float = 3.0) -> torch.Tensor:
            return function(x, scale)

        return wrapper

    def injecting(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: torch.Tensor) -> torch.Tensor:
            return function(x, 2.0)

        return wrapper

    @eager_on_graph
    @with_scale
    def first(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale

    @eager_on_graph
    @injecting
    def second(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    check(lambda x: first(x + 1) + second(x + 2))
    with pytest.raises(ConfigError, match="Below another decorator|names 'meta'"):
        eager_on_graph(live=("meta",))(torch.no_grad()(lambda x, meta: x))


def test_a_refusal_that_the_model_swallows_fails_the_capture() -> None:
    """FAULT-E2: on CUDA the capture would be invalid; here the refusal comes back at the end."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        try:
            n = int(x.sum())
        except RuntimeError:
            n = 0
        return x + n

    with pytest.raises(CaptureIllegalError, match="host read"):
        capture(forward, torch.ones(4))


def test_a_reset_during_a_replay_is_refused() -> None:
    """FAULT-L10: from a break and from another thread; the replay goes on and is right."""
    refused: list[BaseException] = []
    armed: list[BreakableCUDAGraph] = []

    def reset() -> None:
        try:
            armed[0].reset()
        except ConcurrentReplayError as error:
            refused.append(error)

    @eager_on_graph
    def brk(x: torch.Tensor) -> torch.Tensor:
        if armed:
            reset()
            thread = threading.Thread(target=reset)
            thread.start()
            thread.join()
        return x * 2

    x = torch.ones(4)
    graph, out = capture(lambda x: brk(x + 1) + 5, x)
    armed.append(graph)
    x.fill_(3)
    graph.replay()
    assert len(refused) == 2
    assert out.tolist() == [13.0] * 4
    graph.reset()
    assert not graph.sealed


def test_an_eager_step_inside_a_segment_is_refused() -> None:
    """FAULT-F5: its breaks would be recorded with the live data of the capture; in a break it is fine."""

    @eager_on_graph(live=("n",))
    def brk(x: torch.Tensor, n: float) -> torch.Tensor:
        return x * n

    def forward(x: torch.Tensor) -> torch.Tensor:
        with eager_step({"n": 2.0}):
            return brk(x, 1.0) + 0

    with pytest.raises(CaptureIllegalError, match="inside a segment"):
        capture(forward, torch.ones(4))
    check(lambda x: eager_on_graph(forward)(x + 1) + 1)


def test_autocasts_of_the_models_own_carry_no_cast_across_a_break() -> None:
    """FAULT-E8: the decorator form and cache_enabled=True switch the cache on; a replay still casts the weight anew."""
    linear = torch.nn.Linear(4, 4).requires_grad_(False)

    @eager_on_graph
    def brk(x: torch.Tensor) -> torch.Tensor:
        return linear(x)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return linear(brk(x)) + 0

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
            return linear(brk(x)) + 0

    for forward in (decorated, inside):
        x = torch.randn(1, 4)
        graph, out = capture(forward, x)
        linear.weight.mul_(2)
        graph.replay()
        with torch.no_grad():
            assert_same_bits(out, expected=forward(x))
    assert torch.is_autocast_cache_enabled()


def test_break_arguments_are_addresses_of_the_call() -> None:
    """FAULT-F2: what the model does to the tensor object afterwards (`t_()`, `.data =`) does not reach later replays."""

    @eager_on_graph
    def rowsum(t: torch.Tensor) -> torch.Tensor:
        return t.sum(0)

    @eager_on_graph
    def plus_one(t: torch.Tensor) -> torch.Tensor:
        return t + 1

    def transposed(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).view(2, 2) * torch.arange(1.0, 5.0).view(2, 2)
        z = rowsum(y)
        y.t_()
        return z + y.sum()

    def rebound(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = plus_one(y)
        y.data = y * 10
        return z + y

    check(transposed)
    check(rebound)


def test_a_hoisted_break_over_what_a_segment_wrote_is_refused() -> None:
    """The emulated backend sees which static buffers operators write; on CUDA this is a footgun."""
    position = torch.zeros(4)

    @eager_on_graph(hoist=True)
    def plan(p: torch.Tensor) -> torch.Tensor:
        return p * 10

    def forward(x: torch.Tensor) -> torch.Tensor:
        position.add_(1)
        return plan(position) + x

    with pytest.raises(CaptureError, match="made or written by a segment"):
        capture(forward, torch.zeros(4), state=(position,))


def test_a_view_of_a_hoisted_result_may_be_hoisted() -> None:
    """Results of hoisted breaks stay in order among themselves, views of them too."""

    @eager_on_graph(hoist=True, live=("m",))
    def first(m: int) -> torch.Tensor:
        return torch.full((4,), float(m))

    @eager_on_graph(hoist=True)
    def second(t: torch.Tensor) -> torch.Tensor:
        return t * 2

    x = torch.zeros(3)
    graph, out = capture(lambda x: x + second(first(1)[1:]), x, live={"m": 1})
    graph.replay(live={"m": 5})
    assert out.tolist() == [10.0] * 3


def test_live_data_that_is_returned_goes_through_a_bridge() -> None:
    """FAULT-F1: a break that returns its live tensor, or a view of it, is copied back at each replay."""

    @eager_on_graph(live=("m",))
    def give(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return m[:2]

    captured = torch.full((4,), 5.0)
    graph, out = capture(lambda x: give(x, captured) + 1, torch.ones(4), live={"m": captured})
    graph.replay(live={"m": torch.full((4,), 7.0)})
    assert out.tolist() == [8.0, 8.0]


def test_two_keys_of_one_repr_are_two_leaves() -> None:
    """FAULT-F8: both values of such a dict reach the next segment."""

    class Key:
        def __repr__(self) -> str:
            return "key"

    keys = (Key(), Key())

    @eager_on_graph
    def brk(x: torch.Tensor) -> dict[Key, torch.Tensor]:
        return {keys[0]: x * 2, keys[1]: x * 5}

    def forward(x: torch.Tensor) -> torch.Tensor:
        result = brk(x + 1)
        return result[keys[0]] * 10 + result[keys[1]]

    check(forward)


def test_an_exception_that_takes_no_notes_is_not_replaced() -> None:
    """FAULT-E1: a frozen exception class; afterwards gc, frame, cache and locks are as before, the next capture works."""

    @dataclasses.dataclass(frozen=True)
    class StopError(Exception):
        code: int

    @eager_on_graph
    def raising(x: torch.Tensor) -> torch.Tensor:
        raise StopError(4)

    def direct(x: torch.Tensor) -> torch.Tensor:
        raise StopError(3)

    for forward, code in ((direct, 3), (lambda x: raising(x + 1), 4)):
        with pytest.raises(StopError) as caught:
            capture(forward, torch.ones(4))
        assert caught.value.code == code
        assert gc.isenabled()
        assert current_frame() is None
        assert torch.is_autocast_cache_enabled()
        check(lambda x: x * 2)


def test_one_failing_restore_leaves_nothing_else_changed() -> None:
    """The other state is put back, the recorded segments are given back, the error is the restore's own."""
    state = torch.zeros(4)
    pool = GraphPool(backend="emulated")

    class Bad:
        def save(self) -> int:
            return 1

        def restore(self, saved: int) -> None:
            raise RuntimeError("restore")

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        return x * 2

    with pytest.raises(RuntimeError, match="restore"):
        capture(forward, torch.ones(4), state=(Bad(), state), pool=pool)
    assert state.tolist() == [0.0] * 4
    assert pool.backend.pool_bytes() == 0
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool=pool):
        torch.ones(2) * 2


@pytest.mark.parametrize("what", ["abort", "release"])
def test_a_failing_teardown_is_a_note_of_the_users_exception(what: str) -> None:
    """FAULT-E1: a backend that can no longer clean up (a driver error that sticks) does not replace the ValueError."""
    pool = GraphPool(backend="emulated")
    state = torch.zeros(2)

    def broken() -> None:
        raise RuntimeError("driver")

    def forward(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        raise ValueError("mine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.backend, what, broken)
        with pytest.raises(ValueError, match="mine") as caught:
            capture(forward, torch.ones(2), pool=pool, state=(state,))
    assert any("RuntimeError as well: driver" in note for note in caught.value.__notes__)
    assert state.tolist() == [0.0, 0.0]
    assert gc.isenabled()
    assert current_frame() is None


def test_a_first_segment_that_cannot_begin_leaves_nothing_entered() -> None:
    """FAULT-E1: the backend's error reaches the caller; locks, frame and gc are as before, and the next capture works."""
    pool = GraphPool(backend="emulated")

    def broken() -> None:
        raise RuntimeError("begin")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool.backend, "begin", broken)
        with pytest.raises(RuntimeError, match="begin"):
            capture(lambda x: x * 2, torch.ones(2), pool=pool)
    assert gc.isenabled()
    assert current_frame() is None
    graph, out = capture(lambda x: x * 2, torch.ones(2), pool=pool)
    graph.replay()
    assert out.tolist() == [2.0, 2.0]


def test_a_graph_that_is_dropped_without_reset_frees_its_memory() -> None:
    """FAULT-E11: only live graphs count towards their pool."""
    pool = GraphPool(backend="emulated")
    for _ in range(3):
        graph, out = capture(lambda x: x * 2, torch.ones(1000), pool=pool)
        del graph, out
        gc.collect()
        assert pool.backend.pool_bytes() == 0


def test_tensors_without_plain_storage_are_refused_with_their_kind() -> None:
    """A wrapper subclass in a segment, and a subclass or sparse tensor returned by a break, by name; as input it is fine."""

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args = torch.utils._pytree.tree_map(lambda t: t.inner if isinstance(t, Wrapped) else t, args)
            return func(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        pass

    weight, sparse = Wrapped(torch.eye(4)), torch.eye(4).to_sparse()

    @eager_on_graph
    def with_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(w, x)

    x = torch.ones(4, 1)
    with pytest.raises(CaptureIllegalError, match="Wrapped"):
        capture(lambda x: torch.mm(weight, x) + 1, x)
    for inputs in (weight, sparse):
        graph, out = capture(lambda x, inputs=inputs: with_input(x + 1, inputs) + 1, x)
        graph.replay()
        assert out.eq(3).all()
    with pytest.raises(CaptureError, match="returned a Tagged"):
        capture(lambda x: eager_on_graph(lambda y: y.as_subclass(Tagged))(x + 1) * 2, x)
    with pytest.raises(CaptureError, match="sparse_coo"):
        capture(lambda x: eager_on_graph(lambda y: y.to_sparse())(x + 1), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"live": ["a"]}, "live"),
        ({"state": 5}, "state"),
        ({"state": (5,)}, "state"),
        ({"generators": (5,)}, "generators"),
        ({"pool": "x"}, "pool"),
    ],
)
def test_options_of_another_kind_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """Before anything is entered, with what was expected."""
    with pytest.raises(ConfigError, match=rf"\({message}=\.\.\.\)"):
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), **options)


def test_arguments_of_a_step_of_another_kind_are_refused() -> None:
    """valid_rows and live of a replay and of an eager step; missing and misspelt live names are both named."""

    @eager_on_graph(live=("lengths",))
    def brk(x: torch.Tensor, lengths: int) -> torch.Tensor:
        return x * lengths

    graph, _ = capture(lambda x: brk(x + 1, 2) + 0, torch.ones(4))
    for rows in ("3", 2.5, True):
        with pytest.raises(LiveDataError, match="must be an integer"):
            graph.replay(live={"lengths": 1}, valid_rows=rows)  # type: ignore[arg-type]
        with pytest.raises(LiveDataError, match="must be an integer"), eager_step(valid_rows=rows):  # type: ignore[arg-type]
            pass
    with pytest.raises(LiveDataError, match="live is a int"):
        graph.replay(live=5)  # type: ignore[arg-type]
    with pytest.raises(LiveDataError, match=r"missing \['lengths'\] and has unknown names \['lenghts'\]"):
        graph.replay(live={"lenghts": 1})


def test_an_argument_that_contains_itself_is_refused() -> None:
    """No RecursionError; an attrs or dataclass field that was never set is passed over."""

    @dataclasses.dataclass
    class Node:
        next: Any = None
        later: Any = dataclasses.field(init=False)

    node = Node()
    marked = eager_on_graph(lambda x, n: x * 2)
    check(lambda x: marked(x + 1, node) + 1)
    node.next = node
    check(lambda x: marked(x + 1, node) + 1)  # an object with an identity is passed as it is
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CaptureError, match="contains itself"):
        capture(lambda x: marked(x + 1, endless) + 1, torch.ones(4))


def test_bridges_keep_the_strides_of_their_source() -> None:
    """A sum over a part of a wider tensor has eager's bits, since the next segment sees the same strides."""

    @eager_on_graph
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 1.1).split(3, dim=1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum(0) for part in parts(x + 1)])

    def example(round_: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(17, 9, generator=torch.Generator().manual_seed(round_))}

    graph = assert_replay_matches_eager(forward, example=example, backend="emulated")
    assert {leaf.captured.stride() for leaf in graph.breaks[0].contract.leaves} == {(9, 1)}


def test_values_are_made_once_per_replay() -> None:
    """once_per_replay calls its maker for the first break of a step that asks; the token tells steps apart."""
    made: list[int] = []
    tokens: list[int] = []

    @eager_on_graph
    def layer(x: torch.Tensor) -> torch.Tensor:
        from breakgraph import current_replay

        context = current_replay()
        tokens.append(context.token)
        factor = context.once_per_replay("factor", lambda: made.append(1) or len(made))
        return x * factor

    x = torch.ones(4)
    graph, _ = capture(lambda x: layer(layer(x + 1) + 1), x)
    made.clear()
    tokens.clear()
    graph.replay()
    graph.replay()
    assert (len(made), len(set(tokens))) == (2, 2)
    assert tokens[0] == tokens[1]
