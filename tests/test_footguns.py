"""What the package cannot see: each row of docs/footguns.md that has no refusal has its test here, so that it stays true."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphKey, GraphPool, StaticInput, eager_on_graph
from breakgraph.decode_runner import Example
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad
from tests.runner_models import SLOTS, DecodeRig


def test_a_returned_tensor_that_was_not_an_argument_is_a_copy() -> None:
    """A break that returns a buffer of its module hands the model a bridge: later writes to either are not shared."""
    buffer = torch.zeros(4)

    @eager_on_graph
    def get() -> torch.Tensor:
        return buffer

    @eager_on_graph
    def get_given(x: torch.Tensor) -> torch.Tensor:
        return x

    x = torch.ones(4)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        get().add_(x)
        get_given(buffer).add_(x * 10)  # what is passed in stays in place
    assert buffer.tolist() == [10.0] * 4
    graph.replay()
    assert buffer.tolist() == [20.0] * 4


def test_results_of_a_graph_end_with_the_next_replay_of_its_pool() -> None:
    """The next replay overwrites a result; a capture leaves alone what is still held."""
    pool = GraphPool(backend="emulated")

    @eager_on_graph
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(4)
    first, second = BreakableCUDAGraph(), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(first, pool=pool):
        bridge = double(x + 1)
    with BreakableCUDAGraphCapture(second, pool=pool):
        double(x * 10) + 0
    assert bridge.tolist() == [4.0] * 4
    x.fill_(2)
    first.replay()
    assert bridge.tolist() == [6.0] * 4


def test_a_changeable_object_is_handed_over_as_it_is() -> None:
    """A replay sees the fields of a changeable object as they are then, and of a frozen one as they were at the call."""

    @dataclasses.dataclass
    class Changeable:
        scale: float

    @dataclasses.dataclass(frozen=True)
    class Frozen:
        parts: list[float]

    @eager_on_graph
    def scaled(x: torch.Tensor, by: Any) -> torch.Tensor:
        return x * (by.scale if isinstance(by, Changeable) else sum(by.parts))

    changeable, frozen = Changeable(3.0), Frozen([1.0, 2.0])
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"):
        ones = torch.ones(2)
        first, second = scaled(ones, changeable), scaled(ones, frozen)
        out = first * second
        frozen.parts.append(7.0)
    graph.replay()
    assert out.tolist() == [9.0] * 2
    changeable.scale = 5.0
    graph.replay()
    assert out.tolist() == [15.0] * 2


def test_context_managers_of_the_model_are_not_in_force_in_replayed_breaks() -> None:
    """Grad, inference and autocast modes are kept; any other setting that the forward makes around a break is not."""
    setting = ["default"]
    seen: list[str] = []

    @contextmanager
    def set_to(value: str) -> Iterator[None]:
        setting[0] = value
        yield
        setting[0] = "default"

    @eager_on_graph
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(setting[0])
        return x * 1

    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated"), set_to("mine"):
        look(torch.ones(2) + 1) * 2
    graph.replay()
    assert seen == ["mine", "default"]


def test_two_hoisted_breaks_over_one_workspace_leave_the_last_values() -> None:
    """Both run before the first segment at a replay, though the forward reads the workspace between them."""
    workspace = torch.zeros(4)

    @eager_on_graph(hoist=True, live=("n",))
    def plan(target: torch.Tensor, n: float) -> None:
        target.fill_(n)

    @eager_on_graph(hoist=True, live={"n": "m"})
    def plan_again(target: torch.Tensor, n: float) -> None:
        target.fill_(n)

    x = torch.zeros(4)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, backend="emulated", live={"n": 1.0, "m": 2.0}):
        plan(workspace, 1.0)
        y = x + workspace
        plan_again(workspace, 2.0)
        out = y * 100 + workspace
    assert out.tolist() == [102.0] * 4
    graph.replay(live={"n": 3.0, "m": 4.0})
    assert out.tolist() == [404.0] * 4  # eager would give 304


def test_index_inputs_padded_with_zero_write_to_row_zero() -> None:
    """Padding by the default fills row numbers with zero: a live request in row 0 is written; keep_out leaves it alone."""
    for pad, untouched in ((Pad.zero(), False), (Pad.keep_out(SLOTS - 1), True)):
        last_token = torch.full((SLOTS,), 5)
        inputs = [
            StaticInput("last_token", source="device", buffer=last_token),
            StaticInput("rows", shape=(REQUESTS,), pad=pad),
            StaticInput("positions", shape=(TOKENS,), dtype=torch.int32),
        ]
        rig = DecodeRig(torch.device("cpu"), inputs=inputs)
        rig.capture()
        last_token.fill_(5)
        step = {"rows": torch.tensor([1, 2, 3]), "positions": torch.zeros(3, dtype=torch.int32)}
        assert rig.runner.run(step, key=GraphKey(3)).replayed
        assert (int(last_token[0]) == 5) is untouched


def test_the_key_decides_and_not_a_live_flag() -> None:
    """A replay computes what its key's graph holds, whatever a live flag says; an eager step follows the flag."""

    def forward(rows: torch.Tensor, greedy: bool) -> torch.Tensor:
        return rows * (1 if greedy else 2)

    ticks = itertools.count(1)
    rig = DecodeRig(
        torch.device("cpu"),
        sizes=(4,),
        keys=GraphKey.product([4], is_all_greedy_sample=(False, True)),
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example(
            {"rows": torch.full((key.batch_size,), next(ticks))}, {"greedy": key.is_all_greedy_sample}
        ),
    )
    rig.capture()
    step, key = {"rows": torch.ones(3, dtype=torch.int64)}, GraphKey(3)
    assert rig.runner.run(step, key=key, live={"greedy": True}).output.tolist() == [2] * 3
    with rig.runner.suspend():
        assert rig.runner.run(step, key=key, live={"greedy": True}).output.tolist() == [1] * 3


def test_what_the_device_advances_it_advances_for_padding_too() -> None:
    """A length that forward itself counts up grows for the padding request at every padded step."""
    lengths = torch.zeros(SLOTS, dtype=torch.int64)

    def forward(lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        lengths.index_copy_(0, rows, lengths.index_select(0, rows) + 1)
        return lengths.index_select(0, rows)

    rig = DecodeRig(
        torch.device("cpu"),
        sizes=(4,),
        forward=forward,
        inputs=[
            StaticInput("lengths", source="device", buffer=lengths),
            StaticInput("rows", shape=(REQUESTS,), pad=Pad.keep_out(0)),
        ],
        example=lambda key: Example({"rows": torch.randperm(SLOTS - 1)[: key.batch_size] + 1}),
    )
    rig.capture()
    for _ in range(5):
        rig.runner.run({"rows": torch.tensor([1, 2, 3])}, key=GraphKey(3))
    assert lengths[:4].tolist() == [5, 5, 5, 5]


def test_an_eager_step_of_an_idle_rank_has_no_rows() -> None:
    """GraphKey(0) replays with padding rows only; run eagerly, forward gets tensors without rows."""
    seen: list[int] = []

    def forward(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows + 1

    ticks = itertools.count(1)
    rig = DecodeRig(
        torch.device("cpu"),
        sizes=(4,),
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}),
    )
    rig.capture()
    empty = {"rows": torch.zeros(0, dtype=torch.int64)}
    assert rig.runner.run(empty, key=GraphKey(0)).output.shape == (0,)
    assert 0 not in seen
    with rig.runner.suspend():
        assert rig.runner.run(empty, key=GraphKey(0)).output.shape == (0,)
    assert seen[-1] == 0


def test_a_break_that_keeps_what_a_segment_made_keeps_one_buffer() -> None:
    """A break that appends its argument to a list has the same memory at every replay; a clone is its own."""
    kept: list[torch.Tensor] = []
    cloned: list[torch.Tensor] = []

    @eager_on_graph
    def remember(k: torch.Tensor) -> None:
        kept.append(k)
        cloned.append(k.clone())

    x = torch.zeros(2)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="emulated"):
        remember(x + 1)
    kept.clear()
    cloned.clear()
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
    assert [float(one[0]) for one in kept] == [3.0, 3.0]
    assert [float(one[0]) for one in cloned] == [2.0, 3.0]
