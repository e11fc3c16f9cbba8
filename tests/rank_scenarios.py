"""What the ranks of a group do, each in a process of its own; `test_ranks.py` starts them and looks at what they saw.

python -m tests.rank_scenarios RANK WORLD FOLDER SCENARIO ...
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from breakgraph import eager_on_graph
from breakgraph.buckets import Buckets
from breakgraph.errors import BreakgraphError
from breakgraph.gates import Gate
from breakgraph.graph_key import GraphKey, PrefillKey, SampleType
from breakgraph.padding_limit import Times
from breakgraph.prefill_runner import PrefillRunner
from breakgraph.ranks import RankAgreement, RankGroup
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput
from breakgraph.step import Result
from breakgraph.work import Example
from tests.runner_models import SLOTS, DecodeRig

CPU = torch.device("cpu")
SCENARIOS: dict[str, Callable[[RankGroup], Any]] = {}


def scenario(function: Callable[[RankGroup], Any]) -> Callable[[RankGroup], Any]:
    """Registers what every rank runs."""
    SCENARIOS[function.__name__] = function
    return function


def inputs_of(size: int, *, tokens: int | None = None) -> dict[str, torch.Tensor]:
    """The inputs of a decode step."""
    positions = torch.arange(size if tokens is None else tokens, dtype=torch.int32)
    return {"rows": torch.arange(1, size + 1), "positions": positions}


def step(rig: DecodeRig, key: GraphKey, **options: Any) -> tuple[bool, int, str, str]:
    """Whether a step replayed, in which bucket, and why not; the tokens must be right either way."""
    rig.last_token.copy_(torch.arange(SLOTS) * 7)
    size, per_request = key.batch_size, key.draft_len + 1
    result = rig.runner.run(inputs_of(size, tokens=size * per_request), key=key, **options)
    positions = [list(range(row * per_request, (row + 1) * per_request)) for row in range(size)]
    expected = [DecodeRig.reference((row + 1) * 7, positions[row]) for row in range(size)]
    assert result.output.tolist() == expected, (result, expected)
    return seen(result)


def seen(result: Result[Any]) -> tuple[bool, int, str, str]:
    """A result as values that can be pickled and compared."""
    size = getattr(result.key, "batch_size", getattr(result.key, "tokens", 0))
    return result.replayed, size, "" if result.reason is None else result.reason.name, result.detail


def caught(call: Callable[[], Any]) -> str:
    """The error that a call raises, in words."""
    try:
        call()
    except BreakgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# Steps.


@scenario
def unequal_sizes(group: RankGroup) -> Any:
    """Four rounds of sizes, the last one with a size above the largest bucket."""
    rig = DecodeRig(CPU, ranks=RankAgreement(group))
    rig.capture()
    rounds = ((5, 7, 1, 2), (1, 1, 1, 1), (8, 3, 8, 8), (2, 9, 1, 1))
    return [step(rig, GraphKey(sizes[group.rank])) for sizes in rounds]


@scenario
def idle_ranks(group: RankGroup) -> Any:
    """Rank 0 works, the others are idle; then all are."""
    keys = GraphKey.product([1, 2, 4], draft_len=(0, 2), sample_type=(SampleType.FULL, SampleType.FAST))
    rig = DecodeRig(CPU, sizes=(1, 2, 4), keys=keys, ranks=RankAgreement(group))
    rig.capture()
    busy = GraphKey(3, draft_len=2, sample_type=SampleType.FAST)
    one = rig.runner.run(
        inputs_of(3, tokens=9) if group.rank == 0 else inputs_of(0), key=busy if group.rank == 0 else GraphKey(0)
    )
    none = rig.runner.run(inputs_of(0), key=GraphKey(0))
    return str(one.key), len(one.output), one.replayed, none.replayed, len(none.output)


@scenario
def without_padding(group: RankGroup) -> Any:
    """Unequal sizes, equal ones, and equal ones beside idle ranks."""
    rig = DecodeRig(CPU, ranks=RankAgreement(group, pad=False))
    rig.capture()
    rounds = ((4, 5, 4, 4), (5, 5, 5, 5), (5, 5, 0, 0))
    return [step(rig, GraphKey(sizes[group.rank])) for sizes in rounds]


@scenario
def other_keys(group: RankGroup) -> Any:
    """Ranks differ in draft length, in sampling, in greedy; and in greedy where that is declared harmless."""
    keys = GraphKey.product(
        [4], draft_len=(0, 1), is_all_greedy_sample=(False, True), sample_type=(SampleType.FULL, SampleType.FAST)
    )
    found = []
    strict = RankAgreement(group)
    for ranks in (strict, RankAgreement(group, may_differ=("is_all_greedy_sample",))):
        rig = DecodeRig(CPU, sizes=(4,), keys=keys, ranks=ranks)
        rig.capture()
        odd = group.rank == 1
        found.append(step(rig, GraphKey(4, draft_len=int(odd))))
        found.append(step(rig, GraphKey(4, sample_type=SampleType.FULL if odd else SampleType.FAST)))
        found.append(step(rig, GraphKey(4, is_all_greedy_sample=odd)))
    return found


@scenario
def a_gate_on_one_rank(group: RankGroup) -> Any:
    """Rank 1 refuses the second step by a gate, rank 0 the fourth."""
    refuses: list[int] = []
    gate = Gate("not today", lambda key, live: "no" if group.rank in refuses else None)
    rig = DecodeRig(CPU, ranks=RankAgreement(group), gates=[gate])
    rig.capture()
    found = [step(rig, GraphKey(3))]
    refuses.append(1)
    found.append(step(rig, GraphKey(3)))
    refuses.clear()
    found.append(step(rig, GraphKey(3)))
    with rig.runner.suspend() if group.rank == 0 else rig.runner.suspend_dummies():
        found.append(step(rig, GraphKey(3)))
    return found, dict(rig.runner.statistics.eager)


class Storage:
    """Gives padding requests a row while there is one."""

    def __init__(self, free: int) -> None:
        self.free = free

    def allocate(self, *, draft_len: int) -> dict[str, torch.Tensor] | None:
        """Take it."""
        if not self.free:
            return None
        self.free -= 1
        return {"rows": torch.tensor([SLOTS - 1])}

    def release(self, *, draft_len: int) -> None:
        """Give it back."""
        self.free += 1


@scenario
def no_storage_on_one_rank(group: RankGroup) -> Any:
    """Rank 1 has no storage for a padding request until the last round."""
    storage = Storage(0 if group.rank == 1 else 1)
    rig = DecodeRig(CPU, ranks=RankAgreement(group), dummies=storage)
    rig.capture()
    found = [step(rig, GraphKey(3)), step(rig, GraphKey(4)), step(rig, GraphKey((3, 4, 3, 3)[group.rank]))]
    storage.free = max(storage.free, 1)
    found.append(step(rig, GraphKey(3)))
    return found


@attrs.frozen
class Plan:
    """Live data with a plan in it."""

    pages: int

    def replay_signature(self) -> int:
        """What a graph has baked in."""
        return self.pages


@scenario
def another_plan_on_one_rank(group: RankGroup) -> Any:
    """Rank 1 plans another number of pages in the second round."""

    def forward(rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        return rows * 2

    ticks = iter(range(1, 10**6))
    rig = DecodeRig(
        CPU,
        sizes=(4,),
        ranks=RankAgreement(group),
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}, {"plan": Plan(1)}),
    )
    rig.capture()
    rounds = [(1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 1)]
    run = rig.runner.run
    return [
        seen(run({"rows": torch.ones(3, dtype=torch.int64)}, key=GraphKey(3), live={"plan": Plan(pages[group.rank])}))
        for pages in rounds
    ]


@scenario
def an_error_before_a_step(group: RankGroup) -> Any:
    """Rank 1 gives inputs that are refused; then its gate raises; then all is well."""

    def check(key: object, live: object) -> str | None:
        if broken:
            raise ValueError("the gate's own")
        return None

    broken: list[bool] = []
    rig = DecodeRig(CPU, ranks=RankAgreement(group), gates=[Gate("raises", check)])
    rig.capture()
    begin = time.perf_counter()
    key = GraphKey(3)
    first = caught(lambda: rig.runner.run(inputs_of(2 if group.rank == 1 else 3), key=key))
    if group.rank == 1:
        broken.append(True)
    try:
        second = caught(lambda: rig.runner.run(inputs_of(3), key=key))
    except ValueError as error:
        second = f"own {error}"
    broken.clear()
    return first, second, step(rig, key), time.perf_counter() - begin


@scenario
def a_graph_lost_at_run_time(group: RankGroup) -> Any:
    """With verify="always" rank 1 finds a mismatch, which the others cannot know of."""
    wrong = [0]

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return rows + wrong[0]

    ticks = iter(range(1, 10**6))
    rig = DecodeRig(
        CPU,
        sizes=(2, 4),
        ranks=RankAgreement(group),
        forward=forward,
        verify="always",
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}),
    )
    rig.capture()
    found = []
    for size in (3, 3, 2):
        found.append(seen(rig.runner.run({"rows": torch.ones(size, dtype=torch.int64)}, key=GraphKey(size))))
        wrong[0] = 5 if group.rank == 1 and len(found) == 1 else wrong[0]
    found.append(seen(rig.runner.run({"rows": torch.ones(2, dtype=torch.int64)}, key=GraphKey(2))))
    return found


@scenario
def prefill_buckets(group: RankGroup) -> Any:
    """Token counts differ; one rank measured that its largest bucket does not pay."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    ticks = iter(range(1, 10**6))
    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS, 1), dtype=torch.float32)],
        buckets=Buckets.of([8, 16, 32]),
        example=lambda key: Example({"x": torch.full((key.tokens, 1), float(next(ticks)))}),
        device=CPU,
        measure="always",
        ranks=RankAgreement(group),
    )

    def times(key: PrefillKey) -> Times:
        pays = not (group.rank == 1 and key.tokens == 32)
        return Times(eager=1.0 if pays else 0.1, replay=0.5)

    runner._graphs.times = times  # type: ignore[method-assign]
    with runner.capture_window():
        runner.capture()
    rounds = [(5, 12, 3, 0), (5, 7, 0, 1), (5, 20, 1, 1), (16, 40, 1, 1)]
    found = []
    for sizes in rounds:
        size = sizes[group.rank]
        result = runner.run({"x": torch.full((size, 1), 2.0)}, size=size)
        assert result.output.tolist() == [[6.0]] * size
        found.append(seen(result))
    return found


@scenario
def random_traffic(group: RankGroup) -> Any:
    """Random sizes, drafts, gates and idle ranks; a break of the model sums over the ranks, at the padded shape."""
    together = dist.new_group(backend="gloo")
    shared, own = random.Random(5), random.Random(group.rank)

    @eager_on_graph
    def reduce(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(1, dtype=torch.int64)
        total.copy_(torch.tensor([len(x)]))
        dist.all_reduce(total, group=together)
        return total

    def forward(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows * 2, reduce(rows).expand(len(rows)).clone()

    ticks = iter(range(1, 10**6))
    refuse = [False]
    rig = DecodeRig(
        CPU,
        sizes=(1, 2, 4, 8),
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,), pad=Pad.keep_out(0))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}),
        gates=[Gate("now and then", lambda key, live: "no" if refuse[0] else None)],
        ranks=RankAgreement(group),
    )
    rig.capture()
    found = []
    for _ in range(300):
        refuse[0] = shared.random() < 0.1 and own.random() < 0.5
        size = own.choice([0, 1, 2, 3, 5, 7, 8, 9 if own.random() < 0.1 else 4])
        rows = torch.tensor([own.randrange(1, 60) for _ in range(size)], dtype=torch.int64)
        result = rig.runner.run({"rows": rows}, key=GraphKey(size))
        doubled, total = result.output
        assert doubled.tolist() == (rows * 2).tolist()
        if result.replayed and size:
            assert total.tolist() == [result.key.batch_size * group.size] * size  # type: ignore[union-attr]
        found.append((*seen(result)[:2], size))
    return found, dict(rig.runner.statistics.eager)


def summing(group: RankGroup) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A forward with a break that adds up the rows of all ranks: ranks that are apart get another sum, or wait."""
    together = dist.new_group(backend="gloo")

    @eager_on_graph
    def reduce(x: torch.Tensor) -> torch.Tensor:
        total = torch.tensor([len(x)])
        dist.all_reduce(total, group=together)
        return total

    return lambda rows: (rows * 2, reduce(rows).expand(len(rows)).clone())


def rig_of(group: RankGroup, *, sizes: tuple[int, ...] = (2, 4, 8), **options: Any) -> DecodeRig:
    """A decode runner over one input."""
    ticks = iter(range(1, 10**6))
    return DecodeRig(
        CPU,
        sizes=sizes,
        forward=options.pop("forward", None) or summing(group),
        inputs=[StaticInput("rows", shape=(REQUESTS,), pad=Pad.keep_out(0))],
        example=options.pop("example", lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))})),
        ranks=options.pop("ranks", None) or RankAgreement(group),
        **options,
    )


def ones(size: int) -> dict[str, torch.Tensor]:
    """The input of such a runner."""
    return {"rows": torch.ones(size, dtype=torch.int64)}


@scenario
def variants_without_a_bucket(group: RankGroup) -> Any:
    """Ranks may differ in greedy, and one variant lacks a bucket: with sizes 3 and 7, and beside idle ranks."""
    keys = [GraphKey(4, is_all_greedy_sample=True), *GraphKey.product([4, 8])]
    rig = rig_of(group, sizes=(4, 8), keys=keys, ranks=RankAgreement(group, may_differ=("is_all_greedy_sample",)))
    rig.capture()
    found = []
    for sizes in ((3, 7, 1, 1), (3, 4, 1, 1), (7, 0, 0, 0), (3, 0, 0, 0)):
        size = sizes[group.rank]
        key = GraphKey(size, is_all_greedy_sample=group.rank == 0 and sizes[1] > 0)
        result = rig.runner.run(ones(size), key=key)
        found.append((result.replayed, result.output[1].tolist()))
    return found


@scenario
def idle_with_other_keys(group: RankGroup) -> Any:
    """All are idle, with keys of other variants; then rank 0 has keys of numpy and the others are idle."""
    rig = rig_of(group, sizes=(4,), keys=[GraphKey(4, draft_len=1)])
    rig.capture()
    first = seen(rig.runner.run(ones(0), key=GraphKey(0, draft_len=int(group.rank == 0))))
    busy = GraphKey.for_batch(np.array([1, 1, 1])) if group.rank == 0 else GraphKey(0)
    return first, seen(rig.runner.run(ones(busy.batch_size), key=busy))


@scenario
def other_runners(group: RankGroup) -> Any:
    """Rank 0 steps a prefill runner, the others a decode runner of the same group."""
    ticks = iter(range(1, 10**6))
    prefill = PrefillRunner(
        lambda x: x * 2,
        inputs=[StaticInput("x", shape=(TOKENS,))],
        buckets=Buckets.of([4]),
        example=lambda key: Example({"x": torch.full((key.tokens,), next(ticks))}),
        device=CPU,
        ranks=RankAgreement(group),
    )
    with prefill.capture_window():
        prefill.capture()
    rig = rig_of(group, sizes=(4,))
    rig.capture()
    if group.rank == 0:
        first = caught(lambda: prefill.run({"x": torch.ones(3, dtype=torch.int64)}, size=3))
    else:
        first = caught(lambda: rig.runner.run(ones(0), key=GraphKey(0)))
    return first, seen(rig.runner.run(ones(3), key=GraphKey(3)))


@scenario
def planning_that_raises(group: RankGroup) -> Any:
    """plan() raises on rank 1, after the vote: for a replay, and for an eager step."""
    broken: list[bool] = []

    def plan(key: GraphKey, live: object, rows: int) -> None:
        if broken:
            raise ValueError("plan's own")

    rig = rig_of(group, sizes=(4,), plan=plan)
    rig.capture()
    found = []
    for size in (3, 5):
        if group.rank == 1:
            broken.append(True)
        try:
            found.append(caught(lambda size=size: rig.runner.run(ones(size), key=GraphKey(size))))  # type: ignore[misc]
        except ValueError as error:
            found.append(f"own {error}")
        broken.clear()
    return (*found, seen(rig.runner.run(ones(3), key=GraphKey(3))))


@scenario
def encoder_tokens_on_one_rank(group: RankGroup) -> Any:
    """Rank 0 has no encoder tokens: a graph with cross-attention is not for it."""

    def forward(rows: torch.Tensor, cross: bool) -> torch.Tensor:
        return rows * 2 + (1000 if cross else 0)

    ticks = iter(range(1, 10**6))
    rig = rig_of(
        group,
        sizes=(4,),
        keys=GraphKey.product([4], num_encoder_tokens=(0, 8)),
        forward=forward,
        example=lambda key: Example(
            {"rows": torch.full((key.batch_size,), next(ticks))}, {"cross": key.num_encoder_tokens > 0}
        ),
    )
    rig.capture()
    extent = 0 if group.rank == 0 else 5
    result = rig.runner.run(ones(3), key=GraphKey(3, num_encoder_tokens=extent), live={"cross": extent > 0})
    return result.replayed, result.output.tolist()


# Captures.


@scenario
def proofs_that_go_apart(group: RankGroup) -> Any:
    """With a collective in a break: rank 1 has no example for fewer rows, then a mismatch in the proof of a bucket."""

    def example(key: GraphKey) -> Example:
        if group.rank == 1 and key.batch_size not in (2, 4):
            raise ValueError("no such example")
        return Example({"rows": torch.full((key.batch_size,), next(ticks))})

    ticks = iter(range(1, 10**6))
    first = rig_of(group, sizes=(2, 4), example=example)
    first.capture()
    runs = [0]
    forward = summing(group)

    def drifting(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs[0] += 1
        doubled, total = forward(rows)
        return doubled + (group.rank == 1 and len(rows) == 4 and runs[0] > 3), total

    second = rig_of(group, sizes=(2, 4), forward=drifting)
    second.capture()
    return [key.batch_size for key in first.runner.graphs], {k.batch_size: v for k, v in second.runner.dropped.items()}


@scenario
def a_mismatch_in_service(group: RankGroup) -> Any:
    """verify="always" with a collective in a break: rank 1 drops its graph; capture() again is refused; then clear()."""
    wrong = [0]
    forward = summing(group)

    def drifting(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled, total = forward(rows)
        return doubled + wrong[0], total

    rig = rig_of(group, sizes=(2, 4), forward=drifting, verify="always")
    rig.capture()
    wrong[0] = 5 if group.rank == 1 else 0
    found = [seen(rig.runner.run(ones(3), key=GraphKey(3)))]
    wrong[0] = 0
    refused = caught(rig.capture)
    size = 2 if group.rank == 1 else 3
    found.append(seen(rig.runner.run(ones(size), key=GraphKey(size))))
    rig.runner.clear()
    rig.capture()
    found.append(seen(rig.runner.run(ones(size), key=GraphKey(size))))
    return found, refused


@scenario
def limits_measured_in_one_order(group: RankGroup) -> Any:
    """Two variants with collectives of other shapes are measured; keys hold a set of strings, whose order is a process's own."""
    together = dist.new_group(backend="gloo")

    @eager_on_graph(live=("wide",))
    def reduce(x: torch.Tensor, wide: bool) -> torch.Tensor:
        total = torch.zeros(4 if wide else 2)
        dist.all_reduce(total, group=together)
        return x + 0

    def forward(x: torch.Tensor, wide: bool) -> torch.Tensor:
        return reduce(x * 2, wide)

    ticks = iter(range(1, 10**6))
    runner = PrefillRunner(
        forward,
        inputs=[StaticInput("x", shape=(TOKENS,))],
        buckets=Buckets.of([4]),
        extras=[(("on", frozenset({"a", "b", "c", name})),) for name in ("wide", "narrow")],
        example=lambda key: Example(
            {"x": torch.full((key.tokens,), next(ticks))}, {"wide": "wide" in dict(key.extra)["on"]}
        ),
        device=CPU,
        measure="always",
        ranks=RankAgreement(group),
    )
    with runner.capture_window():
        runner.capture()
    return len(runner.graphs)


@scenario
def a_bucket_that_one_rank_cannot_capture(group: RankGroup) -> Any:
    """Rank 1 fails in another phase for each of three buckets; the fourth is fine."""
    fails = {8: "warm-up", 4: "capture", 2: "verify"}
    passes: dict[int, int] = {}

    @eager_on_graph
    def brk(x: torch.Tensor) -> torch.Tensor:
        return x + 0

    def forward(rows: torch.Tensor) -> torch.Tensor:
        size = len(rows)
        passes[size] = passes.get(size, 0) + 1
        phase = {1: "warm-up", 2: "capture"}.get(passes[size], "verify")
        out = brk(rows + 1)
        if group.rank == 1 and fails.get(size) == phase:
            if phase == "verify":
                return out * 2
            raise ValueError(f"not {size} in {phase}")
        return brk(out) * 1

    ticks = iter(range(1, 10**6))
    rig = DecodeRig(
        CPU,
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}),
        ranks=RankAgreement(group),
    )
    begin = time.perf_counter()
    rig.capture()
    seconds = time.perf_counter() - begin
    dropped = {key.batch_size: reason for key, reason in rig.runner.dropped.items()}
    graphs = [key.batch_size for key in rig.runner.graphs]
    passes.update(dict.fromkeys(passes, 99))
    fails.clear()
    after = [seen(rig.runner.run({"rows": torch.ones(n, dtype=torch.int64)}, key=GraphKey(n))) for n in (1, 3)]
    return dropped, graphs, after, seconds


@scenario
def fewer_breaks_on_one_rank(group: RankGroup) -> Any:
    """Rank 1 leaves a break out."""

    @eager_on_graph
    def brk(x: torch.Tensor) -> torch.Tensor:
        return x + 0

    def forward(rows: torch.Tensor) -> torch.Tensor:
        out = brk(rows + 1)
        return (out if group.rank == 1 else brk(out)) * 2

    ticks = iter(range(1, 10**6))
    rig = DecodeRig(
        CPU,
        sizes=(2,),
        forward=forward,
        inputs=[StaticInput("rows", shape=(REQUESTS,))],
        example=lambda key: Example({"rows": torch.full((key.batch_size,), next(ticks))}),
        ranks=RankAgreement(group),
    )
    begin = time.perf_counter()
    rig.capture()
    return {key.batch_size: reason for key, reason in rig.runner.dropped.items()}, time.perf_counter() - begin


@scenario
def other_buckets_on_one_rank(group: RankGroup) -> Any:
    """Rank 1 leaves a bucket out, then does not pad."""
    rig = DecodeRig(CPU, sizes=(1, 2) if group.rank == 1 else (1, 2, 4), ranks=RankAgreement(group))
    other = DecodeRig(CPU, sizes=(1, 2), ranks=RankAgreement(group, pad=group.rank != 1))
    return caught(rig.capture), caught(other.capture)


@scenario
def a_step_beside_a_capture(group: RankGroup) -> Any:
    """Rank 0 captures while the others step."""
    rig = DecodeRig(CPU, sizes=(1, 2), ranks=RankAgreement(group))
    rig.capture()
    other = DecodeRig(CPU, sizes=(1, 2), ranks=RankAgreement(group))
    return caught(other.capture if group.rank == 0 else lambda: step(rig, GraphKey(2)))


@scenario
def a_rank_that_dies(group: RankGroup) -> Any:
    """The last scenario of its processes: rank 1 ends without a word."""
    short = RankGroup.create(timeout_seconds=5)
    rig = DecodeRig(CPU, sizes=(1, 2), ranks=RankAgreement(short))
    rig.capture()
    step(rig, GraphKey(2))
    if group.rank == 1:
        os._exit(7)
    begin = time.perf_counter()
    error = caught(lambda: step(rig, GraphKey(2)))
    return error, time.perf_counter() - begin


@scenario
def a_rank_that_hangs(group: RankGroup) -> Any:
    """The last scenario of its processes: rank 1 does not come."""
    short = RankGroup.create(timeout_seconds=2)
    rig = DecodeRig(CPU, sizes=(1, 2), ranks=RankAgreement(short))
    rig.capture()
    begin = time.perf_counter()
    if group.rank == 1:
        time.sleep(4)
        return "", 0.0
    return caught(lambda: step(rig, GraphKey(2))), time.perf_counter() - begin


def main() -> None:
    """Run scenarios as one rank of a group and leave what each returned in a file."""
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world)
    for name in sys.argv[4:]:
        found = SCENARIOS[name](RankGroup.create(timeout_seconds=20))
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
