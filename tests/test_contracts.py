"""What a capture or a replay refuses, each with its own message of three parts."""

from __future__ import annotations

import re
import threading
from typing import Any

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
from breakgraph.errors import (
    BreakgraphError,
    CaptureError,
    CaptureIllegalError,
    ConcurrentReplayError,
    CopyBackError,
    LiveDataError,
    NestedCaptureError,
    NoGraphError,
)


@attrs.frozen
class Outer:
    """Two levels deep."""

    inner: Any


class Opaque:
    """No value equality."""


def capture_result(make: Any, device: torch.device, backend: str, **options: Any) -> BreakableCUDAGraph:
    """Capture a forward whose only break returns `make()`."""
    x = torch.ones(2, 4, device=device)
    marked = eager_on_graph(make, **options) if not options else eager_on_graph(**options)(make)
    graph = BreakableCUDAGraph(name="contract")
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        y = x + 1
        marked()
        y.add_(1)
    return graph


VIOLATIONS: dict[str, tuple[Any, Any, str]] = {
    "broadcastable shape": (
        lambda d: torch.ones(2, 4, device=d),
        lambda d: torch.ones(1, 4, device=d),
        r"shape \(1, 4\)",
    ),
    "float into an int bridge": (
        lambda d: torch.ones(2, dtype=torch.int64, device=d),
        lambda d: torch.ones(2, device=d),
        "float32",
    ),
    "shorter tuple": (
        lambda d: (torch.ones(2, device=d), torch.ones(2, device=d)),
        lambda d: (torch.ones(2, device=d),),
        "a tuple with leaves",
    ),
    "list for tuple": (lambda d: (torch.ones(2, device=d),), lambda d: [torch.ones(2, device=d)], "a list with leaves"),
    "another key": (lambda d: {"a": torch.ones(2, device=d)}, lambda d: {"b": torch.ones(2, device=d)}, "'b'"),
    "None for a tensor": (lambda d: torch.ones(2, device=d), lambda d: None, "returned None"),
    "None for a tensor in a tuple": (
        lambda d: (torch.ones(2, device=d), 1),
        lambda d: (None, 1),
        "returned NoneType at",
    ),
    "tensor for None": (lambda d: (None, 1), lambda d: (torch.ones(2, device=d), 1), "at capture it was None"),
    "nested attrs object": (
        lambda d: Outer(Outer(torch.ones(2, device=d))),
        lambda d: Outer(Outer(torch.ones(3, device=d))),
        r"'.inner.inner'",
    ),
    "a plain value that changed": (lambda d: (torch.ones(2, device=d), 3), lambda d: (torch.ones(2, device=d), 4), "3"),
    "True for 1": (lambda d: (torch.ones(2, device=d), 1), lambda d: (torch.ones(2, device=d), True), "True"),
    "two tensors for one": (
        lambda d: (lambda t: (t, t))(torch.ones(2, device=d)),
        lambda d: (torch.ones(2, device=d), torch.ones(2, device=d)),
        "at capture they were one",
    ),
}


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_a_result_that_breaks_the_contract_is_refused(kind: str, backend: str, device: torch.device) -> None:
    """FAULT-F8: structure, shape, dtype and plain values must match exactly; never broadcast, cast or dropped."""
    first, later, message = VIOLATIONS[kind]
    calls = iter([first, later, first])
    graph = capture_result(lambda: next(calls)(device), device, backend)
    with pytest.raises(CopyBackError, match=message) as caught:
        graph.replay()
    assert "step 1 of contract" in caught.value.what
    assert caught.value.why
    assert caught.value.fix
    graph.replay()  # FAULT-E10: the next replay works


@pytest.mark.gpu
def test_a_tensor_on_another_device_is_refused() -> None:
    """FAULT-F8: a CPU result is refused at capture and at replay: a segment would bake its value in."""
    device = torch.device("cuda")
    with pytest.raises(CaptureError, match="returned a tensor on cpu"):
        capture_result(lambda: torch.ones(2), device, "cuda")
    calls = iter([torch.ones(2, device=device), torch.ones(2)])
    graph = capture_result(lambda: next(calls), device, "cuda")
    with pytest.raises(CopyBackError, match="on cpu"):
        graph.replay()


def test_a_mutable_plain_value_is_compared_by_content(backend: str, device: torch.device) -> None:
    """The same set object with other content is a change, though identity is equal."""
    shared = {1, 2}
    graph = capture_result(lambda: (torch.ones(1, device=device), shared), device, backend)
    graph.replay()
    shared.add(3)
    with pytest.raises(CopyBackError, match=r"\{1, 2\}"):
        graph.replay()


def test_an_object_without_value_equality_is_refused_at_capture(backend: str, device: torch.device) -> None:
    """A replay could not tell whether it changed."""
    with pytest.raises(CaptureError, match="a Opaque at"):
        capture_result(lambda: (torch.ones(1, device=device), Opaque()), device, backend)


def test_an_inplace_result_that_moves_is_refused(backend: str, device: torch.device) -> None:
    """A result that was a view of its argument must stay at that address."""
    fresh = [False, True]
    calls = iter(fresh)

    @eager_on_graph
    def maybe(x: torch.Tensor) -> torch.Tensor:
        return x.clone() if next(calls) else x

    graph = BreakableCUDAGraph()
    x = torch.ones(2, 4, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        maybe(x + 1).mul_(2)
    with pytest.raises(CopyBackError, match="view of its own argument"):
        graph.replay()


def test_wrong_row_counts_are_refused(backend: str, device: torch.device) -> None:
    """valid_rows above the captured rows or below zero is refused, and so is a result that is not cut."""

    @eager_on_graph(rows=("x", "return"))
    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, 2, device=x.device)

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        pad(torch.ones(4, 2, device=device) * 2).mul_(1)
    for bad in (5, -1):
        with pytest.raises(LiveDataError, match=f"valid_rows is {bad}"):
            graph.replay(valid_rows=bad)
    with pytest.raises(CopyBackError, match=r"shape \(4, 2\).*is shape \(3, 2\)"):
        graph.replay(valid_rows=3)


def test_rows_of_two_lengths_are_refused(backend: str, device: torch.device) -> None:
    """One graph has one token axis: within a call and between calls."""

    @eager_on_graph(rows=("x", "y"))
    def two(x: torch.Tensor, y: torch.Tensor) -> None:
        return None

    @eager_on_graph(rows=("x",))
    def one(x: torch.Tensor) -> None:
        return None

    long, short = torch.ones(4, device=device), torch.ones(3, device=device)
    with (
        pytest.raises(CaptureError, match="different lengths"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        two(long, short)
    with (
        pytest.raises(CaptureError, match=r"length \[3\]; this graph's is 4"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        one(long)
        one(short)


def test_live_data_must_be_complete_and_known(backend: str, device: torch.device) -> None:
    """FAULT-F1: a missing or unknown name is named, with the names that there are."""

    @eager_on_graph(live=("meta",))
    def use(x: torch.Tensor, meta: int) -> torch.Tensor:
        return x * meta

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, live={"extra": 0}, backend=backend):
        use(torch.ones(2, device=device) + 1, 2).mul_(1)
    with pytest.raises(LiveDataError, match=r"missing \['extra', 'meta'\]"):
        graph.replay()
    with pytest.raises(LiveDataError, match=r"unknown names \['typo'\]"):
        graph.replay(live={"meta": 1, "extra": 2, "typo": 3})
    with pytest.raises(LiveDataError, match="needs live data 'meta'"), eager_step({"extra": 1}):
        use(torch.ones(2, device=device), 2)


def test_two_objects_under_one_live_name_are_refused(backend: str, device: torch.device) -> None:
    """By identity: equal objects are still two things that a replay would make one."""

    @eager_on_graph(live=("meta",))
    def use(x: torch.Tensor, meta: list[int]) -> torch.Tensor:
        return x * meta[0]

    with (
        pytest.raises(LiveDataError, match="binds another list"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        x = torch.ones(2, device=device)
        use(use(x, [1]), [1])
    with (
        pytest.raises(LiveDataError, match="binds another list"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), live={"meta": [1]}, backend=backend),
    ):
        use(torch.ones(2, device=device), [1])


def test_current_replay_outside_every_step_is_refused() -> None:
    """There is no hidden default context."""
    with pytest.raises(LiveDataError, match="outside a capture"):
        current_replay()


def test_nested_captures_are_refused(backend: str, device: torch.device) -> None:
    """FAULT-E7: in a segment, in a break, in an eager step and in a replay; the outer one goes on unharmed."""
    graph = BreakableCUDAGraph()
    refused: list[str] = []

    def nest() -> None:
        try:
            with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend):
                pass
        except NestedCaptureError as error:
            refused.append(error.what)

    @eager_on_graph
    def in_break(x: torch.Tensor) -> torch.Tensor:
        nest()
        return x * 2

    x = torch.ones(2, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        y = x + 1
        nest()
        out = in_break(y) + 1
    with eager_step():
        nest()
    graph.replay()
    assert len(refused) == 4
    assert out.tolist() == [5.0, 5.0]


def test_a_sealed_graph_is_not_captured_over_and_an_empty_one_not_replayed(backend: str, device: torch.device) -> None:
    """Both name what to do."""
    graph = BreakableCUDAGraph(name="mine")
    with pytest.raises(NoGraphError, match="mine was replayed"):
        graph.replay()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        torch.ones(2, device=device) * 2
    with pytest.raises(CaptureError, match="already holds"), BreakableCUDAGraphCapture(graph, backend=backend):
        pass


def test_expected_breaks_are_counted(backend: str, device: torch.device) -> None:
    """FAULT-F5, REQ-H8: the break that was forgotten is an error, by count and by name."""

    @eager_on_graph(name="attention")
    def attention(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2, device=device)
    for expected in (2, {"attention": 2}, {"norm": 1}):
        graph = BreakableCUDAGraph()
        with (
            pytest.raises(CaptureError, match="attention"),
            BreakableCUDAGraphCapture(graph, backend=backend, expect_breaks=expected),
        ):
            attention(x + 1).mul_(1)
        assert not graph.sealed
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend, expect_breaks={"attention": 1}):
        attention(x + 1).mul_(1)


def test_a_capture_without_device_work_is_refused(backend: str, device: torch.device) -> None:
    """A model on another device records nothing: said at capture, not by wrong numbers later."""
    with (
        pytest.raises(CaptureError, match="no device work"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        break_graph()


@pytest.mark.gpu
def test_a_cpu_model_on_a_cuda_machine_is_refused() -> None:
    """backend='auto' takes CUDA there, and the model's work was not recorded."""
    with pytest.raises(CaptureError, match="another device"), BreakableCUDAGraphCapture(BreakableCUDAGraph()):
        torch.ones(2) * 2


def test_an_input_that_requires_grad_is_refused(backend: str, device: torch.device) -> None:
    """With grad mode on a replay would lose gradients silently; under no_grad the same capture works."""
    weight = torch.nn.Parameter(torch.ones(2, 2, device=device))

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2, 2, device=device)
    with (
        pytest.raises(CaptureIllegalError, match="requires grad"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        look(x @ weight)

    @eager_on_graph
    def multiply(y: torch.Tensor) -> torch.Tensor:
        return y @ weight

    with (
        pytest.raises(CaptureIllegalError, match="returned a tensor that requires grad"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        multiply(x + 1)


def test_hoisted_inputs_from_segments_and_breaks_are_refused(backend: str, device: torch.device) -> None:
    """A hoisted break runs before both, so it would read the last step's numbers."""

    @eager_on_graph(hoist=True)
    def plan(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @eager_on_graph
    def ordinary(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(2, device=device)
    with (
        pytest.raises(CaptureError, match="made or written by a segment"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        plan(x + 1)
    with (
        pytest.raises(CaptureError, match="made by an ordinary break"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        plan(ordinary(x))
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        out = plan(plan(x)) + 1  # from another hoisted break is fine: they keep their order
    x.fill_(2)
    graph.replay()
    assert out.tolist() == [9.0, 9.0]


@pytest.mark.parametrize("where", ["segment", "break", "swallowed"])
def test_an_exception_in_a_capture_reaches_the_caller_unchanged(where: str, backend: str, device: torch.device) -> None:
    """FAULT-E1: the user's ValueError with a note; generator, stream, grad mode as before; the next capture works."""

    @eager_on_graph
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    @eager_on_graph
    def works(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    pool = GraphPool(backend=backend)
    graph = BreakableCUDAGraph(name="broken")
    x = torch.ones(64, device=device)
    torch.manual_seed(3)
    expected = torch.rand(2, device=device)
    torch.manual_seed(3)
    stream = torch.cuda.current_stream() if backend == "cuda" else None
    with (
        pytest.raises(CaptureError if where == "swallowed" else ValueError, match="mine|swallowed") as caught,
        BreakableCUDAGraphCapture(graph, pool=pool),
    ):
        y = works(x + torch.rand(64, device=device))
        if where == "break":
            fails(y)
        elif where == "swallowed":
            try:
                fails(y)
            except ValueError:
                y = y + 1
        else:
            y = y + 1
            raise ValueError("mine")
    notes = " ".join(getattr(caught.value, "__notes__", []))
    if where != "swallowed":
        assert "capture of broken" in notes
    if where == "break":
        assert "break 'fails' (step 2 of broken)" in notes
        assert "test_contracts.py" in notes
    assert not graph.sealed
    assert torch.equal(torch.rand(2, device=device), expected)
    if stream is not None:
        assert torch.cuda.current_stream() == stream
    with BreakableCUDAGraphCapture(graph, pool=pool):
        out = works(x + 1) + 1
    graph.replay()
    assert out.eq(5).all()


def test_an_exception_in_a_break_at_replay_leaves_the_graph_usable(backend: str, device: torch.device) -> None:
    """FAULT-E10: the caller gets the break's own exception with a note; the next replay gives the right numbers."""
    fail = [False]

    @eager_on_graph
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise KeyError("mine")
        return x * 2

    graph = BreakableCUDAGraph(name="g")
    x = torch.ones(2, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        out = sometimes(x + 1) + 1
    fail[0] = True
    with pytest.raises(KeyError, match="mine") as caught:
        graph.replay()
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        r"raised at replay in break 'sometimes' \(step 1 of g\), called at .*test_contracts.py:\d+ in \w+", note
    )
    fail[0] = False
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [9.0, 9.0]


def test_a_second_replay_of_one_pool_at_the_same_time_is_refused(backend: str, device: torch.device) -> None:
    """FAULT-E12: from another thread and from inside a break; the running replay is not disturbed."""
    refused: list[ConcurrentReplayError] = []
    enter = [False]

    def again() -> None:
        try:
            graph.replay()
        except ConcurrentReplayError as error:
            refused.append(error)

    @eager_on_graph
    def slow(x: torch.Tensor) -> torch.Tensor:
        if enter[0]:
            enter[0] = False
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
            again()
        return x * 2

    graph = BreakableCUDAGraph()
    x = torch.ones(2, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        out = slow(x + 1) + 1
    enter[0] = True
    x.fill_(4)
    graph.replay()
    assert len(refused) == 2
    assert out.tolist() == [11.0, 11.0]


def test_a_graph_with_its_own_pool_may_replay_inside_a_break(backend: str, device: torch.device) -> None:
    """Its memory is its own, and the outer context is there again afterwards."""
    x = torch.ones(2, device=device)
    inner = BreakableCUDAGraph(name="inner")
    with BreakableCUDAGraphCapture(inner, backend=backend):
        doubled = x * 2

    @eager_on_graph(live=("meta",))
    def outer_break(y: torch.Tensor, meta: int) -> torch.Tensor:
        inner.replay()
        assert current_replay().live["meta"] == meta
        return y + doubled

    outer = BreakableCUDAGraph(name="outer")
    with BreakableCUDAGraphCapture(outer, backend=backend):
        out = outer_break(x + 1, 1) + 1
    x.fill_(10)
    outer.replay(live={"meta": 2})
    assert out.tolist() == [32.0, 32.0]
    with (
        pytest.raises(CaptureIllegalError, match="inside a segment"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        inner.replay()


def test_every_message_has_three_parts_and_survives_pickling() -> None:
    """Errors carry what, why and fix as lines and as attributes; pickled (by a worker process) they stay whole."""
    import copy
    import pickle

    error = LiveDataError("what", why="why", fix="fix")
    assert str(error) == "what\nwhy\nfix"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(twin), twin.what, twin.why, twin.fix) == (LiveDataError, "what", "why", "fix")
    assert isinstance(error, BreakgraphError)
    with pytest.raises(TypeError):
        LiveDataError("only what")  # type: ignore[call-arg]
