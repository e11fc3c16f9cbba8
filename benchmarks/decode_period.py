"""The period of decode steps that follow each other, against that of bare replays of the same graph.

    python benchmarks/decode_period.py --out benchmarks/results/decode_period_h200.json [--shapes 135M,1B,8B]
    python benchmarks/decode_period.py --hf --out benchmarks/results/continuous_batching_h200.json [--shapes 135M,1B]

Random weights in bfloat16, greedy, contexts around 160, batches that are buckets. *Bare*: 200 replays of the decode graph
between two synchronisations. *Period*: `DecodeStep.launch` of step n+1, then `PendingTokens.wait` of step n, as the engine does;
every length grows by one a step. Both are host time a step, in rounds that take turns; medians of the rounds. *Host*: where the
host was in a period, from rounds of their own with a clock around the calls. *Eager*: the same loop with the runner suspended.
Before it is timed, the tokens of four steps in a row are compared with those of four eager steps of the same shape.

With --hf, instead: whole requests (160 tokens of prompt, 64 new ones, greedy) through the engine and through the continuous
batching of transformers, the same weights in both; see `benchmarks/continuous_batching.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import continuous_batching
from benchmarks.engines import MAX_SEQ_LEN, TOKENS_PER_REQUEST, decode_engine
from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph.graph_key import GraphKey
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import DecodeBatch

BATCHES = (1, 8, 32, 128)
CONTEXT = 160
STEPS = 60
EAGER_STEPS = 28
SETTLED = 8  # steps of a round that are not counted
REPLAYS = 200
CHECKED_STEPS = 4


@attrs.frozen(eq=False)
class Case:
    """A batch of an engine.

    Attributes:
        engine: Its decode graphs are captured.
        requests: Hold rows and enough blocks.
    """

    engine: Engine
    requests: tuple[Request, ...]

    @classmethod
    def of(cls, engine: Engine, *, batch: int) -> Case:
        """`batch` requests, with blocks for all lengths that are measured."""
        blocks = blocks_for(TOKENS_PER_REQUEST, block_size=engine.sizes.block_size)
        requests = []
        for index in range(batch):
            request = Request(
                prompt_ids=(1,) * CONTEXT, params=SamplingParams(), seed=0, max_new_tokens=1, stop_ids=frozenset()
            )
            request.row = index + 1
            request.blocks = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
            requests.append(request)
        return cls(engine, tuple(requests))

    def at(self, length: int) -> DecodeBatch:
        """The batch with `length` tokens in every request."""
        return DecodeBatch(self.requests, (length,) * len(self.requests))

    def synchronize(self) -> None:
        """Wait for the device, where there is one."""
        if self.engine.state.device.type == "cuda":
            torch.cuda.synchronize(self.engine.state.device)


@contextmanager
def timed(target: object, name: str, spent: list[float]) -> Iterator[None]:
    """Note the seconds of every call of a method of one object."""
    original = getattr(target, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begin)

    setattr(target, name, wrapper)
    try:
        yield
    finally:
        delattr(target, name)


def decode_round(case: Case, *, steps: int) -> tuple[float, list[float]]:
    """Seconds a step of a round, and the seconds of each wait; the host is one step ahead, as in the engine.

    Every counted interval goes from the end of one wait to the end of the next: it has one launch and one wait.
    """
    step = case.engine.decode
    start = CONTEXT - (SETTLED + steps) // 2  # the mean length of the counted steps is CONTEXT
    batches = [case.at(length) for length in range(start, start + steps)]
    stamps, waits = [], []
    case.synchronize()
    pending = step.run(batches[0])
    for batch in batches[1:]:
        launched = step.run(batch)
        begin = time.perf_counter()
        pending.wait()
        stamps.append(time.perf_counter())
        waits.append(stamps[-1] - begin)
        pending = launched
    pending.wait()
    return (stamps[-1] - stamps[SETTLED]) / (len(stamps) - 1 - SETTLED), waits


def bare_round(case: Case, *, replays: int) -> float:
    """Seconds a replay; the plan is that of a real step of CONTEXT tokens."""
    context = case.engine.decode.context(len(case.requests), longest=CONTEXT)
    key = GraphKey(len(case.requests), is_all_greedy_sample=True, extra=(("context", context),))
    graph = case.engine.decode.runner.graphs[key]
    case.engine.decode.run(case.at(CONTEXT)).wait()
    live = {"step": None}
    case.synchronize()
    begin = time.perf_counter()
    for _ in range(replays):
        graph.replay(live)
    case.synchronize()
    return (time.perf_counter() - begin) / replays


def host_round(case: Case, *, steps: int) -> dict[str, float]:
    """Seconds of a period by what the host did; they add up to it."""
    step = case.engine.decode
    spent: dict[str, list[float]] = {name: [] for name in ("plan_decode", "prepare", "launch", "step")}
    with ExitStack() as stack:
        stack.enter_context(timed(case.engine.state.attention, "plan_decode", spent["plan_decode"]))
        stack.enter_context(timed(step.runner, "prepare", spent["prepare"]))
        stack.enter_context(timed(step.runner, "launch", spent["launch"]))
        stack.enter_context(timed(step, "run", spent["step"]))
        period, waits = decode_round(case, steps=steps)
    # The wait of step n ends the interval in which step n+1 was launched.
    plan, prepare, launch, whole = (statistics.mean(values[SETTLED + 2 :]) for values in spent.values())
    wait = statistics.mean(waits[SETTLED + 1 :])
    return {
        "plan": plan,
        "rest_of_prepare": prepare - plan,
        "launch": launch,
        "rest_of_step": whole - prepare - launch,
        "wait": wait,
        "loop": period - whole - wait,
    }


def micros(seconds: Sequence[float]) -> dict[str, float]:
    """Median and deciles, microseconds."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "median": round(1e6 * statistics.median(seconds), 2),
        "p10": round(1e6 * deciles[0], 2),
        "p90": round(1e6 * deciles[-1], 2),
    }


def check(case: Case) -> dict[str, int]:
    """Tokens of replayed steps that equal those of eager steps at the same shape."""
    state, runner = case.engine.state, case.engine.decode.runner
    generator = torch.Generator().manual_seed(len(case.requests))
    ids = torch.randint(state.decoder.config.vocab_size, state.last_token.shape, generator=generator)

    def tokens() -> list[int]:
        state.last_token.copy_(ids)  # a step reads its input there and leaves its output
        made = [case.engine.decode.run(case.at(CONTEXT + number)).wait() for number in range(CHECKED_STEPS)]
        return [token for row in made for token in row]

    before = runner.statistics.replays
    replayed = tokens()
    assert runner.statistics.replays == before + CHECKED_STEPS, runner.statistics.eager
    with runner.suspend():
        eager = tokens()
    assert runner.statistics.replays == before + CHECKED_STEPS
    return {
        "tokens": len(eager),
        "equal": sum(a == b for a, b in zip(replayed, eager, strict=True)),
        "different_ids": len(set(eager)),
    }


def run_case(case: Case, *, rounds: int, replays: int = REPLAYS) -> dict[str, Any]:
    """One batch size."""
    runner, batch = case.engine.decode.runner, len(case.requests)
    checked = check(case)
    bare, real = [], []
    bare_round(case, replays=replays // 10)
    decode_round(case, steps=STEPS)
    before = runner.statistics.replays
    for _ in range(rounds):
        bare.append(bare_round(case, replays=replays))
        real.append(decode_round(case, steps=STEPS)[0])
    hosts = [host_round(case, steps=STEPS) for _ in range(3)]
    steps = rounds + (rounds + len(hosts)) * STEPS  # a bare round has one real step
    assert runner.statistics.replays == before + steps, runner.statistics.eager
    with runner.suspend():
        eager = [decode_round(case, steps=EAGER_STEPS)[0] for _ in range(3)]
    return {
        "batch": batch,
        "bare_us": micros(bare),
        "period_us": micros(real),
        "ratio": round(statistics.median(real) / statistics.median(bare), 4),
        "tokens_per_s": round(batch / statistics.median(real), 1),
        "host_us": {name: round(1e6 * statistics.median(host[name] for host in hosts), 2) for name in hosts[0]},
        "eager": {"period_us": micros(eager), "tokens_per_s": round(batch / statistics.median(eager), 1)},
        "checked": checked,
    }


def run_shape(
    model: LoadedModel,
    *,
    rounds: int,
    batches: Sequence[int] = BATCHES,
    max_seq_len: int = MAX_SEQ_LEN,
    replays: int = REPLAYS,
) -> dict[str, Any]:
    """All batch sizes of one model."""
    engine = decode_engine(model, batches=batches, max_seq_len=max_seq_len)
    with torch.no_grad():
        begin = time.perf_counter()
        engine.decode.capture()
        seconds = time.perf_counter() - begin
        runner = engine.decode.runner
        if runner.dropped:
            raise RuntimeError(f"decode graphs were dropped: {runner.dropped}")
        # Noise in the cache, so that attention matters for the tokens that are compared.
        for tensor in (tensor for layer in engine.state.cache.layers for tensor in layer):
            tensor.normal_()
        cases = [run_case(Case.of(engine, batch=batch), rounds=rounds, replays=replays) for batch in batches]
    return {
        "attention": engine.state.attention.kind,
        "capture_seconds": round(seconds, 2),
        "cases": cases,
    }


def _period(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = random_model(SHAPES[name], device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    row = run_shape(model, rounds=options.rounds)
    for case in row["cases"]:
        print(name, *(f"{key}={value}" for key, value in case.items()), flush=True)
    return row


def _hf(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = random_model(SHAPES[name], device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    row = continuous_batching.run_shape(model, seconds=options.hf_seconds)
    for case in row["cases"]:
        print(name, case, flush=True)
    return row


def main() -> None:
    """Measure and write the results file, after each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", help="135M,1B,8B; with --hf 135M,1B")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument(
        "--hf", action="store_true", help="compare with the continuous batching of transformers instead"
    )
    parser.add_argument("--hf-seconds", type=float, default=100.0, help="what is left of a shape after it is skipped")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    part: Callable[[str, argparse.Namespace], dict[str, Any]] = _hf if options.hf else _period
    shapes = options.shapes or ("135M,1B" if options.hf else "135M,1B,8B")
    results: dict[str, Any] = {**provenance(options.commit), "shapes": {}}
    for name in shapes.split(","):
        begin = time.perf_counter()
        results["shapes"][name] = part(name, options)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    checks = [case["checked"] for row in results["shapes"].values() for case in row["cases"] if "checked" in case]
    if any(checked["tokens"] != checked["equal"] for checked in checks):
        raise SystemExit(f"replayed and eager tokens differ: {checks}")


if __name__ == "__main__":
    main()
