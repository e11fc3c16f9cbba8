"""FlashInfer's decode kernels with and without tensor cores, by shape, batch and context: where they cross.

    python benchmarks/decode_kernels.py --out benchmarks/results/decode_kernels_h200.json

Heads of the three shapes, bfloat16, blocks of 16 tokens, every sequence as long as the context. Each kernel is planned by
FlashInfer for a graph; 32 calls over the caches of 8 layers are captured, and a replay is timed with events: the median of
5, by 32. *Floor*: bytes of keys and values by 4.8 TB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph.models.config import DecoderConfig

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (64, 160, 576, 2048)
PAGE, LAYERS, ROUNDS = 16, 8, 4
BYTES_PER_US = 4.8e6


def kernel_us(shape: DecoderConfig, *, batch: int, context: int, tensor_cores: bool) -> float:
    """Microseconds of a call."""
    import flashinfer

    pages = -(-context // PAGE)
    total = batch * pages + 1  # block 0 belongs to nobody, as in the engine
    size = (total, PAGE, shape.num_kv_heads, shape.head_dim)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    caches = [(torch.randn(size, **options), torch.randn(size, **options)) for _ in range(LAYERS)]
    q = torch.randn(batch, shape.num_heads, shape.head_dim, **options)

    def indices(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device="cuda")

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(400 << 20, dtype=torch.uint8, device="cuda"),
        kv_layout="NHD",
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=indices(batch + 1),
        paged_kv_indices_buffer=indices(total),
        paged_kv_last_page_len_buffer=indices(batch),
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32) * pages,
        torch.arange(1, total, dtype=torch.int32, device="cuda"),
        torch.full((batch,), (context - 1) % PAGE + 1, dtype=torch.int32),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    out = torch.empty_like(q)
    wrapper.run(q, caches[0], out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches * ROUNDS:
            wrapper.run(q, cache, out=out)
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (LAYERS * ROUNDS))
    return statistics.median(times[1:])


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        for batch in BATCHES:
            for context in CONTEXTS:
                row: dict[str, Any] = {"model": name, "batch": batch, "context": context}
                for key, tensor_cores in (("tensor_cores_us", True), ("cuda_cores_us", False)):
                    time = kernel_us(shape, batch=batch, context=context, tensor_cores=tensor_cores)
                    row[key] = round(time, 2)
                moved = 4 * batch * context * shape.num_kv_heads * shape.head_dim
                rows.append(row | {"floor_us": round(moved / BYTES_PER_US, 2)})
                print(rows[-1], flush=True)
    options.out.write_text(json.dumps({**provenance(options.commit), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
