"""What the runners and the serving loop ask of a decoder, whoever wrote it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from breakgraph.models.attention import AttentionVariant, KVLayer, KVShape
from breakgraph.models.experts import ExpertsChoice

__all__ = ["Attend", "Decoder"]

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(call, q, k_cache, v_cache) -> out`: q is (T, heads, key_dim), out (T, heads, value_dim)."""


class Decoder(nn.Module, abc.ABC):
    """A decoder of packed rows over a paged cache.

    An attention *call* is one use of the attention in a forward, usually one a layer: each has a pair of caches and a variant.

    Attributes:
        experts: How a mixture of experts is computed; None where there is none, or nobody chose.
        breaks: Breaks of a forward besides attention: name -> calls.
        eager_prefill: Why prefill steps have no graphs; None where they have.
        eager_decode: Why decode steps have no graphs; None where they have.
    """

    experts: ExpertsChoice | None = None
    breaks: Mapping[str, int] = MappingProxyType({})
    eager_prefill: str | None = None
    eager_decode: str | None = None

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """What rows and cache are held in."""

    @property
    @abc.abstractmethod
    def hidden_size(self) -> int:
        """Width of the rows."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    @abc.abstractmethod
    def heads(self) -> int:
        """Query heads of the first attention call."""

    @property
    @abc.abstractmethod
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """What each attention call keeps of a token."""

    @property
    @abc.abstractmethod
    def variants(self) -> tuple[AttentionVariant, ...]:
        """What each attention call does besides plain attention."""

    @abc.abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (T,), int32 or int64, to rows (T, hidden_size)."""

    @abc.abstractmethod
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
            hidden: (T, hidden_size), from `embed`. It may be overwritten.
            positions: int64 (T,).
            slots: int64 (T,), where each row's key and value go: `block * block_size + offset`.
            kv: One pair of caches for each attention call; written at `slots`.
            attend: Attention of one call over the cache just written.

        Returns:
            (T, hidden_size).
        """

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows (R, hidden_size) after `forward` to float32 (R, vocab_size)."""
