"""A decoder for Llama, SmolLM2, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE, over packed rows and a paged cache.

One forward serves prefill and decode: rows are tokens, whoever they belong to. `positions` says where in its
sequence each token stands, `slots` where its key and value go, and `attend` how the rows see one another. The
differences between the families are three flags: biases on q, k and v, a bias on the output, norms on q and k; and
in some layers a mixture of experts stands in place of the MLP, see `experts`.

Everything here is device work of fixed shape, so all of it may lie in a graph; only `attend` decides for itself
whether it is a break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from breakgraph.models.attention import PLAIN, AttentionVariant, KVLayer, KVShape
from breakgraph.models.config import DecoderConfig
from breakgraph.models.decoder import Attend, Decoder
from breakgraph.models.experts import ExpertsChoice, SparseMLP, choose_experts
from breakgraph.models.linear import GatedMLP, Linear, parameter
from breakgraph.models.ops import Ops, make_ops
from breakgraph.models.rope import rope_table

__all__ = ["Attend", "LlamaDecoder"]


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm.

    Args:
        config: Shape of the decoder.
        experts: How experts are computed; None makes an ordinary MLP.
        ops: Elementwise kernels.
        device: Where the parameters are made.
        dtype: What they are held in.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        experts: ExpertsChoice | None,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        hidden = config.hidden_size
        self.input_norm = parameter(hidden, device=device, dtype=dtype)
        self.qkv_proj = linear(hidden, config.q_size + 2 * config.kv_size, config.qkv_bias)
        self.q_norm = parameter(config.head_dim, device=device, dtype=dtype) if config.qk_norm else None
        self.k_norm = parameter(config.head_dim, device=device, dtype=dtype) if config.qk_norm else None
        self.o_proj = linear(config.q_size, hidden, config.o_bias)
        self.post_attention_norm = parameter(hidden, device=device, dtype=dtype)
        self.mlp: GatedMLP | SparseMLP
        if experts is not None and config.experts is not None:
            self.mlp = SparseMLP(
                config.experts, hidden_size=hidden, choice=experts, ops=ops, device=device, dtype=dtype
            )
        else:
            self.mlp = GatedMLP(hidden, config.intermediate_size, ops=ops, device=device, dtype=dtype)

    def attention_inputs(
        self, normed: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of (T, H) rows, turned by rope: (T, heads, head_dim) each."""
        config = self.config
        qkv = self.qkv_proj(normed).split((config.q_size, config.kv_size, config.kv_size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.ops.rms_norm(q, self.q_norm, config.rms_norm_eps)
            k = self.ops.rms_norm(k, self.k_norm, config.rms_norm_eps)
        q, k = self.ops.rope(q, k, positions, table)
        return q, k, v


class LlamaDecoder(Decoder):
    """Embedding, layers, final norm and output matrix. Parameters are uninitialised until they are loaded.

    Args:
        config: Shape of the decoder.
        device: Where the parameters are made.
        dtype: What they are held in; None takes the configuration's.
        max_positions: Rows of the rope table; None takes the configuration's.
        ops: Elementwise kernels; None chooses them for device and dtype.
        experts: How a mixture of experts is computed, see `choose_experts`.

    Attributes:
        experts: What was chosen, and why; None in a decoder without experts.
    """

    rope: torch.Tensor

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        max_positions: int | None = None,
        ops: Ops | None = None,
        experts: str = "auto",
    ) -> None:
        super().__init__()
        device, dtype = torch.device(device), dtype or config.dtype
        self.config = config
        self.ops = ops or make_ops(device, dtype)
        self.embed_tokens = parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.experts = (
            choose_experts(config.experts, hidden_size=config.hidden_size, device=device, dtype=dtype, kind=experts)
            if config.experts is not None
            else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                experts=self.experts if config.is_sparse(index) else None,
                ops=self.ops,
                device=device,
                dtype=dtype,
            )
            for index in range(config.num_layers)
        )
        self.norm = parameter(config.hidden_size, device=device, dtype=dtype)
        self.lm_head = (
            self.embed_tokens
            if config.tie_word_embeddings
            else parameter(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        )
        table = rope_table(config, positions=max_positions or config.max_positions)
        self.register_buffer("rope", table.to(device), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.device

    @property
    def hidden_size(self) -> int:
        """Width of the rows."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def heads(self) -> int:
        """Query heads of a layer."""
        return self.config.num_heads

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each layer keeps of a token."""
        shape = KVShape(self.config.num_kv_heads, self.config.head_dim, self.config.head_dim)
        return (shape,) * self.config.num_layers

    @property
    def variants(self) -> tuple[AttentionVariant, ...]:
        """Every layer's attention is plain."""
        return (PLAIN,) * self.config.num_layers

    @property
    def dtype(self) -> torch.dtype:
        """What the weights, the residual stream and the cache are held in."""
        return self.embed_tokens.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (T,), int32 or int64, to rows (T, H)."""
        return F.embedding(token_ids, self.embed_tokens)

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[KVLayer],
        attend: Attend,
    ) -> torch.Tensor:
        """Run all layers over packed rows.

        Args:
            hidden: (T, H), from `embed`. It may be overwritten.
            positions: int64 (T,), each below the rows of the rope table.
            slots: int64 (T,), where each row's key and value go: `block * block_size + offset`. Rows whose slot lies
                in block 0 are padding: they share its slots, and experts do not compute them.
            kv: One pair of caches for each layer; written at `slots`.
            attend: Attention of one layer over the cache just written.

        Returns:
            (T, H), after the final norm.
        """
        eps = self.config.rms_norm_eps
        layers = cast("Sequence[DecoderLayer]", self.layers)
        # A segment of a graph cannot know how many rows are real, but it sees where they are stored.
        padding = slots < kv[0][0].shape[1] if self.experts is not None else None
        places = self.ops.places(slots, blocks=kv[0][0].shape[0])
        residual = hidden
        normed = self.ops.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            q, k, v = layer.attention_inputs(normed, positions, self.rope)
            self.ops.append(k, v, kv[index], places)
            attended = layer.o_proj(attend(index, q, *kv[index]).flatten(1))
            normed, residual = self.ops.add_rms_norm(attended, residual, layer.post_attention_norm, eps)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else self.norm
            normed, residual = self.ops.add_rms_norm(layer.mlp(normed, padding), residual, following, eps)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: rows (R, H) after `forward` to float32 (R, vocab_size)."""
        return F.linear(hidden, self.lm_head).float()
