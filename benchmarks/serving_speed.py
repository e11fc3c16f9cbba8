"""What a caller of `LLM` sees on a GPU: tokens/s offline, time to the first token, the step of a decode.

    python benchmarks/serving_speed.py --out benchmarks/results/serving_speed_h200.json [--shapes 135M,1B,8B]

Random weights in bfloat16, a vocabulary of 32,000, prompts of token ids that share no prefix, temperature 0, no prefix reuse, one
process; one `LLM` for all cases of a shape, with `OFFLINE`. Host-clock times around `LLM.generate`, after some that do not count.

- *offline*: 256 requests of 512 prompt tokens and 128 new ones in one call; generated tokens over its time, median of 3.
- *first token*: one request with `max_tokens=1`, from call to return, median of 15 after 3. *Graph alone*: replays of the prefill
  graph of that size, planned for this prompt, by their number.
- *decode step*: (a call with 256 new tokens - a call with 1) / 255, prompts of 32 tokens, medians of 3 each. *Graph alone*: 200
  replays of the decode graph at the mean context of these steps, between two synchronisations, by 200.
- *overhead*: the decode step less the graph alone, by the decode step.
- *parts*: where the host was in a decode step, from the engine's own records of the same calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.decode_period import Case, bare_round
from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph.models.attention import BatchLayout, Placement
from breakgraph.models.weights import random_model
from breakgraph.serving import LLM, SamplingParams

VOCABULARY = 32_000
REQUESTS, PROMPT, NEW = 256, 512, 128
FIRST_TOKEN = (16, 128, 512, 2048)
BATCHES = (1, 32, 128)
DECODE_PROMPT, DECODE_NEW = 32, 256
MAX_SEQ_LEN = 2560
# Longer steps and more of them in a row: tokens of others may wait, where nobody looks at them one by one.
OFFLINE: dict[str, Any] = {
    "max_num_tokens": 4096,
    "prefill_burst": 8,
    "prefill_sizes": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
}


def prompts(count: int, *, length: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, VOCABULARY, size=(count, length)).tolist()  # type: ignore[no-any-return]


def timed(llm: LLM, ids: list[list[int]], *, new: int) -> float:
    """Seconds of one call."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = llm.generate(ids, params)
    seconds = time.perf_counter() - begin
    if {len(one.token_ids) for one in done} != {new}:
        raise RuntimeError("an answer has another number of tokens than was asked for")
    return seconds


def several(run: Callable[[int], float], *, warm: int, runs: int) -> list[float]:
    """Seconds of the runs after the first ones; each gets a seed of its own."""
    return [run(number) for number in range(warm + runs)][warm:]


def offline(llm: LLM) -> dict[str, Any]:
    """Tokens a second of a whole batch."""
    times = several(lambda seed: timed(llm, prompts(REQUESTS, length=PROMPT, seed=seed), new=NEW), warm=1, runs=3)
    seconds = statistics.median(times)
    return {
        "requests": REQUESTS,
        "prompt": PROMPT,
        "new": NEW,
        "seconds": round(seconds, 4),
        "runs": [round(value, 4) for value in times],
        "tokens_per_s": round(REQUESTS * NEW / seconds, 1),
    }


def prefill_alone(llm: LLM, *, tokens: int, repeats: int) -> float | None:
    """Seconds of a replay of the prefill graph of exactly `tokens`, None where there is none."""
    step = llm.engine.prefill
    graph = next((graph for key, graph in step.runner.graphs.items() if key.tokens == tokens), None)
    if graph is None or step.placement is not Placement.CAPTURED:
        return None
    size = llm.engine.sizes.block_size
    table = np.arange(1, 1 + -(-tokens // size), dtype=np.int32)
    layout = BatchLayout(np.array([tokens], np.int32), np.zeros(1, np.int32), [table])
    positions = torch.arange(tokens)
    inputs = {"ids": torch.arange(tokens), "positions": positions, "slots": positions + size}
    live = step.live(layout)
    with torch.no_grad():
        step.runner.run(inputs, size=tokens, live=live)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            graph.replay(live)
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def first_token(llm: LLM, *, tokens: int) -> dict[str, Any]:
    """From call to return, one request."""
    times = several(lambda seed: timed(llm, prompts(1, length=tokens, seed=seed), new=1), warm=3, runs=15)
    alone = prefill_alone(llm, tokens=tokens, repeats=20)
    seconds = statistics.median(times)
    return {
        "prompt": tokens,
        "ms": round(1e3 * seconds, 3),
        "fastest_ms": round(1e3 * min(times), 3),
        "slowest_ms": round(1e3 * max(times), 3),
        "graph_alone_ms": None if alone is None else round(1e3 * alone, 3),
        "to_graph_alone": None if alone is None else round(seconds / alone, 4),
    }


def decode_step(llm: LLM, *, batch: int) -> dict[str, Any]:
    """The step between two lengths of an answer, and the graph alone."""

    def run(new: int) -> float:
        return statistics.median(
            several(lambda seed: timed(llm, prompts(batch, length=DECODE_PROMPT, seed=seed), new=new), warm=1, runs=3)
        )

    one = run(1)
    before = llm.statistics
    whole = run(DECODE_NEW)
    after = llm.statistics
    step = (whole - one) / (DECODE_NEW - 1)
    with torch.no_grad():
        case = Case.of(llm.engine, batch=batch)
        alone = statistics.median(bare_round(case, replays=200) for _ in range(3))
    steps = after.decode.steps - before.decode.steps
    parts = {name: after.parts[name] - before.parts[name] for name in after.parts}
    return {
        "batch": batch,
        "step_ms": round(1e3 * step, 4),
        "graph_alone_ms": round(1e3 * alone, 4),
        "overhead": round((step - alone) / step, 4),
        "tokens_per_s": round(batch / step, 1),
        "parts_ms": {name: round(1e3 * seconds / steps, 4) for name, seconds in parts.items()},
    }


def run_shape(name: str) -> dict[str, Any]:
    """All cases of one shape."""
    config = attrs.evolve(SHAPES[name], vocab_size=VOCABULARY)
    model = random_model(config, device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    llm = LLM(model, max_batch_size=REQUESTS, max_seq_len=MAX_SEQ_LEN, prefix_reuse="off", **OFFLINE)
    begin = time.perf_counter()
    llm.start()
    started = time.perf_counter() - begin
    row: dict[str, Any] = {"start_seconds": round(started, 2), "placement": llm.engine.prefill.placement.value}
    if llm.statistics.dropped:
        raise RuntimeError(f"dropped: {llm.statistics.dropped}")
    row["offline"] = offline(llm)
    print(name, row, flush=True)
    row["first_token"] = [first_token(llm, tokens=tokens) for tokens in FIRST_TOKEN]
    print(name, *row["first_token"], sep="\n", flush=True)
    row["decode"] = [decode_step(llm, batch=batch) for batch in BATCHES]
    print(name, *row["decode"], sep="\n", flush=True)
    row["eager_steps"] = llm.statistics.eager
    return row


def main() -> None:
    """Measure and write the results file, after each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="135M,1B,8B")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    results: dict[str, Any] = {**provenance(options.commit), "shapes": {}}
    for name in options.shapes.split(","):
        begin = time.perf_counter()
        results["shapes"][name] = run_shape(name)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", results["shapes"][name]["eager_steps"], flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
