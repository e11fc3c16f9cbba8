"""Which decode kernel FlashInfer is asked for: the rule against what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from breakgraph.models.attention_types import AttentionShape
from breakgraph.models.flashinfer_kernels import CUDA_CORE_GROUP_SIZES, prefers_tensor_cores, short_context

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "decode_kernels_h200.json"
HEADS = {"135M": (9, 3, 64), "1B": (32, 8, 64), "8B": (32, 8, 128)}


def _shape(heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, 16, torch.bfloat16, torch.device("cpu"))


def test_the_rule_takes_the_kernel_that_was_measured_to_be_faster() -> None:
    """From 160 tokens on, the kernel of the rule is at most 10 % slower than the faster one, at every measured place."""
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["context"] >= 160]
    assert {row["model"] for row in rows} == set(HEADS)
    chosen = set()
    for row in rows:
        shape = _shape(*HEADS[row["model"]])
        kernel = (
            "tensor_cores_us"
            if prefers_tensor_cores(shape, batch_size=row["batch"], context=row["context"])
            else "cuda_cores_us"
        )
        chosen.add(kernel)
        assert row[kernel] <= 1.1 * min(row["tensor_cores_us"], row["cuda_cores_us"]), row
    assert len(chosen) == 2


@pytest.mark.parametrize("batch", [1, 8, 9, 95, 96, 191, 192, 256])
@pytest.mark.parametrize("shape", [*HEADS.values(), (40, 8, 128), (14, 2, 64), (64, 8, 128), (8, 8, 128)])
def test_a_context_divides_the_kernels(shape: tuple[int, int, int], batch: int) -> None:
    """Up to the short context there are no tensor cores, beyond it there are; a group without that kernel never takes it."""
    made = _shape(*shape)
    short = short_context(made, batch_size=batch)
    if made.group_size not in CUDA_CORE_GROUP_SIZES:
        assert short == 0
    for context in (1, 100, 320, 640, 10_000):
        expected = short is not None and context > short
        assert prefers_tensor_cores(made, batch_size=batch, context=context) is expected
