"""What a prefill runner adds to a bare replay: checks, staging, copy-in, and the cut of the result.

    python benchmarks/runner_cost.py --out benchmarks/results/runner_cost_h200.json

Random weights in bfloat16, one full bucket for each size, attention in a break a layer, planned once outside. Host time until
the call returns, the device idle before it; device time between two events around the call. Medians.
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
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import BatchLayout
from breakgraph.models.weights import random_model
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.kv_cache import slots_of
from breakgraph.serving.startup import build_engine

SIZES = (16, 64, 256, 1024, 4096)


def medians(steps: dict[str, Callable[[], Any]], *, repeats: int) -> dict[str, dict[str, float]]:
    """Host and device microseconds of each step.

    Host time is taken in runs of one kind of step, as a serving loop makes them, the kinds in turn; device time behind a
    kernel that keeps the device busy meanwhile, so that it is not the host's.
    """
    host: dict[str, list[float]] = {name: [] for name in steps}
    device: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3):
        for name, step in steps.items():
            for number in range(repeats + 5):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step()
                if number >= 5:
                    host[name].append(1e6 * (time.perf_counter() - begin))
    for _ in range(repeats // 2):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            device[name].append(1e3 * start.elapsed_time(end))
    return {
        name: {
            "host_us": round(statistics.median(host[name]), 1),
            "device_us": round(statistics.median(device[name]), 1),
        }
        for name in steps
    }


def run_shape(name: str, *, repeats: int) -> list[dict[str, Any]]:
    """All sizes of one shape."""
    device = torch.device("cuda")
    model = random_model(SHAPES[name], device=device, dtype=torch.bfloat16, seed=1)
    config = EngineConfig(
        max_batch_size=1,
        max_num_tokens=max(SIZES),
        max_seq_len=max(SIZES) + 64,
        prefill_sizes=SIZES,
        memory_fraction=0.6,
        placement="break",
        measure="never",
    )
    engine = build_engine(model, config=config)
    engine.prefill.capture()
    state, runner = engine.state, engine.prefill.runner
    assert not runner.dropped, runner.dropped
    rows = []
    one = torch.zeros(1, device=device)
    for tokens in SIZES:
        blocks = list(range(1, 1 + -(-tokens // state.cache.block_size)))
        layout = BatchLayout(
            np.array([tokens], dtype=np.int32), np.zeros(1, dtype=np.int32), (np.array(blocks, dtype=np.int32),)
        )
        live = {"batch": state.attention.plan_prefill(layout)}
        inputs = {
            "hidden": torch.randn(tokens, state.decoder.config.hidden_size, device=device).to(state.decoder.dtype),
            "positions": torch.arange(tokens),
            "slots": torch.from_numpy(slots_of(blocks, start=0, count=tokens, block_size=state.cache.block_size)),
        }
        graph = runner.graphs[PrefillKey(tokens)]

        def bare(graph: Any = graph, tokens: int = tokens, live: Any = live) -> None:
            graph.replay(live, valid_rows=tokens)

        def whole(inputs: Any = inputs, tokens: int = tokens, live: Any = live) -> None:
            result = runner.launch(runner.prepare(inputs, size=tokens, live=live))
            assert result.replayed, result.detail

        def behind_a_kernel(bare: Any = bare) -> None:
            one.add_(1)
            bare()

        def half(inputs: Any = inputs, tokens: int = tokens, live: Any = live) -> None:
            runner.prepare(inputs, size=tokens, live=live)

        with torch.no_grad():
            whole()  # a bare replay reads the static inputs of the last step, which must be one of this key
            measured = medians(
                {
                    "bare replay": bare,
                    "prepare and launch": whole,
                    "prepare": half,
                    "one small kernel": lambda: one.add_(1),
                    "one small kernel and the bare replay": behind_a_kernel,
                },
                repeats=repeats,
            )
        host, on_device = (
            measured["prepare and launch"][kind] - measured["bare replay"][kind] for kind in ("host_us", "device_us")
        )
        share = 100 * on_device / measured["bare replay"]["device_us"]
        rows.append(
            {
                "tokens": tokens,
                **measured,
                "overhead_host_us": round(host, 1),
                "overhead_device_us": round(on_device, 1),
                "overhead_device_percent": round(share, 2),
            }
        )
    return rows


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="1B,8B")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    results = {
        **provenance(options.commit),
        "shapes": {name: run_shape(name, repeats=options.repeats) for name in options.shapes.split(",")},
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    for name, rows in results["shapes"].items():
        for row in rows:
            print(name, row)


if __name__ == "__main__":
    main()
