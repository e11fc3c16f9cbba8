"""Segments, breaks and replays with small synthetic models, on both backends."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

import attrs
import pytest
import torch

from breakgraph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    GraphPool,
    break_graph,
    current_replay,
    eager_on_graph,
    eager_step,
)
from breakgraph.replay_program import StepKind
from breakgraph.testing import assert_replay_matches_eager, assert_same_bits

ROWS, WIDTH = 8, 4


def example_on(device: torch.device) -> Any:
    """Round -> fresh inputs."""

    def example(round_: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(round_)
        return {"x": torch.randn(ROWS, WIDTH, generator=generator).to(device)}

    return example


@eager_on_graph
def host_scale(x: torch.Tensor) -> torch.Tensor:
    """A break that syncs: its factor depends on the data."""
    return x * float(x.abs().max().item())


class _Layer:
    """Marked functions of every kind."""

    factor = 3.0

    @eager_on_graph
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return host_scale(x) * self.factor

    @staticmethod
    @eager_on_graph
    def static(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum().item())

    @eager_on_graph
    @staticmethod
    def static_outside(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum().item())

    @classmethod
    @eager_on_graph
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor * float(x.min().item())

    @eager_on_graph(name="outside")
    @classmethod
    def of_class_outside(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor * float(x.min().item())


class _Subtractor:
    """An object with __call__."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x - float(x.mean().item())


callable_break = eager_on_graph(_Subtractor())


def _no_break(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x.T).sum(-1)


def _one_break(x: torch.Tensor) -> torch.Tensor:
    return host_scale(x + 1).cos()


def _three_breaks(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = host_scale(x * 0.5) + x
    return x


def _break_first(x: torch.Tensor) -> torch.Tensor:
    return host_scale(x) + 1


def _break_last(x: torch.Tensor) -> torch.Tensor:
    return host_scale(x + 1)


def _two_in_a_row(x: torch.Tensor) -> torch.Tensor:
    return host_scale(host_scale(x + 1)) * 2


def _split_only(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    break_graph()
    break_graph()
    return y + 1


PROGRAMS = {
    "no break": (_no_break, 1, 0),
    "one break": (_one_break, 2, 1),
    "three breaks": (_three_breaks, 4, 3),
    "break first": (_break_first, 1, 1),
    "break last": (_break_last, 1, 1),
    "two in a row": (_two_in_a_row, 2, 2),
    "split only": (_split_only, 2, 0),
    "method": (lambda x: _Layer().method(x + 1) + 1, 2, 1),
    "static method": (lambda x: _Layer.static(x + 1) + 1, 2, 1),
    "static method, mark outside": (lambda x: _Layer.static_outside(x + 1) + 1, 2, 1),
    "class method": (lambda x: _Layer.of_class(x + 1) + 1, 2, 1),
    "class method, mark outside": (lambda x: _Layer.of_class_outside(x + 1) + 1, 2, 1),
    "callable object": (lambda x: callable_break(x + 1) + 1, 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_equals_eager_wherever_breaks_stand(name: str, backend: str, device: torch.device) -> None:
    """A replay on new inputs equals eager bit for bit; segments and breaks are counted, empty segments never kept."""
    program, segments, breaks = PROGRAMS[name]
    graph = assert_replay_matches_eager(program, example=example_on(device), backend=backend)
    assert (len(graph.segments), len(graph.breaks)) == (segments, breaks)
    assert [step.kind for step in graph.steps].count(StepKind.SEGMENT) == segments


def test_a_marked_function_inside_a_break_is_a_plain_call(backend: str, device: torch.device) -> None:
    """FAULT-E7: `_Layer.method` calls a marked function; that is one break, at capture and at replay."""
    graph = assert_replay_matches_eager(lambda x: _Layer().method(x) + 1, example=example_on(device), backend=backend)
    assert [call.spec.name for call in graph.breaks] == ["method"]


@attrs.frozen
class Pair:
    """A frozen attrs result with a nested one."""

    first: Any
    inner: Any = None


@dataclasses.dataclass
class Data:
    """A dataclass result."""

    a: torch.Tensor
    b: torch.Tensor | None = None


class Named(NamedTuple):
    """A named tuple result."""

    left: torch.Tensor
    right: torch.Tensor


def _sync(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.max().item())


RESULTS: dict[str, tuple[Any, Any]] = {
    "tuple": (lambda x: (_sync(x), x.clone() + 1), lambda r: r[0] + r[1]),
    "list": (lambda x: [_sync(x)], lambda r: r[0] + 1),
    "named tuple": (lambda x: Named(_sync(x), x + 1), lambda r: r.left + r.right),
    "dict": (lambda x: {"b": _sync(x), "a": x + 2}, lambda r: r["a"] * r["b"]),
    "attrs": (lambda x: Pair(_sync(x), Pair(x + 2)), lambda r: r.first + r.inner.first),
    "dataclass": (lambda x: Data(_sync(x)), lambda r: r.a + (1 if r.b is None else 2)),
    "tensor and None": (lambda x: (_sync(x), None), lambda r: r[0] + (1 if r[1] is None else 2)),
    "tensor and plain values": (lambda x: (_sync(x), 7, "k", float("nan")), lambda r: r[0] + r[1]),
    "view of the argument": (lambda x: x.mul_(float(x.max().item()))[1:].T, lambda r: r + 1),
    "transposed fresh tensor": (lambda x: _sync(x).T, lambda r: r @ r.T),
    "bool and int tensors": (lambda x: (x > 0, (x * 3).long(), _sync(x)), lambda r: torch.where(r[0], r[1], r[2])),
    "empty tensor": (lambda x: (_sync(x), x[:0]), lambda r: torch.cat(r)),
    "the same tensor twice": (lambda x: (lambda y: (y, y))(_sync(x)), lambda r: r[0] + r[1]),
    "parts of one tensor": (lambda x: _sync(x).split(2, dim=1), lambda r: r[0] @ r[1].T),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_every_kind_reach_the_next_segment(kind: str, backend: str, device: torch.device) -> None:
    """What a break returns, in any structure, is what the next segment reads at every replay (FAULT-L3)."""
    make, use = RESULTS[kind]
    marked = eager_on_graph(make, name="make")
    assert_replay_matches_eager(lambda x: use(marked(x + 1)) * 2, example=example_on(device), backend=backend, rounds=4)


def test_a_break_that_returns_none_writes_in_place(backend: str, device: torch.device) -> None:
    """An output allocated in the segment and written by the break is seen by the next segment, with no copy-back."""

    @eager_on_graph
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * float(x.max().item()))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        out = torch.empty_like(y)
        fill(y, out)
        return out * 2

    graph = assert_replay_matches_eager(forward, example=example_on(device), backend=backend)
    assert graph.stats().bridge_bytes == 0


def test_live_data_changes_at_each_replay(backend: str, device: torch.device) -> None:
    """FAULT-F1: a live parameter and current_replay().live both show this replay's object, never the captured one."""
    seen: list[tuple[float, float]] = []

    def deep() -> float:
        return float(current_replay().live["meta"]["scale"])

    @eager_on_graph(live=("meta",))
    def scale(x: torch.Tensor, meta: dict[str, float]) -> torch.Tensor:
        seen.append((meta["scale"], deep()))
        return x * meta["scale"]

    def forward(x: torch.Tensor, meta: dict[str, float]) -> torch.Tensor:
        return scale(x + 1, meta=meta) + 1

    live = [{"meta": {"scale": 2.0 + i}} for i in range(3)]
    assert_replay_matches_eager(forward, example=example_on(device), live=lambda round_: live[round_], backend=backend)
    assert seen[-1] == (4.0, 4.0)


def test_live_parameter_under_another_name_and_two_names(backend: str, device: torch.device) -> None:
    """`live={"meta": "sliding"}` maps a parameter to its own name, so two breaks can have two objects."""

    @eager_on_graph(live={"meta": "full"})
    def full(x: torch.Tensor, meta: list[float]) -> torch.Tensor:
        return x * meta[0]

    @eager_on_graph(live={"meta": "sliding"})
    def sliding(x: torch.Tensor, meta: list[float]) -> torch.Tensor:
        return x + meta[0]

    graph = BreakableCUDAGraph()
    x = example_on(device)(0)["x"]
    first, second = [2.0], [3.0]
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        out = sliding(full(x + 1, first), second) * 2
    graph.replay(live={"full": [5.0], "sliding": [7.0]})
    assert_same_bits(out, expected=((x + 1) * 5.0 + 7.0) * 2)


@pytest.mark.parametrize("valid", [0, 1, 5, ROWS])
def test_rows_are_narrowed_and_tails_are_zero(valid: int, backend: str, device: torch.device) -> None:
    """FAULT-P1: a break sees the real rows only; returned and written tails are zero before the next segment reads."""
    shapes: list[int] = []

    @eager_on_graph(rows=("x", "out", "return"), writes=("out",))
    def attend(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape[0])
        out.copy_(x * 3)
        return x + 1

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        out = torch.full_like(y, float("nan"))
        z = attend(y, out)
        return torch.ones(ROWS, ROWS, device=x.device) @ torch.cat([z, out], dim=1)

    assert_replay_matches_eager(
        forward, example=example_on(device), valid_rows=lambda _: valid, backend=backend, rounds=4
    )
    assert shapes[-1] == valid


def test_rows_of_an_inplace_return_and_of_another_axis(backend: str, device: torch.device) -> None:
    """A returned view of a rows argument stays in place with its tail zeroed; `rows={...: axis}` names another axis."""

    @eager_on_graph(rows={"x": 1, "return": 1})
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return scale((x + 1).T.contiguous()).sum(0)

    assert_replay_matches_eager(forward, example=example_on(device), valid_rows=lambda r: 8 - r, backend=backend)


def test_only_some_returned_leaves_have_rows(backend: str, device: torch.device) -> None:
    """`return[0]` narrows one leaf; the others keep their shape whatever the row count."""

    @eager_on_graph(rows=("x", "return[0]"))
    def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum().reshape(1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows, total = attend(x + 1)
        return rows + total

    assert_replay_matches_eager(forward, example=example_on(device), valid_rows=lambda r: 3 + r, backend=backend)


def test_counts_are_visible_in_the_context(backend: str, device: torch.device) -> None:
    """REQ-H4: a break reads real and padded counts; the capture learns the padded one from its first rows break."""
    seen: list[tuple[int | None, int | None]] = []

    @eager_on_graph(rows=("x", "return"))
    def look(x: torch.Tensor) -> torch.Tensor:
        context = current_replay()
        seen.append((context.valid_rows, context.padded_rows))
        return x * 1

    graph = BreakableCUDAGraph()
    x = torch.ones(ROWS, WIDTH, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend, padded_rows=ROWS):
        out = look(x + 1) + 1
    graph.replay(valid_rows=3)
    assert seen == [(None, ROWS), (3, ROWS)]
    assert out[3:].eq(1).all()


def test_captured_in_inference_mode_and_replayed_outside(backend: str, device: torch.device) -> None:
    """Modes of the capture are in force at a replay: grad off and inference on, inside breaks too."""
    modes: list[tuple[bool, bool]] = []

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x * 2

    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    x = torch.randn(ROWS, WIDTH, device=device)
    graph = BreakableCUDAGraph()
    with torch.inference_mode(), BreakableCUDAGraphCapture(graph, backend=backend):
        out = look(x @ weight) @ weight
    x.copy_(torch.randn(ROWS, WIDTH))
    graph.replay()
    assert modes == [(False, True), (False, True)]
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert_same_bits(out, expected=((x @ weight) * 2) @ weight)


def test_a_mode_inside_the_forward_is_kept_for_its_break(backend: str, device: torch.device) -> None:
    """A break called under no_grad inside a capture that has grad on runs under no_grad at replay."""
    modes: list[bool] = []

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return x * 2

    x = torch.ones(ROWS, WIDTH, device=device)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        with torch.no_grad():
            y = look(x + 1)
        out = look(y) + 1
    graph.replay()
    assert modes == [False, True, False, True]
    assert out.eq(9).all()


def test_autocast_of_the_capture_is_entered_at_replay(backend: str, device: torch.device) -> None:
    """FAULT-E8: a capture under autocast replays with its casts, in segments and breaks, and no cached cast of before."""
    dtypes: list[torch.dtype] = []
    weight = torch.randn(WIDTH, WIDTH, device=device)
    x = torch.randn(ROWS, WIDTH, device=device)

    @eager_on_graph
    def multiply(y: torch.Tensor) -> torch.Tensor:
        z = y @ weight
        dtypes.append(z.dtype)
        return z

    graph = BreakableCUDAGraph()
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        _ = x @ weight  # fills autocast's cache of cast weights
        with BreakableCUDAGraphCapture(graph, backend=backend):
            out = multiply(x @ weight) @ weight
        expected_before = out.clone()
    weight.mul_(2)
    graph.replay()
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False):
        assert_same_bits(out, expected=((x @ weight) @ weight) @ weight)
    assert not torch.equal(out, expected_before)


def test_hoisted_breaks_run_first_and_segments_follow_back_to_back(backend: str, device: torch.device) -> None:
    """A hoisted break runs before the first segment at a replay, though the forward calls it between two."""
    order: list[str] = []

    @eager_on_graph(live=("lengths",), hoist=True)
    def plan(lengths: list[int], table: torch.Tensor) -> None:
        order.append("plan")
        table.copy_(torch.tensor(lengths, dtype=table.dtype))

    @eager_on_graph
    def ordinary(x: torch.Tensor) -> torch.Tensor:
        order.append("ordinary")
        return x + 1

    table = torch.zeros(2, dtype=torch.int64, device=device)
    x = torch.ones(2, device=device)
    graph = BreakableCUDAGraph()
    first = [1, 2]
    with BreakableCUDAGraphCapture(graph, backend=backend):
        y = ordinary(x * 2)
        y = y * 2
        plan(first, table)
        out = y + table
    graph.replay(live={"lengths": [10, 20]})
    assert order == ["ordinary", "plan", "plan", "ordinary"]
    kinds = [step.kind for step in graph.steps]
    assert kinds[0] is StepKind.HOISTED
    assert kinds[-2:] == [StepKind.SEGMENT, StepKind.SEGMENT]
    assert out.tolist() == [16.0, 26.0]


def test_capture_stub_stands_in_during_capture_only(backend: str, device: torch.device) -> None:
    """The stub's result is the contract; every replay calls the function itself."""
    calls: list[str] = []

    def stub(x: torch.Tensor) -> torch.Tensor:
        calls.append("stub")
        return torch.zeros_like(x)

    @eager_on_graph(capture_stub=stub)
    def real(x: torch.Tensor) -> torch.Tensor:
        calls.append("real")
        return x * 2

    x = torch.ones(3, device=device)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        out = real(x + 1) + 1
    assert out.tolist() == [1.0] * 3
    graph.replay()
    assert (calls, out.tolist()) == (["stub", "real"], [5.0] * 3)


def test_scratch_hands_host_values_to_later_breaks_of_one_replay(backend: str, device: torch.device) -> None:
    """Scratch is shared by the breaks of a step and empty at the start of the next."""

    @eager_on_graph
    def first(x: torch.Tensor) -> torch.Tensor:
        assert current_replay().scratch == {}
        current_replay().scratch["top"] = float(x.max().item())
        return x

    @eager_on_graph
    def second(x: torch.Tensor) -> torch.Tensor:
        return x * float(current_replay().scratch["top"])

    assert_replay_matches_eager(lambda x: second(first(x + 1) + 1), example=example_on(device), backend=backend)


def test_state_is_put_back_after_the_capture(backend: str, device: torch.device) -> None:
    """FAULT-F7: what the forward adds during a capture is undone; each replay adds it once."""

    class Counter:
        def __init__(self) -> None:
            self.value = 5

        def save(self) -> int:
            return self.value

        def restore(self, saved: int) -> None:
            self.value = saved

    counter = Counter()
    lengths = torch.zeros(4, dtype=torch.int64, device=device)

    @eager_on_graph
    def count(x: torch.Tensor) -> torch.Tensor:
        counter.value += 1
        return x * 1

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend, state=(lengths, counter)):
        lengths.add_(2)
        count(lengths)
    assert (lengths.tolist(), counter.value) == ([0] * 4, 5)
    graph.replay()
    graph.replay()
    assert (lengths.tolist(), counter.value) == ([4] * 4, 7)


def test_graphs_of_one_pool_share_bridges(backend: str, device: torch.device) -> None:
    """FAULT-L1: three buckets in one pool, largest first; replayed in any order each gives eager's numbers."""
    pool = GraphPool(backend=backend)
    graphs: dict[int, tuple[BreakableCUDAGraph, torch.Tensor, torch.Tensor]] = {}
    sizes: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = host_scale(x * 2 + 1) * 0.1
        return x.sum(-1)

    for rows in (256, 64, 16):
        x = torch.randn(rows, WIDTH, device=device)
        graph = BreakableCUDAGraph(name=f"bucket[{rows}]")
        with torch.no_grad(), BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        graphs[rows] = (graph, x, out)
        sizes.append(pool.arena.nbytes)
    assert sizes[0] == sizes[-1]
    for rows in (256, 64, 256, 16, 16, 256, 64):
        graph, x, out = graphs[rows]
        x.copy_(torch.randn(rows, WIDTH))
        junk = [torch.full((rows, WIDTH), float("nan"), device=device) for _ in range(3)]
        graph.replay()
        assert_same_bits(out, expected=forward(x.clone()), what=f"bucket {rows}")
        del junk


def test_break_inputs_are_let_go_at_once(backend: str, device: torch.device) -> None:
    """FAULT-L1: a segment's temporary dies with the model's last reference, though garbage collection is off.

    Whoever keeps one, if only through a reference cycle, keeps its block of the pool for good.
    """

    @eager_on_graph(rows=("x", "return[0]"))
    def nested(x: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, Pair]:
        return x * float(x.max().item()), Pair(options["y"] * 2)

    pool = GraphPool(backend=backend)
    if backend == "emulated":  # there borrowing is the identity, since recorded operators own all
        pool.backend.borrow = lambda tensor: tensor.clone()  # type: ignore[method-assign]
    x = torch.ones(4, device=device)
    with torch.no_grad(), BreakableCUDAGraphCapture(BreakableCUDAGraph(), pool=pool):
        y, z = x * 2, x * 3
        alive = [weakref.ref(y), weakref.ref(z)]
        first, second = nested(y, {"y": z, "more": [Pair(y)]})
        (first * second.first).sum()
        del y, z
        assert [reference() for reference in alive] == [None, None]


def test_swapped_bridges_are_copied_as_if_at_once(backend: str, device: torch.device) -> None:
    """A break that returns two earlier bridges in swapped order, kept outside its arguments, swaps them."""
    kept: list[torch.Tensor] = []

    @eager_on_graph
    def make(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, x * 2

    @eager_on_graph
    def swap() -> tuple[torch.Tensor, torch.Tensor]:
        return kept[1], kept[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        a, b = make(x)
        kept[:] = [a, b]
        c, d = swap()
        return c * 10 + d

    assert_replay_matches_eager(forward, example=example_on(device), backend=backend, poisoned=False)


def test_eager_step_gives_the_semantics_of_a_replay(device: torch.device) -> None:
    """eager_step rebinds live data and pads returned rows though nothing is captured."""

    @eager_on_graph(live=("meta",), rows=("return",))
    def rows_from_nothing(meta: int) -> torch.Tensor:
        return torch.ones(meta, 2, device=device)

    with eager_step({"meta": 3}, valid_rows=3, padded_rows=5):
        result = rows_from_nothing(None)
    assert result.sum(1).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]


def test_reset_lets_the_graph_be_captured_again(backend: str, device: torch.device) -> None:
    """After reset() nothing is sealed; the same graph object and pool take a new capture."""
    graph = BreakableCUDAGraph()
    x = torch.ones(4, device=device)
    for factor in (2, 3):
        with BreakableCUDAGraphCapture(graph, pool=graph.pool, backend=backend):
            out = host_scale(x * factor) + 0
        graph.replay()
        assert out.tolist() == [float(factor * factor)] * 4
        assert graph.sealed
        graph.reset()
        assert not graph.sealed
        assert graph.steps == ()


def test_explain_lists_steps_with_their_lines(backend: str, device: torch.device) -> None:
    """explain() shows every step in order with its kind, name and the user's line."""
    graph = BreakableCUDAGraph(name="demo")
    with BreakableCUDAGraphCapture(graph, backend=backend):
        _one_break(torch.ones(2, device=device))
    text = str(graph.explain())
    assert "demo: 2 segments, 1 break, " in text
    assert "host_scale [return: bridge]" in text
    assert "test_capture.py" in text
    assert graph.stats().segments == 2


def test_a_break_assigns_its_modules_attribute_at_every_replay(backend: str, device: torch.device) -> None:
    """FAULT-F6, REQ-H10: a break's side effects on objects happen at each replay; a segment's happened once, at capture."""

    class Model:
        in_segment = 0
        in_break = 0

        @eager_on_graph
        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.in_break += 1
            return x * 2

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.in_segment += 1
            return self.step(x + 1) + 1

    model = Model()
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        model(torch.ones(2, device=device))
    for _ in range(3):
        graph.replay()
    assert (model.in_segment, model.in_break) == (1, 4)


def test_hoisting_with_a_plan_over_pinned_staging(backend: str, device: torch.device) -> None:
    """A plan like an attention kernel's: host work, pinned staging, copies to static buffers, hoisted before the segments."""
    pin = backend == "cuda"
    staging = torch.zeros(9, dtype=torch.int64, pin_memory=pin)
    indptr = torch.zeros(9, dtype=torch.int64, device=device)

    @eager_on_graph(live=("lengths",), hoist=True)
    def plan(lengths: list[int], target: torch.Tensor) -> None:
        if pin:
            torch.cuda.current_stream().synchronize()  # the staging buffer may still be read
        total = 0
        for i in range(8):
            staging[i] = total
            total += lengths[i]
        staging[8] = total
        target.copy_(staging, non_blocking=True)

    def forward(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        y = x * 2
        plan(lengths, indptr)
        return y[:8] + (indptr[1:] - indptr[:-1])

    x = torch.zeros(8, device=device)
    graph = BreakableCUDAGraph()
    first = [1] * 8
    with BreakableCUDAGraphCapture(graph, backend=backend, live={"lengths": first}):
        out = forward(x, first)
    assert graph.steps[0].kind is StepKind.HOISTED
    for round_ in range(5):
        lengths = [(round_ * 3 + i) % 7 for i in range(8)]
        x.fill_(round_)
        graph.replay(live={"lengths": lengths})
        assert out.tolist() == [2.0 * round_ + n for n in lengths]
