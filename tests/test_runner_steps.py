"""Between the halves of a step: what a launch may still change, and what it refuses."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest
import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.buckets import Buckets
from breakgraph.errors import ConcurrentReplayError, ConfigError, LiveDataError, NoGraphError, ReplayError
from breakgraph.graph_key import GraphKey, PrefillKey
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.static_buffers import TOKENS, StaticInput
from breakgraph.statistics import Reason
from tests.runner_models import SLOTS, DecodeRig, Meta, PrefillRig
from tests.test_decode_runner import Dummies, rows_and_positions


@pytest.fixture
def rig(device: torch.device) -> PrefillRig:
    """A captured runner with buckets 4, 8 and 16."""
    rig = PrefillRig(device)
    rig.capture()
    assert not rig.runner.dropped
    return rig


def tiny(device: torch.device, forward: Any, **options: Any) -> PrefillRunner:
    """A captured runner of one float input and bucket 4."""
    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("ids", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of([4]),
        example=lambda key: Example({"ids": torch.randn(key.tokens)}),
        device=device,
        **options,
    )
    with runner.capture_window():
        runner.capture()
    return runner


def ids(value: float) -> dict[str, torch.Tensor]:
    """Four rows of one value."""
    return {"ids": torch.full((4,), float(value))}


# A launch that is refused changes nothing.


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_refused_launch_leaves_the_running_replay_alone(device: torch.device, verify: str) -> None:
    """FAULT-R5, REQ-E8: a launch refused since another thread replays has written no static buffer and run no hook."""
    entered, go = threading.Event(), threading.Event()
    armed: list[int] = []
    hooked: list[str] = []
    got: dict[str, torch.Tensor] = {}

    @eager_on_graph
    def wait(x: torch.Tensor) -> torch.Tensor:
        if armed and threading.current_thread().name == "first":
            entered.set()
            assert go.wait(20)
        return x * 1

    runner = tiny(
        device,
        lambda ids: wait(ids * 0) + ids * 2,
        verify=verify,
        hooks=[lambda key, live: hooked.append(threading.current_thread().name)],
    )
    armed.append(1)
    hooked.clear()
    first = threading.Thread(target=lambda: got.update(first=runner.run(ids(1), size=4).output.clone()), name="first")
    first.start()
    assert entered.wait(20)
    try:
        prepared = runner.prepare(ids(100), size=4)
        with pytest.raises(ConcurrentReplayError):
            runner.launch(prepared)
    finally:
        go.set()
        first.join(20)
    assert set(hooked) == {"first"}
    assert got["first"].tolist() == [2.0] * 4
    assert runner.launch(prepared).output.tolist() == [200.0] * 4


def test_hooks_run_while_the_pool_is_held(device: torch.device) -> None:
    """REQ-E5: a hook runs after the copy-in of its step and before the first segment, with the pool taken."""
    seen = []
    holder: list[PrefillRunner] = []

    def hook(key: Any, live: Any) -> None:
        if holder:
            arena = holder[0]._graphs.builder.stage.arena
            seen.append((arena[:16].view(torch.float32).tolist(), holder[0].pool._lock.locked()))

    runner = tiny(device, lambda ids: ids * 2, hooks=[hook])
    holder.append(runner)
    assert runner.run(ids(3), size=4).output.tolist() == [6.0] * 4
    assert seen == [([3.0] * 4, True)]


def test_the_live_mapping_is_copied(rig: PrefillRig) -> None:
    """REQ-E8, FAULT-F1: a caller that refills one dict for step n+1 has not changed step n, graph or eager."""
    for size, padded in ((5, 8), (20, 20)):
        inputs, live = rig.step(size)
        expected = rig.twin(inputs, live, padded=padded)
        prepared = rig.runner.prepare(inputs, size=size, live=live)
        live["meta"] = Meta(factor=1000.0, lengths=[size])
        assert torch.equal(rig.runner.launch(prepared).output, expected)


# Steps whose graph is not there any more.


def test_a_step_of_another_runner_is_refused(device: torch.device) -> None:
    """REQ-E8: launching what another runner prepared is an error, for a graph and for an eager step."""
    double, triple = (tiny(device, forward) for forward in (lambda ids: ids * 2, lambda ids: ids * 3))
    for inputs, size in ((ids(100), 4), ({"ids": torch.ones(5)}, 5)):
        prepared = double.prepare(inputs, size=size)
        with pytest.raises(ReplayError, match="another runner prepared") as caught:
            triple.launch(prepared)
        assert caught.value.why
        assert caught.value.fix
    assert double.launch(double.prepare(ids(100), size=4)).output.tolist() == [200.0] * 4


def test_a_step_from_before_clear_is_refused(device: torch.device) -> None:
    """REQ-D6: clear() frees what a prepared step's graph reads, so its launch is an error; an eager step still runs."""
    runner = tiny(device, lambda ids: ids * 2)
    graph, eager = runner.prepare(ids(1), size=4), runner.prepare({"ids": torch.ones(5)}, size=5)
    runner.clear()
    with pytest.raises(ReplayError, match=r"before clear\(\)"):
        runner.launch(graph)
    assert runner.launch(eager).output.tolist() == [2.0] * 5
    with runner.capture_window():
        runner.capture()
    with pytest.raises(ReplayError, match=r"before clear\(\)"):
        runner.launch(graph)


def test_a_step_whose_graph_was_dropped_meanwhile_runs_eagerly(device: torch.device) -> None:
    """REQ-E9, FAULT-R4: two steps ahead, the first drops the graph: the second is right, eager, counted as DROPPED."""
    factor = [2.0]
    runner = tiny(device, lambda ids: ids * factor[0], verify="always")
    factor[0] = 3.0
    first, second = runner.prepare(ids(1), size=4), runner.prepare({"ids": torch.full((3,), 5.0)}, size=3)
    assert runner.launch(first).output.tolist() == [3.0] * 4
    result = runner.launch(second)
    assert (result.replayed, result.reason) == (False, Reason.DROPPED)
    assert "differs from eager" in result.detail
    assert result.output.tolist() == [15.0] * 3
    assert runner.statistics.eager == {"DROPPED": 2}


def test_fallback_error_holds_for_a_graph_dropped_meanwhile(device: torch.device) -> None:
    """REQ-E9: with fallback="error" such a step is a NoGraphError as well."""
    factor = [2.0]
    runner = tiny(device, lambda ids: ids * factor[0], verify="always", fallback="error")
    factor[0] = 3.0
    first, second = runner.prepare(ids(1), size=4), runner.prepare(ids(5), size=4)
    for prepared in (first, second):
        with pytest.raises(NoGraphError, match="(?i)dropped"):
            runner.launch(prepared)


def test_suspend_holds_for_steps_that_are_launched_inside(rig: PrefillRig) -> None:
    """REQ-B, REQ-E9: a step prepared for a graph and launched inside suspend() runs eagerly, with the same numbers."""
    inputs, live = rig.step(5)
    expected = rig.twin(inputs, live, padded=8)
    prepared = rig.runner.prepare(inputs, size=5, live=live)
    with rig.runner.suspend(Reason.RANK_DISAGREEMENT):
        result = rig.runner.launch(prepared)
    assert (result.replayed, result.reason) == (False, Reason.RANK_DISAGREEMENT)
    assert torch.equal(result.output, expected)
    assert rig.runner.statistics.replays == 0


# Options that cost or change something at each step.


def test_verify_always_runs_each_break_three_times(device: torch.device) -> None:
    """verify="always" is for debugging: a step runs its breaks in a replay, in the eager twin, and in what it returns."""
    calls: list[int] = []

    @eager_on_graph
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 1

    runner = tiny(device, lambda ids: count(ids * 2) + 1, verify="always")
    calls.clear()
    assert runner.run(ids(1), size=4).output.tolist() == [3.0] * 4
    assert len(calls) == 3
    assert (runner.statistics.compared, runner.statistics.replays) == (1, 1)


def test_verify_always_finds_rows_that_nobody_wrote(device: torch.device) -> None:
    """verify="always": a padded step whose break leaves rows as they were is found, where no padded step was proven."""

    @eager_on_graph(rows=("x", "out"))
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        x = ids[:, None].expand(-1, 2) * 1.0
        out = torch.empty_like(x)
        fill(x, out)
        return out.sum(0, keepdim=True) + x

    def example(key: PrefillKey) -> Example:
        if key.tokens < 4:
            raise LookupError("so that no padded step is proven at capture")
        return Example({"ids": torch.randn(key.tokens)})

    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("ids", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of([4]),
        example=example,
        device=device,
        verify="always",
        measure="never",
    )
    with runner.capture_window():
        runner.capture()
    assert not runner.dropped
    step = {"ids": torch.ones(2)}
    assert not runner.run(step, size=2).replayed
    assert "differs from eager" in runner.dropped[PrefillKey(4)]


def test_autocast_of_the_capture_is_not_that_of_an_eager_step(device: torch.device) -> None:
    """FAULT-E8: modes around capture() are those of replays; an eager step runs in the modes of its caller."""
    weight = torch.randn(4, 4, device=device)
    forward = lambda ids: ids.new_ones(len(ids), 4) @ weight  # noqa: E731
    with torch.autocast(device.type, dtype=torch.bfloat16):
        runner = tiny(device, forward)
        assert not runner.dropped
    assert runner.run(ids(1), size=4).output.dtype is torch.bfloat16
    with runner.suspend():
        assert runner.run(ids(1), size=4).output.dtype is torch.float32


# Padding requests.


def test_a_padding_request_given_back_is_not_written(device: torch.device) -> None:
    """REQ-C5, FAULT-P10: a step padded with a request that was given back since is refused and has written nothing."""
    dummies = Dummies(free=2)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    for give_back in (rig.runner.release_dummies, lambda: rig.runner.suspend_dummies().__enter__()):
        padded = rig.runner.prepare(rows_and_positions([1, 2, 3], [0, 0, 0]), key=GraphKey(3))
        full = rig.runner.prepare(rows_and_positions([1, 2], [0, 0]), key=GraphKey(2))
        assert padded.replays
        give_back()
        before = rig.last_token.clone()
        with pytest.raises(ReplayError, match="padding request was given back"):
            rig.runner.launch(padded)
        assert torch.equal(rig.last_token, before)
        assert rig.runner.launch(full).replayed


def test_clear_keeps_padding_requests(device: torch.device) -> None:
    """REQ-C4: clear() keeps padding requests for the next capture; release_dummies() gives them back."""
    dummies = Dummies(free=2)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    rig.runner.clear()
    assert dummies.free == 1
    rig.runner.release_dummies()
    assert dummies.free == 2


ONE_ROW = torch.tensor([1])


@pytest.mark.parametrize(
    ("rows", "draft_len", "message"),
    [
        ({"row": ONE_ROW}, 0, r"rows for 'row'; inputs with a symbolic axis are \['positions', 'rows'\]"),
        ({"last_token": ONE_ROW}, 0, "rows for 'last_token'"),
        ({"rows": [1]}, 0, "a list for 'rows'"),
        (
            {"rows": torch.tensor([1, 2])},
            0,
            r"shape \(2,\), torch.int64 for 'rows'; one request has \(1,\), torch.int64",
        ),
        ({"rows": torch.tensor(1)}, 0, r"shape \(\), torch.int64 for 'rows'"),
        (
            {"rows": torch.tensor([1], dtype=torch.int32)},
            0,
            r"torch.int32 for 'rows'; one request has \(1,\), torch.int64",
        ),
        ({"rows": torch.empty(1, dtype=torch.int64, device="meta")}, 0, "expected a dense tensor"),
        (
            {"positions": torch.tensor([1], dtype=torch.int32)},
            2,
            r"shape \(1,\).* for 'positions'; one request has \(3,\)",
        ),
        ([ONE_ROW], 0, "a list; expected a mapping"),
    ],
)
def test_rows_of_a_padding_request_are_held_to_the_inputs(
    device: torch.device, rows: Any, draft_len: int, message: str
) -> None:
    """REQ-C2, REQ-C6: rows that would be left out, broadcast or misaligned are refused as they are taken, and given back."""

    class Odd(Dummies):
        def allocate(self, *, draft_len: int) -> Any:
            super().allocate(draft_len=draft_len)
            return rows

    dummies = Odd(free=2, token_row=SLOTS - 1)
    keys = GraphKey.product([1, 2, 4, 8], draft_len=(draft_len,))
    rig = DecodeRig(device, keys=keys, dummies=dummies)
    with pytest.raises(ConfigError, match=message):
        rig.capture()
    assert dummies.free == 2


@pytest.mark.parametrize("dummies", [object(), Dummies])
def test_a_provider_can_give_and_take_back(dummies: Any) -> None:
    """What has no allocate and release, or is a class and no object, is refused before anything is captured."""
    with pytest.raises(ConfigError, match="dummies=.*expected an object with allocate"):
        DecodeRig(torch.device("cpu"), dummies=dummies)


def test_two_threads_take_one_padding_request(device: torch.device) -> None:
    """REQ-C5, FAULT-P8: two threads that prepare while there is none allocate one between them, and lose none."""

    class Slow(Dummies):
        def allocate(self, *, draft_len: int) -> Any:
            time.sleep(0.05)
            return super().allocate(draft_len=draft_len)

    dummies = Slow(free=3)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    rig.runner.release_dummies()
    inputs = {"rows": torch.tensor([1, 2, 3]), "positions": torch.zeros(3, dtype=torch.int32)}
    threads = [threading.Thread(target=lambda: rig.runner.prepare(inputs, key=GraphKey(3))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dummies.free == 2
    rig.runner.release_dummies()
    assert dummies.free == 3


def test_blocks_that_move_during_prepare_are_noticed(device: torch.device) -> None:
    """REQ-C5, FAULT-P2: a padding request that moves while another thread prepares is not written where it was."""
    planning, moved = threading.Event(), threading.Event()

    def plan(key: GraphKey, live: Any, rows: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            planning.set()
            moved.wait(5)

    rig = DecodeRig(device, dummies=Dummies(free=2), plan=plan)
    rig.capture()
    inputs = {"rows": torch.tensor([1, 2, 3]), "positions": torch.zeros(3, dtype=torch.int32)}
    steps: list[Any] = []
    thread = threading.Thread(target=lambda: steps.append(rig.runner.prepare(inputs, key=GraphKey(3))))
    thread.start()
    planning.wait(5)
    with rig.runner.suspend_dummies():
        pass
    moved.set()
    thread.join()
    with pytest.raises(ReplayError, match="padding request was given back"):
        rig.runner.launch(steps[0])


def test_a_step_is_launched_once(device: torch.device) -> None:
    """REQ-E3: a prepared step that is launched again would go on from its own result: refused, replayed or eager."""
    rig = DecodeRig(device)
    inputs = {"rows": torch.tensor([1, 2]), "positions": torch.zeros(2, dtype=torch.int32)}
    for capture in (False, True):
        if capture:
            rig.capture()
        prepared = rig.runner.prepare(inputs, key=GraphKey(2))
        assert rig.runner.launch(prepared).replayed is capture
        with pytest.raises(ReplayError, match="launched twice"):
            rig.runner.launch(prepared)
    with pytest.raises(ConfigError, match="launch\\(\\) got a Result; expected what prepare"):
        rig.runner.launch(rig.runner.run(inputs, key=GraphKey(2)))  # type: ignore[arg-type]


# Live data.


@pytest.mark.parametrize("size", [4, 5])
def test_names_of_live_data_are_held_to_forward(device: torch.device, size: int) -> None:
    """FAULT-F1, REQ-E9: a missing or unknown name is a LiveDataError before anything runs, in graph and eager steps."""
    runner = PrefillRunner(
        lambda ids, factor, bias=0.0: ids * factor + bias,
        inputs=[StaticInput("ids", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of([4]),
        example=lambda key: Example({"ids": torch.randn(key.tokens)}, {"factor": 2.0}),
        device=device,
        verify="never",
    )
    with runner.capture_window():
        runner.capture()
    inputs = {"ids": torch.ones(size)}
    with pytest.raises(LiveDataError, match=r"missing \['factor'\]"):
        runner.prepare(inputs, size=size)
    with pytest.raises(LiveDataError, match=r"unknown names \['zz'\]; forward takes \['bias', 'factor'\]"):
        runner.prepare(inputs, size=size, live={"factor": 2.0, "zz": 1})
    with pytest.raises(LiveDataError, match="is a list; expected a mapping"):
        runner.prepare(inputs, size=size, live=["factor"])  # type: ignore[arg-type]
    assert runner.run(inputs, size=size, live={"factor": 2.0}).output.tolist() == [2.0] * size


def test_a_wrapper_may_add_live_arguments_of_its_own(device: torch.device) -> None:
    """A forward behind functools.wraps is held to the wrapper's parameters, not to those of what it wraps."""

    def inner(ids: torch.Tensor, scale: float) -> torch.Tensor:
        return ids * scale

    @functools.wraps(inner)
    def forward(ids: torch.Tensor) -> torch.Tensor:
        return inner(ids, 3.0)

    runner = tiny(device, forward)
    assert runner.run(ids(1), size=4).output.tolist() == [3.0] * 4
    with pytest.raises(LiveDataError, match="unknown names"):
        runner.run(ids(1), size=4, live={"scale": 2.0})
