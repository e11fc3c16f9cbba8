"""Times of prefill and decode steps on a GPU: eager, breakable graph or decode graph, and one whole graph.

    python benchmarks/steps.py --out benchmarks/results/steps_h200.json [--shapes 135M,1B,8B]

Random weights in bfloat16, one sequence per prefill, context 160 for decode. Every graph is verified against its eager twin
bit for bit before it is timed, and again at random real sizes. Host-clock times of a synchronised region, medians over
`--repeats`, with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph import eager_step
from breakgraph.capture import GraphPool
from breakgraph.models.attention import BatchLayout
from breakgraph.models.weights import random_model
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.decode_keys import StepEnd
from breakgraph.serving.decode_step import DecodeStep
from breakgraph.serving.device_state import DeviceState
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import slots_of
from breakgraph.serving.prefill_step import PrefillStep, prefill_body
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import DecodeBatch
from breakgraph.serving.startup import build_engine
from breakgraph.testing import assert_same_bits

PREFILL = (16, 128, 512, 2048)
BUCKETS = (16, 64, 128, 256, 512, 1024, 2048)
DECODE = (1, 8, 32, 128)
CONTEXT = 160
ENGINE = ((1, 16), (1, 128), (1, 512), (8, 128), (32, 128), (128, 128))


def measure(step: Callable[[], Any], *, repeats: int) -> dict[str, float]:
    """Milliseconds of a step with a synchronisation before and after it."""
    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    deciles = statistics.quantiles(times, n=10)
    return {
        "median_ms": round(statistics.median(times), 4),
        "p10_ms": round(deciles[0], 4),
        "p90_ms": round(deciles[-1], 4),
    }


def host_only(step: Callable[[], Any], *, repeats: int) -> dict[str, float]:
    """Milliseconds until a step returns to the host, the device idle before it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return {"median_ms": round(statistics.median(times), 4)}


def prefill_case(state: DeviceState, step: PrefillStep, *, tokens: int, repeats: int) -> dict[str, Any]:
    """One prompt of `tokens` tokens."""
    body = prefill_body(state, layers=state.cache.layers)
    ids = torch.randint(state.decoder.config.vocab_size, (tokens,))
    blocks = list(range(1, 1 + -(-tokens // state.cache.block_size)))
    layout = BatchLayout(
        np.array([tokens], dtype=np.int32), np.zeros(1, dtype=np.int32), (np.array(blocks, dtype=np.int32),)
    )
    slots = torch.from_numpy(slots_of(blocks, start=0, count=tokens, block_size=state.cache.block_size))
    host = {"ids": ids, "positions": torch.arange(tokens), "slots": slots}
    device = {name: tensor.to(state.device) for name, tensor in host.items()}

    def eager() -> torch.Tensor:
        live = {"batch": state.attention.plan_prefill(layout)}
        with eager_step(live, valid_rows=tokens, padded_rows=tokens):
            return body(**device, **live)

    def replay() -> torch.Tensor:
        live = {"batch": state.attention.plan_prefill(layout)}
        result = step.runner.run(host, size=tokens, live=live)
        assert result.replayed, result.reason
        return result.output  # type: ignore[no-any-return]

    assert_same_bits(replay(), expected=eager(), what=f"prefill[{tokens}]")
    # One whole graph: attention captured with a fixed plan, which is right for this very batch only.
    live = {"batch": state.attention.plan_prefill(layout)}
    static = {name: tensor.clone() for name, tensor in device.items()}
    whole = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body(**static, **live)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(whole, stream=stream):
        body(**static, **live)

    def whole_graph() -> None:
        static["ids"].copy_(device["ids"])
        whole.replay()

    row = {
        "tokens": tokens,
        "eager": measure(eager, repeats=repeats),
        "breakable_graph": measure(replay, repeats=repeats),
        "breakable_graph_host": host_only(replay, repeats=repeats),
        "one_whole_graph": measure(whole_graph, repeats=repeats),
    }
    whole.reset()
    return row


def random_sizes(state: DeviceState, step: PrefillStep, *, sizes: list[int]) -> int:
    """Compare replays of real sizes below their bucket with the padded eager twin, bit for bit; returns the count."""
    body = prefill_body(state, layers=state.cache.layers)
    block = state.cache.block_size
    for tokens in sizes:
        bucket = step.runner.buckets.round_up(tokens)
        assert bucket is not None
        blocks = list(range(1, 1 + -(-tokens // block)))
        layout = BatchLayout(
            np.array([tokens], dtype=np.int32), np.zeros(1, dtype=np.int32), (np.array(blocks, dtype=np.int32),)
        )
        ids = torch.randint(state.decoder.config.vocab_size, (bucket,))
        ids[tokens:] = 0
        slots = torch.zeros(bucket, dtype=torch.int64)
        slots[:tokens] = torch.from_numpy(slots_of(blocks, start=0, count=tokens, block_size=block))
        positions = torch.zeros(bucket, dtype=torch.int64)
        positions[:tokens] = torch.arange(tokens)
        live = {"batch": state.attention.plan_prefill(layout)}
        result = step.runner.run(
            {"ids": ids[:tokens], "positions": positions[:tokens], "slots": slots[:tokens]},
            size=tokens,
            live=live,
        )
        got = result.output.clone()
        live = {"batch": state.attention.plan_prefill(layout)}
        with eager_step(live, valid_rows=tokens, padded_rows=bucket):
            expected = body(
                ids=ids.to(state.device), positions=positions.to(state.device), slots=slots.to(state.device), **live
            )
        assert_same_bits(got, expected=expected[:tokens], what=f"{tokens} tokens in prefill[{bucket}]")
    return len(sizes)


def decode_case(state: DeviceState, step: DecodeStep, *, batch: int, repeats: int) -> dict[str, Any]:
    """`batch` sequences of `CONTEXT` tokens, one token each, greedy; sampling is in the graph."""
    runner = step.runner
    blocks = -(-CONTEXT // 16)
    requests = []
    for index in range(batch):
        request = Request(
            prompt_ids=(1,) * CONTEXT, params=SamplingParams(), seed=0, max_new_tokens=1, stop_ids=frozenset()
        )
        request.row = index + 1
        request.blocks = list(range(1 + index * blocks, 1 + (index + 1) * blocks))
        requests.append(request)
    work = DecodeBatch(tuple(requests), (CONTEXT,) * batch)

    def eager() -> list[int]:
        with runner.suspend():
            return step.run(work).wait()

    def replay() -> list[int]:
        return step.run(work).wait()

    before = runner.statistics.replays
    tokens = []
    for run in (replay, eager):
        state.last_token.fill_(1)  # a step reads its input there and leaves its output
        tokens.append(run())
    assert tokens[0] == tokens[1] or batch > 1  # more rows may be tiled otherwise without padding
    assert runner.statistics.replays == before + 1
    context = step.context(batch, longest=max(work.lengths))
    graph = runner.graphs[StepEnd.GREEDY.key(batch, context=context)]
    return {
        "batch": batch,
        "eager": measure(eager, repeats=max(repeats // 3, 10)),
        "decode_runner": measure(replay, repeats=repeats),
        "decode_runner_host": host_only(lambda: step.run(work), repeats=repeats),
        "one_whole_graph": measure(lambda: graph.replay({"step": None}), repeats=repeats),
    }


def end_to_end(engine: Engine, *, batch: int, prompt: int, new: int) -> dict[str, float]:
    """Through the engine: time until every request of a batch has its first token, and the pure decode steps after that."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    vocabulary = engine.state.decoder.config.vocab_size
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    prompts = [[(row * 7919 + i * 31) % vocabulary for i in range(prompt)] for row in range(batch)]
    waiting = {engine.add(ids, params=params) for ids in prompts}
    first = 0.0
    steps = tokens = 0
    while engine.has_work:
        made = engine.step()
        if first:
            steps += 1
            tokens += len(made)
            continue
        waiting -= {token.request for token in made}
        if not waiting:
            first = time.perf_counter()
    seconds = time.perf_counter() - first
    return {
        "first_token_ms": round(1000 * (first - begin), 3),
        "decode_step_ms": round(1000 * seconds / steps, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def engine_case(engine: Engine, *, batch: int, prompt: int) -> dict[str, Any]:
    """The engine with its graphs and with both runners suspended, medians of five runs each."""

    def run() -> dict[str, float]:
        runs = [end_to_end(engine, batch=batch, prompt=prompt, new=33) for _ in range(6)][1:]
        return {name: statistics.median(run[name] for run in runs) for name in runs[0]}

    before = engine.statistics()
    with_graphs = run()
    after = engine.statistics()
    assert after.eager == before.eager, after.eager
    with engine.prefill.runner.suspend(), engine.decode.runner.suspend():
        eager = run()
    return {"batch": batch, "prompt": prompt, "graphs": with_graphs, "eager": eager}


def run_shape(name: str, *, repeats: int) -> dict[str, Any]:
    """All cases of one shape."""
    device = torch.device("cuda")
    model = random_model(SHAPES[name], device=device, dtype=torch.bfloat16, seed=1)
    config = EngineConfig(
        max_batch_size=max(DECODE),
        max_num_tokens=max(PREFILL),
        max_seq_len=4096,
        prefill_sizes=BUCKETS,
        placement="break",
        measure="never",  # every size through its graph, also where an eager step is cheaper
        memory_fraction=0.6,
        prefix_reuse="off",  # runs are repeated with the same prompts, and each is to compute them
    )
    engine = build_engine(model, config=config)
    begin = time.perf_counter()
    engine.capture()
    capture_seconds = time.perf_counter() - begin
    state, prefill, decode = engine.state, engine.prefill, engine.decode
    pools: list[GraphPool] = [prefill.runner.pool, decode.runner.pool]
    rng = np.random.default_rng(0)
    sizes = sorted({*range(1, 17), *rng.integers(17, max(PREFILL), size=40).tolist()})
    with torch.no_grad():
        return {
            "shape": name,
            "attention": state.attention.kind,
            "capture_seconds": round(capture_seconds, 2),
            "prefill_buckets": list(prefill.runner.buckets.sizes),
            "decode_graphs": len(decode.runner.graphs),
            "dropped": {str(k): v for k, v in {**prefill.runner.dropped, **decode.runner.dropped}.items()},
            "pool_mib": [round(pool.backend.pool_bytes() / 2**20, 1) for pool in pools],
            "bridge_mib": [round(pool.arena.nbytes / 2**20, 1) for pool in pools],
            "sizes_bit_equal_to_eager_twin": random_sizes(state, prefill, sizes=sizes),
            "prefill": [prefill_case(state, prefill, tokens=tokens, repeats=repeats) for tokens in PREFILL],
            "decode": [decode_case(state, decode, batch=batch, repeats=repeats) for batch in DECODE],
            "engine": [engine_case(engine, batch=batch, prompt=prompt) for batch, prompt in ENGINE],
        }


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="135M,1B,8B")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    results: dict[str, Any] = {**provenance(options.commit), "shapes": []}
    for name in options.shapes.split(","):
        row = run_shape(name, repeats=options.repeats)
        results["shapes"].append(row)
        for case in row["prefill"]:
            print(name, "prefill", case["tokens"], *(f"{k}={v['median_ms']}" for k, v in case.items() if k != "tokens"))
        for case in row["decode"]:
            print(name, "decode", case["batch"], *(f"{k}={v['median_ms']}" for k, v in case.items() if k != "batch"))
        for case in row["engine"]:
            print(name, "engine", case)
        print({k: v for k, v in row.items() if k not in ("prefill", "decode", "engine")})
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
