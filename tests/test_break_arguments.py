"""What a break is handed at a replay, and what the model goes on with: identity, containers, shapes, lifetimes."""

from __future__ import annotations

import collections
import dataclasses
import gc
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph, eager_step
from breakgraph.call_site import raised_at, user_line
from breakgraph.errors import CaptureError, CaptureIllegalError
from breakgraph.testing import assert_replay_matches_eager, assert_same_bits
from tests.runner_models import Meta, PrefillRig


@eager_on_graph
def double(x: torch.Tensor) -> torch.Tensor:
    """The plainest break."""
    return x * 2


def check(
    forward: Callable[..., Any],
    *,
    backend: str,
    live: Callable[[int], dict[str, Any]] | None = None,
    rows: int | None = None,
) -> BreakableCUDAGraph:
    """Capture a forward of a 4 x 4 tensor and compare two replays on new values with eager."""
    device = "cuda" if backend == "cuda" else "cpu"
    x = torch.randn(4, 4, device=device)
    graph, pool = BreakableCUDAGraph(), GraphPool(backend=backend, poison=True)
    data = live(0) if live else {}
    with torch.no_grad():
        with BreakableCUDAGraphCapture(graph, pool=pool, live=data):
            out = forward(x, **data)
        for round_ in (1, 2):
            data = live(round_) if live else {}
            x.copy_(torch.randn(4, 4))
            with eager_step(data, valid_rows=rows):
                expected = forward(x.clone(), **data)
            graph.replay(data, valid_rows=rows)
            assert_same_bits(out, expected=expected)
    return graph


# Shapes changed in place.


@pytest.mark.parametrize("change", ["t_", "unsqueeze_"])
def test_a_result_reshaped_in_place_by_the_model(backend: str, change: str) -> None:
    """The contract has a tensor object of its own, so `t_()` on a break's result is no part of it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = double(x)
        y.t_() if change == "t_" else y.unsqueeze_(0)
        return y + 1

    check(forward, backend=backend)


def test_a_bridge_reshaped_after_it_was_passed_on(backend: str) -> None:
    """A later break holds a bridge as it was when it received it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = double(x)
        z = double(y)
        y.t_()
        return y + z

    check(forward, backend=backend)


def test_a_held_tensor_reshaped_in_place_is_refused(backend: str, device: torch.device) -> None:
    """A view of a static buffer that a break holds must not change its shape in place: the replay would see that."""
    static = torch.randn(4, 4, device=device)
    view = static.view(2, 8)
    with (
        pytest.raises(CaptureError, match=r"received a tensor of shape \(2, 8\) .* it is \(8, 2\) now"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        double(view)
        view.t_()


# Kept results.


class LazyTable(torch.nn.Module):
    """Builds a table in a break on first use and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    @eager_on_graph
    def build(self, x: torch.Tensor) -> torch.Tensor:
        """Sizes that are known on the host only."""
        return torch.arange(4.0, device=x.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Another break's result, and the table."""
        if self.table is None:
            self.table = self.build(x)
        return double(x + 0) + self.table


def test_a_table_kept_from_a_break_is_left_alone_by_later_captures(backend: str, device: torch.device) -> None:
    """FAULT-L8: bridges that a model still holds are no memory for the next graph of the pool."""
    pool = GraphPool(backend=backend)
    model = LazyTable()
    x = torch.randn(4, 4, device=device)
    expected = x * 2 + torch.arange(4.0, device=device)
    graphs = []
    for _ in range(3):
        graph = BreakableCUDAGraph()
        with torch.no_grad(), BreakableCUDAGraphCapture(graph, pool=pool):
            out = model(x)
        graphs.append((graph, out))
    for turn in (2, 0, 1, 2):
        graph, out = graphs[turn]
        graph.replay()
        assert_same_bits(out, expected=expected)
        assert_same_bits(model(x), expected=expected, what="eager afterwards")
    before = pool.arena.nbytes
    del graphs, out
    model.table = None
    gc.collect()
    for _ in range(50):
        graph = BreakableCUDAGraph()
        with torch.no_grad(), BreakableCUDAGraphCapture(graph, pool=pool):
            double(x) + 0
    assert pool.arena.nbytes == before, "what nobody holds is used again"


# Containers and objects.

ORDERED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "dict": lambda a, b: {"a": a},
    "list": lambda a, b: [a],
    "OrderedDict": lambda a, b: collections.OrderedDict(a=a),
    "defaultdict": lambda a, b: collections.defaultdict(list, a=a),
    "deque": lambda a, b: collections.deque([a]),
}


def _grow(box: Any, item: torch.Tensor) -> None:
    if isinstance(box, dict):
        box["b"] = item
    else:
        box.append(item)


@eager_on_graph
def total(box: Any) -> torch.Tensor:
    """The sum of what is in a container at the call."""
    values = box.values() if isinstance(box, dict) else box
    return torch.stack(list(values)).sum(0)


@pytest.mark.parametrize("kind", ORDERED)
def test_a_container_that_grows_after_the_call(backend: str, kind: str) -> None:
    """A replay hands over what the call received, of every kind of container."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        box = ORDERED[kind](x + 1, x)
        first = total(box)
        _grow(box, x * 3)
        return first + total(box)

    check(forward, backend=backend)


def test_a_container_inside_a_frozen_class(backend: str) -> None:
    """The list in a frozen class's field is copied as well."""

    @attrs.frozen
    class Batch:
        parts: list[torch.Tensor]

    @eager_on_graph
    def read(batch: Batch) -> torch.Tensor:
        return torch.stack(batch.parts).sum(0)

    def forward(x: torch.Tensor) -> torch.Tensor:
        batch = Batch([x + 1])
        first = read(batch)
        batch.parts.append(x * 2)
        return first + read(batch)

    check(forward, backend=backend)


@pytest.mark.parametrize("kind", ["deque", "OrderedDict", "list"])
def test_a_break_that_empties_its_container_is_refused(backend: str, kind: str) -> None:
    """The model's code behind it is not run at a replay, so what it would see there is lost."""

    @eager_on_graph
    def empty(box: Any) -> torch.Tensor:
        return (box.popitem()[1] if isinstance(box, dict) else box.pop()) * 2

    with pytest.raises(CaptureError, match="changed a list or dict"):
        check(lambda x: empty(ORDERED[kind](x + 1, x)), backend=backend)


def test_a_dataclass_is_its_own_self(backend: str) -> None:
    """FAULT-F6: a layer that is a dataclass keeps its identity: what a break counts and what its owner sets are seen."""

    @dataclasses.dataclass(eq=False)
    class Layer:
        weight: torch.Tensor
        scale: float = 1.0
        count: int = 0
        hidden: torch.Tensor | None = None
        parent: Any = None

        @eager_on_graph
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.scale

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = x * self.weight
            y = self.attend(self.hidden)
            self.hidden = None
            return y + 1

    device = "cuda" if backend == "cuda" else "cpu"
    layer = Layer(torch.ones(4, device=device))
    layer.parent = [layer]
    x = torch.ones(4, 4, device=device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        out = layer(x)
    layer.scale = 3.0
    graph.replay()
    assert layer.count == 2
    assert out.tolist() == [[4.0] * 4] * 4


# Rows in place, hoisting, live data.


@pytest.mark.parametrize("rows", [4, 3, 1, 0])
def test_a_view_of_an_argument_with_few_rows(backend: str, rows: int) -> None:
    """An in-place result stays in place with one real row and with none, whatever the strides of such axes say."""

    @eager_on_graph(rows=("q", "return"), writes=("q",))
    def rope(q: torch.Tensor) -> torch.Tensor:
        q.mul_(2.0)
        return q.view(q.shape[0], 2, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return rope((x + 1)[:, :2]) + 1

    check(forward, backend=backend, rows=rows)


def test_a_hoisted_break_reads_what_a_segment_only_reads(backend: str, device: torch.device) -> None:
    """Writing one argument of an operator is no write to the others: `index_copy_` only reads its index."""
    slots, cache = torch.tensor([2, 0, 1, 3], device=device), torch.zeros(4, 4, device=device)

    @eager_on_graph(hoist=True)
    def plan(index: torch.Tensor) -> torch.Tensor:
        return index.float() * 2

    def forward(x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, slots, x + 1)
        return cache + plan(slots)

    check(forward, backend=backend)


def test_live_data_may_be_changed_by_its_break(backend: str) -> None:
    """A dict that is live data belongs to the step: what a break caches in it is nobody else's."""

    @eager_on_graph(live=("meta",))
    def scaled(x: torch.Tensor, meta: dict[str, Any]) -> torch.Tensor:
        meta.setdefault("half", meta["scale"] / 2)
        return x * meta["half"]

    check(lambda x, meta: scaled(x + 1, meta), backend=backend, live=lambda r: {"meta": {"scale": 2.0 + r}})


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tensor_of_live_data_may_be_returned(backend: str, frozen: bool) -> None:
    """It is another tensor at each step, so it goes through a bridge."""
    kind = dataclasses.make_dataclass("Positions", ["at"], frozen=frozen)
    device = "cuda" if backend == "cuda" else "cpu"

    @eager_on_graph(live=("meta",))
    def positions(meta: Any) -> torch.Tensor:
        return meta.at  # type: ignore[no-any-return]

    check(
        lambda x, meta: x + positions(meta),
        backend=backend,
        live=lambda r: {"meta": kind(torch.full((4,), float(r), device=device))},
    )


def test_live_numbers_are_equal_by_value(backend: str) -> None:
    """Two equal integers bound to one name are one, also where Python made two objects."""

    @eager_on_graph(live={"n": "count"})
    def times(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    device = "cuda" if backend == "cuda" else "cpu"
    x = torch.ones(4, device=device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        out = times(times(x, len(x) * 1000), len(x) * 1000) + 0
    graph.replay({"count": 3})
    assert out.tolist() == [9.0] * 4


# Pools, generators, messages.


def test_a_graph_dropped_in_a_break_leaves_no_false_alarm() -> None:
    """FAULT-L10: memory of a graph that is gone is anybody's: a later tensor at its address is not that graph's."""
    pool = GraphPool(backend="emulated")
    graphs = []
    for _ in range(3):
        graph = BreakableCUDAGraph()
        with BreakableCUDAGraphCapture(graph, pool=pool):
            torch.ones(1000) * 2
        graphs.append(graph)

    @eager_on_graph
    def evict() -> None:
        graphs.clear()
        gc.collect()

    del graph
    last = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(last, pool=pool):
        evict()
        kept = [torch.ones(1000) * 2 for _ in range(20)]
        out = torch.stack(kept).sum()
    last.replay()
    assert out.item() == 40_000.0


def test_state_and_generators_may_be_iterators(device: torch.device) -> None:
    """They are read once; an iterator that a check had exhausted would be ignored in silence."""
    generator, counter = torch.Generator(device=device).manual_seed(3), torch.zeros(1, device=device)
    before = generator.get_state()
    with (
        pytest.raises(ValueError, match="mine"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), generators=iter([generator]), state=iter([counter])),
    ):
        counter.add_(1)
        torch.rand(2, generator=generator, device=device)
        raise ValueError("mine")
    assert torch.equal(generator.get_state(), before)
    assert counter.item() == 0


def test_overlapping_captures_keep_the_collector_off() -> None:
    """FAULT-E5: the collector comes back with the last capture that had it off, whichever thread that is."""
    from breakgraph.capture import _no_garbage_collection

    first, second = _no_garbage_collection(), _no_garbage_collection()
    first.__enter__()
    second.__enter__()
    seen = []
    thread = threading.Thread(target=lambda: first.__exit__(None, None, None))
    thread.start()
    thread.join()
    seen.append(gc.isenabled())
    second.__exit__(None, None, None)
    seen.append(gc.isenabled())
    assert seen == [False, True]


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky])
def test_checks_of_linalg_are_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """FAULT-F3: what waits for the device inside a kernel is refused on a CPU too; the variant that does not is fine."""
    x = torch.eye(4)
    with (
        pytest.raises(CaptureIllegalError, match="torch.linalg"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"),
    ):
        function(x)
    check(lambda y: torch.linalg.inv_ex(y)[0], backend="emulated")


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_poison_leaves_quantized_tensors_alone() -> None:
    """A dtype without NaN and without a sign to ask for is no error."""
    pool = GraphPool(backend="emulated", poison=True)
    graph = BreakableCUDAGraph()
    x = torch.rand(4)
    with BreakableCUDAGraphCapture(graph, pool=pool):
        out = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    graph.replay()
    assert_same_bits(out, expected=torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize())


def test_lines_that_were_typed_in_are_the_users() -> None:
    """`python -c` and a prompt have no file; what attrs and others generate is nobody's line."""
    namespace: dict[str, Any] = {"user_line": user_line}
    exec(compile("def typed():\n    return user_line()", "<string>", "exec"), namespace)
    assert namespace["typed"]() == "<string>:2 in typed"
    exec(compile("def made():\n    return user_line()", "<generated>", "exec"), namespace)
    assert "test_break_arguments.py" in namespace["made"]()
    exec(compile("def failing():\n    raise ValueError('mine')", "<stdin>", "exec"), namespace)
    with pytest.raises(ValueError, match="mine") as caught:
        namespace["failing"]()
    assert raised_at(caught.value.__traceback__) == "<stdin>:2 in failing"


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
        (torch.zeros(2), -torch.zeros(2)),
        (3, torch.tensor(3)),
        (torch.tensor(3), 3),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 2.0])),
    ],
)
def test_the_same_bits_are_not_asserted_of_others(got: Any, expected: Any) -> None:
    """Other keys, lengths, kinds and signs of zero fail with an AssertionError; NaN equals NaN."""
    with pytest.raises(AssertionError):
        assert_same_bits(got, expected=expected)
    assert_same_bits([got], expected=[got])


def test_a_misspelt_returned_leaf_is_refused(backend: str) -> None:
    """rows= that names no returned leaf would do nothing; the message lists what there is."""

    @eager_on_graph(rows=("x", "return.outt"))
    def attend(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x * 2}

    with pytest.raises(CaptureError, match=r"rows='return.outt', and returned \[\"return\['out'\]\"\]"):
        check(lambda x: attend(x)["out"] + 1, backend=backend)


def test_an_exception_in_a_replayed_break_names_its_call(backend: str) -> None:
    """FAULT-E10: no frame of the model is on the stack at a replay, so the note has the line of the call."""
    armed: list[bool] = []

    @eager_on_graph
    def failing(x: torch.Tensor) -> torch.Tensor:
        if armed:
            raise KeyError("mine")
        return x * 2

    graph = check(lambda x: failing(x + 1) + 1, backend=backend)
    armed.append(True)
    with pytest.raises(KeyError, match="mine") as caught:
        graph.replay()
    assert any("called at" in note and "test_break_arguments.py" in note for note in caught.value.__notes__)


def test_live_data_that_no_break_binds_is_told() -> None:
    """FAULT-F5: explain() says which live data no break binds: a forgotten mark looks like that."""
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="emulated", live={"lengths": [3]}):
        double(torch.ones(2)) + 1
    assert "live data ['lengths'] is bound by no break" in str(graph.explain())


def test_an_example_may_draw_random_numbers(backend: str) -> None:
    """testing.assert_replay_matches_eager calls it once a round, so replay and eager see the same numbers."""
    device = "cuda" if backend == "cuda" else "cpu"
    assert_replay_matches_eager(
        lambda x: double(x + 1) * 3, example=lambda r: {"x": torch.rand(4, device=device)}, backend=backend
    )


def test_a_graph_serves_one_row_after_its_proof(device: torch.device) -> None:
    """REQ-H5: a break that returns a view of its argument works for every real size, one row included."""
    rig = PrefillRig(device)

    @eager_on_graph(live=("meta",), rows=("hidden", "out", "return"), writes=("out",))
    def attend(hidden: torch.Tensor, out: torch.Tensor, meta: Meta) -> torch.Tensor:
        rig.model.mix(hidden, out, meta)
        return out.view(len(out), 2, -1)

    rig.model.attend = attend  # type: ignore[method-assign]
    rig = PrefillRig(device, model=rig.model, expect_breaks=None)
    rig.capture()
    assert not rig.runner.dropped
    for size in range(1, 17):
        inputs, live = rig.step(size)
        assert rig.runner.run(inputs, size=size, live=live).replayed
