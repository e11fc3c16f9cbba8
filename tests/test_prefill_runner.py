"""PrefillRunner: replays of every size equal eager, inputs are strict, results are views of one arena."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import ConfigError, ReplayError, StaticInputError
from breakgraph.graph_key import PrefillKey
from breakgraph.prefill_runner import Example
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput
from breakgraph.statistics import Reason
from tests.runner_models import SLOTS, WIDTH, PrefillRig


@pytest.fixture
def rig(device: torch.device) -> PrefillRig:
    """A captured runner with buckets 4, 8 and 16."""
    rig = PrefillRig(device)
    rig.capture()
    assert not rig.runner.dropped
    return rig


# Replays.


def test_every_size_equals_its_eager_twin(rig: PrefillRig) -> None:
    """REQ-H5, FAULT-P7: for each real size up to the largest bucket, real rows are bit-equal to eager at that shape."""
    for size in range(1, 17):
        inputs, live = rig.step(size)
        padded = rig.runner.buckets.round_up(size)
        assert padded is not None
        expected = rig.twin(inputs, live, padded=padded)
        result = rig.runner.run(inputs, size=size, live=live)
        assert result.replayed
        assert result.key == PrefillKey(padded)
        assert torch.equal(result.output, expected)
    assert rig.runner.statistics.replays == 16
    assert not rig.runner.statistics.eager


def test_replay_is_close_to_eager_at_the_real_size(rig: PrefillRig) -> None:
    """FAULT-P7: without padding the numbers differ at most by the rounding of another shape."""
    for size in (1, 5, 16):
        inputs, live = rig.step(size)
        with rig.runner.suspend():
            eager = rig.runner.run(inputs, size=size, live=live)
        assert eager.reason is Reason.DISABLED
        torch.testing.assert_close(rig.runner.run(inputs, size=size, live=live).output, eager.output)


def test_breaks_see_real_rows_and_padded_counts(rig: PrefillRig) -> None:
    """REQ-H4, FAULT-F1: a break receives the step's own live data and rows, and knows the padded rows as well."""
    inputs, live = rig.step(5)
    rig.model.seen.clear()
    rig.runner.run(inputs, size=5, live=live)
    assert rig.model.seen == [(5, 8, 5)]


def test_padded_rows_write_the_null_slot_only(rig: PrefillRig) -> None:
    """REQ-H5, FAULT-P2: after a padded replay only the real slots and the null slot have changed."""
    inputs, live = rig.step(5)
    rig.model.cache.fill_(3.0)
    rig.runner.run(inputs, size=5, live=live)
    changed = (rig.model.cache != 3.0).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) == {0, *inputs["slots"].tolist()}


def test_nothing_of_an_earlier_step_is_read(rig: PrefillRig) -> None:
    """REQ-C8, FAULT-P3, FAULT-P4: whatever the static buffers held before, a replay reads this step's data only."""
    inputs, live = rig.step(5)
    expected = rig.runner.run(inputs, size=5, live=live).output.clone()
    rig.runner._graphs.builder.stage.arena.fill_(0x7F)
    rig.model.cache.fill_(math.nan)
    assert torch.equal(rig.runner.run(inputs, size=5, live=live).output, expected)


def test_unwritten_rows_of_a_break_are_zero(device: torch.device) -> None:
    """FAULT-P1: a break fills the real rows of an empty tensor; a matmul over rows afterwards sees zeros in the rest."""

    @eager_on_graph(rows=("x", "out"), writes=("out",))
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x).fill_(math.nan)
        fill(x, out)
        return torch.ones(len(x), len(x), device=device) @ out

    rig = PrefillRig(
        device,
        forward=forward,
        inputs=[StaticInput("x", shape=(TOKENS, WIDTH), dtype=torch.float32)],
        example=lambda key: Example({"x": torch.randn(key.tokens, WIDTH)}),
        state=(),
        expect_breaks=1,
    )
    rig.capture()
    assert not rig.runner.dropped
    row = torch.randn(1, WIDTH)
    assert torch.equal(rig.runner.run({"x": row}, size=1).output.cpu(), row)


def test_results_share_one_arena(rig: PrefillRig) -> None:
    """REQ-E7, REQ-H9: each bucket returns views of its first rows of one memory; copy=True gives the caller its own."""
    small, live_small = rig.step(3)
    large, live_large = rig.step(16)
    first = rig.runner.run(large, size=16, live=live_large).output
    own = rig.runner.launch(rig.runner.prepare(small, size=3, live=live_small), copy=True).output
    kept = own.clone()
    second = rig.runner.run(small, size=3, live=live_small).output
    assert second.shape == (3, WIDTH)
    assert second.data_ptr() == first.data_ptr()
    rig.runner.run(large, size=16, live=live_large)
    assert torch.equal(own, kept)


def test_structured_results_are_cut_to_real_rows(device: torch.device) -> None:
    """REQ-H9: tuples, dicts and None keep their structure; every tensor is cut to the real rows."""

    def forward(x: torch.Tensor) -> dict[str, Any]:
        return {"pair": (x + 1, x.sum(-1)), "nothing": None}

    rig = PrefillRig(
        device,
        forward=forward,
        inputs=[StaticInput("x", shape=(TOKENS, WIDTH), dtype=torch.float32)],
        example=lambda key: Example({"x": torch.randn(key.tokens, WIDTH)}),
        state=(),
        expect_breaks=0,
    )
    rig.capture()
    x = torch.randn(3, WIDTH)
    output = rig.runner.run({"x": x}, size=3).output
    assert output["nothing"] is None
    assert torch.equal(output["pair"][0].cpu(), x + 1)
    assert output["pair"][1].shape == (3,)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x[:1].sum(), "rows or .* requests in front"),
        (lambda x: (x, 3), "returned a int at"),
        (lambda x: x.new_ones(3, 3), "shape .3, 3."),
    ],
)
def test_results_that_cannot_be_cut_drop_the_key(device: torch.device, result: Any, message: str) -> None:
    """REQ-C7: a result without a row axis in front would hand padding to the caller, so the graph is not made."""
    rig = PrefillRig(
        device,
        forward=result,
        inputs=[StaticInput("x", shape=(TOKENS, WIDTH), dtype=torch.float32)],
        example=lambda key: Example({"x": torch.randn(key.tokens, WIDTH)}),
        state=(),
        expect_breaks=None,
    )
    rig.capture()
    assert set(rig.runner.dropped) == {PrefillKey(size) for size in (4, 8, 16)}
    assert re.search(f"warm-up: CaptureError: .*{message}", rig.runner.dropped[PrefillKey(16)])


def test_one_step_ahead(rig: PrefillRig) -> None:
    """Prepare and launch are apart: step n+1 is prepared before step n is launched, and both are right."""
    steps = [rig.step(size) for size in (3, 7, 16, 2, 9)]
    expected = [
        rig.twin(inputs, live, padded=rig.runner.buckets.round_up(len(inputs["slots"])) or 0) for inputs, live in steps
    ]
    waiting = None
    results = []
    for inputs, live in steps:
        ahead = rig.runner.prepare(inputs, size=len(inputs["slots"]), live=live)
        inputs["x"].fill_(math.nan)
        if waiting is not None:
            results.append(rig.runner.launch(waiting, copy=True).output)
        waiting = ahead
    assert waiting is not None
    results.append(rig.runner.launch(waiting, copy=True).output)
    assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected, strict=True))


def test_a_step_that_waited_too_long_is_refused(rig: PrefillRig) -> None:
    """REQ-E8: the third prepared step takes the first one's slot; launching the first is an error, not stale data."""
    inputs, live = rig.step(4)
    first = rig.runner.prepare(inputs, size=4, live=live)
    for _ in range(2):
        rig.runner.prepare(inputs, size=4, live=live)
    with pytest.raises(ReplayError, match="two later steps"):
        rig.runner.launch(first)


def test_grad_and_inference_mode_of_the_caller_do_not_matter(device: torch.device) -> None:
    """FAULT-E8: captured in inference mode, replayed with grad on, and eager outside: equal and without history."""
    rig = PrefillRig(device)
    with torch.inference_mode():
        rig.capture()
    inputs, live = rig.step(5)
    expected = rig.twin(inputs, live, padded=8)
    output = rig.runner.run(inputs, size=5, live=live).output
    assert torch.equal(output, expected)
    assert not output.requires_grad
    assert not output.is_inference()


def test_real_number_of_requests_may_be_smaller(device: torch.device) -> None:
    """REQ-H2: an input per request is padded to max_requests; more than that is refused, naming the input."""

    def forward(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return x + starts.sum()

    rig = PrefillRig(
        device,
        forward=forward,
        inputs=[
            StaticInput("x", shape=(TOKENS,)),
            StaticInput("starts", shape=(REQUESTS + 1,), dtype=torch.int32, pad=Pad.repeat_last()),
        ],
        example=lambda key: Example(
            {"x": torch.randint(9, (key.tokens,)), "starts": torch.arange(5, dtype=torch.int32)}
        ),
        max_requests=4,
        state=(),
        expect_breaks=None,
    )
    rig.capture()
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    result = rig.runner.run({"x": torch.zeros(3, dtype=torch.int64), "starts": starts}, size=3)
    assert result.replayed
    assert result.output.tolist() == [0 + 1 + 3 + 3 + 3] * 3
    with pytest.raises(StaticInputError, match=r"'starts' of a prefill step.*5 requests"):
        rig.runner.run({"x": torch.zeros(3, dtype=torch.int64), "starts": torch.zeros(6, dtype=torch.int32)}, size=3)


# Strict inputs.


def test_inputs_are_strict_in_replays_and_eager_steps(rig: PrefillRig) -> None:
    """REQ-E1, REQ-E2, FAULT-P5: too short, too long, broadcastable, unknown, size 0: refused before anything runs."""
    inputs, live = rig.step(5)
    for size in (4, 6, 17):
        with pytest.raises(StaticInputError, match="'x' of PrefillRunner"):
            rig.runner.prepare(inputs, size=size, live=live)
    with pytest.raises(StaticInputError, match="size is 0"):
        rig.runner.prepare(inputs, size=0, live=live)
    with pytest.raises(StaticInputError, match="'slots' of PrefillRunner is missing"):
        rig.runner.prepare({"x": inputs["x"]}, size=5, live=live)
    assert rig.runner.statistics.replays == 0


@pytest.mark.parametrize("size", [3.0, "3", None, -1])
def test_a_size_is_an_integer(rig: PrefillRig, size: Any) -> None:
    """REQ-E1: a size that is no integer, or below 1, is refused before it reaches a key; a numpy integer is one."""
    inputs, live = rig.step(3)
    with pytest.raises(StaticInputError, match="expected an integer, 1 or more") as caught:
        rig.runner.prepare(inputs, size=size, live=live)
    assert caught.value.fix
    assert rig.runner.run(inputs, size=np.int64(3), live=live).replayed  # type: ignore[arg-type]


def test_inputs_and_extra_of_the_wrong_kind_are_refused(rig: PrefillRig) -> None:
    """REQ-E1, REQ-H1: no mapping of inputs, a sparse input, an extra that is not hashable: named, with a way out."""
    inputs, live = rig.step(3)
    with pytest.raises(StaticInputError, match="expected a mapping"):
        rig.runner.prepare(None, size=3, live=live)  # type: ignore[arg-type]
    with pytest.raises(StaticInputError, match="'x' of PrefillRunner has .*sparse"):
        rig.runner.prepare({**inputs, "x": inputs["x"].to_sparse()}, size=3, live=live)
    with pytest.raises(ConfigError, match="hashable"):
        rig.runner.prepare(inputs, size=3, live=live, extra=(("a", [1]),))  # type: ignore[arg-type]


def test_an_optional_input_takes_its_default(device: torch.device) -> None:
    """REQ-E3, REQ-H7, FAULT-P6: omitted, it is its default in replays and eager steps, not the value of the last step."""

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    rig = PrefillRig(
        device,
        forward=forward,
        inputs=[
            StaticInput("x", shape=(TOKENS,), dtype=torch.float32),
            StaticInput("scale", shape=(TOKENS,), dtype=torch.float32, default=2.0),
        ],
        example=lambda key: Example({"x": torch.randn(key.tokens)}),
        state=(),
        expect_breaks=None,
    )
    rig.capture()
    x = torch.ones(3)
    assert rig.runner.run({"x": x, "scale": torch.full((3,), 5.0)}, size=3).output.tolist() == [5.0] * 3
    assert rig.runner.run({"x": x}, size=3).output.tolist() == [2.0] * 3
    assert rig.runner.run({"x": torch.ones(17)}, size=17).output.tolist() == [2.0] * 17


# Plan and hooks.


def test_plan_and_hooks_are_called_in_their_places(device: torch.device) -> None:
    """REQ-E5: plan runs in prepare with key and padded rows; hooks run in launch, after the copy-in, for replays only."""
    calls: list[tuple[str, int, int]] = []
    rig = PrefillRig(
        device,
        sizes=(4,),
        verify="never",
        plan=lambda key, live, padded: calls.append(("plan", key.tokens, padded)),
        hooks=[lambda key, live: calls.append(("hook", key.tokens, len(live["meta"].lengths)))],
    )
    rig.capture()
    assert calls == [("plan", 4, 4), ("plan", 4, 4)]
    calls.clear()
    inputs, live = rig.step(3)
    prepared = rig.runner.prepare(inputs, size=3, live=live)
    assert calls == [("plan", 4, 4)]
    rig.runner.launch(prepared)
    assert calls == [("plan", 4, 4), ("hook", 4, 2)]
    calls.clear()
    inputs, live = rig.step(5)
    rig.runner.run(inputs, size=5, live=live)
    assert calls == [("plan", 5, 5)]


@pytest.mark.gpu
def test_a_thousand_steps_with_refilled_sources() -> None:
    """FAULT-O7, FAULT-L1: pinned sources overwritten at once, buckets mixed, allocator churned: every step is right."""
    device = torch.device("cuda")
    rig = PrefillRig(device)
    rig.capture()
    pinned = {"x": torch.empty(16, WIDTH).pin_memory(), "slots": torch.empty(16, dtype=torch.int64).pin_memory()}
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for step in range(1000):
        size = 1 + step % 16
        inputs, live = rig.step(size)
        expected = rig.twin(inputs, live, padded=rig.runner.buckets.round_up(size) or 0)
        for name, tensor in inputs.items():
            pinned[name][:size] = tensor
        prepared = rig.runner.prepare({name: pinned[name][:size] for name in pinned}, size=size, live=live)
        pinned["x"].fill_(math.nan)
        pinned["slots"].fill_(SLOTS - 1)
        output = rig.runner.launch(prepared).output
        wrong += (output != expected).any()
        del expected
        if step % 100 == 0:
            torch.full((1 << 20,), math.nan, device=device)
    assert int(wrong) == 0
