"""Host cost of replays, and cost of captures, beside a bare loop and beside the package breakable-cuda-graphs.

    python benchmarks/capture_cost.py --out benchmarks/results/capture_cost_h200.json

1. Replay: 33 segments of 8 small kernels with 32 breaks that do nothing; host time until the last call returns, the device idle
   at the start, the final synchronisation excluded, medians of 200.
2. Capture: the 8B shape, 128 tokens, one bucket, attention in place in a break per layer, after warm-up.
3. Memory: seven buckets 2048 ... 16, largest first, against the largest alone: drop of free device memory since warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool, eager_on_graph
from breakgraph.backends.cuda_capture import cudart
from breakgraph.models.attention import BatchLayout, make_attention
from breakgraph.models.weights import random_model

SEGMENTS, KERNELS = 33, 8


def nothing() -> None:
    """A break that does nothing."""


def work(x: torch.Tensor, pause: Callable[[], None]) -> None:
    """33 times 8 small kernels, with a pause between."""
    for segment in range(SEGMENTS):
        for _ in range(KERNELS):
            x.add_(1.0)
        if segment + 1 < SEGMENTS:
            pause()


def host_time(step: Callable[[], Any], *, repeats: int = 200) -> float:
    """Median microseconds until `step` returns, the device idle before it."""
    times = []
    for _ in range(repeats + 20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return round(statistics.median(times[20:]), 2)


def replay_cost(peer: Any) -> dict[str, float]:
    """Host time of one replay: ours, a bare loop, the peer; each three times in turn, the best median of each."""
    x = torch.zeros(256, device="cuda")
    ours = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(ours):
        work(x, eager_on_graph(nothing))
    bare: list[Callable[[], Any]] = []
    stream = torch.cuda.current_stream().cuda_stream
    launch = cudart.cudaGraphLaunch

    def bind(executable: Any) -> Callable[[], Any]:
        return lambda: launch(executable, stream)

    for segment in ours.segments:
        bare.append(bind(cudart.cudaGraphExec_t(segment.graph.raw_cuda_graph_exec())))  # type: ignore[attr-defined]
        bare.append(nothing)
    bare.pop()

    def loop() -> None:
        for call in bare:
            call()

    steps: dict[str, Callable[[], Any]] = {"ours": ours.replay, "bare_loop": loop}
    if peer is not None:
        theirs = peer.BreakableCUDAGraph()
        with torch.no_grad(), peer.breakable_graph(theirs):
            work(x, peer.no_graph(nothing))
        steps["peer"] = theirs.replay
    with torch.no_grad():
        rounds = [{name: host_time(step) for name, step in steps.items()} for _ in range(3)]
    result = {f"{name}_us": min(round_[name] for round_ in rounds) for name in steps}
    result["ours_over_bare_loop"] = round(result["ours_us"] / result["bare_loop_us"], 3)
    if peer is not None:
        result["ours_over_peer"] = round(result["ours_us"] / result["peer_us"], 3)
    return result


class Prefill:
    """The decoder's body for one prompt, attention in place in a break per layer."""

    def __init__(self, name: str, *, mark: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        config = SHAPES[name]
        self.device = torch.device("cuda")
        self.decoder = random_model(config, device=self.device, dtype=torch.bfloat16, seed=1).decoder
        self.attention = make_attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=16,
            dtype=torch.bfloat16,
            device=self.device,
        )
        shape = (130, 16, config.num_kv_heads, config.head_dim)
        self.layers = [
            (
                torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
                torch.zeros(shape, dtype=torch.bfloat16, device=self.device),
            )
            for _ in range(config.num_layers)
        ]
        self.batch: Any = None
        self.attend = mark(self._attend)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        type(self.attention).prefill.__wrapped__(self.attention, q, k, v, out, self.batch)  # type: ignore[attr-defined]

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Static inputs for a prompt, and its plan."""
        blocks = np.arange(1, 1 + -(-tokens // 16), dtype=np.int32)
        self.batch = self.attention.plan_prefill(
            BatchLayout(np.array([tokens], dtype=np.int32), np.zeros(1, dtype=np.int32), (blocks,))
        )
        hidden = torch.randn(tokens, self.decoder.config.hidden_size, device=self.device, dtype=torch.bfloat16)
        places = torch.arange(tokens, device=self.device)
        return {"hidden": hidden, "positions": places, "slots": places + 16}

    def __call__(self, *, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Hidden states in, hidden states out."""

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            self.attend(q, k, v, out)
            return out

        result: torch.Tensor = self.decoder(hidden, positions=positions, slots=slots, kv=self.layers, attend=attend)
        return result


def ours_capture(forward: Prefill, inputs: dict[str, torch.Tensor], pool: GraphPool) -> BreakableCUDAGraph:
    """One capture with this package."""
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, pool=pool):
        forward(**inputs)
    return graph


def capture_cost(name: str, peer: Any, *, memory: bool) -> dict[str, float]:
    """Milliseconds of a capture of 128 tokens and MiB that buckets take, for this package or for the peer."""
    forward = Prefill(name, mark=eager_on_graph if peer is None else peer.no_graph)
    pool = GraphPool(backend="cuda")
    handle: Any = None
    stream = torch.cuda.Stream()

    def one(inputs: dict[str, torch.Tensor]) -> Any:
        nonlocal handle
        if peer is None:
            return ours_capture(forward, inputs, pool)
        graph = peer.BreakableCUDAGraph(pool=handle)
        handle = graph.pool()
        with peer.breakable_graph(graph, stream=stream):
            forward(**inputs)
        return graph

    result: dict[str, float] = {}
    with torch.no_grad():
        sizes = (2048, 1024, 512, 256, 128, 64, 16)
        for context in (pool.on_capture_stream(), torch.cuda.stream(stream)):
            with context:
                for tokens in sizes:
                    forward(**forward.inputs(tokens))
        torch.cuda.synchronize()
        inputs = forward.inputs(128)
        eager = host_time(lambda: forward(**inputs), repeats=20) / 1000
        times = []
        for _ in range(4):
            gc.collect()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            graph = one(inputs)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - begin))
            launches = host_time(graph.replay, repeats=20) / 1000
            graph.reset()
        result["capture_ms"] = round(statistics.median(times[1:]), 2)
        result["eager_host_ms"] = round(eager, 2)
        result["replay_host_ms"] = round(launches, 2)
        result["overhead_ms"] = round(result["capture_ms"] - eager - launches, 2)
        if memory:
            gc.collect()
            torch.cuda.empty_cache()
            kept = []
            before = torch.cuda.mem_get_info()[0]
            for tokens in sizes:
                kept.append((one(forward.inputs(tokens)), tokens))
                torch.cuda.synchronize()
                taken = (before - torch.cuda.mem_get_info()[0]) / 2**20
                result.setdefault("largest_mib", round(taken, 1))
                result["all_seven_mib"] = round(taken, 1)
            result["all_over_largest"] = round(result["all_seven_mib"] / result["largest_mib"], 3)
    return result


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    try:
        import breakable_cuda_graphs as peer
    except ImportError:
        peer = None
    results: dict[str, Any] = {**provenance(options.commit), "shape": options.shape}
    if peer is not None:
        results["versions"]["breakable-cuda-graphs"] = metadata.version("breakable-cuda-graphs")
    results["replay"] = replay_cost(peer)
    results["capture"] = {"ours": capture_cost(options.shape, None, memory=True)}
    gc.collect()
    torch.cuda.empty_cache()
    if peer is not None:
        results["capture"]["peer"] = capture_cost(options.shape, peer, memory=True)
        ours, theirs = results["capture"]["ours"], results["capture"]["peer"]
        results["capture"]["overhead_ours_over_peer"] = round(ours["overhead_ms"] / theirs["overhead_ms"], 3)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
