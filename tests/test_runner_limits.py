"""What a runner may take, when a graph pays, and what a step can ask for: budget, measured limit, opt-outs, swaps, plans."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph import eager_on_graph, swapped
from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError, NoGraphError, ReplayError
from breakgraph.graph_key import GraphKey, PrefillKey, cached_tokens
from breakgraph.padding_limit import Times, least_sizes
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.staging import Field, _Slot
from breakgraph.static_buffers import TOKENS, StaticInput
from breakgraph.statistics import CapturePhase, Reason
from tests.runner_models import DecodeRig, PrefillModel, PrefillRig

MIB = 1 << 20


def wide_runner(device: torch.device, *, sizes: tuple[int, ...], **options: Any) -> PrefillRunner:
    """A runner whose graphs take about 2 MiB of intermediates for each bucket of 64."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.expand(-1, 4096) * torch.ones(4096, device=device)
        return (wide + 1).sum(-1, keepdim=True)

    turns = itertools.count()

    def example(key: PrefillKey) -> Example:
        return Example({"x": torch.full((key.tokens, 1), float(next(turns)))})

    return PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS, 1), dtype=torch.float32)],
        buckets=Buckets.of(sizes),
        example=example,
        device=device,
        **options,
    )


def test_a_budget_keeps_what_fits_and_says_why_the_rest_is_gone(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULT-R5, REQ-D8: ten buckets of 2 MiB and more against 7 MiB: some are kept, each other key says what it needs."""
    sizes = tuple(range(64, 74))
    runner = wide_runner(device, sizes=sizes, memory_budget=7 * MIB)
    with caplog.at_level(logging.INFO, logger="breakgraph"), runner.capture_window():
        runner.capture()
    assert "capturing 10 graphs" in caplog.text
    assert 0 < len(runner.graphs) < 10 if device.type == "cpu" else runner.graphs
    assert len(runner.graphs) + len(runner.dropped) == 10
    for key, reason in runner.dropped.items():
        assert f"prefill[{key.tokens}] needs" in reason
        assert f"of a budget of {7 * MIB} bytes" in reason
    assert runner._graphs.nbytes <= 7 * MIB
    for size in (3, 64, 73):
        result = runner.run({"x": torch.full((size, 1), 2.0)}, size=size)
        assert result.output.tolist() == [[4096 * 3.0]] * size
        assert result.replayed or result.reason is Reason.DROPPED
    roomy = wide_runner(device, sizes=sizes, memory_budget=1024 * MIB)
    with roomy.capture_window():
        roomy.capture()
    assert len(roomy.graphs) == 10


def test_a_budget_too_small_for_anything_leaves_eager_steps(device: torch.device) -> None:
    """FAULT-R5: nothing fits, every step is eager with the reason, and no memory of the graphs stays behind."""
    runner = wide_runner(device, sizes=(64, 32), memory_budget=1)
    with runner.capture_window():
        runner.capture()
    assert not runner.graphs
    assert runner.run({"x": torch.ones(32, 1)}, size=32).reason is Reason.DROPPED
    assert runner.pool.backend.pool_bytes() == 0 or device.type == "cuda"


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "64 MiB"])
def test_a_budget_is_a_number_of_bytes(budget: Any) -> None:
    """A budget of another kind is refused when the runner is made."""
    with pytest.raises(ConfigError, match="memory_budget"):
        wide_runner(torch.device("cpu"), sizes=(4,), memory_budget=budget)


def test_reports_tell_time_by_phase_and_memory_by_key(device: torch.device) -> None:
    """REQ-D10: warm-up, capture, instantiate and verify have times of their own; memory is told key by key."""
    runner = wide_runner(device, sizes=(64, 32))
    with runner.capture_window():
        runner.capture()
    reports = runner.statistics.reports
    for report in reports.values():
        assert set(report.seconds) == set(CapturePhase)
        assert all(seconds >= 0 for seconds in report.seconds.values())
        assert report.executable_bytes >= 0
    assert reports[PrefillKey(64)].memory_bytes >= 64 * 4096 * 4
    if device.type == "cpu":
        assert reports[PrefillKey(32)].memory_bytes >= 32 * 4096 * 4  # the emulated pool uses no block twice
    else:
        assert reports[PrefillKey(32)].memory_bytes < 64 * 4096 * 4  # in the blocks of the larger one
        assert runner.statistics.seconds(CapturePhase.INSTANTIATE) > 0


# The measured limit.


def brute_force(times: Mapping[int, Times], n: int) -> bool:
    """Whether a step of n rows should use its graph, by interpolation of the eager time at n itself."""
    bucket = min(size for size in times if size >= n)
    below = max((size for size in times if size < bucket), default=0)
    low = times[below].eager if below else times[bucket].eager
    share = (n - below) / (bucket - below)
    return low + share * (times[bucket].eager - low) >= 0.9 * times[bucket].replay - 1e-9


@given(
    st.dictionaries(st.integers(1, 64), st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=6).map(
        lambda found: {size: Times(*pair) for size, pair in found.items()}
    )
)
def test_least_sizes_follow_the_interpolated_times(times: dict[int, Times]) -> None:
    """REQ-G5: where eager time grows with rows, a size uses its graph exactly when eager there is not a tenth cheaper."""
    steady = dict(zip(sorted(times), sorted(times.values(), key=lambda t: t.eager), strict=True))
    least = least_sizes(steady)
    assert least.keys() == steady.keys()
    for n in range(1, max(steady) + 1):
        bucket = min(size for size in steady if size >= n)
        assert (n >= least[bucket]) == brute_force(steady, n), (n, bucket, least, steady)


def test_sizes_that_do_not_pay_run_eagerly(device: torch.device) -> None:
    """REQ-G5: with the measured times of a device-bound bucket, small real sizes are eager, counted by their reason."""
    runner = wide_runner(device, sizes=(16, 64))
    measured = {16: Times(eager=1.0, replay=0.5), 64: Times(eager=4.0, replay=3.0)}
    runner._policy = attrs.evolve(runner._policy, measure="always")
    runner._graphs.times = lambda key: measured[key.tokens]  # type: ignore[method-assign]
    with runner.capture_window():
        runner.capture()
    least = {key.tokens: report.least_size for key, report in runner.statistics.reports.items()}  # type: ignore[attr-defined]
    assert least == {16: 0, 64: 44}  # eager of n rows is 1 + (n - 16) / 16, a replay 3, a tenth of it apart
    for size, replayed in ((3, True), (16, True), (17, False), (43, False), (44, True), (64, True)):
        result = runner.run({"x": torch.ones(size, 1)}, size=size)
        assert result.replayed is replayed, size
        if not replayed:
            assert result.reason is Reason.EAGER_IS_CHEAPER
            assert result.detail == "prefill[64] was measured to pay from 44 tokens on"
    assert runner.statistics.eager["EAGER_IS_CHEAPER"] == 2


def test_a_graph_that_never_pays_is_told(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """REQ-G5, FAULT-R6: where eager is cheaper at every size, the log says that the graph will not be used."""
    runner = wide_runner(device, sizes=(16,), measure="always")
    runner._graphs.times = lambda key: Times(eager=1.0, replay=2.0)  # type: ignore[method-assign]
    with runner.capture_window():
        runner.capture()
    assert "prefill[16] will not be used" in caplog.text
    assert runner.run({"x": torch.ones(16, 1)}, size=16).reason is Reason.EAGER_IS_CHEAPER


def test_times_are_measured_and_state_is_put_back(device: torch.device) -> None:
    """REQ-G5: both times are positive and in the report; measuring leaves the cache as it was."""
    rig = PrefillRig(device, measure="always")
    before = rig.model.cache.uniform_().clone()
    rig.capture()
    for report in rig.runner.statistics.reports.values():
        assert report.eager_seconds is not None
        assert report.eager_seconds > 0
        assert report.replay_seconds is not None
        assert report.replay_seconds > 0
    assert torch.equal(rig.model.cache, before)


def test_a_measurement_that_fails_leaves_the_graphs(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """REQ-G5: an example that fails when buckets are timed is told in the log; every graph serves."""
    runner = wide_runner(device, sizes=(16,), measure="always")

    def fail(key: PrefillKey) -> Times:
        raise ValueError("no more examples")

    runner._graphs.times = fail  # type: ignore[method-assign]
    with runner.capture_window():
        runner.capture()
    assert "ValueError: no more examples" in caplog.text
    assert runner.run({"x": torch.ones(3, 1)}, size=3).replayed


def test_nothing_is_measured_where_replays_are_emulated() -> None:
    """REQ-G5: by default only a CUDA device is measured: an emulated replay is no faster than eager."""
    rig = PrefillRig(torch.device("cpu"))
    rig.capture()
    assert all(report.eager_seconds is None for report in rig.runner.statistics.reports.values())
    with pytest.raises(ConfigError, match="measure"):
        PrefillRig(torch.device("cpu"), measure="sometimes")


# What a step can ask for.


def test_a_step_can_opt_out(device: torch.device) -> None:
    """REQ-H6: a request that wants what no graph gives makes its step eager, with its reason; the next one replays."""
    rig = PrefillRig(device)
    rig.capture()
    inputs, live = rig.step(5)
    result = rig.runner.run(inputs, size=5, live=live, opt_out="logits of the prompt")
    assert (result.reason, result.detail) == (Reason.OPT_OUT, "logits of the prompt")
    assert rig.runner.statistics.eager == {"OPT_OUT": 1}
    assert rig.runner.run(inputs, size=5, live=live).replayed
    strict = PrefillRig(device, fallback="error")
    strict.capture()
    with pytest.raises(NoGraphError, match="logits of the prompt"):
        strict.runner.run(inputs, size=5, live=live, opt_out="logits of the prompt")
    decode = DecodeRig(device)
    decode.capture()
    step = decode.example(GraphKey(2))
    assert decode.runner.run(step.inputs, key=GraphKey(2), live=step.live, opt_out="penalties").detail == "penalties"


class Cached(torch.nn.Module):
    """Reads whichever cache is in place."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.own = torch.zeros(1, device=device)
        self.static = torch.full((1,), 10.0, device=device)
        self.cache = self.own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows plus the cache."""
        return x + self.cache


def test_attributes_are_swapped_for_graphs_and_back(device: torch.device) -> None:
    """REQ-E6: another cache is in place at warm-up, capture, proof and replay, and swapped back, also after an error."""
    model = Cached(device)
    armed = []

    @contextlib.contextmanager
    def around(key: PrefillKey, live: Mapping[str, Any]) -> Iterator[None]:
        with swapped(model, cache=model.static):
            if armed:
                raise ValueError("mine")
            yield

    runner = PrefillRunner(
        model,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
        around=around,
    )
    with runner.capture_window():
        runner.capture()
    assert not runner.dropped
    assert model.cache is model.own
    assert runner.run({"x": torch.ones(3)}, size=3).output.tolist() == [11.0] * 3
    assert model.cache is model.own
    assert runner.run({"x": torch.ones(9)}, size=9).output.tolist() == [1.0] * 9  # eager: what the caller has in place
    armed.append(True)
    with pytest.raises(ValueError, match="mine"):
        runner.run({"x": torch.ones(3)}, size=3)
    assert model.cache is model.own
    armed.clear()
    assert runner.run({"x": torch.ones(3)}, size=3).output.tolist() == [11.0] * 3


def test_swapped_puts_back_what_was_there() -> None:
    """REQ-E6: values, what only the class has, and frozen classes; a name that is not there is refused, not ignored."""

    class Holder:
        first = 1

        def __init__(self) -> None:
            self.second = 2

    holder = Holder()
    with pytest.raises(ZeroDivisionError), swapped(holder, first=5, second=6):
        assert (holder.first, holder.second) == (5, 6)
        raise ZeroDivisionError
    assert vars(holder) == {"second": 2}
    with (
        pytest.raises(ConfigError, match="'secnod', which this Holder does not have"),
        swapped(holder, second=3, secnod=4),
    ):
        pass
    assert vars(holder) == {"second": 2}
    frozen = attrs.make_class("Frozen", ["value"], frozen=True)(1)
    with pytest.raises(attrs.exceptions.FrozenInstanceError), swapped(frozen, value=2):
        pass
    assert frozen.value == 1


@attrs.define(eq=False)
class PlannedMeta:
    """Live data with a number of pages that the graph holds."""

    pages: int

    def replay_signature(self) -> int:
        """The pages."""
        return self.pages


def test_another_plan_is_eager_with_its_reason(device: torch.device) -> None:
    """REQ-E10: a plan baked in at capture is part of the signature of live data; a step with another one runs eagerly."""

    def forward(x: torch.Tensor, *, meta: PlannedMeta) -> torch.Tensor:
        return x * meta.pages  # a host constant: frozen in the graph

    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}, {"meta": PlannedMeta(7)}),
        device=device,
    )
    with runner.capture_window():
        runner.capture()
    x = {"x": torch.ones(3)}
    same = runner.run(x, size=3, live={"meta": PlannedMeta(7)})
    assert same.replayed
    assert same.output.tolist() == [7.0] * 3
    other = runner.run(x, size=3, live={"meta": PlannedMeta(8)})
    assert other.output.tolist() == [8.0] * 3
    assert other.reason is Reason.OTHER_PLAN
    assert "'meta' has replay signature 8; prefill[4] holds 7" in other.detail
    unplanned = runner.run(x, size=3, live={"meta": attrs.make_class("Plain", ["pages"])(7)})
    assert unplanned.reason is Reason.OTHER_PLAN


def test_a_signature_is_hashable(device: torch.device) -> None:
    """REQ-E10: a signature that cannot be compared by value drops the graph with a reason that says what to return."""

    @attrs.define(eq=False)
    class Meta:
        pages: list[int]

        def replay_signature(self) -> Any:
            return self.pages

    runner = PrefillRunner(
        lambda x, meta: x * 2,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}, {"meta": Meta([1])}),
        device=device,
    )
    with runner.capture_window():
        runner.capture()
    assert "is a list, which cannot be compared by value" in runner.dropped[PrefillKey(4)]


# What a caller gets wrong.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": torch.nn.Linear(2, 2)}, "modules=Linear; expected a sequence"),
        ({"modules": ("weights",)}, "modules=tuple"),
        ({"buckets": [8, 16]}, r"buckets=\[8, 16\]; expected Buckets"),
    ],
)
def test_options_of_another_kind_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    """A module for a sequence of them, a list for a ladder: an error of the constructor, not one for each key later."""
    given: dict[str, Any] = {
        "inputs": [StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        "buckets": Buckets.of((4,)),
        "example": lambda key: Example({"x": torch.rand(key.tokens)}),
        "device": torch.device("cpu"),
    }
    with pytest.raises(ConfigError, match=message):
        PrefillRunner(lambda x: x, **{**given, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"example": lambda key: {"x": torch.rand(key.tokens)}},
            "example(PrefillKey(tokens=4, extra=())) returned a dict",
        ),
        ({"around": lambda key, live: None}, "returned a NoneType; expected a context manager"),
        ({"around": lambda key: None}, "takes 1 positional argument but 2 were given"),
    ],
)
def test_callables_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    """REQ-D5: what a callable of the caller does wrong drops the keys with the reason and its line."""
    given: dict[str, Any] = {
        "inputs": [StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        "buckets": Buckets.of((4,)),
        "example": lambda key: Example({"x": torch.rand(key.tokens)}),
        "device": torch.device("cpu"),
    }
    runner = PrefillRunner(lambda x: x, **{**given, **options})
    with runner.capture_window():
        runner.capture()
    assert message in runner.dropped[PrefillKey(4)]


def test_a_bug_in_forward_is_reported_with_its_line(device: torch.device) -> None:
    """REQ-D5: a forward that fails in warm-up, before any capture, drops its keys with the line that raised."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.no_such_method()  # type: ignore[attr-defined, no-any-return]

    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
    )
    with runner.capture_window():
        runner.capture()
    reason = runner.dropped[PrefillKey(4)]
    assert reason.startswith("warm-up: AttributeError")
    assert "test_runner_limits.py" in reason
    assert "in forward: return x.no_such_method()" in reason


class LastTable(torch.nn.Module):
    """Keeps the table of the last size only."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows plus their place."""
        if len(self.cache.get("table", ())) != len(x):
            self.cache["table"] = torch.arange(len(x), device=x.device, dtype=x.dtype)
        return x + self.cache["table"]


def test_a_table_that_an_eager_step_replaces_is_held(device: torch.device) -> None:
    """FAULT-L5: made in warm-up, read by the graph by address, replaced by a larger eager step: the graph's own is held."""
    model = LastTable()
    runner = PrefillRunner(
        model,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((8,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
        modules=(model,),
        measure="never",
        verify="never",
    )
    with runner.capture_window():
        runner.capture()
    for size in (3, 20, 8, 20, 5):
        result = runner.run({"x": torch.zeros(size)}, size=size)
        junk = [torch.full((8,), float("nan"), device=device) for _ in range(100)]
        assert result.replayed is (size <= 8)
        assert result.output.tolist() == list(range(size))
        del junk


# What an example stands for, and where it runs.


@pytest.mark.parametrize(
    ("key", "options", "expected"),
    [
        (GraphKey(4), {"max_seq_len": 100}, 99),
        (GraphKey(4, draft_len=3), {"max_seq_len": 100}, 96),
        (GraphKey(4, draft_len=3), {"max_seq_len": 100, "rotary_length": 64}, 60),
        (GraphKey(4), {"max_seq_len": 101, "context_parallel": 4}, 25),
        (GraphKey(4), {"max_seq_len": 100, "context_parallel": 2, "rotary_length": 60}, 29),
        (GraphKey(4, short_seq_len_mode=True), {"max_seq_len": 100, "short_threshold": 32}, 31),
        (GraphKey(4, draft_len=3, short_seq_len_mode=True), {"max_seq_len": 100, "short_threshold": 32}, 28),
        (GraphKey(4, short_seq_len_mode=True), {"max_seq_len": 100, "short_threshold": 32, "step_tokens": 8}, 24),
        (GraphKey(4), {"max_seq_len": 1}, 0),
    ],
)
def test_examples_reach_the_longest_sequence_of_their_graph(
    key: GraphKey, options: dict[str, int], expected: int
) -> None:
    """REQ-D9: short variants stay below their threshold, ranks hold a part, positions never pass the rotary table."""
    assert cached_tokens(key, **options) == expected


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        (GraphKey(4, short_seq_len_mode=True), {"max_seq_len": 100}, "short_threshold"),
        (GraphKey(4), {"max_seq_len": 0}, "max_seq_len"),
        (GraphKey(4), {"max_seq_len": 100.5}, "max_seq_len"),
        (GraphKey(4), {"max_seq_len": 8, "context_parallel": 0}, "context_parallel"),
        (GraphKey(4, draft_len=7), {"max_seq_len": 100, "rotary_length": 7}, "does not fit"),
    ],
)
def test_limits_that_cannot_be_are_refused(key: GraphKey, options: dict[str, Any], message: str) -> None:
    """REQ-D9: a missing threshold, a limit below 1, and a step longer than its limit are errors."""
    with pytest.raises(ConfigError, match=message):
        cached_tokens(key, **options)


@pytest.mark.gpu
def test_warm_up_and_capture_run_on_one_stream() -> None:
    """REQ-D11: an allocator or library that holds a workspace per stream sees the same stream in all passes."""
    device = torch.device("cuda")
    model = PrefillModel(device)
    seen: list[int] = []

    def forward(x: torch.Tensor, slots: torch.Tensor, meta: Any) -> torch.Tensor:
        seen.append(torch.cuda.current_stream().cuda_stream)
        return model(x, slots, meta)

    rig = PrefillRig(device, model=model, forward=forward)
    rig.capture()
    assert len(seen) > 2 * 3
    assert set(seen) == {rig.runner.pool.backend.stream.cuda_stream}  # type: ignore[attr-defined]


def test_the_captured_part_is_the_callers_choice(device: torch.device) -> None:
    """REQ-H3: the decoder's body is captured; embedding and logits stay outside, over the real rows only."""
    table, head = torch.randn(32, 8, device=device), torch.randn(8, 5, device=device)
    body: Callable[..., torch.Tensor] = lambda hidden: torch.tanh(hidden) * 2  # noqa: E731
    runner = PrefillRunner(
        body,
        inputs=[StaticInput("hidden", shape=(TOKENS, 8), dtype=torch.float32)],
        buckets=Buckets.of((4, 8)),
        example=lambda key: Example({"hidden": torch.randn(key.tokens, 8)}),
        device=device,
    )
    with runner.capture_window():
        runner.capture()
    ids = torch.tensor([3, 1, 4, 1, 5], device=device)
    result = runner.run({"hidden": table[ids]}, size=5)
    assert result.replayed
    assert torch.equal(result.output[-1:] @ head, (torch.tanh(table[ids]) * 2)[-1:] @ head)


# Found by an attack.


def test_a_measured_limit_does_not_leave_out_the_padded_proof(device: torch.device) -> None:
    """REQ-G5, FAULT-F4: after clear() the proof of a padded step is made again, whatever was measured before."""

    def forward(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n  # frozen at capture

    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((16,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}, {"n": key.tokens}),
        device=device,
        measure="always",
    )
    for least in (16, 0):
        runner._least_size[PrefillKey(16)] = least
        with runner.capture_window():
            runner.capture()
        assert "with 10 of 16 rows" in runner.dropped[PrefillKey(16)]
        runner.clear()


def test_measuring_leaves_what_is_swapped_in_alone(device: torch.device) -> None:
    """REQ-E6, REQ-G5: examples of capture and measurement never touch the model's own cache."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(1, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(len(x))
            return x + self.count

    model = Counting()
    static, own = torch.zeros(1, device=device), model.count
    runner = PrefillRunner(
        model,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4, 8)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
        state=(static,),
        around=lambda key, live: swapped(model, count=static),
        measure="always",
    )
    with runner.capture_window():
        runner.capture()
    assert not runner.dropped
    assert own.item() == 0
    assert static.item() == 0
    prepared = runner.prepare({"x": torch.zeros(3)}, size=3)
    with runner.suspend():
        assert runner.launch(prepared).output.tolist() == [4.0] * 3  # eager, padded, over the model's own
        assert runner.run({"x": torch.zeros(3)}, size=3).output.tolist() == [7.0] * 3


def test_modules_and_parameters_can_be_swapped() -> None:
    """REQ-E6: whatever lies under a name of a module, and whatever is put there, the old one is back afterwards."""
    parts: list[Any] = [None, torch.zeros(1), torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1)), 7]
    for before, inside in itertools.permutations(parts, 2):
        model = torch.nn.Module()
        model.cache = before
        names = [list(table) for table in (model._parameters, model._buffers, model._modules)]
        with swapped(model, cache=inside):
            assert model.cache is inside
        assert model.cache is before
        assert [list(table) for table in (model._parameters, model._buffers, model._modules)] == names

    class OnTheClass(torch.nn.Module):
        cache = None

        def method(self) -> int:
            return 1

    model = OnTheClass()
    with swapped(model, method=lambda: 2):
        assert model.method() == 2
    assert "method" not in vars(model)
    with pytest.raises(ConfigError, match="reads another value"), swapped(model, cache=torch.nn.Linear(1, 1)):
        pass
    assert model.cache is None

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    wrapper = Wrapper(attrs.make_class("Inner", ["cache"])(1))
    with pytest.raises(ConfigError, match="does not have of its own"), swapped(wrapper, cache=2):
        pass
    assert vars(wrapper).keys() == {"inner"}


def test_signatures_are_asked_for_after_the_plan(device: torch.device) -> None:
    """REQ-E10: what plan= decides is what is compared, of new and of reused live objects; one without is another plan too."""

    @attrs.define(eq=False)
    class Meta:
        tokens: int
        pages: int = 0

        def replay_signature(self) -> int:
            return self.pages

    def plan(key: PrefillKey, live: Mapping[str, Any], padded: int) -> None:
        if isinstance(live["meta"], Meta):
            live["meta"].pages = -(-live["meta"].tokens // 4)

    def forward(x: torch.Tensor, meta: Any) -> torch.Tensor:
        return x * meta.pages

    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((16,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}, {"meta": Meta(key.tokens)}),
        device=device,
        plan=plan,
        measure="never",
    )
    with runner.capture_window():
        runner.capture()
    assert not runner.dropped
    assert "another" not in runner.statistics.reports[PrefillKey(16)].padded_skipped
    meta = Meta(4)
    for tokens, replayed in ((4, False), (15, True), (13, True), (12, False), (16, True)):
        meta.tokens = tokens
        for live in (meta, Meta(tokens)):
            result = runner.run({"x": torch.ones(tokens)}, size=tokens, live={"meta": live})
            assert result.replayed is replayed
            assert result.output.tolist() == [float(-(-tokens // 4))] * tokens
    plain = attrs.make_class("Plain", ["pages"])(9)
    result = runner.run({"x": torch.ones(3)}, size=3, live={"meta": plain})
    assert (result.reason, result.output.tolist()) == (Reason.OTHER_PLAN, [9.0] * 3)


@pytest.mark.parametrize("signature", [[1], torch.tensor([1, 2])])
def test_signatures_that_cannot_be_compared_drop_the_graph(device: torch.device, signature: Any) -> None:
    """REQ-E10: a list has no hash, a tensor no truth value: said at capture, not at every step."""
    kind = attrs.make_class("Meta", ["value"], eq=False)
    kind.replay_signature = lambda self: self.value  # type: ignore[attr-defined]
    runner = PrefillRunner(
        lambda x, meta: x * 2,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}, {"meta": kind(signature)}),
        device=device,
    )
    with runner.capture_window():
        runner.capture()
    assert "cannot be compared by value" in runner.dropped[PrefillKey(4)]


def test_around_cannot_swallow_a_failure(device: torch.device) -> None:
    """FAULT-E10: the exception of a break reaches the caller, and no earlier result is returned in its place."""
    armed: list[bool] = []

    @eager_on_graph
    def failing(x: torch.Tensor) -> torch.Tensor:
        if armed:
            raise RuntimeError("mine")
        return x * 2

    runner = PrefillRunner(
        lambda x: failing(x + 1) + 0,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
        around=lambda key, live: contextlib.suppress(RuntimeError),
    )
    with runner.capture_window():
        runner.capture()
    assert runner.run({"x": torch.ones(3)}, size=3).replayed
    armed.append(True)
    with pytest.raises(RuntimeError, match="mine"):
        runner.run({"x": torch.ones(3)}, size=3)
    assert runner.statistics.replays == 1


def test_a_large_key_over_the_budget_leaves_room_for_small_ones(device: torch.device) -> None:
    """REQ-D8: what a key that does not fit had taken is given back; smaller keys are captured."""
    runner = wide_runner(device, sizes=(512, 8), memory_budget=4 * MIB)
    with runner.capture_window():
        runner.capture()
    assert set(runner.graphs) == {PrefillKey(8)}
    assert "prefill[512] needs" in runner.dropped[PrefillKey(512)]
    assert runner._graphs.nbytes <= 4 * MIB


def test_two_threads_do_not_mix_their_rows(device: torch.device) -> None:
    """FAULT-E12: a launch beside another one is refused; what is returned is always the caller's own."""
    runner = wide_runner(device, sizes=(16,))
    with runner.capture_window():
        runner.capture()
    wrong: list[float] = []
    refused = 0

    def work(value: float) -> None:
        nonlocal refused
        for _ in range(300):
            try:
                prepared = runner.prepare({"x": torch.full((4, 1), value)}, size=4)
                output = runner.launch(prepared, copy=True).output
            except ReplayError:
                refused += 1
                continue
            wrong.extend(v for v in output.flatten().tolist() if v != 4096 * (value + 1))

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert runner.run({"x": torch.ones(4, 1)}, size=4).replayed


def test_a_slot_is_not_refilled_between_the_look_at_it_and_its_copy(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULT-O7, FAULT-E12: another thread prepares two steps while one is being launched; the launch copies its own rows."""
    runner = wide_runner(device, sizes=(16,))
    with runner.capture_window():
        runner.capture()

    def prepare_two() -> None:
        for _ in range(2):
            runner.prepare({"x": torch.full((4, 1), 100.0)}, size=4)

    others: list[threading.Thread] = []
    span = _Slot.span

    def slowly(*arguments: Any, **options: Any) -> Any:
        others.append(threading.Thread(target=prepare_two))
        others[-1].start()
        others[-1].join(timeout=0.2)  # it has to wait for this launch
        return span(*arguments, **options)

    prepared = runner.prepare({"x": torch.full((4, 1), 7.0)}, size=4)
    monkeypatch.setattr(_Slot, "span", slowly)
    output = runner.launch(prepared, copy=True).output
    monkeypatch.setattr(_Slot, "span", span)
    others[0].join()
    assert output.flatten().tolist() == [4096 * 8.0] * 4


def test_a_slot_that_is_being_filled_is_not_taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT-O7: a thread that is slow to fill its slot does not write among the rows of the step that takes it next."""
    runner = wide_runner(device, sizes=(16,))
    with runner.capture_window():
        runner.capture()
    filling, go_on = threading.Event(), threading.Event()
    write = Field.write_array

    def slowly(self: Field, *arguments: Any, **options: Any) -> None:
        if threading.current_thread() is slow and not filling.is_set():
            filling.set()
            go_on.wait(5)
        write(self, *arguments, **options)

    def rows(value: float) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4, 1), value)}

    monkeypatch.setattr(Field, "write_array", slowly)
    slow = threading.Thread(target=lambda: runner.prepare(rows(7.0), size=4))
    slow.start()
    filling.wait(5)
    first = runner.run(rows(1.0), size=4).output.flatten().tolist()
    threading.Timer(0.2, go_on.set).start()
    second = runner.launch(runner.prepare(rows(2.0), size=4), copy=True).output  # takes the slot of the slow thread
    slow.join()
    assert first == [4096 * 2.0] * 4
    assert second.flatten().tolist() == [4096 * 3.0] * 4


def test_an_eager_step_may_be_launched_beside_a_replay(device: torch.device) -> None:
    """FAULT-E12: a break may run another step of its runner eagerly, which has its own tensors; a replay there is refused."""
    seen: list[Any] = []

    @eager_on_graph
    def nested(x: torch.Tensor) -> torch.Tensor:
        if runners:
            inner = runners.pop()  # once
            seen.append(inner.run({"x": torch.ones(9)}, size=9).reason)
            with pytest.raises(ReplayError, match="around this call"):
                inner.run({"x": torch.ones(2)}, size=2)
        return x * 2

    runners: list[PrefillRunner] = []
    runner = PrefillRunner(
        lambda x: nested(x + 1) + 0,
        inputs=[StaticInput("x", shape=(TOKENS,), dtype=torch.float32)],
        buckets=Buckets.of((4,)),
        example=lambda key: Example({"x": torch.rand(key.tokens)}),
        device=device,
        measure="never",
    )
    with runner.capture_window():
        runner.capture()
    runners.append(runner)
    result = runner.run({"x": torch.ones(3)}, size=3)
    assert result.replayed
    assert seen == [Reason.ABOVE_LARGEST_BUCKET]
    assert runner.run({"x": torch.ones(3)}, size=3).output.tolist() == [4.0] * 3
