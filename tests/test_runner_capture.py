"""How a runner captures: order, failure per key, the proof against eager, and addresses."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch

from breakgraph.buckets import Buckets
from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture
from breakgraph.errors import CaptureError, CaptureIllegalError, MovedBufferError
from breakgraph.graph_key import PrefillKey
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.static_buffers import TOKENS, StaticInput
from breakgraph.statistics import CapturePhase, Reason
from breakgraph.verification import Tolerance
from tests.runner_models import Meta, PrefillModel, PrefillRig


@pytest.fixture
def rig(device: torch.device) -> PrefillRig:
    """A captured runner with buckets 4, 8 and 16."""
    rig = PrefillRig(device)
    rig.capture()
    assert not rig.runner.dropped
    return rig


# Capture.


def test_capture_needs_the_window(device: torch.device) -> None:
    """REQ-D1: capture outside the window is refused; an unknown size at run time is never captured."""
    rig = PrefillRig(device)
    with pytest.raises(CaptureError, match="capture window"):
        rig.runner.capture()
    with pytest.raises(ZeroDivisionError), rig.runner.capture_window():
        raise ZeroDivisionError
    assert gc.isenabled()
    with pytest.raises(CaptureError, match="capture window"):
        rig.runner.capture()
    inputs, live = rig.step(3)
    rig.runner.run(inputs, size=3, live=live)
    assert not rig.runner.graphs


def test_passes_and_order(device: torch.device) -> None:
    """REQ-D2: every key runs eagerly, largest first, before any capture; then capture and proof, largest first."""
    seen = []
    rig = PrefillRig(device, progress=lambda step: seen.append((step.phase, step.key.tokens)))
    rig.capture()
    warm, capture, verify = CapturePhase.WARM_UP, CapturePhase.CAPTURE, CapturePhase.VERIFY
    assert [key.tokens for key in rig.examples] == [16, 8, 4, 16, 16, 10, 8, 8, 5, 4, 4, 2]
    assert seen == [(warm, 16), (warm, 8), (warm, 4)] + [
        (phase, size) for size in (16, 8, 4) for phase in (capture, verify)
    ]
    assert all(set(report.seconds) == set(CapturePhase) for report in rig.runner.statistics.reports.values())
    assert all(report.fresh_inputs for report in rig.runner.statistics.reports.values())


def test_capture_leaves_state_and_generators_alone(device: torch.device) -> None:
    """REQ-D3, FAULT-F7: warm-up, capture and verification leave declared state and random generators as they were."""
    rig = PrefillRig(device)
    rig.model.cache.uniform_()
    before = rig.model.cache.clone()
    torch.manual_seed(5)
    drawn = torch.rand(3, device=device)
    torch.manual_seed(5)
    rig.capture()
    assert torch.equal(rig.model.cache, before)
    assert torch.equal(torch.rand(3, device=device), drawn)


def test_a_failing_key_leaves_the_others(device: torch.device) -> None:
    """REQ-D5, FAULT-E4: a forward that fails for one bucket drops that key with its reason; the others replay."""
    model = PrefillModel(device)

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        if len(x) == 8:
            raise ValueError("eight is too many")
        return model(x, slots, meta)

    rig = PrefillRig(device, forward=forward, model=model)
    rig.capture()
    assert set(rig.runner.graphs) == {PrefillKey(4), PrefillKey(16)}
    assert "ValueError: eight is too many" in rig.runner.dropped[PrefillKey(8)]
    inputs, live = rig.step(7)
    result = rig.runner.run(inputs, size=7, live=live)
    assert result.reason is Reason.DROPPED
    assert "eight is too many" in result.detail
    inputs, live = rig.step(16)
    assert rig.runner.run(inputs, size=16, live=live).replayed


def test_an_error_in_a_break_at_replay_is_the_callers(rig: PrefillRig) -> None:
    """FAULT-E10: a break that fails at replay raises its own exception, and the next replay works."""
    inputs, live = rig.step(5)
    with pytest.raises(TypeError):
        rig.runner.run(inputs, size=5, live={"meta": Meta(0.5, None)})  # type: ignore[arg-type]
    expected = rig.twin(inputs, live, padded=8)
    assert torch.equal(rig.runner.run(inputs, size=5, live=live).output, expected)


def test_expected_breaks_that_are_missing_drop_the_key(device: torch.device) -> None:
    """REQ-H8, FAULT-F5: a forgotten break is refused at capture, naming what was expected."""
    rig = PrefillRig(device, model=PrefillModel(device, breaks=False))
    rig.capture()
    assert not rig.runner.graphs
    assert "attend" in rig.runner.dropped[PrefillKey(16)]


def test_a_forgotten_break_fails_its_proof(device: torch.device) -> None:
    """FAULT-F5: without expect_breaks, verification with other live data finds the stale metadata."""

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x * meta.factor

    rig = PrefillRig(device, forward=forward, expect_breaks=None)
    rig.capture()
    assert not rig.runner.graphs
    assert "the replay differs from eager" in rig.runner.dropped[PrefillKey(16)]
    inputs, live = rig.step(3)
    assert torch.equal(rig.runner.run(inputs, size=3, live=live).output.cpu(), inputs["x"] * live["meta"].factor)


def test_state_is_part_of_the_proof(device: torch.device) -> None:
    """FAULT-F2: a graph whose result is right but whose writes to declared state are stale is not published."""
    table = torch.zeros(4, device=device)

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        table.add_(meta.factor)
        return x * 2

    rig = PrefillRig(device, forward=forward, state=(table,), expect_breaks=None)
    rig.capture()
    assert not rig.runner.graphs
    assert "state" in rig.runner.dropped[PrefillKey(16)]
    assert not table.any()


def test_equal_examples_are_reported(device: torch.device) -> None:
    """Verification with the inputs of the capture proves little; the report of each key says so."""
    rig = PrefillRig(device, sizes=(4,))
    step, live = rig.step(4)
    rig = PrefillRig(device, sizes=(4,), example=lambda key: Example(step, live))
    rig.capture()
    assert rig.runner.statistics.reports[PrefillKey(4)].fresh_inputs is False


def test_verify_never_publishes_unproven(device: torch.device) -> None:
    """verify="never" takes one example less per key and publishes what was captured."""
    rig = PrefillRig(device, verify="never")
    rig.capture()
    assert len(rig.examples) == 6
    assert len(rig.runner.graphs) == 3


def test_verify_always_drops_a_graph_that_goes_wrong(device: torch.device) -> None:
    """verify="always" compares each step; a mismatch returns eager's result and state, and drops the graph."""
    model = PrefillModel(device)
    hidden = {"factor": 1.0}

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        return model(x, slots, meta) * hidden["factor"]

    rig = PrefillRig(device, forward=forward, model=model, verify="always")
    rig.capture()
    inputs, live = rig.step(5)
    assert rig.runner.run(inputs, size=5, live=live).replayed
    hidden["factor"] = 3.0
    result = rig.runner.run(inputs, size=5, live=live)
    assert result.reason is Reason.DROPPED
    assert torch.equal(result.output, rig.twin(inputs, live, padded=8) * 3.0)
    assert set(rig.runner.graphs) == {PrefillKey(4), PrefillKey(16)}
    assert rig.runner.run(inputs, size=5, live=live).reason is Reason.DROPPED


def test_tolerance_applies_only_where_eager_differs_from_itself(device: torch.device) -> None:
    """A tolerance never excuses a replay that differs from a reproducible eager run."""
    calls = {"count": 0}

    def unstable(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        calls["count"] += 1
        return x + 1e-6 * calls["count"]

    for tolerance, published in ((None, False), (Tolerance(rtol=0.0, atol=1e-3), True)):
        rig = PrefillRig(device, sizes=(4,), forward=unstable, expect_breaks=None, state=(), tolerance=tolerance)
        rig.capture()
        assert bool(rig.runner.graphs) is published
        assert rig.runner.statistics.reports[PrefillKey(4)].tolerated is published

    def stale(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x + 1e-6 * meta.factor

    rig = PrefillRig(
        device, sizes=(4,), forward=stale, expect_breaks=None, state=(), tolerance=Tolerance(rtol=0.0, atol=1e-3)
    )
    rig.capture()
    assert not rig.runner.graphs


def test_an_example_of_another_size_is_refused(device: torch.device) -> None:
    """REQ-D4: an example that does not fill its key is a StaticInputError in the key's reason, with a note."""
    rig = PrefillRig(device, sizes=(4,))
    inputs, live = rig.step(3)
    rig = PrefillRig(device, sizes=(4,), example=lambda key: Example(inputs, live))
    rig.capture()
    text = rig.runner.dropped[PrefillKey(4)]
    assert "StaticInputError" in text
    assert "all rows of its key" in text


def test_extras_select_graphs(device: torch.device) -> None:
    """REQ-H1: extra fields of a key choose among graphs of one bucket."""
    plain, wide = (), (("mode", "wide"),)
    rig = PrefillRig(device, sizes=(4,), extras=[plain, wide])
    rig.capture()
    inputs, live = rig.step(3)
    for extra in (plain, wide):
        assert rig.runner.run(inputs, size=3, live=live, extra=extra).key == PrefillKey(4, extra)


def test_a_second_window_captures_what_was_dropped(device: torch.device) -> None:
    """REQ-D5: a key that failed is tried again in the next window; graphs already published stay as they are."""
    model = PrefillModel(device)
    broken = {"now": True}

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        if broken["now"] and len(x) == 8:
            raise ValueError("not yet")
        return model(x, slots, meta)

    rig = PrefillRig(device, forward=forward, model=model)
    rig.capture()
    kept = rig.runner.graphs[PrefillKey(16)]
    broken["now"] = False
    rig.capture()
    assert not rig.runner.dropped
    assert rig.runner.graphs[PrefillKey(16)] is kept
    inputs, live = rig.step(7)
    assert torch.equal(rig.runner.run(inputs, size=7, live=live).output, rig.twin(inputs, live, padded=8))


def test_clear_gives_everything_back(rig: PrefillRig) -> None:
    """REQ-D6: after clear() steps are eager, the pool is another one, and a new capture works."""
    pool = rig.runner.pool
    rig.runner.clear()
    assert not rig.runner.graphs
    assert rig.runner.pool is not pool
    inputs, live = rig.step(3)
    assert rig.runner.run(inputs, size=3, live=live).reason is Reason.NOT_CAPTURED_YET
    rig.capture()
    assert torch.equal(rig.runner.run(inputs, size=3, live=live).output, rig.twin(inputs, live, padded=4))


# Addresses.


def moved(rig: PrefillRig, what: str) -> str:
    """Move one thing that a graph reads, and return its name in messages."""
    model = rig.model
    if what == "data":
        model.up.data = model.up.data.clone() * 2
        return "PrefillModel.up"
    if what == "parameter":
        model.down = torch.nn.Parameter(model.down.clone(), requires_grad=False)
        return "PrefillModel.down"
    model.bias = model.bias.clone()
    return "PrefillModel.bias"


@pytest.mark.parametrize("what", ["data", "parameter", "buffer"])
def test_moved_tensors_are_named(device: torch.device, what: str) -> None:
    """FAULT-L6: with check_addresses="always" a replaced parameter, its data or a buffer is refused by name."""
    rig = PrefillRig(device, check_addresses="always")
    rig.capture()
    inputs, live = rig.step(5)
    rig.runner.run(inputs, size=5, live=live)
    name = moved(rig, what)
    prepared = rig.runner.prepare(inputs, size=5, live=live)
    with pytest.raises(MovedBufferError, match=name):
        rig.runner.launch(prepared)
    with pytest.raises(MovedBufferError, match=name):
        rig.capture()


def test_first_check_is_before_the_first_replay_of_each_graph(rig: PrefillRig) -> None:
    """check_addresses="first" covers each graph's first replay: moved before it is found, moved after it is not."""
    inputs, live = rig.step(5)
    rig.runner.run(inputs, size=5, live=live)
    moved(rig, "buffer")
    rig.runner.run(inputs, size=5, live=live)
    inputs, live = rig.step(16)
    with pytest.raises(MovedBufferError):
        rig.runner.run(inputs, size=16, live=live)


def test_updates_in_place_are_seen(rig: PrefillRig) -> None:
    """FAULT-L6: a parameter updated in place is what the next replay computes with."""
    inputs, live = rig.step(5)
    before = rig.runner.run(inputs, size=5, live=live).output.clone()
    rig.model.up.mul_(2)
    after = rig.runner.run(inputs, size=5, live=live).output
    assert not torch.equal(before, after)
    assert torch.equal(after, rig.twin(inputs, live, padded=8))


class Grower(torch.nn.Module):
    """Keeps a workspace in a buffer and replaces it when a step needs a larger one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("workspace", torch.zeros(1, device=device))

    def forward(self, x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        """Smaller steps need more workspace: 64 rows of 4, 32 of 8, 16 of 16."""
        need = 256 // len(x)
        if len(self.workspace) < need:
            self.workspace = torch.zeros(need, device=x.device)
        self.workspace[:need].copy_(x.sum().expand(need))
        return x + self.workspace[:need].sum()


def test_a_workspace_grows_before_the_first_capture(device: torch.device) -> None:
    """REQ-D2, FAULT-L4: a smaller key that needs more workspace has grown it in pass 1, so all graphs read one buffer."""
    grower = Grower(device)
    rig = PrefillRig(device, forward=grower, modules=(grower,), state=(), expect_breaks=None, check_addresses="always")
    rig.capture()
    assert not rig.runner.dropped
    for size in (16, 4, 8, 16):
        inputs, live = rig.step(size)
        assert torch.equal(
            rig.runner.run(inputs, size=size, live=live).output, grower(inputs["x"].to(device), None, None)
        )


def test_a_workspace_that_grows_later_is_named(device: torch.device) -> None:
    """FAULT-L4: an eager step that grows the workspace after capture makes the next replay a named error."""
    grower = Grower(device)
    rig = PrefillRig(device, forward=grower, modules=(grower,), state=(), expect_breaks=None, check_addresses="always")
    rig.capture()
    with rig.runner.suspend():
        inputs, live = rig.step(1)
        rig.runner.run(inputs, size=1, live=live)
    inputs, live = rig.step(4)
    with pytest.raises(MovedBufferError, match="Grower.workspace"):
        rig.runner.run(inputs, size=4, live=live)


class LastTable(torch.nn.Module):
    """Keeps the table of the last size only, so each capture makes it anew, inside a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        """Rows times their place."""
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x), device=x.device, dtype=x.dtype)[:, None]
        return x * self.table


@pytest.mark.gpu
def test_a_tensor_that_a_model_keeps_from_a_segment_drops_all_graphs() -> None:
    """FAULT-L8, FAULT-L5: no graph may overwrite it later, so none serves; the reason names its holder; eager is right."""
    device = torch.device("cuda")
    model = LastTable()
    rig = PrefillRig(device, forward=model, modules=(model,), state=(), expect_breaks=None)
    rig.capture()
    assert not rig.runner.graphs
    assert set(rig.runner.dropped) == {PrefillKey(4), PrefillKey(8), PrefillKey(16)}
    for reason in rig.runner.dropped.values():
        assert re.search(r"float32 \(\d+, 1\) held by LastTable.table", reason)
    inputs, live = rig.step(8)
    result = rig.runner.run(inputs, size=8, live=live)
    assert result.reason is Reason.DROPPED
    assert torch.equal(result.output, inputs["x"].to(device) * torch.arange(8, device=device)[:, None])
    # Mended as the message says, the next window captures all.
    model.forward = lambda x, slots, meta: x * torch.arange(len(x), device=x.device)[:, None]  # type: ignore[method-assign]
    rig.capture()
    assert set(rig.runner.graphs) == {PrefillKey(4), PrefillKey(8), PrefillKey(16)}
    inputs, live = rig.step(8)
    assert rig.runner.run(inputs, size=8, live=live).replayed


def test_a_branch_chosen_by_the_example_is_found(device: torch.device) -> None:
    """FAULT-F4: `if max(lengths) < 8` in a segment is frozen; the proof with other lengths drops the graph, eager serves."""
    model = PrefillModel(device)

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        hidden = model(x, slots, meta)
        return hidden * 2 if max(meta.lengths) < 8 else hidden

    rig = PrefillRig(device, model=model, forward=forward, sizes=(16,))
    turns = itertools.cycle(([8, 8], [15, 1], [7, 9], [16], [4, 4, 4, 4]))

    def example(key: PrefillKey) -> Example:
        inputs, live = rig.step(key.tokens)
        live["meta"].lengths = next(turns) if key.tokens == 16 else [key.tokens]
        return Example(inputs, live)

    for short_first in (False, True):
        turns = itertools.cycle(([4, 4, 4, 4], [16]) if short_first else ([16], [4, 4, 4, 4]))
        rig = PrefillRig(device, model=model, forward=forward, sizes=(16,), example=example)
        # Warm-up takes one example, the capture the next, the proof a third: two kinds in turn differ in the last two.
        rig.capture()
        assert "differs" in rig.runner.dropped[PrefillKey(16)]
        inputs, live = rig.step(16)
        live["meta"].lengths = [4, 4, 4, 4]
        result = rig.runner.run(inputs, size=16, live=live)
        assert not result.replayed
        ready = {name: tensor.to(device) for name, tensor in inputs.items()}
        assert torch.equal(result.output, rig.eager(forward, ready, live))


def test_a_branch_on_device_data_is_refused_with_its_line(backend: str, device: torch.device) -> None:
    """FAULT-F4: `if lengths.max() < 64` on a device tensor asks the device, so a segment refuses it."""
    lengths = torch.tensor([3, 70], device=device)
    with (
        pytest.raises((CaptureIllegalError, RuntimeError)) as caught,
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend=backend),
    ):
        if lengths.max() < 64:
            lengths.add_(1)
    assert "test_runner_capture.py" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


class Counter:
    """State that is no tensor."""

    def __init__(self) -> None:
        self.lengths = [3, 4]

    def save(self) -> list[int]:
        """A copy of the lengths."""
        return list(self.lengths)

    def restore(self, saved: list[int]) -> None:
        """Put the lengths back."""
        self.lengths[:] = saved


def test_state_that_is_no_tensor_is_kept(device: torch.device) -> None:
    """REQ-D3, FAULT-F7: an object with save and restore is as before after every pass, whatever breaks did to it."""
    counter = Counter()
    model = PrefillModel(device)
    plain = model.mix

    def mix(hidden: torch.Tensor, out: torch.Tensor, meta: Meta) -> None:
        counter.lengths[0] += len(hidden)
        plain(hidden, out, meta)

    model.mix = mix  # type: ignore[method-assign]
    rig = PrefillRig(device, model=model, state=(model.cache, counter))
    rig.capture()
    assert not rig.runner.dropped
    assert counter.lengths == [3, 4]
    inputs, live = rig.step(5)
    rig.runner.run(inputs, size=5, live=live)
    assert counter.lengths == [8, 4]


def test_inference_tensors_can_be_state(device: torch.device) -> None:
    """REQ-D3: a cache allocated in inference mode is saved and restored outside it as well."""
    with torch.inference_mode():
        model = PrefillModel(device)
    assert model.cache.is_inference()
    rig = PrefillRig(device, model=model)
    with torch.inference_mode():
        rig.capture()
    assert not rig.runner.dropped
    assert not model.cache.any()


class Counting(torch.nn.Module):
    """Counts its calls on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows plus one."""
        self.calls.add_(1)
        return x + 1


@pytest.mark.parametrize("declared", [False, True])
def test_a_buffer_that_forward_writes_is_named(
    device: torch.device, declared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """REQ-D3, FAULT-F7: a capture that left a buffer changed says which, unless it is declared and put back."""
    model, random = Counting(device), torch.Generator().manual_seed(0)
    runner = PrefillRunner(
        model,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of([4]),
        example=lambda key: Example({"x": torch.rand(key.tokens, generator=random)}),
        device=device,
        modules=(model,),
        state=(model.calls,) if declared else (),
        measure="never",
    )
    with runner.capture_window():
        runner.capture()
    assert ("Counting.calls" in caplog.text) is not declared
    assert (int(model.calls) == 0) is declared
