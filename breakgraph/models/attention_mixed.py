"""A step that mixes decode rows and prompt rows: two attention calls in one break, decode rows first.

A prefill graph takes such a step as it is: its segments do not care whose rows they compute, and the break sees the real
ones. The engine does not mix by default: a decode row then waits for a prompt's matmuls. A loop that wants to keep decode going
beside long prompts plans with `plan_mixed` and marks the step's attention with `mixed_attention`.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import LiveDataError
from breakgraph.models.attention import Attention, BatchLayout, DecodeState, Int32Array

__all__ = ["MixedBatch", "mixed_attention", "plan_mixed"]


@attrs.frozen(eq=False)
class MixedBatch:
    """The plan of one mixed step.

    Attributes:
        decode_rows: Rows 0 .. decode_rows-1 are one token of as many running requests.
        state: Of the decode call; None without decode rows.
        block_tables: int32 (decode_rows, state.max_blocks), on the device.
        seq_lens: int32 (decode_rows,), on the device: tokens of each sequence, this one included.
        prefill: What `plan_prefill` returned for the rows behind; None without prompt rows.
        rows: Real rows of the step.
    """

    decode_rows: int
    state: DecodeState | None
    block_tables: torch.Tensor | None
    seq_lens: torch.Tensor | None
    prefill: Any
    rows: int


def plan_mixed(
    attention: Attention,
    *,
    block_tables: Int32Array,
    seq_lens: Int32Array,
    prompts: BatchLayout | None,
    state: DecodeState | None = None,
) -> MixedBatch:
    """Host work of a mixed step.

    Args:
        attention: What both calls go through.
        block_tables: int32 (D, blocks), the blocks of each decoding request; entries beyond its blocks are the null block.
        seq_lens: int32 (D,), tokens of each of them, the one of this step included.
        prompts: The rows behind the decode rows; None where there are none.
        state: A `decode_state` of D rows whose `max_blocks` is the width of `block_tables`, to be used again; a new one by
            default, which allocates.

    Returns:
        Live data for `mixed_attention`. It is valid until the plan after the next one.
    """
    count, device = len(seq_lens), attention.shape.device
    planned = None if prompts is None else attention.plan_prefill(prompts)
    rows = count + (0 if prompts is None else prompts.rows)
    if not count:
        return MixedBatch(0, None, None, None, planned, rows)
    if state is None:
        width = max(1, block_tables.shape[1])
        state = attention.decode_state(batch_size=count, max_context=width * attention.shape.block_size)
    attention.plan_decode(state, block_tables=block_tables, seq_lens=seq_lens)
    tables, lengths = (
        torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(device) for array in (block_tables, seq_lens)
    )
    return MixedBatch(count, state, tables, lengths, planned, rows)


@eager_on_graph(name="attention", live=("batch",), rows=("q", "out"), writes=("out",))
def mixed_attention(
    attention: Attention,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    batch: MixedBatch,
) -> None:
    """Attention of a mixed step, a break of the graph: live data `batch`, rows of `q` and `out`.

    Args:
        attention: As it was planned with.
        q: (T, num_heads, head_dim), the real rows, decode rows first.
        k_cache: Key cache of the layer, this step's keys included.
        v_cache: Value cache of the layer.
        out: (T, num_heads, head_dim), written in place; rows beyond the real ones become zero.
        batch: What `plan_mixed` returned.

    Raises:
        LiveDataError: The batch describes another number of rows.
    """
    if q.shape[0] != batch.rows:
        raise LiveDataError(
            f"The attention received {q.shape[0]} rows; its batch describes {batch.rows}.",
            why="Rows that the batch does not describe would keep what an earlier step left in the output.",
            fix="Pass valid_rows equal to the decode rows and the prompt rows that were planned.",
        )
    first = batch.decode_rows
    if batch.state is not None:
        assert batch.block_tables is not None
        assert batch.seq_lens is not None
        attended = attention.decode(q[:first], k_cache, v_cache, batch.state, batch.block_tables, batch.seq_lens)
        out[:first].copy_(attended)
    if batch.prefill is not None:
        attention.attend(q[first:], k_cache, v_cache, out[first:], batch.prefill)
