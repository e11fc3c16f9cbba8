"""What attention is described with: shapes, variants, the layout of a step, and what graphs have baked in."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "PLAIN",
    "AttentionShape",
    "AttentionVariant",
    "BatchLayout",
    "DecodeState",
    "Int32Array",
    "KVLayer",
    "KVShape",
    "Placement",
    "PrefillState",
]

Int32Array = npt.NDArray[np.int32]

KVLayer = tuple[torch.Tensor, torch.Tensor]
"""Key cache and value cache of one layer, each (num_blocks, block_size, num_kv_heads, head_dim)."""


@attrs.frozen
class AttentionShape:
    """What a kernel is chosen by.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        block_size: Tokens in a block of the cache.
        dtype: Of queries, cache and output.
        device: Where they are.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group_size(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_heads // self.num_kv_heads

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)


@attrs.frozen
class KVShape:
    """What one attention call keeps of a token.

    Attributes:
        heads: Key and value heads.
        key_dim: Width of a key.
        value_dim: Width of a value.
    """

    heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of one token, key and value together."""
        return self.heads * (self.key_dim + self.value_dim)


@attrs.frozen(eq=False)
class AttentionVariant:
    """What one layer's attention does besides plain causal attention.

    Attributes:
        scale: Multiplies the scores; None: one over the root of the head dimension.
        window: Tokens that a token looks back on, itself included; None: all.
        chunk: A token sees only those of its own chunk of this many positions; None: all.
        softcap: Scores are squashed by a tangent to at most this; None: they are not.
        sinks: (num_heads,), one more score in the denominator of each head's softmax; None: there is none.
    """

    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Plain causal attention with the usual scale."""
        return not any(value is not None for value in (self.scale, self.window, self.chunk, self.softcap, self.sinks))


PLAIN = AttentionVariant()


@attrs.frozen(eq=False)
class BatchLayout:
    """One prefill step, on the host: which rows belong to whom and where their context lies.

    Rows are packed: request 0 owns rows 0 .. query_lens[0]-1, request 1 the next, and so on.

    Attributes:
        query_lens: int32 [R], rows of each request in this step, at least 1 each.
        context_lens: int32 [R], tokens of each request that were cached before this step.
        block_tables: R int32 arrays, the blocks that cover context and query of each request, in order; more
            blocks than needed are allowed and ignored.
    """

    query_lens: Int32Array
    context_lens: Int32Array
    block_tables: Sequence[Int32Array]

    @property
    def rows(self) -> int:
        """Real rows of the step."""
        return int(self.query_lens.sum())

    @property
    def seq_lens(self) -> Int32Array:
        """int32 [R]: tokens of each request after this step."""
        return np.add(self.context_lens, self.query_lens, dtype=np.int32)


@attrs.define(eq=False)
class DecodeState:
    """What a captured decode of one graph key has baked in; subclasses add their buffers.

    Attributes:
        batch_size: Rows of the graph, padding included.
        max_context: Longest sequence, in tokens, this token included.
        max_blocks: Columns of the block tables that the graph takes.
    """

    batch_size: int
    max_context: int
    max_blocks: int


class Placement(enum.Enum):
    """Where the attention of a prefill stands.

    Attributes:
        AUTO: Captured where the attention can be and was measured to be faster so, else a break.
        BREAK: Each layer's attention is a break: any batch of any shape, between two segments.
        CAPTURED: It lies in the graph and reads what was planned for the step, outside.
    """

    AUTO = "auto"
    BREAK = "break"
    CAPTURED = "captured"


class PrefillState:
    """What a captured prefill of one bucket has baked in; subclasses add their buffers.

    Args:
        rows: Rows of the graph, padding included.
        requests: Most requests of a step.
        max_context: Longest sequence in tokens.

    Attributes:
        rows: As given.
        requests: As given.
        max_context: As given.
        planned_for: The step whose plan it holds, for whoever plans; None before the first.
    """

    def __init__(self, rows: int, requests: int, max_context: int) -> None:
        self.rows, self.requests, self.max_context = rows, requests, max_context
        self.planned_for: object = None
