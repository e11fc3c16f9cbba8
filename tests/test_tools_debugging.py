"""`debugging`: replays that are eager, kernel by kernel, awaited or named give the same numbers and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph
from breakgraph.errors import ConfigError
from breakgraph.statistics import Reason
from breakgraph.testing import assert_same_bits
from breakgraph.tools import DebugMode, debugging
from tests.runner_models import PrefillRig


@eager_on_graph
def half(x: torch.Tensor) -> torch.Tensor:
    """A break."""
    return x * 0.5


def _captured(backend: str, device: torch.device) -> tuple[BreakableCUDAGraph, torch.Tensor, torch.Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        out = half((x @ x).relu() + 1).softmax(-1) * 2
    return graph, x, out


def _segments(graph: BreakableCUDAGraph) -> list[int]:
    return [index for index, step in enumerate(graph.steps) if step.segment is not None]


@pytest.mark.parametrize("modes", [[], ["synchronise"], ["nvtx"], [DebugMode.SYNCHRONISE, DebugMode.NVTX]])
@pytest.mark.parametrize("chosen", [[], [0], [0, 2]])
def test_every_mode_gives_the_same_numbers(
    backend: str, device: torch.device, modes: list[Any], chosen: list[int]
) -> None:
    """Chosen segments kernel by kernel, awaited or in ranges: bit for bit what the graph gives."""
    graph, x, out = _captured(backend, device)
    assert _segments(graph) == [0, 2]
    x.copy_(torch.randn(8, 8))
    graph.replay()
    expected = out.clone()
    out.zero_()
    with debugging(graph, modes=modes, eager_segments=chosen):
        graph.replay()
    assert_same_bits(out.clone(), expected=expected)
    assert graph._observers == ()


def test_kernels_of_a_segment_run_one_by_one(backend: str, device: torch.device) -> None:
    """A segment's pieces are as many as its kernels, in an order that computes what the segment computes."""
    graph, x, out = _captured(backend, device)
    for segment in graph.segments:
        assert len(segment.pieces()) == segment.size == sum(segment.kernels().values())
    x.fill_(0.25)
    graph.replay()
    expected = out.clone()
    out.zero_()
    last = graph.segments[-1]
    for piece in last.pieces():
        piece.run()
    assert_same_bits(out.clone(), expected=expected)


@pytest.mark.gpu
def test_side_streams_run_in_turn_kernel_by_kernel() -> None:
    """A segment that forks gives the same numbers when its kernels run in turn on one stream."""
    x = torch.randn(256, 256, device="cuda")
    side = torch.cuda.Stream()
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            b = (x * 2).cumsum(0)
        a = x + 1
        torch.cuda.current_stream().wait_stream(side)
        out = a @ b
    graph.replay()
    expected = out.clone()
    out.zero_()
    with debugging(graph, eager_segments=_segments(graph), modes=["synchronise"]):
        graph.replay()
    assert_same_bits(out.clone(), expected=expected)


def test_ranges_are_named_after_steps(backend: str, device: torch.device) -> None:
    """In a profile each step is a range with its place, kind and name."""
    graph, _, _ = _captured(backend, device)
    with debugging(graph, modes=["nvtx"]), torch.profiler.profile(acc_events=True) as profile:
        graph.replay()
    names = {event.key for event in profile.key_averages()}
    assert {f"breakgraph {i} {step.kind.value} {step.name}" for i, step in enumerate(graph.steps)} <= names


def test_an_exception_names_the_kernel_that_raised() -> None:
    """Kernel by kernel, what a segment raises has a note with the kernel and its line."""
    graph, _, _ = _captured("emulated", torch.device("cpu"))
    segment = graph.segments[0]
    operators: Any = segment
    broken = operators.operators[1]
    operators.operators[1] = type(broken)(_raises, broken.args, broken.kwargs, broken.fresh, broken.line)
    with debugging(graph, eager_segments=[0]), pytest.raises(KeyError, match="mine") as caught:
        graph.replay()
    assert any("kernel 1 of step 0" in note and "test_tools_debugging.py" in note for note in caught.value.__notes__)
    assert graph._observers == ()


class _Raises:
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("mine")

    def name(self) -> str:
        return "mine::operator"


_raises = _Raises()


def test_a_runner_runs_eagerly_in_the_buffers_of_its_graph(device: torch.device) -> None:
    """Mode "eager": steps are prepared for their graph and run eagerly in its place, padded, counted, with equal results."""
    rig = PrefillRig(device, sizes=(8,), measure="never")
    rig.capture()
    inputs, live = rig.step(5)
    expected = rig.runner.run(inputs, size=5, live=live).output.clone()
    rig.model.seen.clear()
    with debugging(rig.runner, modes=["eager"]):
        result = rig.runner.run(inputs, size=5, live=live)
    assert (result.replayed, result.reason) == (False, Reason.DEBUGGING)
    assert rig.model.seen == [(5, 8, 5)]
    assert_same_bits(result.output, expected=expected)
    assert rig.runner.statistics.eager["DEBUGGING"] == 1
    assert rig.runner.run(inputs, size=5, live=live).replayed


def test_eager_is_no_fallback(device: torch.device) -> None:
    """Mode "eager" was asked for, so fallback="error" does not refuse it."""
    rig = PrefillRig(device, sizes=(8,), measure="never", fallback="error")
    rig.capture()
    inputs, live = rig.step(5)
    with debugging(rig.runner, modes=["eager"]):
        assert not rig.runner.run(inputs, size=5, live=live).replayed


def test_blocks_may_end_in_another_order() -> None:
    """Two blocks that overlap leave nothing behind, whichever ends first."""
    graph, _, _ = _captured("emulated", torch.device("cpu"))
    one, other = debugging(graph, modes=["nvtx"]), debugging(graph, modes=["synchronise"])
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert len(graph._observers) == 1
    other.__exit__(None, None, None)
    assert graph._observers == ()


def test_all_graphs_of_a_runner_are_observed(device: torch.device) -> None:
    """Modes hold for every graph that the runner has, and end with the block, also when it raises."""
    rig = PrefillRig(device, sizes=(4, 8), measure="never")
    rig.capture()
    with pytest.raises(KeyError), debugging(rig.runner, modes=["synchronise"]):
        assert all(len(graph._observers) == 1 for graph in rig.runner.graphs.values())
        raise KeyError
    assert all(graph._observers == () for graph in rig.runner.graphs.values())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modes": ["slow"]}, "modes has 'slow'"),
        ({"modes": "eager"}, "expected several of them"),
        ({"modes": None}, "expected several of them"),
        ({"eager_segments": 0}, "expected several of them"),
        ({"eager_segments": [False]}, "expected whole numbers"),
        ({"eager_segments": [0.0]}, "expected whole numbers"),
        ({"modes": ["eager"]}, "does not know the forward"),
        ({"eager_segments": [1]}, "are no segments"),
        ({"eager_segments": [99]}, "are no segments"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    """Unknown modes, places that are no segment, eager without a forward: refused before anything runs."""
    graph, _, _ = _captured("emulated", torch.device("cpu"))
    with pytest.raises(ConfigError, match=says), debugging(graph, **options):
        raise AssertionError
    with pytest.raises(ConfigError, match="expected a BreakableCUDAGraph or a runner"), debugging(3):  # type: ignore[arg-type]
        raise AssertionError
