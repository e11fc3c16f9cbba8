"""Thousands of steps of the serving loop: the tokens of an engine without graphs, exact counts, flat memory."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.shapes import SHAPES
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import Placement
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving import LLM, FinishReason, Graphs, SamplingParams
from breakgraph.serving.engine import Engine
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling import greedy, sample
from breakgraph.serving.scheduler import DecodeBatch, PrefillBatch
from breakgraph.statistics import Reason
from tests.serving_reference import TIE, tiny_model

REPLAY = "replay"
STATM = Path("/proc/self/statm")
MIB = 1 << 20
MOST_WAITING = 10
# What the second half of a run may add to memory: one object a step would be 2,500 blocks, one activation a step hundreds
# of megabytes. On CUDA an eager decode of another batch size makes a planner of 1 MiB, once for each.
MOST_GROWTH = {"blocks": 1000, "resident": 2 * MIB, "allocated": 2 * MIB, "reserved": 32 * MIB}


@attrs.frozen
class Workload:
    """A model, its engine, and what is asked of it.

    Attributes:
        model: Makes the model.
        options: Of both engines.
        longest_prompt: Several chunks.
        longest_answer: In tokens.
        tie: How far below the best logit a token may be where rounding decided: rows differ with the batch.
        preemptions: At least so many are part of the run.
    """

    model: Callable[[], LoadedModel]
    options: dict[str, Any]
    longest_prompt: int
    longest_answer: int
    tie: float
    preemptions: int


# In both the steps of long prompts are above the largest bucket, and the cache is too small for as many long requests as
# there are rows.
WORKLOADS = {
    "tiny": Workload(
        model=tiny_model,
        options={
            "max_batch_size": 4,
            "max_num_tokens": 24,
            "max_seq_len": 64,
            "block_size": 4,
            "num_blocks": 26,
            "prefill_sizes": [4, 16],
            "contexts": [16],
            "seed": 1,
        },
        longest_prompt=50,
        longest_answer=20,
        tie=TIE,
        preemptions=10,
    ),
    # The error of a row in bfloat16, 0.03 of its norm, is 0.03 in a logit, whose own spread is 0.9 with these weights.
    "1B": Workload(
        model=lambda: random_model(SHAPES["1B"], device="cuda", dtype=torch.bfloat16, seed=2),
        options={
            "max_batch_size": 8,
            "max_num_tokens": 160,
            "max_seq_len": 512,
            "num_blocks": 60,
            "prefill_sizes": [16, 64, 128],
            "seed": 1,
        },
        longest_prompt=450,
        longest_answer=40,
        tie=0.3,
        preemptions=0,
    ),
}


class Tally:
    """Counts the steps of an engine and works out, from its batches alone, what should become of each.

    Attributes:
        steps: Steps by phase.
        tokens: Tokens by phase.
        expected: By phase, how often each reason for an eager step, and `REPLAY`.
        sampled: Tokens that the steps sample.
        suspended: By phase, the reason why its steps are eager for now.
    """

    def __init__(self, engine: Engine, *, graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine
        self._graphs = graphs
        self.steps: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.expected: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        self.sampled = 0
        self.suspended: dict[str, Reason] = {}
        for phase, step in (("prefill", engine.prefill), ("decode", engine.decode)):
            monkeypatch.setattr(step, "prepare", self._counted(phase, step.prepare))

    def _counted(self, phase: str, prepare: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(batch: PrefillBatch | DecodeBatch) -> Any:
            self.steps[phase] += 1
            self.tokens[phase] += batch.num_tokens
            self.sampled += len(batch.sampled)
            self.expected[phase][self._becomes(phase, batch.num_tokens)] += 1
            return prepare(batch)

        return counted

    def _becomes(self, phase: str, tokens: int) -> str:
        if self._graphs is Graphs.OFF:
            return Reason.DISABLED.name
        if phase in self.suspended:
            return self.suspended[phase].name
        if phase == "decode":
            return REPLAY
        runner = self._engine.prefill.runner
        bucket = runner.buckets.round_up(tokens)
        if bucket is None:
            return Reason.ABOVE_LARGEST_BUCKET.name
        # Measured on CUDA only.
        cheaper = tokens < runner.statistics.reports[PrefillKey(bucket)].least_size
        return Reason.EAGER_IS_CHEAPER.name if cheaper else REPLAY

    @property
    def launched(self) -> int:
        """Steps of both phases."""
        return self.steps.total()

    def check(self, *, prompt_tokens: int, generated: int) -> None:
        """Every counter of the engine and of its runners is what the batches make it, to the step and to the token."""
        statistics = self._engine.statistics()
        assert statistics.dropped == {}
        replays = {phase: expected[REPLAY] for phase, expected in self.expected.items()}
        eager = {phase: expected - Counter({REPLAY: replays[phase]}) for phase, expected in self.expected.items()}
        for phase, step in (("prefill", self._engine.prefill), ("decode", self._engine.decode)):
            counted, runner = getattr(statistics, phase), step.runner.statistics
            assert (counted.steps, counted.tokens) == (self.steps[phase], self.tokens[phase])
            assert counted.replays == runner.replays == runner.replays_by_key.total() == replays[phase]
            assert dict(runner.eager) == dict(eager[phase])
            assert counted.replays + runner.eager.total() == counted.steps
            assert runner.real_rows + runner.eager_rows == counted.tokens
        assert statistics.eager == dict(eager["prefill"] + eager["decode"])
        captured = self._engine.prefill.placement is Placement.CAPTURED
        layers = 0 if captured else self._engine.state.decoder.config.num_layers
        assert statistics.breaks == layers * replays["prefill"]
        assert statistics.segments == (layers + 1) * replays["prefill"] + replays["decode"]
        assert statistics.prompt_tokens == prompt_tokens
        assert statistics.generated_tokens == generated
        assert statistics.generated_tokens + statistics.discarded_tokens == self.sampled


@attrs.define(eq=False)
class Pair:
    """The same request in both engines.

    Attributes:
        ours: With graphs.
        theirs: Without.
        abort: The step at which the caller gives up, if they have not ended by then.
    """

    ours: Request
    theirs: Request
    abort: int | None

    @property
    def first_difference(self) -> int | None:
        """Number of the first token that differs; None also where one has more tokens than the other."""
        both = zip(self.ours.output_ids, self.theirs.output_ids, strict=False)
        return next((index for index, (one, other) in enumerate(both) if one != other), None)


class Soak:
    """Two engines that get the same requests at the same steps: one with graphs, one without.

    Neither reuses prefixes, so that both schedule alike; with `shares` ours does, and most prompts have one of three beginnings.

    Attributes:
        ours: With graphs.
        tally: Of `ours`.
        differences: Requests whose tokens differ, each for a near-tie.
        reasons: How requests ended.
        agreed: Greedy tokens that both engines gave.
        moved_blocks: Blocks that were moved, with steps in flight.
        cached_tokens: Prompt tokens that requests of `ours` found in the cache.
    """

    def __init__(
        self, workload: Workload, monkeypatch: pytest.MonkeyPatch, *, verify: str = "first", shares: bool = False
    ) -> None:
        self._workload = workload
        self._model = workload.model()
        self._exact = self._model.decoder.dtype is torch.float32
        self.ours = LLM(self._model, verify=verify, prefix_reuse=shares, **workload.options).engine
        # Without graphs there is no padding request, so a block less makes the two schedule alike.
        options = {**workload.options, "num_blocks": workload.options["num_blocks"] - 1, "prefix_reuse": "off"}
        self._theirs = LLM(self._model, graphs=Graphs.OFF, **options).engine
        self.tally = Tally(self.ours, graphs=Graphs.ON, monkeypatch=monkeypatch)
        self._their_tally = Tally(self._theirs, graphs=Graphs.OFF, monkeypatch=monkeypatch)
        self._random = np.random.default_rng(11)
        self._pairs: list[Pair] = []
        self._rate = 1.0
        self._step = 0
        self._in_step = not shares  # what is found need not be computed
        self._beginnings = [self._tokens(workload.longest_prompt // 2) for _ in range(3 * shares)]
        self._prompt_tokens = 0
        self._generated = [0, 0]
        self.differences = 0
        self.agreed = 0
        self.moved_blocks = 0
        self.cached_tokens = 0
        self.reasons: Counter[FinishReason] = Counter()

    def run(self, steps: int) -> None:
        """Go on until `steps` steps have been launched since the start, then let all requests end; check everything."""
        while self.tally.launched < steps:
            self._arrive()
            self._advance()
        self._drain()

    def _advance(self) -> None:
        """One step of each engine; now and then ours is eager by request."""
        with ExitStack() as stack:
            for phase, step in (("prefill", self.ours.prefill), ("decode", self.ours.decode)):
                if self._random.random() < 0.05:
                    reason = Reason.DISABLED if self._random.random() < 0.5 else Reason.RECORDING_STATISTICS
                    stack.enter_context(step.runner.suspend(reason))
                    self.tally.suspended[phase] = reason
            before = self.tally.launched
            self.ours.step()
            assert self.tally.launched - before <= 1
        self.tally.suspended.clear()
        if self._random.random() < 0.03:  # ours only: the other engine's blocks stay where they are
            self.moved_blocks += self.ours.defragment()
        self._theirs.step()
        self._step += 1
        for pair in self._pairs:
            if self._step == pair.abort:
                self.ours.finish(pair.ours, reason=FinishReason.ABORT)
                self._theirs.finish(pair.theirs, reason=FinishReason.ABORT)
        self._in_step = self._in_step and all(pair.first_difference is None for pair in self._pairs)
        ended = [pair for pair in self._pairs if pair.ours.finish_reason and pair.theirs.finish_reason]
        for pair in ended:
            self._compare(pair)
            self._pairs.remove(pair)
        if self._in_step:  # as long as tokens are the same, so is what is scheduled
            assert self.ours.has_work == self._theirs.has_work
            assert self.ours.free_blocks == self._theirs.free_blocks
            assert self.tally.steps == self._their_tally.steps

    def _drain(self) -> None:
        while self.ours.has_work or self._theirs.has_work:
            self._advance()
        assert not self._pairs
        for engine, tally, generated in zip(
            (self.ours, self._theirs), (self.tally, self._their_tally), self._generated, strict=True
        ):
            assert engine.free_blocks == engine.usable_blocks
            assert sorted(engine._scheduler._free_rows) == list(range(1, engine.sizes.max_batch_size + 1))
            tally.check(prompt_tokens=self._prompt_tokens, generated=generated)

    def _arrive(self) -> None:
        """Busy and quiet times by turns, and now and then none until all is done."""
        random = self._random
        if random.random() < 0.02:
            self._rate = float(random.choice([0.05, 0.3, 1.0]))
            if random.random() < 0.25:
                self._drain()
        for _ in range(min(random.poisson(self._rate), MOST_WAITING - len(self._pairs))):
            self._add()
        if not self._pairs and not self.ours.has_work:
            self._add()

    def _add(self) -> None:
        random, workload = self._random, self._workload
        longest = int(random.choice([4, 20, workload.longest_prompt]))
        count = workload.longest_prompt if random.random() < 0.05 else int(random.integers(1, longest, endpoint=True))
        prompt = self._tokens(count)
        if self._beginnings and random.random() < 0.7:
            beginning = self._beginnings[random.integers(len(self._beginnings))][: random.integers(count)]
            prompt[: len(beginning)] = beginning
        params = self._params()
        # Nothing, a prompt half computed, or an answer half made may be given up.
        abort = self._step + 1 + int(random.integers(0, 25)) if random.random() < 0.15 else None
        self._pairs.append(
            Pair(self.ours.add(prompt, params=params), self._theirs.add(prompt, params=params), abort=abort)
        )
        assert self._pairs[-1].ours.seed == self._pairs[-1].theirs.seed
        self._prompt_tokens += count

    def _tokens(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self._model.config.vocab_size, size=count).tolist()
        return ids

    def _params(self) -> SamplingParams:
        random = self._random
        most = int(random.integers(1, self._workload.longest_answer, endpoint=True))
        tokens = self._model.config.vocab_size
        stop = random.choice(tokens, size=tokens // 30, replace=False).tolist() if random.random() < 0.3 else []
        if random.random() < 0.5:
            return SamplingParams(max_tokens=most, stop_token_ids=stop)
        return SamplingParams(
            max_tokens=most,
            stop_token_ids=stop,
            temperature=float(random.choice([0.7, 1.0, 1.3])),
            top_k=int(random.choice([0, 5])),
            top_p=float(random.choice([0.8, 1.0])),
            min_p=float(random.choice([0.0, 0.1])),
            seed=int(random.integers(2**62)) if random.random() < 0.7 else None,
        )

    # Comparing.

    def _compare(self, pair: Pair) -> None:
        """Both answers are the same, or differ first where rounding decides; and ours is what plain logits say."""
        ours, theirs = pair.ours.output_ids, pair.theirs.output_ids
        self._generated[0] += len(ours)
        self._generated[1] += len(theirs)
        _check_end(pair.ours)
        self.reasons[pair.ours.finish_reason or FinishReason.ABORT] += 1
        self.cached_tokens += pair.ours.cached_tokens
        greedy = pair.ours.params.temperature == 0
        if not greedy and not self._exact:
            # With a large vocabulary every rounding shifts the draw; verify="always" compares these, bit for bit.
            self.differences += ours != theirs
            return
        self._check_tokens(pair.ours)
        first = pair.first_difference
        self.agreed += (min(len(ours), len(theirs)) if first is None else first) * greedy
        if first is not None:
            self.differences += 1
            logits = plain_logits(self._model, [*pair.ours.prompt_ids, *ours[:first]], rows=1)[0]
            where = f"token {first} of {pair.ours}"
            assert self._is_tie(logits, pair.ours, first, tokens={ours[first], theirs[first]}), where
        elif self._in_step or FinishReason.ABORT not in (pair.ours.finish_reason, pair.theirs.finish_reason):
            assert (ours, pair.ours.finish_reason) == (theirs, pair.theirs.finish_reason)

    def _check_tokens(self, request: Request) -> None:
        """Each token is the one that the logits of a plain forward over all before it give, but for near-ties."""
        ids, prompt, params = request.output_ids, request.prompt_ids, request.params
        if not ids:
            return
        logits = plain_logits(self._model, [*prompt, *ids[:-1]], rows=len(ids))
        drawn = _draw(logits, request, first=0)
        for index, (token, expected) in enumerate(zip(ids, drawn, strict=True)):
            if token != expected:
                where = f"token {index} of {request} is {token}; plain logits give {expected} ({params})"
                assert self._is_tie(logits[index], request, index, tokens={token, expected}), where

    def _is_tie(self, logits: torch.Tensor, request: Request, index: int, *, tokens: set[int]) -> bool:
        """Whether an error of the size of `tie` in the logits makes the difference between these tokens."""
        tie = self._workload.tie
        if request.params.temperature == 0:
            return bool((logits.max() - logits[list(tokens)]).max() < tie)
        generator = torch.Generator(logits.device).manual_seed(0)
        noise = torch.rand((256, *logits.shape), generator=generator, device=logits.device) * 2 - 1
        return tokens <= {_draw((logits + tie * one)[None], request, first=index)[0] for one in noise}


def _check_end(request: Request) -> None:
    """A request ends at its length, at its first stop token, or where its caller gave up, and holds nothing then."""
    ids, stop = request.output_ids, set(request.params.stop_token_ids)
    assert not stop & set(ids[:-1])
    assert len(ids) <= request.max_new_tokens
    if request.finish_reason is FinishReason.STOP:
        assert ids[-1] in stop
    elif request.finish_reason is FinishReason.LENGTH:
        assert len(ids) == request.max_new_tokens
        assert not stop & set(ids)


def _draw(logits: torch.Tensor, request: Request, *, first: int) -> list[int]:
    """What the sampler draws from rows of logits for the tokens of a request from number `first` on."""
    params, rows, device = request.params, len(logits), logits.device
    if params.temperature == 0:
        best: list[int] = greedy(logits).tolist()
        return best

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    tokens = sample(
        logits,
        temperature=column(params.temperature, torch.float32),
        top_k=column(params.top_k, torch.int64),
        top_p=column(params.top_p, torch.float64),
        min_p=column(params.min_p, torch.float64),
        seed=column(request.seed, torch.int64),
        position=len(request.prompt_ids) + first + torch.arange(rows, device=device),
    )
    ids: list[int] = tokens.tolist()
    return ids


def plain_logits(model: LoadedModel, token_ids: list[int], *, rows: int) -> torch.Tensor:
    """Logits (rows, vocabulary) behind the last tokens of a sequence: full attention, no batch, no pages, no graph."""
    decoder, shape = model.decoder, model.config
    count, device = len(token_ids), decoder.device
    cache = [
        tuple(
            torch.zeros(1, count, shape.num_kv_heads, shape.head_dim, dtype=decoder.dtype, device=device)
            for _ in range(2)
        )
        for _ in range(shape.num_layers)
    ]

    def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        repeat = shape.num_heads // shape.num_kv_heads
        k, v = (x[0].repeat_interleave(repeat, dim=1).transpose(0, 1)[None] for x in (k_cache, v_cache))
        attended = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
        return attended[0].transpose(0, 1)

    places = torch.arange(count, device=device)
    with torch.no_grad():
        hidden = decoder.embed(torch.tensor(token_ids, device=device))
        hidden = decoder(hidden, positions=places, slots=places, kv=cache, attend=attend)
        return decoder.logits(hidden[-rows:])


def _memory(device: torch.device) -> dict[str, int]:
    """What the process holds while the engines have nothing to do: blocks of the interpreter on a CPU, and bytes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what is kept for the next step only is no leak
        return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    held = {"blocks": sys.getallocatedblocks()}
    if STATM.exists():  # Linux
        held["resident"] = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return held


@pytest.mark.parametrize(
    ("name", "steps", "decodes"),
    [("tiny", 13000, 9000), pytest.param("1B", 2600, 1700, marks=pytest.mark.gpu)],
    ids=lambda value: str(value),
)
def test_thousands_of_steps(
    name: str, steps: int, decodes: int, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    """REQ-C5, REQ-H2, REQ-H5, FAULT-P2, FAULT-P8, FAULT-P9: random requests come, go and are given up while blocks move.

    Tokens are those of an engine without graphs and of plain logits, counters add up to the step, all blocks and rows come back,
    and the second half of the run holds no more memory than the first.
    """
    soak = Soak(WORKLOADS[name], monkeypatch)
    device = soak.ours.state.device
    soak.run(steps // 2)
    half = _memory(device)
    soak.run(steps)
    growth = {what: size - half[what] for what, size in _memory(device).items()}
    assert soak.tally.launched >= steps
    assert soak.tally.steps["decode"] >= decodes
    assert soak.moved_blocks > decodes // 100
    assert {what: size for what, size in growth.items() if size > MOST_GROWTH[what]} == {}

    # All of this happened, so all of it was compared.
    assert set(soak.reasons) == set(FinishReason) - {FinishReason.ERROR}
    assert soak.ours.statistics().preemptions >= WORKLOADS[name].preemptions
    assert soak.ours.statistics().discarded_tokens > 0
    for phase in ("prefill", "decode"):
        expected = soak.tally.expected[phase]
        assert expected[REPLAY] > expected.total() // 5
        assert expected[Reason.DISABLED.name] + expected[Reason.RECORDING_STATISTICS.name] > 0
    assert soak.tally.expected["prefill"][Reason.ABOVE_LARGEST_BUCKET.name] > 0
    assert soak.agreed > steps // 20
    summary = f"{soak.differences} near-ties; {soak.agreed} greedy tokens agree; growth {growth}"
    record_property("soak", summary)
    print(summary, f"{soak.ours.statistics().preemptions} preemptions", soak.ours.statistics().summary(), sep="\n")


@pytest.mark.parametrize(
    ("name", "steps"), [("tiny", 2500), pytest.param("1B", 800, marks=pytest.mark.gpu)], ids=lambda value: str(value)
)
def test_thousands_of_steps_that_share_blocks(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-C5, REQ-H5, FAULT-P9: the same traffic over common beginnings: tokens are those of an engine that shares nothing.

    Blocks are found, evicted, moved and given up on the way; all come back, and the count of found tokens is exact.
    """
    soak = Soak(WORKLOADS[name], monkeypatch, shares=True)
    soak.run(steps)
    statistics = soak.ours.statistics()
    assert statistics.cached_tokens == soak.cached_tokens > statistics.prompt_tokens // 20
    assert statistics.preemptions >= WORKLOADS[name].preemptions
    assert set(soak.reasons) == set(FinishReason) - {FinishReason.ERROR}
    assert soak.moved_blocks > 0
    assert soak.agreed > steps // 20


@pytest.mark.parametrize(
    ("name", "steps"), [("tiny", 300), pytest.param("1B", 200, marks=pytest.mark.gpu)], ids=lambda value: str(value)
)
def test_every_batch_equals_its_eager_twin(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-H5, FAULT-P7: with verify="always" no step of the same traffic, sampled ones included, differs by a bit."""
    soak = Soak(WORKLOADS[name], monkeypatch, verify="always")
    soak.run(steps)
    assert soak.ours.statistics().dropped == {}
    assert min(soak.tally.expected[phase][REPLAY] for phase in ("prefill", "decode")) > steps // 40
