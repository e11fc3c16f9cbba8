"""Host time of planning FlashInfer's attention: its public plan() and our thin planner.

    python benchmarks/planner.py --out benchmarks/results/planner_h200.json

*Public* and *ours*: host time until `plan_decode`, `plan_prefill` or `plan_captured` returns, in runs of one kind that
take turns, as in `runner_cost.py`; *busy*: with a kernel of a millisecond running on the device, as in a loop that
plans step n+1 while step n runs; *idle*: behind a synchronisation, where the first copy also has to wake the device.
*Native*: the part of a plan of ours that is the call of FlashInfer's C++ plan, from runs of their own with a clock
around it; FA3 is planned without. *Captured*: the plan of a graph of 4096 rows with FA3, padding included. *Kernel* is
device time of one layer's attention of that batch, as planned publicly and by us. Decode: contexts around 160. Prefill:
chunks of 32 rows (16 for 256 requests), every other one behind 128 cached tokens. Medians, microseconds. The plan of
each batch is compared with the public one before it is timed.
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
from breakgraph.models.attention import AttentionShape, BatchLayout
from breakgraph.models.attention_flashinfer import FlashInferAttention
from breakgraph.models.flashinfer_planner import Planning
from breakgraph.models.flashinfer_schedule import works_of

REQUESTS = (1, 8, 64, 256)
BLOCK = 16
CACHE_BLOCKS = 4096
ROWS, CACHED = 32, 128
MAX_CONTEXT = 512
GRAPH_ROWS = 4096


def host_medians(plans: dict[str, Callable[[], Any]], *, repeats: int) -> dict[str, float]:
    """Host microseconds of each plan, behind an idle device and beside a busy one."""
    spent: dict[str, list[float]] = {f"{name}_{device}_us": [] for name in plans for device in ("idle", "busy")}
    for _ in range(3):
        for name, plan in plans.items():
            for device in ("idle", "busy"):
                for number in range(repeats + 5):
                    torch.cuda.synchronize()
                    if device == "busy":
                        torch.cuda._sleep(2_000_000)
                    begin = time.perf_counter()
                    plan()
                    if number >= 5:
                        spent[f"{name}_{device}_us"].append(1e6 * (time.perf_counter() - begin))
    return {name: round(statistics.median(values), 1) for name, values in spent.items()}


def native_median(planners: list[Any], plan: Callable[[], Any], *, repeats: int) -> float:
    """Microseconds of the C++ plan within a thin plan."""
    spent: list[float] = []
    originals = [planner._native for planner in planners]

    def timed(native: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = native(*args)
            spent.append(1e6 * (time.perf_counter() - begin))
            return result

        return call

    for planner in planners:
        planner._native = timed(planner._native)
    for _ in range(repeats):
        torch.cuda.synchronize()
        plan()
    for planner, native in zip(planners, originals, strict=True):
        planner._native = native
    return round(statistics.median(spent), 1)


def device_median(run: Callable[[], Any], *, repeats: int) -> float:
    """Device microseconds, behind a kernel that keeps the device busy until the host has launched it."""
    spent = []
    for number in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            spent.append(1e3 * start.elapsed_time(end))
    return round(statistics.median(spent), 1)


def assert_same(thin: Any, public: Any) -> None:
    """Two wrappers have the same plan, or with FA3 the same works."""
    if public._backend == "fa3":
        ctas = torch.cuda.get_device_properties("cuda").multi_processor_count
        ours, theirs = (
            works_of(each._int_workspace_buffer.view(torch.int32).cpu().numpy(), each._plan_info, ctas=ctas)
            for each in (thin, public)
        )
        if not np.array_equal(ours, theirs):
            raise RuntimeError(f"our schedule has {len(ours)} works, other ones than the public {len(theirs)}")
    elif list(thin._plan_info) != list(public._plan_info):
        raise RuntimeError(f"the thin plan is {list(thin._plan_info)}, the public one {list(public._plan_info)}")


def decode_case(attentions: dict[str, FlashInferAttention], *, requests: int, repeats: int) -> dict[str, float]:
    """Decode of a number of requests."""
    random = np.random.default_rng(requests)
    lens = random.integers(100, 221, requests).astype(np.int32)
    table = random.integers(1, CACHE_BLOCKS, (requests, -(-int(lens.max()) // BLOCK))).astype(np.int32)
    states = {name: a.decode_state(batch_size=requests, max_context=MAX_CONTEXT) for name, a in attentions.items()}

    def plan(name: str) -> Callable[[], None]:
        return lambda: attentions[name].plan_decode(states[name], block_tables=table, seq_lens=lens)

    plans = {name: plan(name) for name in attentions}
    for each in plans.values():
        each()
    ours = states["ours"].planner
    assert ours.thin is not None
    assert_same(ours.wrapper, states["public"].planner.wrapper)
    return {
        **host_medians(plans, repeats=repeats),
        "native_us": native_median([ours.thin], plans["ours"], repeats=repeats),
    }


def prefill_case(attentions: dict[str, FlashInferAttention], *, requests: int, repeats: int) -> dict[str, float]:
    """Prefill chunks of a number of requests."""
    random = np.random.default_rng(requests)
    rows = np.full(requests, ROWS if requests < 256 else ROWS // 2, dtype=np.int32)
    contexts = (CACHED * (np.arange(requests) % 2)).astype(np.int32)
    tables = [random.integers(1, CACHE_BLOCKS, -(-int(n) // BLOCK)).astype(np.int32) for n in rows + contexts]
    layout = BatchLayout(rows, contexts, tables)

    def plan(name: str) -> Callable[[], Any]:
        return lambda: attentions[name].plan_prefill(layout)

    plans = {name: plan(name) for name in attentions}
    batches = {name: [each() for _ in range(4)][-1] for name, each in plans.items()}  # two wrappers, set up first
    ours, public = (batches[name].planner for name in ("ours", "public"))
    assert ours is not None
    assert public is not None
    torch.cuda.synchronize()
    assert_same(ours.wrapper, public.wrapper)
    attention = attentions["ours"]
    if attention.no_capture() is None and requests <= 64:
        state = attention.prefill_state(rows=GRAPH_ROWS, requests=64, max_context=MAX_CONTEXT)
        plans["captured"] = lambda: attention.plan_captured(state, layout)
    measured = host_medians(plans, repeats=repeats)
    if public.wrapper._backend == "fa2":
        planners = [planner.thin for planner in attention._prefill]
        measured["native_us"] = native_median(planners, plans["ours"], repeats=repeats)
    shape = attention.shape
    cache = (CACHE_BLOCKS, BLOCK, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(cache, device="cuda", dtype=shape.dtype) for _ in range(2))
    q = torch.randn(layout.rows, shape.num_heads, shape.head_dim, device="cuda", dtype=shape.dtype)
    outputs = {name: torch.empty_like(q) for name in attentions}
    for name, each in attentions.items():
        batch = plans[name]()

        def run(each: FlashInferAttention = each, out: torch.Tensor = outputs[name], batch: Any = batch) -> None:
            each.attend(q, k, v, out, batch)

        measured[f"kernel_{name}_us"] = device_median(run, repeats=repeats // 3)
    if not torch.equal(*outputs.values()):
        raise RuntimeError("the outputs differ")
    return measured


def run_shape(name: str, *, repeats: int) -> list[dict[str, Any]]:
    """All numbers of requests of one shape."""
    config = SHAPES[name]
    shape = AttentionShape(
        config.num_heads, config.num_kv_heads, config.head_dim, BLOCK, torch.bfloat16, torch.device("cuda")
    )
    hopper = torch.cuda.get_device_capability()[0] == 9
    kinds = {
        backend: {
            name: FlashInferAttention(shape, reason="benchmark", planning=kind, prefill_backend=backend)
            for name, kind in (("public", Planning.PUBLIC), ("ours", Planning.THIN))
        }
        for backend in (("fa3", "fa2") if hopper else ("fa2",))
    }
    rows = []
    for requests in REQUESTS:
        row: dict[str, Any] = {"requests": requests}
        row["decode"] = decode_case(next(iter(kinds.values())), requests=requests, repeats=repeats)
        for backend, attentions in kinds.items():
            row[f"prefill_{backend}"] = prefill_case(attentions, requests=requests, repeats=repeats)
        rows.append(row)
        print(name, row, flush=True)
    return rows


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="1B,8B")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    begin = time.perf_counter()
    with torch.no_grad():
        shapes = {name: run_shape(name, repeats=options.repeats) for name in options.shapes.split(",")}
    results = {**provenance(options.commit), "shapes": shapes}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
