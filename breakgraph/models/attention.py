"""Paged attention: one interface, chosen once, called by every layer.

Keys and values live in blocks. A cache is `(num_blocks, block_size, num_kv_heads, head_dim)`; a token's slot is
`block * block_size + offset`. Block 0 is the null block: padding rows write to it and read it, and no request owns
it. Whoever allocates a cache fills it with zeros: a masked position still takes part in a multiplication by zero,
and zero times a left-over NaN is NaN.

The keys and values of a step are written to the cache by the decoder, in the segment before the attention; the
attention reads everything, this step's tokens included, from the cache.

*Prefill* is a break: its shapes and its host work change at every step. *Decode* is captured: its shapes are those
of the graph key, its host work is `plan_decode`, done before the replay.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.errors import ConfigError

__all__ = [
    "PLAIN",
    "Attention",
    "AttentionShape",
    "AttentionVariant",
    "BatchLayout",
    "DecodeState",
    "Int32Array",
    "KVLayer",
    "KVShape",
    "make_attention",
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
        return (self.context_lens + self.query_lens).astype(np.int32)


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


class Attention(abc.ABC):
    """Causal attention over a paged cache.

    Args:
        shape: Heads, sizes, dtype and device.
        reason: Why this implementation was chosen, for people.

    Attributes:
        kind: "torch" or "flashinfer".
        plans_decode: Whether `decode` reads the pages that `plan_decode` brought to the device, and neither tables nor lengths.
    """

    kind: str
    plans_decode: bool

    def __init__(self, shape: AttentionShape, *, reason: str) -> None:
        self.shape = shape
        self.reason = reason

    @abc.abstractmethod
    def plan_prefill(self, layout: BatchLayout) -> object:
        """Host work of a prefill step.

        Args:
            layout: Rows and context of each request.

        Returns:
            The live metadata to pass as `batch` to `prefill`. It is valid until the plan after the next one.
        """

    @abc.abstractmethod
    def prefill(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        batch: Any,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """Attention of packed prompts, a break of the graph: live data `batch`, rows of `q` and `out`.

        Args:
            q: (T, num_heads, head_dim), the real rows.
            k_cache: Key cache of the layer, this step's keys included.
            v_cache: Value cache of the layer.
            out: (T, num_heads, head_dim), written in place; rows beyond the real ones become zero.
            batch: What `plan_prefill` returned.
            variant: What the layer does besides plain attention.
        """

    @abc.abstractmethod
    def decode_state(self, *, batch_size: int, max_context: int) -> DecodeState:
        """Make what a captured decode needs; allocate it outside a capture, once per graph key.

        Args:
            batch_size: Rows of the graph, padding included.
            max_context: Longest sequence in tokens, rounded up to whole blocks.
        """

    @abc.abstractmethod
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
        """Attention of one token of each of B sequences; may be captured: no sync, no shape that depends on data.

        Args:
            q: (B, num_heads, head_dim).
            k_cache: Key cache of the layer, this step's keys included.
            v_cache: Value cache of the layer.
            state: From `decode_state`.
            block_tables: int32 (B, state.max_blocks); entries beyond a sequence's blocks point to the null block. None where
                `plans_decode`.
            seq_lens: int32 (B,), tokens of each sequence, this one included; 1 for padding rows. None where `plans_decode`.
            variant: What the layer does besides plain attention.

        Returns:
            (B, num_heads, head_dim).
        """

    @abc.abstractmethod
    def plan_decode(self, state: DecodeState, *, block_tables: Int32Array, seq_lens: Int32Array) -> None:
        """Host work of a decode step, before the capture and before every replay of the graph that uses `state`.

        Args:
            state: From `decode_state`.
            block_tables: int32 (B, W), on the host; W may be less than state.max_blocks where no sequence is longer.
            seq_lens: int32 (B,), on the host.
        """


def make_attention(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kind: str = "auto",
) -> Attention:
    """Choose the attention for a model and a device.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        block_size: Tokens in a block of the cache.
        dtype: Of queries, cache and output.
        device: Where they are.
        kind: "torch", "flashinfer", or "auto": FlashInfer on CUDA where it has a kernel, else torch.

    Returns:
        The attention; `.reason` says why it is this one.

    Raises:
        ConfigError: An unknown kind, or FlashInfer was asked for and cannot serve this shape here.
    """
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, block_size, dtype, torch.device(device))
    if kind not in ("auto", "torch", "flashinfer"):
        raise ConfigError(
            f"Unknown attention kind {kind!r}.",
            why="The attention is chosen once, before anything is captured.",
            fix='Use "auto", "torch" or "flashinfer".',
        )
    # Both imports are late: FlashInfer takes seconds and exists on CUDA machines only, and the interface must be
    # importable without either.
    from breakgraph.models.attention_torch import TorchAttention

    if kind == "torch":
        return TorchAttention(shape, reason="asked for")
    refusal = _no_flashinfer(shape)
    if refusal is None:
        from breakgraph.models.attention_flashinfer import FlashInferAttention

        return FlashInferAttention(shape, reason="asked for" if kind == "flashinfer" else "FlashInfer has a kernel")
    if kind == "flashinfer":
        raise ConfigError(
            f"FlashInfer attention cannot be used: {refusal}.",
            why="It was asked for by name, and another kernel gives other rounding and other speed.",
            fix='Use kind="auto" or kind="torch", or change what the message names.',
        )
    return TorchAttention(shape, reason=refusal)


def _no_flashinfer(shape: AttentionShape) -> str | None:
    """Why FlashInfer cannot serve this shape, or None."""
    if shape.device.type != "cuda":
        return f"FlashInfer needs CUDA, the device is {shape.device.type}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no kernel for {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in (64, 128, 256):
        return f"FlashInfer has no kernel for head dimension {shape.head_dim}"
    from importlib.util import find_spec

    if find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'breakgraph[cuda]')"
    return None
