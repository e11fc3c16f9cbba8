"""The emulated backend is strict where CUDA is, and replays without the model's Python."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph
from breakgraph.backends.emulated import declare_pure
from breakgraph.errors import CaptureIllegalError
from breakgraph.testing import poison


def capture(body: Callable[[torch.Tensor], Any], *, inference: bool = False) -> BreakableCUDAGraph:
    """Capture `body` on the emulated backend."""
    graph = BreakableCUDAGraph()
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    with torch.inference_mode(mode=inference), BreakableCUDAGraphCapture(graph, backend="emulated"):
        body(x + 1)
    return graph


ILLEGAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: 1 if (x > 0).all() else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to device=cpu": lambda x: x.to(device="cpu"),
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 2),
    "boolean index": lambda x: x[x > 2],
    "boolean assignment of a tensor": lambda x: x.__setitem__(x > 2, torch.ones(2, 3)[x > 2]),
    "masked_select": lambda x: torch.masked_select(x, x > 2),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], torch.arange(3)),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tensor from host data": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "scalar tensor from host data": lambda x: x + torch.tensor(2.0),
    "print": lambda x: f"{x.sum()}",
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", ILLEGAL)
def test_host_syncs_and_data_dependent_shapes_are_refused(kind: str, inference: bool) -> None:
    """FAULT-F3, FAULT-E2: what CUDA cannot capture is refused on a CPU too, naming the user's line, in both modes."""
    with pytest.raises(CaptureIllegalError) as caught:
        capture(ILLEGAL[kind], inference=inference)
    assert "test_emulated.py" in str(caught.value)


LEGAL: dict[str, Callable[[torch.Tensor], Any]] = {
    "one value under a mask": lambda x: x.masked_fill_(x > 2, 0.0),
    "assignment of one value under a mask": lambda x: x.__setitem__(x > 2, 0.0),
    "gather by index": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "repeat_interleave with its size": lambda x: torch.repeat_interleave(x[0], torch.ones(3).long(), output_size=3),
    "to the device of another tensor": lambda x: x.to(x.device),
    "to a dtype": lambda x: x.to(torch.float64),
    "where with three arguments": lambda x: torch.where(x > 2, x, 0.0),
    "in-place change of shape": lambda x: x.add_(1).t_().mul_(2),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", LEGAL)
def test_what_a_graph_can_hold_is_captured(kind: str, inference: bool) -> None:
    """Strict does not mean that ordinary device work is refused."""
    assert len(capture(LEGAL[kind], inference=inference).segments) == 1


def test_the_same_operations_are_legal_in_a_break() -> None:
    """A break may sync: that is what it is for."""
    for body in ILLEGAL.values():
        marked = eager_on_graph(capture_stub=None)(lambda x, body=body: (body(x), None)[1])
        capture(marked)


def test_a_replay_runs_no_python_of_the_model() -> None:
    """A host value read in a segment is frozen; the segment's Python is not called again."""
    calls = []
    scale = [2.0]

    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * scale[0]

    graph = BreakableCUDAGraph()
    x = torch.ones(2)
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = body(x)
    scale[0] = 100.0
    x.fill_(3)
    graph.replay()
    assert (len(calls), out.tolist()) == (1, [6.0, 6.0])


def test_addresses_are_baked_in() -> None:
    """A replay reads the captured buffer, wherever the caller's new tensor is; a rebound weight is not seen."""
    weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    x = torch.ones(2)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = x * weight
    address = out.data_ptr()
    weight.data = torch.full((2,), 5.0)
    graph.replay()
    assert (out.tolist(), out.data_ptr()) == ([1.0, 1.0], address)


def test_an_inplace_change_of_shape_happens_once() -> None:
    """`t_()` changes what later operators see, not the tensor again at every replay."""
    x = torch.arange(6.0).reshape(2, 3)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        y = x + 0
        y.t_()
        out = y * torch.arange(3.0).reshape(3, 1)
    for _ in range(2):
        x.add_(1)
        graph.replay()
        assert torch.equal(out, x.t() * torch.arange(3.0).reshape(3, 1))


def test_random_operators_draw_anew_at_each_replay() -> None:
    """FAULT-E9: dropout in a segment differs between replays and repeats after reseeding."""
    x = torch.ones(64)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(1)
    graph.replay()
    first = out.clone()
    graph.replay()
    second = out.clone()
    torch.manual_seed(1)
    graph.replay()
    assert torch.equal(out, first)
    assert not torch.equal(first, second)


def test_custom_operators_in_python_are_refused_unless_declared_pure() -> None:
    """A replay would run their Python; one that is declared pure is recorded as an operator."""

    @torch.library.custom_op("breakgraph_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(CaptureIllegalError, match="breakgraph_test::twice"):
        capture(twice)
    declare_pure(twice)
    x = torch.ones(2)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = torch.ops.breakgraph_test.twice(x)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [8.0, 8.0]


def test_poison_shows_a_read_of_what_was_not_written() -> None:
    """FAULT-P3: rows of an empty tensor that nothing wrote are NaN after poison; what the graph wrote comes back."""

    @eager_on_graph
    def half(x: torch.Tensor, out: torch.Tensor) -> None:
        out[:1].copy_(x[:1])

    x = torch.ones(2)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        buffer = torch.empty(2)
        half(x * 2, buffer)
        out = buffer + 1
    poison(graph)
    graph.replay()
    assert out[0] == 3
    assert out[1].isnan()


def test_a_tensor_of_another_graphs_segment_is_refused() -> None:
    """FAULT-L8: a workspace first made inside a segment and kept is refused where a later graph of the pool reads it."""
    kept: dict[str, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if "table" not in kept:
            kept["table"] = torch.arange(8.0).cos()
        return x * kept["table"][: len(x)]

    pool = GraphPool(backend="emulated")
    first, second = BreakableCUDAGraph(), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(first, pool=pool):
        forward(torch.ones(8))
    with (
        pytest.raises(CaptureIllegalError, match=r"another graph of the pool made \(in aten::.*test_emulated.py:\d+"),
        BreakableCUDAGraphCapture(second, pool=pool),
    ):
        forward(torch.ones(4))
    first.reset()
    kept.clear()
    forward(torch.ones(8))  # made before the capture, as the message says: both read it
    for graph, rows in ((first, 8), (second, 4)):
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(torch.ones(rows))
        assert out.tolist() == forward(torch.ones(rows)).tolist()


def test_capturing_leaves_other_threads_alone() -> None:
    """Operators of another thread are neither recorded nor refused."""
    results: list[float] = []
    x = torch.ones(2)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        thread = threading.Thread(target=lambda: results.append(torch.ones(3).sum().item()))
        thread.start()
        thread.join()
        x * 2
    assert results == [3.0]
    assert graph.steps[0].name == "1 operator"


def test_a_reset_frees_every_intermediate() -> None:
    """FAULT-E11: a thousand captures and resets leave no tensor and no address behind."""
    pool = GraphPool(backend="emulated")
    x = torch.ones(16)
    for _ in range(1000):
        graph = BreakableCUDAGraph()
        with BreakableCUDAGraphCapture(graph, pool=pool):
            y = x * 2
        alive = weakref.ref(y)
        graph.reset()
        del y
        assert alive() is None
    assert pool.backend.pool_bytes() == 0
    assert not pool.backend.made_by_a_segment(torch.ones(16))


def test_garbage_collection_is_off_during_a_capture_and_as_before_after() -> None:
    """FAULT-E5: no finaliser runs in the middle of a capture; a collector that was off stays off."""
    for enabled in (True, False):
        if not enabled:
            gc.disable()
        try:
            with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"):
                inside = gc.isenabled()
                torch.ones(2) * 2
            assert not inside
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_a_compiled_function_runs_uncompiled_in_a_segment() -> None:
    """Under torch.compile a marked function is a plain call, and a compiled step is recorded operator by operator."""
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    compiled(torch.ones(3))
    graph = BreakableCUDAGraph()
    x = torch.ones(2)
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        out = compiled(x)
    x.fill_(3)
    graph.replay()
    assert out.tolist() == [7.0, 7.0]
    assert graph.steps[0].name == "2 operators"
