"""Start-up of 49 decode graphs: the default ladder of batch sizes up to 2048, on the 1B shape.

    python benchmarks/start_up.py --out benchmarks/results/start_up_h200.json [--shapes 1B]

Random weights in bfloat16, greedy, sequences of at most 256 tokens, FlashInfer attention: one graph for each batch size.
Start-ups in one process, each with an engine of its own: verified, with everything that a process does once (kernels that are
loaded or compiled, cuBLAS), then not verified. Seconds by phase, device memory by what takes it. `--runs first,never,first` does
a verified one again, without what is done once.

Memory: 2.5 GB of weights, 16 GiB of cache (2048 requests of 16 blocks of 0.5 MiB), and at batch 2048 logits of 0.5 GiB in
bfloat16 and 1 GiB in float32, a few of them at a time. It needs a device of 40 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph.capture_window import CaptureProgress
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.startup import build_engine
from breakgraph.statistics import CapturePhase

MAX_BATCH_SIZE = 2048
MAX_SEQ_LEN = 256
LADDER = 49
RUNS = ("first", "never")
MIB = 2**20


class Watch:
    """Notes memory while graphs are captured; on a CPU, nothing but zeros.

    Attributes:
        warm_ups: Bytes that tensors take, after each key's warm-up.
        used: Bytes taken of the device, by moment.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.warm_ups: list[int] = []
        self.used: dict[str, int] = {}

    def allocated(self) -> int:
        """Bytes of all tensors."""
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def peak(self) -> int:
        """Most bytes of all tensors since `idle`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def idle(self) -> None:
        """Wait for the device and give unused memory back to it."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def note(self, moment: str) -> None:
        """Note what is taken of the device now, by everyone."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self.used[moment] = total - free
        else:
            self.used[moment] = 0

    def progress(self, what: str, event: CaptureProgress) -> None:
        """Called after each key of each phase."""
        if event.phase is CapturePhase.WARM_UP:
            self.warm_ups.append(self.allocated())
            if event.done == event.total:
                self.note("warmed_up")


def spread(values: Iterable[float], *, unit: float, digits: int) -> dict[str, float]:
    """Total, median and maximum."""
    scaled = [value / unit for value in values]
    return {
        "total": round(sum(scaled), digits),
        "median": round(statistics.median(scaled), digits),
        "max": round(max(scaled), digits),
    }


def start_up(
    model: LoadedModel, *, verify: str, max_batch_size: int = MAX_BATCH_SIZE, max_seq_len: int = MAX_SEQ_LEN
) -> dict[str, Any]:
    """Capture all decode graphs of a new engine."""
    watch = Watch(model.decoder.device)
    config = EngineConfig(
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        num_blocks=max_batch_size * blocks_for(max_seq_len, block_size=16) + 1,
        sampling="greedy",
        verify=verify,
        measure="never",
    )
    watch.idle()
    watch.note("model")
    engine = build_engine(model, config=config, progress=watch.progress)
    watch.idle()
    watch.note("engine")
    before = watch.allocated()
    begin = time.perf_counter()
    with torch.no_grad():
        engine.decode.capture()
    seconds = time.perf_counter() - begin
    watch.note("captured")
    peak = watch.peak()
    watch.idle()
    watch.note("captured_and_idle")
    runner = engine.decode.runner
    reports = [report for key, report in runner.statistics.reports.items() if key in runner.graphs]
    if not reports:
        raise RuntimeError(f"no graph was made: {runner.dropped}")
    phases = {
        phase.value: spread([report.seconds.get(phase, 0.0) for report in reports], unit=1e-3, digits=2)
        for phase in CapturePhase
    }
    # The first warm-up makes the scratch and the static inputs as well; each further one its state of the attention.
    states = [after - earlier for earlier, after in zip(watch.warm_ups, watch.warm_ups[1:], strict=False)]
    return {
        "verify": verify,
        "attention": engine.state.attention.kind,
        "buckets": list(engine.sizes.decode.sizes),
        "contexts": list(engine.sizes.contexts),
        "graphs": len(runner.graphs),
        "dropped": {str(key): reason for key, reason in runner.dropped.items()},
        "seconds": round(seconds, 3),
        "seconds_in_phases": round(sum(runner.statistics.seconds(phase) for phase in CapturePhase), 3),
        "ms": phases,
        "graph_mib": spread([report.memory_bytes for report in reports], unit=MIB, digits=3),
        "executable_mib": spread([report.executable_bytes for report in reports], unit=MIB, digits=3),
        "pool_mib": round(runner.pool.backend.pool_bytes() / MIB, 1),
        "bridge_mib": round(runner.pool.arena.nbytes / MIB, 1),
        "warm_up_allocated_mib": round((watch.warm_ups[-1] - before) / MIB, 2),
        "attention_state_mib": spread(states or [0], unit=MIB, digits=3),
        "peak_mib": round((peak - before) / MIB, 1),
        "device_used_mib": {moment: round(used / MIB, 1) for moment, used in watch.used.items()},
        "verified_with_padding": sum(report.padded_rows is not None for report in reports),
    }


def run_shape(
    model: LoadedModel,
    *,
    runs: Sequence[str] = RUNS,
    max_batch_size: int = MAX_BATCH_SIZE,
    max_seq_len: int = MAX_SEQ_LEN,
) -> list[dict[str, Any]]:
    """All start-ups of one model."""
    rows = []
    for number, verify in enumerate(runs):
        row = start_up(model, verify=verify, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
        rows.append({"first_of_the_process": number == 0, **row})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="1B")
    parser.add_argument("--runs", default=",".join(RUNS), help="when to verify, for each start-up")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    results: dict[str, Any] = {**provenance(options.commit), "shapes": {}}
    for name in options.shapes.split(","):
        model = random_model(SHAPES[name], device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
        rows = results["shapes"][name] = run_shape(model, runs=options.runs.split(","))
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        for row in rows:
            if len(row["buckets"]) != LADDER:
                raise SystemExit(f"the ladder has {len(row['buckets'])} buckets, not {LADDER}: {row['buckets']}")
        print(f"{name}: the ladder of {LADDER} is {rows[0]['buckets']}", flush=True)
        del model


if __name__ == "__main__":
    main()
