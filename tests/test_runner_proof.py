"""What the proof of a graph sees: padded steps, state of every kind, generators, and which axis a result has in front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from breakgraph.break_function import eager_on_graph
from breakgraph.buckets import Buckets
from breakgraph.graph_key import GraphKey, PrefillKey
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput
from breakgraph.statistics import Reason
from tests.runner_models import DecodeRig, PrefillRig

IDS = StaticInput("ids", shape=(TOKENS,), dtype=torch.float32)


def captured(forward: Any, *, device: torch.device, sizes: tuple[int, ...] = (4,), **options: Any) -> PrefillRunner:
    """A captured runner over float ids."""
    runner = PrefillRunner(
        forward,
        inputs=options.pop("inputs", [IDS]),
        buckets=Buckets.of(sizes),
        example=options.pop("example", lambda key: Example({"ids": torch.randn(key.tokens)})),
        device=device,
        **options,
    )
    with runner.capture_window():
        runner.capture()
    return runner


# Padded steps.


@pytest.mark.parametrize("writes", [(), ("out",)])
def test_forgotten_writes_are_found(device: torch.device, writes: tuple[str, ...]) -> None:
    """FAULT-P1, REQ-H5: a break that leaves padding rows unwritten, read by a segment, is dropped; writes= mends it."""

    @eager_on_graph(rows=("q", "out"), writes=writes)
    def attend(q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(ids)
        attend(ids * 1, out)
        return ids * 0 + out.sum()

    runner = captured(forward, device=device)
    assert bool(runner.graphs) is bool(writes)
    if not writes:
        assert "with 2 of 4 rows: the replay differs from eager" in runner.dropped[PrefillKey(4)]
        assert "writes=" in runner.dropped[PrefillKey(4)]
    runner.run({"ids": torch.full((4,), 100.0)}, size=4)
    result = runner.run({"ids": torch.ones(2)}, size=2)
    assert result.replayed is bool(writes)
    assert result.output.tolist() == [2.0, 2.0]


def test_the_report_says_what_was_proven(device: torch.device) -> None:
    """REQ-H5, REQ-C8: two thirds of a bucket's rows are proven too; a bucket that is never padded has nothing to prove."""
    rig = PrefillRig(device, sizes=(1, 2, 4, 16))
    rig.capture()
    reports = rig.runner.statistics.reports
    assert {key.tokens: report.padded_rows for key, report in reports.items()} == {16: 10, 4: 3, 2: None, 1: None}  # type: ignore[attr-defined]
    assert reports[PrefillKey(16)].padded_skipped == ""
    assert reports[PrefillKey(2)].padded_skipped == "its graph is never padded"
    decode = DecodeRig(device)
    decode.capture()
    reports = decode.runner.statistics.reports
    assert {key.batch_size: report.padded_rows for key, report in reports.items()} == {8: 5, 4: 3, 2: None, 1: None}  # type: ignore[attr-defined]
    assert not decode.runner.dropped


def test_an_example_for_one_size_only_is_no_failure(device: torch.device) -> None:
    """REQ-D4: an example that cannot make fewer rows leaves the padded proof out, and the report says why."""
    runner = captured(lambda ids: ids * 2, device=device, example=lambda key: Example({"ids": torch.randn(4)}))
    assert not runner.dropped
    report = runner.statistics.reports[PrefillKey(4)]
    assert report.padded_rows is None
    assert "StaticInputError" in report.padded_skipped
    assert runner.run({"ids": torch.ones(3)}, size=3).replayed


def test_a_padded_step_that_eager_cannot_run_is_no_failure(device: torch.device) -> None:
    """REQ-D4: where live data of the smaller example does not fit it, eager fails alike, and the graph is kept."""

    @eager_on_graph(live=("lengths",), rows=("x", "out"), writes=("out",))
    def attend(x: torch.Tensor, out: torch.Tensor, lengths: list[int]) -> None:
        for part, into in zip(x.split(lengths), out.split(lengths), strict=True):
            into.copy_(part * 2)

    def forward(ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = torch.zeros_like(ids)
        attend(ids, out, lengths)
        return out + 1

    def example(key: PrefillKey) -> Example:
        return Example({"ids": torch.randn(key.tokens)}, {"lengths": [1, 3]})

    runner = captured(forward, device=device, example=example)
    assert not runner.dropped
    assert "RuntimeError" in runner.statistics.reports[PrefillKey(4)].padded_skipped
    assert runner.run({"ids": torch.ones(3)}, size=3, live={"lengths": [1, 2]}).output.tolist() == [3.0] * 3


def test_a_break_that_cannot_run_padded_drops_its_graph(device: torch.device) -> None:
    """REQ-H4: a break that fails in a padded replay and not in eager would fail in service, so the graph is dropped."""
    calls: list[int] = []

    @eager_on_graph(rows=("x", "return"))
    def attend(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if calls.count(2) == 1:
            raise KeyError("first call with two rows")
        return x * 2

    runner = captured(lambda ids: attend(ids + 0) + 1, device=device)
    assert "the replay raised KeyError and eager did not" in runner.dropped[PrefillKey(4)]


def test_what_the_proof_saw_of_live_data_is_reported(device: torch.device) -> None:
    """FAULT-F5: inputs and live data count separately: a proof over the same live data cannot see a forgotten break."""
    shared = {"factor": torch.ones(1, device=device)}

    def forward(ids: torch.Tensor, meta: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return ids * meta["factor"]

    def same(key: PrefillKey) -> Example:
        return Example({"ids": torch.randn(key.tokens)}, {"meta": shared})

    def changing(key: PrefillKey) -> Example:
        shared["factor"].add_(1)
        return Example({"ids": torch.ones(key.tokens)}, {"meta": shared})

    for example, inputs, live in ((same, True, False), (changing, False, True)):
        runner = captured(forward, device=device, example=example)
        report = runner.statistics.reports[PrefillKey(4)]
        assert (report.fresh_inputs, report.fresh_live) == (inputs, live)
    runner = captured(lambda ids: ids * 2, device=device)
    assert runner.statistics.reports[PrefillKey(4)].fresh_live is None


# State and generators.


class Lengths:
    """State that keeps a tensor and replaces it when it is put back."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, device=device)

    def save(self) -> torch.Tensor:
        """A copy."""
        return self.tensor.clone()

    def restore(self, saved: torch.Tensor) -> None:
        """Put a copy back."""
        self.tensor = saved.clone()


def test_state_that_allocates_is_restored_outside_inference_mode(device: torch.device) -> None:
    """REQ-D3, FAULT-E8: what restore() allocates is no inference tensor, so breaks can go on writing into it."""
    lengths = Lengths(device)

    @eager_on_graph
    def count(x: torch.Tensor) -> torch.Tensor:
        lengths.tensor.add_(1)
        return x * 1

    runner = captured(lambda ids: count(ids * 2) * 1, device=device, state=(lengths,))
    assert not runner.dropped
    assert not lengths.tensor.is_inference()
    assert lengths.tensor.item() == 0
    runner.run({"ids": torch.ones(4)}, size=4)
    assert lengths.tensor.item() == 1


def test_capture_leaves_generators_that_forward_draws_from(device: torch.device) -> None:
    """REQ-D3: default and declared generators are as before after capture(), though forwards and examples drew from them."""
    drop = nn.Dropout(0.5)
    own = torch.Generator(device=device).manual_seed(3)
    torch.manual_seed(0)
    before = [torch.get_rng_state(), own.get_state()]
    if device.type == "cuda":
        before.append(torch.cuda.get_rng_state(device))
    runner = captured(
        lambda ids: drop(ids) + torch.rand(ids.shape, generator=own, device=device), device=device, generators=(own,)
    )
    after = [torch.get_rng_state(), own.get_state()]
    if device.type == "cuda":
        after.append(torch.cuda.get_rng_state(device))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not runner.dropped


# Requests.

REQUEST = StaticInput("rq", shape=(REQUESTS,), dtype=torch.float32, pad=Pad.value(-99))


def by_request(key: PrefillKey) -> Example:
    """Eight requests, any number of tokens."""
    return Example({"ids": torch.randn(key.tokens), "rq": torch.randn(8)})


def test_results_by_request_where_the_bucket_is_max_requests(device: torch.device) -> None:
    """REQ-C7, REQ-H9: with as many tokens as requests in a bucket, each result is still cut to its own kind of rows."""
    runner = captured(
        lambda ids, rq: {"token": ids + 1, "request": rq * 2},
        device=device,
        sizes=(8, 16),
        inputs=[IDS, REQUEST],
        max_requests=8,
        example=by_request,
    )
    assert not runner.dropped
    for size in (6, 12):
        result = runner.run({"ids": torch.ones(size), "rq": torch.full((2,), 3.0)}, size=size)
        assert result.replayed
        assert result.output["token"].tolist() == [2.0] * size
        assert result.output["request"].tolist() == [6.0, 6.0]


def test_results_whose_axis_cannot_be_told_are_refused(device: torch.device) -> None:
    """REQ-C7: where no other token count can be tried, such a bucket is dropped with the reason; eager steps are right."""
    runner = captured(
        lambda ids, rq: rq * 2,
        device=device,
        sizes=(8,),
        inputs=[IDS, REQUEST],
        max_requests=8,
        example=lambda key: Example({"ids": torch.randn(8), "rq": torch.randn(8)}),
    )
    assert "as many tokens as requests, 8" in runner.dropped[PrefillKey(8)]
    result = runner.run({"ids": torch.ones(6), "rq": torch.ones(2)}, size=6)
    assert result.reason is Reason.DROPPED
    assert result.output.tolist() == [2.0, 2.0]


def test_an_example_may_have_fewer_requests(device: torch.device) -> None:
    """REQ-H2: an example with fewer than max_requests requests is padded like a step: for capture and for the proof."""

    def example(key: PrefillKey) -> Example:
        return Example({"ids": torch.randn(key.tokens), "rq": torch.randn(2)})

    runner = captured(
        lambda ids, rq: (ids + 1, rq * 2),
        device=device,
        sizes=(4, 16),
        inputs=[IDS, REQUEST],
        max_requests=8,
        example=example,
    )
    assert not runner.dropped
    tokens, requests = runner.run({"ids": torch.ones(3), "rq": torch.ones(5)}, size=3).output
    assert (len(tokens), requests.tolist()) == (3, [2.0] * 5)


def test_a_decode_example_is_full(device: torch.device) -> None:
    """REQ-D4: in decode the requests are the key, so an example with fewer is refused."""
    rig = DecodeRig(device, sizes=(4,))
    small = rig.example(GraphKey(3))
    rig = DecodeRig(device, sizes=(4,), example=lambda key: small)
    rig.capture()
    assert "StaticInputError" in rig.runner.dropped[GraphKey(4)]
