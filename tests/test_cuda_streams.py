"""Streams and events around segments and breaks, on a GPU: no dependency is lost, no side work is dropped."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, break_graph, eager_on_graph
from breakgraph.errors import StreamJoinError
from breakgraph.testing import assert_same_bits

pytestmark = pytest.mark.gpu

CYCLES = 300_000  # a sleep of about 0.15 ms: longer than any launch here, so that a lost wait shows
ROWS = 64


@eager_on_graph
def host_scale(x: torch.Tensor) -> torch.Tensor:
    """A break that syncs."""
    return x * float(torch.tanh(x.abs().max()).item())


def hooked_methods() -> tuple[Any, ...]:
    """What the ledger replaces during a capture, as found now."""
    stream, event = torch.cuda.Stream, torch.cuda.Event
    return (
        *(stream.__dict__.get(name) for name in ("wait_stream", "wait_event", "__enter__", "__exit__")),
        *(event.__dict__.get(name) for name in ("record", "wait")),
        torch.cuda.set_stream,
    )


def check(forward: Callable[[torch.Tensor], Any], *, rounds: int = 20) -> BreakableCUDAGraph:
    """Capture a forward and compare replays with eager runs on new inputs; hooks are exactly restored."""
    before = hooked_methods()
    x = torch.randn(ROWS, ROWS, device="cuda")
    graph, pool = BreakableCUDAGraph(), GraphPool()
    with torch.no_grad():
        with pool.on_capture_stream():
            forward(x)
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        assert hooked_methods() == before
        for _ in range(rounds):
            x.copy_(torch.randn(ROWS, ROWS))
            expected = forward(x.clone())
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(out, expected=expected)
    return graph


@pytest.mark.parametrize("fork", ["stream", "event"])
@pytest.mark.parametrize("join", ["stream", "event", "event of an earlier segment"])
def test_fork_and_join_across_a_break(fork: str, join: str) -> None:
    """FAULT-O1: fork before a break and join after it, by stream and by event, and mixed: equal to eager 200 times."""
    side = torch.cuda.Stream()
    done = torch.cuda.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        if fork == "stream":
            side.wait_stream(main)
        else:
            side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            z = y * 2
            if join == "event of an earlier segment":
                done.record()
        y = host_scale(y)
        if join == "stream":
            main.wait_stream(side)
        elif join == "event":
            done.record(side)
            done.wait(main)
        else:
            main.wait_event(done)
        return y + z

    check(forward, rounds=200)


@pytest.mark.parametrize("where", ["break", "end", "two, one joined"])
def test_side_streams_never_joined_are_joined_by_the_capture(where: str) -> None:
    """FAULT-O2: side work nobody waits for is part of the replay and done before what follows it."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    kept = [torch.zeros(ROWS, ROWS, device="cuda") for _ in range(2)]

    def forward(x: torch.Tensor) -> Any:
        main = torch.cuda.current_stream()
        y = x * 1
        for side, result in zip(streams, kept, strict=True):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
                result.copy_(y * 3)
        if where == "two, one joined":
            main.wait_stream(streams[0])
        if where == "break":
            y = host_scale(y)
        return y + 1

    x = torch.randn(ROWS, ROWS, device="cuda")
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        out = forward(x)
    for _ in range(20):
        x.copy_(torch.randn(ROWS, ROWS))
        for result in kept:
            result.zero_()
        graph.replay()
        copies = [result.clone() for result in kept]  # on the stream of the replay, which must have joined them
        assert_same_bits(copies, expected=[x * 3, x * 3])
        assert_same_bits(out, expected=(host_scale(x * 1) if where == "break" else x * 1) + 1)


def test_a_fork_that_no_hook_saw_is_joined() -> None:
    """A stream forked through `torch.Stream`'s own methods is found as a leaf of the graph; its work is replayed."""
    side = torch.cuda.Stream()
    kept = torch.zeros(ROWS, ROWS, device="cuda")
    x = torch.randn(ROWS, ROWS, device="cuda")
    graph = BreakableCUDAGraph()
    wait = torch._C._CudaEventBase.wait
    record = torch._C._CudaEventBase.record
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y = x + 1
        event = torch.cuda.Event()
        record(event, torch.cuda.current_stream())
        wait(event, side)
        main = torch.cuda.current_stream()
        torch._C._cuda_setStream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
        torch.cuda._sleep(CYCLES)
        kept.copy_(y * 2)
        torch._C._cuda_setStream(stream_id=main.stream_id, device_index=main.device_index, device_type=main.device_type)
        out = host_scale(y)
    assert "no hook saw" in str(graph.explain())
    for _ in range(20):
        x.copy_(torch.randn(ROWS, ROWS))
        kept.zero_()
        graph.replay()
        assert_same_bits(kept.clone(), expected=(x + 1) * 2)
        assert_same_bits(out, expected=host_scale(x + 1))


def test_generic_streams_and_events_take_part() -> None:
    """FAULT-O1: `torch.Stream` and `torch.Event` given to the methods of `torch.cuda.Stream`, and their own methods."""
    side = torch.Stream("cuda")
    same = torch.cuda.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
    forked, done = torch.Event("cuda"), torch.Event("cuda")
    copied, other = torch.Stream("cuda"), torch.cuda.Stream()
    kept = torch.zeros(ROWS, ROWS, device="cuda")
    source, staged = torch.randn(ROWS, ROWS, device="cuda"), torch.zeros(ROWS, ROWS, device="cuda")

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        main.wait_stream(copied)  # work outside the capture: a real wait before the segment
        y = x + staged
        forked.record(main)  # a fork that no hook sees
        same.wait_event(forked)
        with torch.cuda.stream(same):
            torch.cuda._sleep(CYCLES)
            z = y * 2
        done.record(same)
        main.wait_event(done)
        torch.Stream.wait_stream(other, main)
        with torch.cuda.stream(other):  # nobody waits for this one: joined at the end, and forked again
            torch.cuda._sleep(CYCLES)
            kept.copy_(y)
        z = host_scale(z)
        same.wait_stream(main)
        with torch.cuda.stream(same):
            torch.cuda._sleep(CYCLES)
            z = z + 1
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            kept.add_(1)
        main.wait_stream(side)  # the same stream, by its other name
        return z * 3

    graph, pool = BreakableCUDAGraph(), GraphPool()
    x = torch.randn(ROWS, ROWS, device="cuda")
    with torch.no_grad():
        with pool.on_capture_stream():
            forward(x)
        with BreakableCUDAGraphCapture(graph, pool=pool):
            out = forward(x)
        assert "waits before it for stream" in str(graph.explain())
        for _ in range(20):
            x.copy_(torch.randn(ROWS, ROWS))
            torch.cuda.synchronize()
            with copied:
                torch.cuda._sleep(CYCLES)
                staged.copy_(source)
            graph.replay()
            replayed = kept.clone()
            expected = forward(x.clone())
            torch.cuda.synchronize()
            assert_same_bits([out, replayed], expected=[expected, kept])
            source.normal_()


def test_an_event_recorded_where_no_hook_sees_it_is_refused() -> None:
    """A wait for it is taken for one of work outside; the driver refuses that for an event of a capture, so nothing is lost."""
    side = torch.cuda.Stream()
    x = torch.randn(ROWS, ROWS, device="cuda")
    record = torch._C._CudaEventBase.record
    event = torch.cuda.Event()
    graph, pool = BreakableCUDAGraph(), GraphPool()
    with torch.no_grad(), pytest.raises(RuntimeError), BreakableCUDAGraphCapture(graph, pool=pool):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            y = x * 2
        record(event, side)
        main.wait_event(event)
        y + 1
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, pool=pool):
        out = host_scale(x * 2)
    graph.replay()
    assert_same_bits(out, expected=host_scale(x * 2))


@pytest.mark.parametrize("how", ["by stream", "by event", "generic stream"])
def test_side_work_of_a_break_is_awaited(how: str) -> None:
    """FAULT-O4: a break leaves work on a side stream and returns; the next segment waits for it at every replay."""
    side = torch.cuda.Stream()

    @eager_on_graph
    def leave(x: torch.Tensor, out: torch.Tensor) -> None:
        if how == "by event":
            side.wait_event(torch.cuda.current_stream().record_event())
        elif how == "generic stream":
            torch.Stream.wait_stream(side, torch.cuda.current_stream())
        else:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            out.copy_(x * 2)

    x = torch.randn(ROWS, ROWS, device="cuda")
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y = x + 1
        buffer = torch.empty_like(y)
        leave(y, buffer)
        out = buffer + 1
    for _ in range(20):
        x.copy_(torch.randn(ROWS, ROWS))
        graph.replay()
        assert_same_bits(out, expected=(x + 1) * 2 + 1)


def test_events_cross_boundaries() -> None:
    """FAULT-O5: recorded in a segment and waited for in a break; recorded before the capture, waited for in a segment."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    inside, outside = torch.cuda.Event(), torch.cuda.Event()
    source = torch.zeros(ROWS, ROWS, device="cuda")
    copied = torch.zeros(ROWS, ROWS, device="cuda")

    @eager_on_graph
    def copy_aside(y: torch.Tensor) -> None:
        other.wait_event(inside)
        with torch.cuda.stream(other):
            copied.copy_(y)
        inside.query()  # legal here: the event was recorded for real behind the segment; a captured one would raise

    def feed(value: torch.Tensor) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            source.copy_(value)
            outside.record()

    x = torch.randn(ROWS, ROWS, device="cuda")
    value = torch.randn(ROWS, ROWS, device="cuda")
    graph = BreakableCUDAGraph()
    feed(value)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        torch.cuda.current_stream().wait_event(outside)
        y = x + source
        inside.record()
        copy_aside(y)
        out = copied * 2
    text = str(graph.explain())
    assert "waits before it for an event, asked for at" in text
    assert "records an event behind it" in text
    for _ in range(20):
        x.copy_(torch.randn(ROWS, ROWS))
        value.copy_(torch.randn(ROWS, ROWS))
        feed(value)
        graph.replay()
        assert_same_bits(out, expected=(x + value) * 2)


@pytest.mark.parametrize("in_break", [False, True])
def test_a_wait_for_a_copy_stream_exists_at_every_replay(in_break: bool) -> None:
    """FAULT-O6: the capture stream waits for a stream that the caller, or a break, copies on: a real wait each time."""
    copies = torch.cuda.Stream()
    pinned = torch.randn(ROWS, ROWS).pin_memory()
    buffer = torch.zeros(ROWS, ROWS, device="cuda")

    def feed() -> None:
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            torch.cuda._sleep(CYCLES)
            buffer.copy_(pinned, non_blocking=True)

    feed_in_break = eager_on_graph(feed, name="feed")
    x = torch.randn(ROWS, ROWS, device="cuda")
    graph = BreakableCUDAGraph()
    if not in_break:
        feed()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        y = x * 2
        if in_break:
            feed_in_break()
        torch.cuda.current_stream().wait_stream(copies)
        out = y + buffer
    for _ in range(20):
        x.copy_(torch.randn(ROWS, ROWS))
        torch.cuda.synchronize()
        pinned.copy_(torch.randn(ROWS, ROWS))
        if not in_break:
            feed()
        graph.replay()
        assert_same_bits(out, expected=x * 2 + pinned.cuda())


def test_a_stream_that_never_joins_is_refused_with_its_line() -> None:
    """FAULT-O6: a copy in a segment on a stream outside the capture would run once; the next capture works."""
    copies = torch.cuda.Stream()
    pinned = torch.randn(ROWS, ROWS).pin_memory()
    buffer = torch.zeros(ROWS, ROWS, device="cuda")
    pool = GraphPool()
    x = torch.ones(ROWS, ROWS, device="cuda")
    caller = torch.cuda.current_stream()
    graph = BreakableCUDAGraph()
    with pytest.raises(StreamJoinError, match="test_cuda_streams.py"), BreakableCUDAGraphCapture(graph, pool=pool):
        x * 2
        with torch.cuda.stream(copies):
            buffer.copy_(pinned, non_blocking=True)
    with pytest.raises(StreamJoinError, match="test_cuda_streams.py"), BreakableCUDAGraphCapture(graph, pool=pool):
        x * 2
        with copies:
            buffer.copy_(pinned, non_blocking=True)
    assert torch.cuda.current_stream() == caller
    with BreakableCUDAGraphCapture(graph, pool=pool):
        out = x * 3
    graph.replay()
    assert out.eq(3).all()


def test_the_users_exception_on_a_side_stream_comes_first() -> None:
    """FAULT-E1: a ValueError raised on a stream outside the capture is what the caller sees, and all is put back."""
    before, caller = hooked_methods(), torch.cuda.current_stream()
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    for forked in (True, False):
        with pytest.raises(ValueError, match="mine"), BreakableCUDAGraphCapture(BreakableCUDAGraph()):
            x * 2
            if forked:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                raise ValueError("mine")
    assert (hooked_methods(), torch.cuda.current_stream()) == (before, caller)


def test_a_stream_left_current_by_a_failed_body_is_put_back() -> None:
    """FAULT-E1: the body sets another stream and raises without setting it back; the caller's stream is current again."""
    caller = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with pytest.raises(ValueError, match="mine"), BreakableCUDAGraphCapture(BreakableCUDAGraph()):
        torch.ones(4, device="cuda") * 2
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        raise ValueError("mine")
    assert torch.cuda.current_stream() == caller


def _random_program(seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that forks, joins, breaks and works at random places, decided by the seed alone."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        rng = random.Random(seed)
        main = torch.cuda.current_stream()
        y = x + 0.5
        pending: list[tuple[torch.cuda.Stream, torch.Tensor, torch.cuda.Event | None]] = []
        for _ in range(rng.randrange(3, 10)):
            kind = rng.choice(["work", "break", "fork", "fork", "join", "join"])
            if kind == "work":
                y = torch.tanh(y @ y.T) + y * 0.5
            elif kind == "break":
                y = host_scale(y) + 0.1
            elif kind == "fork":
                side = STREAMS[rng.randrange(len(STREAMS))]
                if rng.random() < 0.5:
                    side.wait_stream(main)
                else:
                    side.wait_event(main.record_event())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(CYCLES // 3)
                    z = y * rng.random() + 1
                    z.record_stream(main)
                    event = side.record_event() if rng.random() < 0.5 else None
                pending.append((side, z, event))
            elif pending:
                side, z, event = pending.pop(rng.randrange(len(pending)))
                if event is None:
                    main.wait_stream(side)
                else:
                    event.wait(main)
                y = y + z
        return y * 2

    return forward


STREAMS: list[torch.cuda.Stream] = []


def test_two_hundred_random_programs_with_side_streams() -> None:
    """Fork and join by stream or event, across breaks or never joined, a sleep on the side: 20 replays equal eager."""
    STREAMS[:] = [torch.cuda.Stream() for _ in range(3)]
    for seed in range(200):
        forward = _random_program(seed)
        x = torch.randn(ROWS, ROWS, device="cuda")
        graph, pool = BreakableCUDAGraph(), GraphPool()
        with torch.no_grad():
            with pool.on_capture_stream():
                forward(x)  # warm-up: cuBLAS makes its handle for a stream when it first meets it
            with BreakableCUDAGraphCapture(graph, pool=pool):
                out = forward(x)
            x.copy_(torch.randn(ROWS, ROWS))
            expected = forward(x.clone())
            torch.cuda.synchronize()
            for round_ in range(20):
                out.fill_(float("nan"))
                graph.replay()
                assert_same_bits(out, expected=expected, what=f"program {seed}, replay {round_}")
        graph.reset()


def test_arguments_by_name_are_understood() -> None:
    """The hooked methods take what torch's take: `stream=` and `event=` by name, in threads without a capture as well."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.cuda.Event()

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(stream=main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            z = y * 2
            event.record(stream=side)
        main.wait_event(event=event)
        return z + y

    check(forward)
    with torch.no_grad(), BreakableCUDAGraphCapture(BreakableCUDAGraph()):
        torch.ones(2, device="cuda") + 1
        thread = threading.Thread(target=lambda: other.wait_stream(stream=side))
        thread.start()
        thread.join()
        with pytest.raises(TypeError):
            side.wait_stream(steam=other)  # type: ignore[call-arg]


@pytest.mark.parametrize("split", ["break", "break_graph"])
def test_a_break_while_a_side_stream_is_current(split: str) -> None:
    """FAULT-O1: the segment ends where it began; the break runs on the capture stream, the model goes on with its own."""
    side = torch.cuda.Stream()
    seen: list[bool] = []

    @eager_on_graph
    def scale(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.cuda.current_stream() == side)
        return x * float(torch.tanh(x.abs().max()).item())

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            z = y * 2
            if split == "break":
                z = scale(z)
            else:
                break_graph()
            assert torch.cuda.current_stream() == side
            torch.cuda._sleep(CYCLES)
            z = z + 1
        main.wait_stream(side)
        return z + y

    graph = check(forward)
    assert len(graph.segments) == 2
    if split == "break":
        assert seen.count(True) == 21  # eager steps run it on the model's stream; the capture and replays do not


def test_a_break_on_a_stream_outside_the_capture_is_refused() -> None:
    """FAULT-O6: a segment that ends while a stream that never joined is current is refused with the line of the stream."""
    side = torch.cuda.Stream()
    pool, graph = GraphPool(), BreakableCUDAGraph()
    x = torch.ones(ROWS, ROWS, device="cuda")
    caller = torch.cuda.current_stream()
    with (
        torch.no_grad(),
        pytest.raises(StreamJoinError, match=r"made current in a segment at .*test_cuda_streams.py:\d+"),
        BreakableCUDAGraphCapture(graph, pool=pool),
        torch.cuda.stream(side),
    ):
        host_scale(x)
    assert torch.cuda.current_stream() == caller
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, pool=pool):
        out = host_scale(x * 2)
    graph.replay()
    assert_same_bits(out, expected=host_scale(x * 2))


def test_an_unjoined_stream_is_refused_while_an_exception_is_handled() -> None:
    """FAULT-O6: inside an `except` block nothing is on its way out, so the refusal stands."""
    side = torch.cuda.Stream()
    x = torch.ones(ROWS, ROWS, device="cuda")
    with torch.no_grad(), pytest.raises(StreamJoinError), BreakableCUDAGraphCapture(BreakableCUDAGraph()):
        y = x + 1
        try:
            raise KeyError("handled")
        except KeyError:
            with torch.cuda.stream(side):
                y = y * 2


def test_nested_streams_may_join_before_they_are_left() -> None:
    """A stream entered inside another is judged when the capture's own stream is current again."""
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(x: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        with torch.cuda.stream(first):
            with torch.cuda.stream(second):
                second.wait_stream(main)
                first.wait_stream(main)
                torch.cuda._sleep(CYCLES)
                z = y * 2
            first.wait_stream(second)
            torch.cuda._sleep(CYCLES)
            z = z + 1
        main.wait_stream(first)
        return host_scale(z) + y

    check(forward)
