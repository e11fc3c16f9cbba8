"""Paged attention in plain torch: the reference, on any device."""

from __future__ import annotations

import attrs
import numpy as np
import torch
import torch.nn.functional as F

from breakgraph.errors import LiveDataError
from breakgraph.models.attention import (
    PLAIN,
    Attention,
    AttentionShape,
    AttentionVariant,
    BatchLayout,
    DecodeState,
    Int32Array,
    Placement,
    PrefillState,
)

__all__ = ["TorchAttention", "TorchBatch", "TorchDecodeState", "TorchPrefillState"]


@attrs.frozen(eq=False)
class TorchRequest:
    """One request of a prefill step.

    Attributes:
        start: First row of the request.
        stop: Row after its last.
        length: Tokens after this step.
        blocks: int64 (blocks,), on the device.
        mask: bool (rows, length), True where a row may look; None for a fresh prompt (plain causal) or one row.
    """

    start: int
    stop: int
    length: int
    blocks: torch.Tensor
    mask: torch.Tensor | None

    @property
    def causal(self) -> bool:
        """The prompt is fresh: row i looks at tokens 0 .. i."""
        return self.mask is None and self.stop - self.start == self.length


@attrs.frozen(eq=False)
class TorchBatch:
    """Live metadata of one prefill step.

    Attributes:
        rows: Real rows of the step.
        requests: In the order of their rows.
    """

    rows: int
    requests: tuple[TorchRequest, ...]


@attrs.define(eq=False)
class TorchDecodeState(DecodeState):
    """Adds what the captured mask is made from.

    Attributes:
        token_index: int32 (max_blocks * block_size,): 0, 1, 2, ...
    """

    token_index: torch.Tensor


class TorchPrefillState(PrefillState):
    """Adds what the captured gather and mask are made from.

    Args:
        rows: Rows of the graph, padding included.
        requests: Most requests of a step.
        max_context: Longest sequence in tokens.
        decode: State of a decode of `rows` sequences.
        device: Where its buffers are.

    Attributes:
        decode: As given.
        tables: int32 (rows, max_blocks), the blocks of the request that each row is of.
        lens: int32 (rows,), tokens that each row sees, itself included.
    """

    def __init__(
        self, rows: int, requests: int, max_context: int, *, decode: TorchDecodeState, device: torch.device
    ) -> None:
        super().__init__(rows, requests, max_context)
        self.decode = decode
        with torch.inference_mode(mode=False):  # written at every step
            self.tables = torch.zeros(rows, decode.max_blocks, dtype=torch.int32, device=device)
            self.lens = torch.ones(rows, dtype=torch.int32, device=device)


class TorchAttention(Attention):
    """Gathers a request's blocks and calls `scaled_dot_product_attention`.

    Prefill goes through the requests one by one. Decode gathers `max_blocks` blocks of every row, so its cost
    follows the context that the graph was made for, not the context that is there: give each context bucket its
    own graph.
    """

    kind = "torch"
    plans_decode = False
    best_placement = Placement.BREAK

    def plan_prefill(self, layout: BatchLayout) -> TorchBatch:
        """See `Attention`. Copies every block table to the device; masks only for prompts that continue."""
        _check_tables(layout, self.shape)
        requests = []
        start = 0
        for rows, length, table in zip(layout.query_lens, layout.seq_lens, layout.block_tables, strict=True):
            stop = start + int(rows)
            blocks = np.asarray(table[: self.shape.blocks_for(int(length))], dtype=np.int64)
            requests.append(
                TorchRequest(
                    start,
                    stop,
                    int(length),
                    torch.from_numpy(blocks).to(self.shape.device),
                    self._mask(int(rows), int(length)),
                )
            )
            start = stop
        return TorchBatch(start, tuple(requests))

    def _mask(self, rows: int, length: int) -> torch.Tensor | None:
        if rows in (1, length):
            return None
        visible = torch.ones(rows, length, dtype=torch.bool, device=self.shape.device)
        return visible.tril_(length - rows)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        batch: TorchBatch,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """See `Attention`. One call of the kernel for each request; a layer that is not plain takes plain matmuls."""
        _check_rows(q, batch.rows)
        for request in batch.requests:
            keys = _gather(k_cache, request.blocks)[:, : request.length]
            values = _gather(v_cache, request.blocks)[:, : request.length]
            rows = slice(request.start, request.stop)
            if not variant.is_plain:
                at = torch.arange(request.length - (request.stop - request.start), request.length, device=q.device)
                seen = _visible(at[:, None], tokens=torch.arange(request.length, device=q.device), variant=variant)
                out[rows].copy_(_general(q[rows], keys, values, seen, variant))
                continue
            attended = F.scaled_dot_product_attention(
                q[rows].transpose(0, 1).unsqueeze(0),
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=request.mask,
                is_causal=request.causal,
                enable_gqa=q.shape[1] > keys.shape[0],
            )
            out[rows].copy_(attended.squeeze(0).transpose(0, 1))

    def no_capture(self) -> str | None:
        """See `Attention`. It can always be captured; see `prefill_captured` for what that costs."""
        return None

    def prefill_state(self, *, rows: int, requests: int, max_context: int) -> TorchPrefillState:
        """See `Attention`."""
        decode = self.decode_state(batch_size=rows, max_context=max_context)
        return TorchPrefillState(rows, requests, max_context, decode=decode, device=self.shape.device)

    def plan_captured(self, state: PrefillState, layout: BatchLayout) -> None:
        """See `Attention`. Rows of padding see the first token of the null block."""
        assert isinstance(state, TorchPrefillState)
        _check_room(state, layout)
        _check_tables(layout, self.shape)
        tables, lens = np.zeros(state.tables.shape, dtype=np.int32), np.ones(state.rows, dtype=np.int32)
        start = 0
        for rows, length, table in zip(layout.query_lens, layout.seq_lens, layout.block_tables, strict=True):
            own = np.asarray(table[: self.shape.blocks_for(int(length))], dtype=np.int32)
            tables[start : start + rows, : len(own)] = own
            lens[start : start + rows] = np.arange(length - rows + 1, length + 1)
            start += int(rows)
        state.tables.copy_(torch.from_numpy(tables))
        state.lens.copy_(torch.from_numpy(lens))

    def prefill_captured(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        state: PrefillState,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """See `Attention`. Each row gathers `max_context` tokens for itself, as in a decode: for small sizes and for tests."""
        assert isinstance(state, TorchPrefillState)
        return self.decode(q, k_cache, v_cache, state.decode, state.tables, state.lens, variant)

    def decode_state(self, *, batch_size: int, max_context: int) -> TorchDecodeState:
        """See `Attention`."""
        blocks = self.shape.blocks_for(max_context)
        index = torch.arange(blocks * self.shape.block_size, dtype=torch.int32, device=self.shape.device)
        return TorchDecodeState(batch_size, max_context, blocks, index)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        state: DecodeState,
        block_tables: torch.Tensor | None,
        seq_lens: torch.Tensor | None,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """See `Attention`. Cost: a copy of batch_size * max_blocks blocks of keys and of values."""
        assert isinstance(state, TorchDecodeState)
        assert block_tables is not None and seq_lens is not None  # noqa: PT018
        batch, tokens = q.shape[0], state.token_index.shape[0]
        flat = block_tables.reshape(-1)
        # Heads and dimensions are those of this layer's cache: layers may differ, and keys from values.
        keys = k_cache.index_select(0, flat).view(batch, tokens, *k_cache.shape[2:]).transpose(1, 2)
        values = v_cache.index_select(0, flat).view(batch, tokens, *v_cache.shape[2:]).transpose(1, 2)
        # The queries that share a key-value head take the place of a query length: they all see the same tokens,
        # so no key is repeated and one mask serves the group.
        grouped = q.reshape(batch, keys.shape[1], -1, q.shape[-1])
        if variant.is_plain:
            visible = state.token_index < seq_lens.unsqueeze(1)
            attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible[:, None, None, :])
        else:
            visible = _visible(seq_lens.unsqueeze(1) - 1, tokens=state.token_index, variant=variant)
            attended = _weighted(grouped, keys, values, visible[:, None, None, :], variant)
        return attended.reshape(batch, q.shape[1], values.shape[-1])

    def plan_decode(self, state: DecodeState, *, block_tables: Int32Array, seq_lens: Int32Array) -> None:
        """See `Attention`. Nothing to plan: the captured kernels read the tables themselves."""


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The tokens of `blocks`: (num_kv_heads, blocks * block_size, head_dim)."""
    return cache.index_select(0, blocks).flatten(0, 1).transpose(0, 1)


def _check_rows(q: torch.Tensor, rows: int) -> None:
    if q.shape[0] != rows:
        raise LiveDataError(
            f"The attention received {q.shape[0]} rows; its batch describes {rows}.",
            why="Rows that the batch does not describe would keep what an earlier step left in the output.",
            fix="Pass valid_rows equal to the sum of query_lens of the layout that was planned.",
        )


def _check_tables(layout: BatchLayout, shape: AttentionShape) -> None:
    """A table that ends early would have rows look at the null block, or at fewer tokens than there are."""
    counts = (len(layout.query_lens), len(layout.context_lens), len(layout.block_tables))
    short = counts[0] != counts[1] or counts[0] != counts[2]
    if not short:
        needed = [shape.blocks_for(int(length)) for length in layout.seq_lens]
        short = any(len(table) < count for table, count in zip(layout.block_tables, needed, strict=True))
    if short or (layout.context_lens < 0).any() or (layout.query_lens < 0).any():
        raise LiveDataError(
            f"The layout has {counts[0]} query lengths, {counts[1]} contexts and {counts[2]} tables of "
            f"{[len(table) for table in layout.block_tables]} blocks of {shape.block_size}, for query lengths "
            f"{layout.query_lens.tolist()} behind {layout.context_lens.tolist()} tokens.",
            why="Rows would look at blocks that no table names.",
            fix="Pass one length, one context of 0 or more, and one table that covers both, for each request.",
        )


def _check_room(state: PrefillState, layout: BatchLayout) -> None:
    requests, rows, longest = len(layout.query_lens), layout.rows, int(layout.seq_lens.max(initial=0))
    if requests > state.requests or rows > state.rows or longest > state.max_context:
        raise LiveDataError(
            f"The step has {rows} rows of {requests} requests, the longest of {longest} tokens; its graph has room for "
            f"{state.rows}, {state.requests} and {state.max_context}.",
            why="The graph has the addresses and sizes of its buffers baked in.",
            fix="Use a graph of a larger bucket, or run the step with the attention in a break.",
        )


def _visible(at: torch.Tensor, *, tokens: torch.Tensor, variant: AttentionVariant) -> torch.Tensor:
    """Bool (rows, tokens): which tokens a row at a position sees.

    Args:
        at: (rows, 1), the position of each row.
        tokens: (tokens,), their positions.
        variant: Window and chunk.
    """
    seen = tokens <= at
    if variant.window is not None:
        seen = seen & (tokens > at - variant.window)
    if variant.chunk is not None:
        seen = seen & (tokens // variant.chunk == at // variant.chunk)
    return seen


def _general(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Rows (T, heads, head_dim) over keys and values (kv heads, tokens, dim), to (T, heads, value dim)."""
    rows, heads, dim = q.shape
    grouped = q.reshape(rows, keys.shape[0], -1, dim).permute(1, 2, 0, 3)  # kv head, head of its group, row
    attended = _weighted(grouped, keys.unsqueeze(1), values.unsqueeze(1), seen, variant)
    return attended.permute(2, 0, 1, 3).reshape(rows, heads, values.shape[-1])


def _weighted(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, variant: AttentionVariant
) -> torch.Tensor:
    """Softmax of the seen scores times values, over the last two axes; the heads are the first or the second two."""
    scale = q.shape[-1] ** -0.5 if variant.scale is None else variant.scale
    scores = torch.matmul(q, keys.transpose(-1, -2)) * scale
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    exact = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.to(exact).masked_fill(~seen, float("-inf"))
    if variant.sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)
    # In decode the heads are axes 1 and 2, in prefill 0 and 1, where the rows follow them.
    heads = q.shape[1:3] if seen.dim() == 4 else q.shape[:2]
    sinks = variant.sinks.to(exact).view(*heads, 1) if seen.dim() == 4 else variant.sinks.to(exact).view(*heads, 1, 1)
    with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(with_sink, dim=-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
