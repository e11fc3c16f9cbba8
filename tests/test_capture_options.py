"""Barrier, one capture a device, what a graph tells about its memory, and small segments."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import breakgraph.capture
from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, break_graph, eager_on_graph
from breakgraph.errors import CaptureError


@eager_on_graph
def brk(x: torch.Tensor) -> torch.Tensor:
    """A break with a bridge."""
    return x * float(x.max().item())


def test_a_barrier_is_called_before_the_capture_and_each_break(backend: str, device: torch.device) -> None:
    """REQ-F5: ranks move together at capture; a replay calls it no more."""
    calls: list[int] = []
    graph = BreakableCUDAGraph()
    x = torch.ones(4, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend, barrier=lambda: calls.append(len(calls))):
        brk(brk(x + 1) + 1)
    assert calls == [0, 1, 2]
    graph.replay()
    assert len(calls) == 3


def test_a_second_thread_waits_for_the_first_ones_capture_with_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture a device at a time: the other waits, and says so when it has waited too long."""
    entered, go = threading.Event(), threading.Event()
    times: list[float] = []

    def first() -> None:
        with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"):
            torch.ones(2) * 2
            entered.set()
            go.wait(10)
            times.append(time.perf_counter())

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    monkeypatch.setattr(breakgraph.capture, "_LOCK_TIMEOUT_SECONDS", 0.05)
    with (
        pytest.raises(CaptureError, match="another thread's"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"),
    ):
        pass
    monkeypatch.setattr(breakgraph.capture, "_LOCK_TIMEOUT_SECONDS", 10.0)
    threading.Timer(0.1, go.set).start()
    with BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"):
        torch.ones(2) * 2
        assert time.perf_counter() > times[0]
    thread.join()


def test_a_graph_reports_its_memory(backend: str, device: torch.device) -> None:
    """Bridges and held inputs by size, the pool by what segments keep, nothing once it is reset."""
    held = torch.ones(1000, device=device)

    @eager_on_graph
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend=backend):
        add(torch.ones(1000, device=device) * 2, held) * 2
    stats = graph.stats()
    assert (stats.bridge_bytes, stats.held_bytes) == (4000, 4000)
    assert stats.pool_bytes >= 4000
    assert stats.executable_bytes >= 0
    graph.reset()
    assert graph.stats().bridge_bytes == graph.stats().held_bytes == 0


def test_small_segments_are_marked(backend: str, device: torch.device) -> None:
    """explain() marks segments that are not worth a launch of their own, by a count the reader chooses."""
    graph = BreakableCUDAGraph()
    x = torch.ones(4, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        y = x + 1
        break_graph()
        for _ in range(6):
            y = y * 2
    lines = [line for line in str(graph.explain()).splitlines() if "segment  " in line]
    assert ["[small]" in line for line in lines] == [True, False]
    assert "[small]" not in str(graph.explain(small=1))


def test_adjacent_breaks_have_no_segment_between_them(backend: str, device: torch.device) -> None:
    """Empty segments are never kept or launched."""
    graph = BreakableCUDAGraph()
    x = torch.ones(4, device=device)
    with BreakableCUDAGraphCapture(graph, backend=backend):
        y = x + 1
        for _ in range(3):
            break_graph()
            y = brk(y)
            break_graph()
        y + 1
    assert [step.kind.value for step in graph.steps] == ["segment", "break", "break", "break", "segment"]


def test_a_reset_gives_the_pool_its_memory_back() -> None:
    """FAULT-E11: what the segments of a graph kept is counted while it lives and not afterwards."""
    pool = GraphPool(backend="emulated")
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, pool=pool):
        torch.ones(1000) * 2
    assert pool.backend.pool_bytes() == 8000  # the ones and their double
    graph.reset()
    assert pool.backend.pool_bytes() == 0
