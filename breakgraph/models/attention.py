"""Paged attention: one interface, chosen once, called by every layer.

Keys and values live in blocks. A cache is `(num_blocks, block_size, num_kv_heads, head_dim)`; a token's slot is
`block * block_size + offset`. Block 0 is the null block: padding rows write to it and read it, and no request owns
it. Whoever allocates a cache fills it with zeros: a masked position still takes part in a multiplication by zero,
and zero times a left-over NaN is NaN.

The keys and values of a step are written to the cache by the decoder, in the segment before the attention; the
attention reads everything, this step's tokens included, from the cache.

*Prefill* is a break, or captured. As a break it takes any batch. Captured, its shapes are those of the bucket, rows of padding
included, and its host work is `plan_captured`, done before the replay. *Decode* is captured: its shapes are those of the graph
key, its host work is `plan_decode`.
"""

from __future__ import annotations

import abc
from typing import Any

import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import ConfigError
from breakgraph.models.attention_types import (
    PLAIN,
    AttentionShape,
    AttentionVariant,
    BatchLayout,
    DecodeState,
    Int32Array,
    KVLayer,
    KVShape,
    Placement,
    PrefillState,
)

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
    "Placement",
    "PrefillState",
    "make_attention",
]


class Attention(abc.ABC):
    """Causal attention over a paged cache.

    Args:
        shape: Heads, sizes, dtype and device.
        reason: Why this implementation was chosen, for people.

    Attributes:
        kind: "torch" or "flashinfer".
        plans_decode: Whether `decode` reads the pages that `plan_decode` brought to the device, and neither tables nor lengths.
        best_placement: Of a prefill, as it was measured; where `no_capture` gives a reason it is a break.
    """

    kind: str
    plans_decode: bool
    best_placement: Placement

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

    @eager_on_graph(name="attention", live=("batch",), rows=("q", "out"), writes=("out",))
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

        Raises:
            LiveDataError: `batch` describes another number of rows, or its plan is gone.
        """
        self.attend(q, k_cache, v_cache, out, batch, variant)

    @abc.abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        batch: Any,
        variant: AttentionVariant = PLAIN,
    ) -> None:
        """What `prefill` does, as an ordinary function: for breaks of one's own, and steps without a graph.

        Args:
            q: See `prefill`.
            k_cache: See `prefill`.
            v_cache: See `prefill`.
            out: See `prefill`.
            batch: See `prefill`.
            variant: See `prefill`.
        """

    @abc.abstractmethod
    def no_capture(self) -> str | None:
        """Why a prefill cannot be captured here; None where it can."""

    @abc.abstractmethod
    def prefill_state(self, *, rows: int, requests: int, max_context: int) -> PrefillState:
        """Make what a captured prefill needs; allocate it outside a capture, once per bucket, where `no_capture` is None.

        Args:
            rows: Rows of the graph, padding included.
            requests: Most requests of a step.
            max_context: Longest sequence in tokens, rounded up to whole blocks.
        """

    @abc.abstractmethod
    def plan_captured(self, state: PrefillState, layout: BatchLayout) -> None:
        """Host work of a step, before the capture and before every replay of the graph that uses `state`.

        It overwrites the plan of the step before, in the order of the current stream: launch that step first.

        Args:
            state: From `prefill_state`.
            layout: The step; its rows beyond are padding.

        Raises:
            LiveDataError: The step does not fit into the graph.
        """

    @abc.abstractmethod
    def prefill_captured(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        state: PrefillState,
        variant: AttentionVariant = PLAIN,
    ) -> torch.Tensor:
        """Attention of packed prompts, in a graph: no sync, no shape that depends on data.

        Args:
            q: (state.rows, num_heads, head_dim).
            k_cache: Key cache of the layer, this step's keys included; its null block holds finite numbers.
            v_cache: Value cache of the layer.
            state: From `prefill_state`, planned for the step.
            variant: What the layer does besides plain attention.

        Returns:
            (state.rows, num_heads, value_dim). Rows of padding look at the null block: finite, and of no meaning.
        """

    def decode_contexts(self, *, batch_size: int) -> tuple[int, ...]:
        """Contexts that divide the decodes of a batch, since longer ones take another kernel: each gets a graph of its own.

        Args:
            batch_size: Requests of the graph.
        """
        return ()

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
            fix='Use "auto" or "torch", or change what the message names.',
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
