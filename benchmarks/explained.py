"""What `explain` says of prefill and decode graphs of the fast path, on a GPU, and what explaining costs.

    python benchmarks/explained.py --out benchmarks/results/explained_h200.json [--shapes 135M,8B] [--pages FOLDER]

Random weights in bfloat16, one request. For each graph: counts beside the graph's own, whole replays as `tools.explain`
measured them, the sum of the steps' device times, the largest kinds of kernels, seconds of explaining with and without
times, bytes of the page. A replay here includes the planning and staging of its example.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph.models.weights import random_model
from breakgraph.serving import LLM
from breakgraph.tools import chrome_trace, explain, html_page

TOKENS = 128
BATCH = 8


def explained(runner: Any, key: Any, *, pages: Path | None, name: str) -> dict[str, Any]:
    """One graph."""
    graph = runner.graphs[key]
    begin = time.perf_counter()
    graph.explain()
    plain_seconds = time.perf_counter() - begin
    begin = time.perf_counter()
    with runner.rehearsal(key) as rehearsal:
        found = explain(graph, replay=rehearsal.replay)
    measured_seconds = time.perf_counter() - begin
    page = html_page(found)
    if pages is not None:
        name = name.replace(" ", "_")
        (pages / f"{name}.html").write_text(page)
        (pages / f"{name}.txt").write_text(str(found))
        (pages / f"{name}.trace.json").write_text(json.dumps(chrome_trace(found)))
    assert found.times is not None
    times = [step.time for step in found.steps if step.time is not None]
    return {
        "graph": name,
        "segments": [len(found.segments), len(graph.segments)],
        "breaks": [len(found.breaks), len(graph.breaks)],
        "kernels": [sum(found.kernels.values()), sum(segment.size for segment in graph.segments)],
        "kernels_of_breaks": sum(step.launches or 0 for step in found.breaks),
        "replay_host_us": round(found.times.host_us, 1),
        "replay_device_us": round(found.times.device_us, 1),
        "steps_host_us": round(sum(one.host_us for one in times), 1),
        "steps_device_us": round(sum(one.device_us for one in times), 1),
        "waits": sum(one.waits for one in times),
        "most": list(found.kernels.items())[:4],
        "seconds_plain": round(plain_seconds, 3),
        "seconds_measured": round(measured_seconds, 3),
        "page_bytes": len(page.encode()),
    }


def main() -> None:
    """Explain three graphs of each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="135M,8B")
    parser.add_argument("--pages", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        config = attrs.evolve(SHAPES[shape], vocab_size=32_000)
        model = random_model(config, device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
        for placement in ("break", "captured"):
            llm = LLM(
                model,
                max_batch_size=BATCH,
                max_num_tokens=TOKENS,
                max_seq_len=512,
                prefill_sizes=(TOKENS,),
                contexts=(512,),
                placement=placement,
                sampling="greedy",
                measure="never",
                verify="first",
                memory_fraction=0.5,
            )
            prefill, decode = llm.engine.prefill.runner, llm.engine.decode.runner
            name = f"{shape} prefill {TOKENS} {placement}"
            rows.append(
                {"shape": shape, **explained(prefill, next(iter(prefill.graphs)), pages=options.pages, name=name)}
            )
            if placement == "captured":
                key = max(decode.graphs, key=lambda one: one.batch_size)
                name = f"{shape} decode {key.batch_size}"
                rows.append({"shape": shape, **explained(decode, key, pages=options.pages, name=name)})
            print(json.dumps(rows[-1]), flush=True)
            del llm, prefill, decode
            torch.cuda.empty_cache()
        del model
    options.out.write_text(json.dumps({**provenance(options.commit), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
