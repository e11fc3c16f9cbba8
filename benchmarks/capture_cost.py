"""Host cost of replays, and cost of captures, beside a bare loop and beside the package breakable-cuda-graphs.

    python benchmarks/capture_cost.py --out benchmarks/results/capture_cost_h200.json

1. Replay: 33 segments of 8 small kernels with 32 breaks that do nothing; host time until the last call returns, the device idle
   at the start, the final synchronisation excluded, medians of 200.
2. Capture: the 8B shape, 128 tokens, one bucket, attention in place in a break per layer, after warm-up. Beside it the least
   that torch needs for the same 33 segments: begin, end, instantiate, launch, and a plain call of each break.
3. Memory: seven buckets 2048 ... 16, largest first, against the largest alone: drop of free device memory since warm-up, each
   graph replayed once, since the driver takes an executable's memory at its first launch.
4. Executables: device memory that the driver takes for one of 1 kernel and one of 12, and host time to instantiate it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
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


def host_time(step: Callable[[], Any], *, repeats: int = 200, leave_out: int = 20) -> float:
    """Median microseconds until `step` returns, the device idle before it; the first calls are left out."""
    times = []
    for _ in range(repeats + leave_out):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - begin))
    torch.cuda.synchronize()
    return round(statistics.median(times[leave_out:]), 2)


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


class TorchAlone:
    """The least that torch needs: segments around plain calls, no bookkeeping."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._handle = torch.cuda.graph_pool_handle()
        self._open = False

    def mark(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A break: end the segment, call, begin the next."""

        def call(*args: Any) -> Any:
            if not self._open:
                return function(*args)
            self.end()
            result = function(*args)
            self.begin()
            return result

        return call

    def begin(self) -> None:
        """Begin a segment."""
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._handle, capture_error_mode="thread_local")
        self._open = True

    def end(self) -> None:
        """End it, which instantiates it, and launch it."""
        self.graphs[-1].capture_end()
        self.graphs[-1].replay()
        self._open = False

    def reset(self) -> None:
        """Give the segments back."""
        for graph in self.graphs:
            graph.reset()
        self.graphs = []
        self._handle = torch.cuda.graph_pool_handle()


class Subject:
    """One way to capture the decoder's body: this package, the peer, or torch alone.

    Args:
        name: Shape of the model.
        kind: `ours`, `peer` or `torch alone`.
        peer: The peer's module.
    """

    def __init__(self, name: str, kind: str, peer: Any) -> None:
        self.kind = kind
        self.peer = peer
        self.alone = TorchAlone()
        self.pool = GraphPool(backend="cuda")
        self.stream = torch.cuda.Stream()
        self.handle: Any = None
        marks = {"ours": eager_on_graph, "torch alone": self.alone.mark}
        self.forward = Prefill(name, mark=peer.no_graph if kind == "peer" else marks[kind])

    def capture(self, inputs: dict[str, torch.Tensor]) -> Any:
        """One capture; returns something with `replay()` and `reset()`."""
        if self.kind == "ours":
            graph = BreakableCUDAGraph()
            with BreakableCUDAGraphCapture(graph, pool=self.pool):
                self.forward(**inputs)
            return graph
        if self.kind == "torch alone":
            with torch.cuda.stream(self.stream):
                self.alone.begin()
                self.forward(**inputs)
                self.alone.end()
            return self.alone
        graph = self.peer.BreakableCUDAGraph(pool=self.handle)
        self.handle = graph.pool()
        with self.peer.breakable_graph(graph, stream=self.stream):
            self.forward(**inputs)
        return graph

    def launches(self, graph: Any) -> list[Callable[[], Any]]:
        """The launches of its segments, without the breaks."""
        if self.kind == "ours":
            return [segment.bound() for segment in graph.segments]
        graphs = graph.graphs if self.kind == "torch alone" else graph._segments
        return [segment.replay for segment in graphs if isinstance(segment, torch.cuda.CUDAGraph)]


def _call_all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


SIZES = (2048, 1024, 512, 256, 128, 64, 16)


def warmed_up(name: str, kind: str, peer: Any) -> Subject:
    """A subject that has run all sizes eagerly, on both capture streams."""
    subject = Subject(name, kind, peer)
    for context in (subject.pool.on_capture_stream(), torch.cuda.stream(subject.stream)):
        with context:
            for tokens in SIZES:
                subject.forward(**subject.forward.inputs(tokens))
    torch.cuda.synchronize()
    return subject


@torch.no_grad()
def capture_cost(name: str, peer: Any, *, rounds: int = 15) -> dict[str, Any]:
    """Milliseconds of host time of a capture of 128 tokens, for each subject in turn, in one process."""
    kinds = ("torch alone", "ours", *(() if peer is None else ("peer",)))
    subjects = {kind: warmed_up(name, kind, peer) for kind in kinds}
    inputs = {kind: subject.forward.inputs(128) for kind, subject in subjects.items()}
    eager: list[float] = []
    captures: dict[str, list[float]] = {kind: [] for kind in kinds}
    launches: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        for kind, subject in subjects.items():
            eager.append(host_time(partial(subject.forward, **inputs[kind]), repeats=5, leave_out=2) / 1000)
            gc.collect()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            graph = subject.capture(inputs[kind])
            captures[kind].append(1000 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
            calls = subject.launches(graph)
            launches[kind].append(host_time(partial(_call_all, calls), repeats=5, leave_out=2) / 1000)
            graph.reset()
    result: dict[str, Any] = {"eager_host_ms": round(statistics.median(eager), 2)}
    for kind in kinds:
        taken, launch = statistics.median(captures[kind][1:]), statistics.median(launches[kind][1:])
        result[kind] = {
            "capture_ms": round(taken, 2),
            "least_and_most_ms": [round(min(captures[kind][1:]), 2), round(max(captures[kind][1:]), 2)],
            "launches_host_ms": round(launch, 2),
            "overhead_ms": round(taken - statistics.median(eager) - launch, 2),
        }
    if peer is not None:
        for kind, key in (("ours", "ours_over_peer"), ("torch alone", "torch_alone_over_peer")):
            result[key] = round(result[kind]["overhead_ms"] / result["peer"]["overhead_ms"], 3)
    return result


@torch.no_grad()
def memory_cost(name: str, kind: str, peer: Any) -> dict[str, float]:
    """MiB that seven buckets take in a process that has captured nothing before."""
    subject = warmed_up(name, kind, peer)
    gc.collect()
    torch.cuda.empty_cache()
    kept, result = [], {}
    before, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for tokens in SIZES:
        kept.append(subject.capture(subject.forward.inputs(tokens)))
        kept[-1].replay()
        torch.cuda.synchronize()
        taken = (before - torch.cuda.mem_get_info()[0]) / 2**20
        executables = taken - (torch.cuda.memory_reserved() - reserved) / 2**20
        if tokens == SIZES[0]:
            result = {"largest_mib": round(taken, 1), "of_it_executables_mib": round(executables, 1)}
    result |= {"all_seven_mib": round(taken, 1), "of_all_executables_mib": round(executables, 1)}
    result["all_over_largest"] = round(result["all_seven_mib"] / result["largest_mib"], 3)
    return result


def executable_cost(kernels: int, *, count: int = 330) -> dict[str, float]:
    """KiB of device memory and microseconds of host time that one instantiated graph takes, in a process without others."""
    x = torch.zeros(1024, device="cuda")
    graphs = []
    with torch.cuda.stream(torch.cuda.Stream()):
        handle = torch.cuda.graph_pool_handle()
        for _ in range(count):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(pool=handle)
            for _ in range(kernels):
                x.add_(1.0)
            graph.capture_end()
            graphs.append(graph)
        torch.cuda.synchronize()
        before, times = torch.cuda.mem_get_info()[0], []
        for graph in graphs:
            begin = time.perf_counter()
            graph.instantiate()
            times.append(1e6 * (time.perf_counter() - begin))
            graph.replay()
        torch.cuda.synchronize()
    taken = before - torch.cuda.mem_get_info()[0]
    return {
        "kernels": kernels,
        "device_kib": round(taken / count / 1024, 1),
        "instantiate_us": round(statistics.median(times), 1),
    }


PARTS: dict[str, Callable[[str, Any], Any]] = {
    "replay": lambda shape, peer: replay_cost(peer),
    "capture": capture_cost,
    "memory ours": lambda shape, peer: memory_cost(shape, "ours", peer),
    "memory peer": lambda shape, peer: None if peer is None else memory_cost(shape, "peer", peer),
    "executables of 1": lambda shape, peer: executable_cost(1),
    "executables of 12": lambda shape, peer: executable_cost(12),
}


def main() -> None:
    """Measure each part in a process of its own, and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--commit", help="where the machine has no git")
    parser.add_argument("--part", choices=PARTS, help="one part only, in this process")
    options = parser.parse_args()
    try:
        import breakable_cuda_graphs as peer
    except ImportError:
        peer = None
    if options.part is not None:
        options.out.write_text(json.dumps(PARTS[options.part](options.shape, peer)))
        return
    results: dict[str, Any] = {**provenance(options.commit), "shape": options.shape}
    if peer is not None:
        results["versions"]["breakable-cuda-graphs"] = metadata.version("breakable-cuda-graphs")
    for part in PARTS:
        arguments = [sys.executable, __file__, "--out", options.out, "--shape", options.shape, "--part", part]
        subprocess.run(arguments, check=True)
        results[part.replace(" ", "_")] = json.loads(options.out.read_text())
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
