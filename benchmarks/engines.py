"""The engine that decode steps are measured on."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from breakgraph.buckets import Buckets
from breakgraph.models.weights import LoadedModel
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.startup import build_engine

__all__ = ["MAX_SEQ_LEN", "PREFILL", "TOKENS_PER_REQUEST", "decode_engine"]

PREFILL = (16, 64, 128, 256, 512, 1024, 2048)
MAX_SEQ_LEN = 4096  # the block tables are as wide as this asks for
TOKENS_PER_REQUEST = 256  # what the cache has room for


def decode_engine(model: LoadedModel, *, batches: Sequence[int], max_seq_len: int = MAX_SEQ_LEN) -> Engine:
    """An engine whose decode graphs are those of `batches`, greedy; nothing is captured yet."""
    config = EngineConfig(
        max_batch_size=max(batches),
        max_num_tokens=max(PREFILL),
        max_seq_len=max_seq_len,
        num_blocks=max(batches) * blocks_for(TOKENS_PER_REQUEST, block_size=16) + 1,
        prefill_sizes=PREFILL,
        sampling="greedy",
        measure="never",
        prefix_reuse="off",  # runs are repeated with the same prompts, and each is to compute them
    )
    engine = build_engine(model, config=config)
    sizes = attrs.evolve(engine.sizes, decode=Buckets.of(batches))
    return Engine(engine.state, sizes=sizes, config=config)
