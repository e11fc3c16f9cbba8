"""How many KV blocks a CUDA device has room for, measured before anything is captured."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from breakgraph.errors import ConfigError
from breakgraph.models.attention import Attention
from breakgraph.models.decoder import Decoder
from breakgraph.replay_context import eager_step
from breakgraph.serving.config import EngineConfig, Graphs, Sizes
from breakgraph.serving.device_state import DeviceState
from breakgraph.serving.kv_cache import KVCache
from breakgraph.serving.logits_tail import LogitsTail
from breakgraph.serving.prefill_step import example_layout, prefill_body
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling_params import SamplingParams

__all__ = ["MemorySplit", "measure_blocks"]

# Graph executables and segment temporaries. Measured for a runner of an 8B shape: 446 MiB for seven prefill
# buckets that share one pool; decode graphs take about 10 MiB each.
_GRAPH_RESERVE_BYTES = 768 << 20


@attrs.frozen(kw_only=True)
class MemorySplit:
    """Where a device's memory goes, in bytes.

    Attributes:
        total: Of the device.
        occupied: Taken when it was measured: weights, the context, other processes.
        activations: Most that an eager step took on top.
        graphs: Kept for graphs.
        cache: Left for the KV cache within the fraction asked for.
    """

    total: int
    occupied: int
    activations: int
    graphs: int
    cache: int


def measure_blocks(
    decoder: Decoder, *, attention: Attention, sizes: Sizes, config: EngineConfig, block_bytes: int
) -> tuple[int, MemorySplit]:
    """Runs the largest prefill and the largest end of a step eagerly and divides what is left into blocks.

    Args:
        decoder: The model, on a CUDA device.
        attention: Its attention.
        sizes: Sizes with as many blocks as could ever be used.
        config: The memory fraction.
        block_bytes: Bytes of one block in all layers.

    Returns:
        Blocks, never more than ``sizes.num_blocks``, and the split.

    Raises:
        ConfigError: Not even one request of the full length fits.
    """
    device = decoder.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run_largest(decoder, attention=attention, sizes=sizes)
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    occupied = total - free
    cache = int(total * config.memory_fraction) - occupied - activations - _GRAPH_RESERVE_BYTES
    split = MemorySplit(
        total=total, occupied=occupied, activations=activations, graphs=_GRAPH_RESERVE_BYTES, cache=max(cache, 0)
    )
    blocks = min(cache // block_bytes, sizes.num_blocks)
    kept = 2 if sizes.pads_decode and config.graphs is Graphs.ON else 1
    if blocks < sizes.max_blocks + kept:
        raise ConfigError(
            f"the KV cache would have {max(blocks, 0)} blocks; one request of {sizes.max_seq_len} tokens takes"
            f" {sizes.max_blocks}, and {kept} more {'are' if kept > 1 else 'is'} kept for padding ({split}).",
            why="The longest request that is promised could not run even alone.",
            fix="Raise memory_fraction, lower max_seq_len or max_num_tokens, or free the device.",
        )
    return blocks, split


def _run_largest(decoder: Decoder, *, attention: Attention, sizes: Sizes) -> None:
    """One eager prefill of the most tokens over a cache of the null block alone, then the end of a step of the most rows."""
    device = decoder.device
    tokens = max(sizes.max_num_tokens, 1)
    cache = KVCache(1, block_size=sizes.block_size, shapes=decoder.kv_shapes, dtype=decoder.dtype, device=device)
    rows = sizes.max_batch_size
    state = DeviceState(
        decoder=decoder,
        attention=attention,
        cache=cache,
        last_token=torch.zeros(rows + 1, dtype=torch.int64, device=device),
    )
    layout = example_layout(tokens, sizes=sizes)
    for table in layout.block_tables:
        table.fill(0)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    with torch.no_grad():
        batch = attention.plan_prefill(layout)
        with eager_step({"batch": batch}, valid_rows=tokens, padded_rows=tokens):
            hidden = prefill_body(state, layers=cache.layers)(ids=zeros, positions=zeros, slots=zeros, batch=batch)
        logits = decoder.logits(hidden[:1].expand(rows, -1))
        # With everything that a request may ask for: the tables of penalties are there from their first request on.
        params = SamplingParams(temperature=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=20)
        requests = [
            Request(prompt_ids=(0,), params=params, seed=0, max_new_tokens=1, row=row + 1) for row in range(rows)
        ]
        LogitsTail(state).first(logits, requests, positions=np.zeros(rows, dtype=np.int64))
