"""When a runner runs eagerly: reasons, counters, gates and options."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError, NoGraphError
from breakgraph.gates import Gate, Rule
from breakgraph.graph_key import PrefillKey
from breakgraph.prefill_runner import PrefillRunner
from breakgraph.statistics import Reason
from tests.runner_models import PrefillRig


@pytest.fixture
def rig(device: torch.device) -> PrefillRig:
    """A captured runner with buckets 4, 8 and 16."""
    rig = PrefillRig(device)
    rig.capture()
    assert not rig.runner.dropped
    return rig


@pytest.mark.parametrize("answer", [False, True, 0])
def test_a_gate_answers_none_or_a_text(device: torch.device, answer: Any) -> None:
    """REQ-B: a gate that returns a flag is refused by name: False would refuse every step, and so would True."""
    rig = PrefillRig(device, gates=[Gate("flag", lambda key, live: answer)])
    rig.capture()
    inputs, live = rig.step(3)
    with pytest.raises(ConfigError, match=f"gate 'flag' returned {answer}; expected None or a text"):
        rig.runner.run(inputs, size=3, live=live)
    with pytest.raises(ConfigError, match="gates has .*expected Gates"):
        PrefillRig(device, gates=[lambda key, live: None])


# Eager fallback.


def test_reasons_and_counters_of_a_mixed_workload(device: torch.device) -> None:
    """REQ-C1, REQ-E9, FAULT-R4, FAULT-R6: each eager step is counted under its reason, each replay under its key."""
    rig = PrefillRig(device, gates=[Gate("odd factor", lambda key, live: "odd" if live["meta"].factor > 1 else None)])

    def run(size: int, *, factor: float = 0.5, extra: tuple[tuple[str, str], ...] = ()) -> Reason | None:
        inputs, live = rig.step(size)
        live["meta"].factor = factor
        return rig.runner.run(inputs, size=size, live=live, extra=extra).reason

    assert run(3) is Reason.NOT_CAPTURED_YET
    rig.capture()
    assert run(3) is None
    assert run(16) is None
    assert run(17) is Reason.ABOVE_LARGEST_BUCKET
    assert run(3, factor=2.0) is Reason.GATE
    assert run(3, extra=(("images", "yes"),)) is Reason.NO_GRAPH
    with rig.runner.suspend(Reason.RECORDING_STATISTICS):
        assert run(3) is Reason.RECORDING_STATISTICS
    statistics = rig.runner.statistics
    assert statistics.eager == {
        "NOT_CAPTURED_YET": 1,
        "ABOVE_LARGEST_BUCKET": 1,
        "odd factor": 1,
        "NO_GRAPH": 1,
        "RECORDING_STATISTICS": 1,
    }
    assert statistics.replays_by_key == {PrefillKey(4): 1, PrefillKey(16): 1}
    assert (statistics.real_rows, statistics.padded_rows, statistics.eager_rows) == (19, 20, 29)
    assert statistics.padding_waste == pytest.approx(1 / 20)


def test_an_eager_step_is_unpadded_and_right(rig: PrefillRig) -> None:
    """A step without a graph runs forward on tensors of the real size, with breaks seeing the live data."""
    inputs, live = rig.step(20)
    rig.model.seen.clear()
    expected = rig.twin(inputs, live, padded=20)
    result = rig.runner.run(inputs, size=20, live=live)
    assert not result.replayed
    assert "largest bucket is 16" in result.detail
    assert rig.model.seen[-1] == (20, 20, 20)
    assert torch.equal(result.output, expected)


def test_eager_inputs_may_be_refilled_after_prepare(rig: PrefillRig) -> None:
    """REQ-E8: host tensors are the caller's again after prepare, in an eager step as in a replay."""
    inputs, live = rig.step(20)
    expected = rig.twin(inputs, live, padded=20)
    prepared = rig.runner.prepare(inputs, size=20, live=live)
    assert not prepared.replays
    inputs["x"].fill_(math.nan)
    assert torch.equal(rig.runner.launch(prepared).output, expected)


def test_fallback_error(device: torch.device) -> None:
    """REQ-E9: fallback="error" turns any fallback into a NoGraphError that names the reason."""
    rig = PrefillRig(device, fallback="error")
    rig.capture()
    inputs, live = rig.step(17)
    with pytest.raises(NoGraphError, match="ABOVE_LARGEST_BUCKET"):
        rig.runner.run(inputs, size=17, live=live)


def test_a_disabled_runner_captures_nothing(device: torch.device) -> None:
    """REQ-H6: enabled=False is the process-level switch: no captures, no examples, every step eager under DISABLED."""
    rig = PrefillRig(device, enabled=False)
    rig.capture()
    assert not rig.examples
    inputs, live = rig.step(3)
    assert rig.runner.run(inputs, size=3, live=live).reason is Reason.DISABLED


def test_gates_run_in_order_and_soft_ones_can_be_overridden(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """REQ-B: the first refusal counts; a soft gate can be overridden with one warning, a hard one cannot."""
    ready = Gate("delta", lambda key, live: "not cached yet", reason=Reason.NOT_READY)
    slow = Gate("wasteful", lambda key, live: "too much padding", rule=Rule.SOFT)
    rig = PrefillRig(device, gates=[slow, ready])
    rig.capture()
    inputs, live = rig.step(3)
    result = rig.runner.run(inputs, size=3, live=live)
    assert (result.reason, result.detail) == (Reason.NOT_READY, "not cached yet")
    with caplog.at_level(logging.WARNING):
        rig = PrefillRig(device, gates=[slow], override=["wasteful"])
    assert caplog.text.count("overridden") == 1
    rig.capture()
    assert rig.runner.run(inputs, size=3, live=live).replayed
    with pytest.raises(ConfigError, match="a hard gate"):
        PrefillRig(device, gates=[ready], override=["delta"])
    with pytest.raises(ConfigError, match="no gate"):
        PrefillRig(device, gates=[ready], override=["nobody"])


def test_options_out_of_range_are_refused(device: torch.device) -> None:
    """An unknown option value is a ConfigError that lists the known ones."""
    for option in ("verify", "check_addresses", "fallback"):
        with pytest.raises(ConfigError, match=f"{option}='sometimes'"):
            PrefillRig(device, **{option: "sometimes"})


def test_no_buckets_means_eager(device: torch.device) -> None:
    """REQ-C1: an empty ladder captures nothing, and every step is eager, above the largest bucket."""
    rig = PrefillRig(device, sizes=())
    rig.capture()
    inputs, live = rig.step(3)
    assert rig.runner.run(inputs, size=3, live=live).reason is Reason.ABOVE_LARGEST_BUCKET
    assert isinstance(rig.runner, PrefillRunner)
    assert rig.runner.buckets == Buckets()
