"""What only a GPU can show: streams, pool memory, addresses, a driver that invalidates a capture."""

from __future__ import annotations

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph
from breakgraph.errors import StreamJoinError
from breakgraph.testing import assert_same_bits
from tests.test_programs import STEPS

pytestmark = pytest.mark.gpu


@eager_on_graph
def host_scale(x: torch.Tensor) -> torch.Tensor:
    """A break that syncs."""
    return x * float(torch.tanh(x.abs().max()).item())


def test_random_programs_replay_equal_to_eager_on_a_gpu() -> None:
    """The property of test_programs on the card, with 150 seeded programs."""
    import random

    from breakgraph.testing import assert_replay_matches_eager
    from tests.test_programs import SIZE, _program

    rng = random.Random(7)
    for seed in range(150):
        names = [rng.choice(sorted(STEPS)) for _ in range(rng.randrange(13))]

        def example(round_: int, seed: int = seed) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed * 100 + round_)
            return {"x": torch.randn(SIZE, SIZE, generator=generator).cuda()}

        assert_replay_matches_eager(
            _program(names), example=example, valid_rows=lambda r, seed=seed: (seed + r) % (SIZE + 1), backend="cuda"
        )


@pytest.mark.parametrize("joined", ["after the break", "never"])
def test_side_stream_work_across_a_break_is_replayed(joined: str) -> None:
    """FAULT-O1, FAULT-O2: fork before a break, work on the side, join after it or not at all; 200 replays equal eager."""
    side = torch.cuda.Stream()
    x = torch.randn(256, 256, device="cuda")
    kept = torch.zeros(256, 256, device="cuda")

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000)
            kept.copy_(y * 2)
        z = host_scale(y * 0.5)
        if joined == "after the break":
            main.wait_stream(side)
            return z + kept
        return z

    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        out = forward(x)
    assert torch.cuda.Stream.wait_stream.__module__ == "torch.cuda.streams"
    for _ in range(200):
        x.copy_(torch.randn(256, 256))
        kept.zero_()
        graph.replay()
        torch.cuda.synchronize()
        y = x + 1
        expected = host_scale(y * 0.5)
        assert_same_bits(kept, expected=y * 2)
        assert_same_bits(out, expected=expected + kept if joined == "after the break" else expected)


def test_a_side_stream_used_again_in_the_next_segment_with_no_new_fork() -> None:
    """FAULT-O3: the fork is made again when the next segment begins, so later work on the side is captured."""
    side = torch.cuda.Stream()
    x = torch.randn(64, 64, device="cuda")
    a, b = torch.zeros_like(x), torch.zeros_like(x)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a.copy_(x * 2)
        y = host_scale(x)
        with torch.cuda.stream(side):
            b.copy_(y * 3)
        torch.cuda.current_stream().wait_stream(side)
        out = a + b
    x.copy_(torch.randn(64, 64))
    graph.replay()
    assert_same_bits(out, expected=x * 2 + host_scale(x) * 3)


def test_a_wait_for_a_stream_outside_the_capture_is_refused() -> None:
    """The driver would invalidate the capture; the error names the line, and the next capture works."""
    other = torch.cuda.Stream()
    pool = GraphPool()
    x = torch.ones(4, device="cuda")
    graph = BreakableCUDAGraph()
    with pytest.raises(StreamJoinError, match="test_cuda_capture.py"), BreakableCUDAGraphCapture(graph, pool=pool):
        y = x + 1
        torch.cuda.current_stream().wait_stream(other)
    with BreakableCUDAGraphCapture(graph, pool=pool):
        y = x * 2
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6.0] * 4


def test_a_sync_inside_a_segment_leaves_everything_usable() -> None:
    """FAULT-E2: the driver invalidates the capture; afterwards random numbers, captures and earlier graphs work."""
    pool = GraphPool()
    x = torch.ones(4, device="cuda")
    before = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(before, pool=pool):
        kept = x * 2
    for attempt in range(2):
        graph = BreakableCUDAGraph()
        with pytest.raises(RuntimeError), BreakableCUDAGraphCapture(graph, pool=pool):
            y = host_scale(x + 1)
            y.sum().item()
        torch.rand(3, device="cuda")
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = host_scale(x + 1) + torch.rand(4, device="cuda") * 0
        x.fill_(attempt + 2.0)
        graph.replay()
        before.replay()
        assert_same_bits(out, expected=host_scale(x + 1))
        assert_same_bits(kept, expected=x * 2)


def test_break_inputs_do_not_keep_the_pool() -> None:
    """FAULT-L1: 40 layers of dropped break inputs share pool blocks; three buckets replay right in any order."""
    pool = GraphPool()

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            y = x * 2 + 1
            x = host_scale(y) * 0.4
            del y
        return x.sum(-1)

    graphs = {}
    with torch.no_grad():
        for rows in (4096, 1024, 256):
            x = torch.randn(rows, 256, device="cuda")
            graph = BreakableCUDAGraph()
            with BreakableCUDAGraphCapture(graph, pool=pool):
                out = forward(x)
            graphs[rows] = (graph, x, out)
    largest = 4096 * 256 * 4
    assert pool.backend.pool_bytes() < 12 * largest  # held one by one they would take 40 x (1 + 1/4 + 1/16)
    assert pool.arena.nbytes < 45 * largest
    for rows in (4096, 1024, 4096, 256, 256, 4096):
        graph, x, out = graphs[rows]
        x.copy_(torch.randn(rows, 256))
        junk = [torch.full((rows, 256), float("nan"), device="cuda") for _ in range(8)]
        graph.replay()
        assert_same_bits(out, expected=forward(x.clone()), what=f"bucket {rows}")
        del junk


def test_fresh_break_outputs_are_copied_and_nobody_elses_memory_is_written() -> None:
    """FAULT-L2: after every reference to eager outputs is gone, a replay writes its bridges and no other tensor."""
    x = torch.randn(512, 512, device="cuda")
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        out = host_scale(x + 1) * 2
    others = [torch.full((512, 512), float(i), device="cuda") for i in range(100)]
    x.copy_(torch.randn(512, 512))
    graph.replay()
    assert_same_bits(out, expected=host_scale(x + 1) * 2)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(others))


def test_replays_from_two_streams_are_ordered() -> None:
    """A replay on another stream of the same thread waits for the first: both see whole temporaries."""
    x = torch.zeros(1 << 20, device="cuda")
    results = [torch.empty_like(x) for _ in range(2)]
    graph = BreakableCUDAGraph()

    with BreakableCUDAGraphCapture(graph):
        y = x + 1
        torch.cuda._sleep(2_000_000)
        out = y * 2
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for value, (stream, result) in enumerate(zip(streams, results, strict=True)):
        with torch.cuda.stream(stream):
            if value:
                stream.wait_stream(streams[0])  # the caller's own refill must wait too: it writes a buffer in use
            x.fill_(float(value))
            graph.replay()
            result.copy_(out)
    torch.cuda.synchronize()
    assert [result.unique().tolist() for result in results] == [[2.0], [4.0]]


def test_random_numbers_in_segments_and_breaks() -> None:
    """FAULT-E9: different between replays, equal after reseeding; an own generator advances as well."""
    own = torch.Generator("cuda")
    x = torch.ones(4096, device="cuda")

    @eager_on_graph
    def noise(y: torch.Tensor) -> torch.Tensor:
        return y + torch.rand(4096, device="cuda")

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, generators=(own,)):
        y = torch.nn.functional.dropout(x, 0.5)
        out = noise(y) + torch.rand(4096, device="cuda", generator=own)

    def run() -> torch.Tensor:
        graph.replay()
        return out.clone()

    torch.manual_seed(1)
    own.manual_seed(2)
    first, second = run(), run()
    torch.manual_seed(1)
    own.manual_seed(2)
    assert torch.equal(first, run())
    assert torch.equal(second, run())
    assert not torch.equal(first, second)
    assert "random" in graph.steps[0].name


def test_captures_and_resets_leave_memory_flat() -> None:
    """FAULT-E11: 500 captures and resets of one graph; reserved memory stays where it was after the first ten."""
    pool = GraphPool()
    x = torch.ones(1024, device="cuda")
    reserved = []
    for round_ in range(500):
        graph = BreakableCUDAGraph()
        with BreakableCUDAGraphCapture(graph, pool=pool):
            host_scale(x + 1) * 2
        graph.replay()
        graph.reset()
        if round_ in (10, 499):
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[0] == reserved[1]


def test_a_segment_with_allocations_only_keeps_its_memory() -> None:
    """A first segment that only allocates is empty; its tensor is written by later segments and stays valid."""
    x = torch.ones(1024, device="cuda")
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph):
        buffer = torch.empty(1024, device="cuda")
        y = host_scale(x)
        buffer.copy_(y)
        out = buffer * 2
    x.fill_(5)
    junk = [torch.full((1024,), float("nan"), device="cuda") for _ in range(50)]
    graph.replay()
    assert_same_bits(out, expected=host_scale(x) * 2)
    del junk
