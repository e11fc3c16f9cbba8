"""What only a GPU can show: streams, pool memory, addresses, a driver that invalidates a capture."""

from __future__ import annotations

import contextlib
import gc
import re
from pathlib import Path

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph
from breakgraph.errors import CaptureIllegalError
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


def test_a_sync_inside_a_segment_leaves_everything_usable() -> None:
    """FAULT-E2: the driver invalidates the capture; afterwards random numbers, captures and earlier graphs work."""
    pool = GraphPool()
    x = torch.ones(4, device="cuda")
    before = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(before, pool=pool):
        kept = x * 2
    for attempt in range(2):
        graph = BreakableCUDAGraph()
        with pytest.raises(RuntimeError) as caught, BreakableCUDAGraphCapture(graph, pool=pool):
            y = host_scale(x + 1)
            y.sum().item()
        notes = "\n".join(caught.value.__notes__)
        assert re.search(r"test_cuda_capture.py:\d+ in test_\w+: y.sum\(\).item\(\); nothing of it was kept", notes)
        assert "The driver invalidated the capture there" in notes
        torch.rand(3, device="cuda")
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = host_scale(x + 1) + torch.rand(4, device="cuda") * 0
        x.fill_(attempt + 2.0)
        graph.replay()
        before.replay()
        assert_same_bits(out, expected=host_scale(x + 1))
        assert_same_bits(kept, expected=x * 2)


def test_a_sync_whose_error_is_swallowed_fails_the_capture() -> None:
    """FAULT-E2: the driver does not forget; the end of the segment says so with its line, and the pool goes on."""
    pool, graph = GraphPool(), BreakableCUDAGraph()
    x = torch.ones(4, device="cuda")
    for with_break in (False, True):
        with (
            pytest.raises(CaptureIllegalError, match=r"had been invalidated") as caught,
            BreakableCUDAGraphCapture(graph, pool=pool),
        ):
            y = x + 1
            with contextlib.suppress(RuntimeError):
                y.sum().item()
            if with_break:
                host_scale(y)
        assert "test_cuda_capture.py" in str(caught.value)
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = host_scale(x + 1) + torch.rand(4, device="cuda") * 0
        graph.replay()
        assert_same_bits(out, expected=host_scale(x + 1))
        graph.reset()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices")
def test_a_graph_of_another_device_than_the_current_one() -> None:
    """A graph on cuda:1 is captured and replayed while cuda:0 is current, breaks run with its device current."""
    device = torch.device("cuda", 1)
    seen = []

    @eager_on_graph
    def scale(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_device())
        return x * float(torch.tanh(x.abs().max()).item())

    def forward(x: torch.Tensor) -> torch.Tensor:
        return scale(x @ x) @ x

    x = torch.randn(256, 256, device=device)
    pool, graph = GraphPool(device=device), BreakableCUDAGraph()
    with torch.no_grad():
        with pool.on_capture_stream():
            forward(x)
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        for _ in range(20):
            x.normal_()
            graph.replay()
            got = out.clone()
            assert torch.cuda.current_device() == 0
            assert_same_bits(got, expected=forward(x))
    assert seen[1] == 1
    assert seen[2::2] == [1] * 20  # at replays; the eager calls between run with the caller's device


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
    """FAULT-E11: after 10,000 captures and resets, memory of torch, of the device and of the process, and open files are flat."""
    pool = GraphPool()
    x = torch.ones(1024, device="cuda")
    seen = []
    for round_ in range(10_000):
        graph = BreakableCUDAGraph()
        with BreakableCUDAGraphCapture(graph, pool=pool):
            host_scale(x + 1) * 2
        if round_ % 100 == 0:
            graph.replay()
        graph.reset()
        if round_ in (1_000, 9_999):
            del graph
            gc.collect()
            torch.cuda.synchronize()
            seen.append(
                {
                    "allocated": torch.cuda.memory_allocated(),
                    "reserved": torch.cuda.memory_reserved(),
                    "device": torch.cuda.mem_get_info()[0],
                    "files": len(list(Path("/proc/self/fd").iterdir())),
                    "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
                }
            )
    before, after = seen
    grown = after.pop("resident") - before.pop("resident")
    assert grown < 9_000 * 512, f"{grown} bytes of the process in 9,000 cycles"  # under 512 bytes a cycle
    assert before == after


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


def test_a_borrowed_view_is_exact_for_every_dtype() -> None:
    """A view through `__cuda_array_interface__` has address, shape, strides and dtype of its tensor, and owns nothing."""
    from breakgraph.aliases import borrowed_view, public_view

    dtypes = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(
            torch.int64,
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.complex64,
            torch.complex128,
        ),
    ]
    for dtype in dtypes:
        base = (torch.rand(6, 8, device="cuda") * 4).to(dtype)
        for tensor in (base, base.t(), base[1:5, ::3], base[0, 0], base[:1].expand(3, 8)):
            for view in (borrowed_view(tensor), public_view(tensor)):
                assert (view.data_ptr(), view.shape, view.stride(), view.dtype) == (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                )
                assert view.device == tensor.device
                if dtype.itemsize > 1 or dtype in (torch.int8, torch.uint8, torch.bool):
                    assert torch.equal(view, tensor)
    gc.collect()
    before = torch.cuda.memory_allocated()
    big = torch.zeros(1 << 20, device="cuda")
    view = borrowed_view(big)
    del big
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_in_a_segment_gives_everything_back() -> None:
    """FAULT-E3: the caller gets torch's own error; memory is where it was, and a smaller capture works."""
    pool = GraphPool()
    x = torch.ones(1024, device="cuda")
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, pool=pool):
        host_scale(x * 2) + 1
    graph.reset()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for where in ("segment", "break"):
        taken = []

        @eager_on_graph
        def greedy(y: torch.Tensor) -> torch.Tensor:
            return torch.empty(1 << 40, device="cuda")

        with pytest.raises(torch.cuda.OutOfMemoryError), BreakableCUDAGraphCapture(graph, pool=pool):
            y = x + 1
            taken.append(torch.empty(1 << 24, device="cuda"))
            if where == "segment":
                torch.empty(1 << 40, device="cuda")
            else:
                greedy(y)
        taken.clear()
        del y
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= allocated
        assert torch.cuda.memory_reserved() <= reserved
    with BreakableCUDAGraphCapture(graph, pool=pool):
        out = host_scale(x * 2) + 1
    graph.replay()
    assert_same_bits(out, expected=host_scale(x * 2) + 1)


@pytest.mark.parametrize("fault", ["value error", "sync", "unjoined", "break", "memory"])
def test_after_any_failure_everything_is_as_before(fault: str) -> None:
    """FAULT-E1: stream, generator, allocated and reserved memory as before; the very next capture of the pool works."""
    pool = GraphPool()
    x = torch.ones(1 << 18, device="cuda")
    graph = BreakableCUDAGraph()

    @eager_on_graph
    def failing(y: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with BreakableCUDAGraphCapture(graph, pool=pool):
        host_scale(x * 2) + 1
    graph.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.manual_seed(11)
    state = torch.cuda.get_rng_state()
    caller = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    # As long as any graph lives torch keeps two words of the generator on the device: one that outlives the pool's.
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.graph(keeper):
        x.mul(1)
    for _ in range(3):
        gc.collect()  # garbage of earlier tests would change the count in the middle
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with pytest.raises((ValueError, RuntimeError)), BreakableCUDAGraphCapture(graph, pool=pool):
            y = host_scale(x * 2) + torch.rand(1 << 18, device="cuda")
            if fault == "value error":
                raise ValueError("mine")
            if fault == "sync":
                y.sum().item()
            if fault == "unjoined":
                with torch.cuda.stream(side):
                    y.mul_(2)
            if fault == "break":
                failing(y)
            torch.empty(1 << 40, device="cuda")
        del y
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert torch.cuda.current_stream() == caller
        assert torch.cuda.memory_allocated() == allocated
        # After an invalidated capture torch may keep blocks of the pool; they are counted, and nothing else is missing.
        assert torch.cuda.memory_reserved() <= reserved + pool.backend.pool.lost_bytes
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = host_scale(x * 2) + torch.rand(1 << 18, device="cuda")
        torch.cuda.manual_seed(5)
        graph.replay()
        torch.cuda.manual_seed(5)
        assert_same_bits(out, expected=host_scale(x * 2) + torch.rand(1 << 18, device="cuda"))
        graph.reset()
        del out
        torch.cuda.empty_cache()
        torch.cuda.set_rng_state(state)


def test_a_tensor_kept_from_a_segment_is_reported() -> None:
    """FAULT-L8: what a model keeps of a segment is counted in stats() and told by explain(); results count as well."""
    pool = GraphPool()
    kept = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.arange(1 << 16, device="cuda"))
        return x * kept[-1][0]

    graph = BreakableCUDAGraph()
    x = torch.ones(8, device="cuda")
    with BreakableCUDAGraphCapture(graph, pool=pool):
        forward(x)
    assert graph.stats().live_bytes >= 8 << 16
    assert "bytes of the pool are held by tensors" in str(graph.explain())
    kept.clear()
    assert graph.stats().live_bytes == 0
    assert "are held by tensors" not in str(graph.explain())


def test_another_thread_may_copy_and_poll_during_a_capture() -> None:
    """FAULT-E6: copies to the device and event queries of another thread neither fail nor invalidate the capture."""
    import threading

    stop = threading.Event()
    errors: list[BaseException] = []
    rounds = [0]

    def busy() -> None:
        stream = torch.cuda.Stream()
        pinned = torch.ones(1 << 16).pin_memory()
        try:
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    pinned.to("cuda", non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    event.query()
                    rounds[0] += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    x = torch.ones(4096, device="cuda")
    try:
        for _ in range(30):
            graph = BreakableCUDAGraph()
            with BreakableCUDAGraphCapture(graph):
                out = host_scale(x * 2) + 1
            graph.replay()
            assert_same_bits(out, expected=host_scale(x * 2) + 1)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert rounds[0] > 10


def test_a_reset_right_behind_a_launch_waits_for_it() -> None:
    """FAULT-L10: the replay's long kernel finishes and its result arrives."""
    x = torch.ones(1 << 20, device="cuda")
    result = torch.zeros_like(x)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph):
        torch.cuda._sleep(50_000_000)
        result.copy_(x * 2)
    result.zero_()
    torch.cuda.synchronize()
    graph.replay()
    graph.reset()
    torch.cuda.empty_cache()
    junk = torch.full((1 << 20,), float("nan"), device="cuda")
    assert result.eq(2).all()
    del junk


def test_two_threads_capture_one_after_the_other() -> None:
    """One capture a device at a time: the second thread waits, and both graphs are right."""
    import threading

    results: dict[int, bool] = {}
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        x = torch.full((4096,), float(index + 1), device="cuda")
        graph = BreakableCUDAGraph()
        torch.cuda.current_stream().synchronize()  # of the stream: one of the device is illegal while another thread captures
        barrier.wait()
        for _ in range(10):
            with BreakableCUDAGraphCapture(graph):
                out = host_scale(x * 2) + 1
            graph.replay()
            results[index] = bool(torch.equal(out, host_scale(x * 2) + 1)) and results.get(index, True)
            graph.reset()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


def test_split_k_matmuls_of_two_graphs_do_not_disturb_each_other() -> None:
    """FAULT-O9: cuBLAS workspaces of two pools; replays A, B, A give eager's bits, no hang."""
    graphs = []
    with torch.no_grad():
        for size in (64, 96):
            a = torch.randn(16, 16384, device="cuda", dtype=torch.bfloat16)
            b = torch.randn(16384, size, device="cuda", dtype=torch.bfloat16)
            graph = BreakableCUDAGraph()
            with BreakableCUDAGraphCapture(graph):
                out = host_scale(a @ b) @ b.T
            graphs.append((graph, a, b, out))
        for index in (0, 1, 0, 0, 1):
            graph, a, b, out = graphs[index]
            a.copy_(torch.randn(16, 16384))
            graph.replay()
            with graph.pool.on_capture_stream():  # type: ignore[union-attr]
                expected = host_scale(a @ b) @ b.T
            assert_same_bits(out, expected=expected)


def test_a_cache_of_the_last_shape_is_right_for_every_bucket() -> None:
    """FAULT-L5: a module keeps the last `arange(n)` only; captured 128 then 64 after warming both up, junk, replay 128."""
    kept: dict[str, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if "places" not in kept or kept["places"].shape != x.shape:
            kept["places"] = torch.arange(x.shape[0], device="cuda", dtype=x.dtype)
        return host_scale(x + kept["places"]) * kept["places"]

    pool = GraphPool()
    graphs = {}
    for n in (128, 64):
        with pool.on_capture_stream():
            forward(torch.ones(n, device="cuda"))
    for n in (128, 64):
        x = torch.randn(n, device="cuda")
        graph = BreakableCUDAGraph()
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        graphs[n] = (graph, x, out)
    torch.cuda.empty_cache()
    junk = [torch.full((128,), float("nan"), device="cuda") for _ in range(200)]
    for n in (128, 64, 128):
        graph, x, out = graphs[n]
        x.copy_(torch.randn(n))
        graph.replay()
        got = out.clone()
        assert_same_bits(got, expected=forward(x))
    del junk


def test_results_of_one_graph_live_until_the_next_replay_of_its_pool() -> None:
    """FAULT-L9: kept while another graph of the pool is captured and replayed, the result may change; its own replay is right."""
    pool = GraphPool()
    x = torch.randn(4096, device="cuda")
    first, second = BreakableCUDAGraph(), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(first, pool=pool):
        out = host_scale(x * 2) + 1
    y = torch.randn(4096, device="cuda")
    with BreakableCUDAGraphCapture(second, pool=pool):
        other = host_scale(y * 3) - 1
    for _ in range(3):
        second.replay()
        first.replay()
        assert_same_bits(out, expected=host_scale(x * 2) + 1)
        second.replay()
        assert_same_bits(other, expected=host_scale(y * 3) - 1)


def test_a_tensor_of_a_side_stream_that_is_dropped_is_not_overwritten_early() -> None:
    """FAULT-O8: made on a side stream, used on the main one and dropped at once, with many allocations around it."""
    side = torch.cuda.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        for step in range(8):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)
                z = x * (step + 1)
                z.record_stream(main)
            main.wait_stream(side)
            x = torch.tanh(z) + x
            del z
            if step % 3 == 2:
                x = host_scale(x)
        return x

    pool = GraphPool()
    x = torch.randn(1 << 18, device="cuda")
    graph = BreakableCUDAGraph()
    with torch.no_grad():
        with pool.on_capture_stream():
            forward(x)
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        for _ in range(20):
            x.copy_(torch.randn(1 << 18))
            junk = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(4)]
            graph.replay()
            assert_same_bits(out, expected=forward(x.clone()))
            del junk
