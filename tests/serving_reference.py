"""What the serving tests compare with: a tiny model, and a loop without cache, batch or graph."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F

from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import LoadedModel, random_model

TIE = 1e-4
"""Rows differ with the batch by up to 1e-5 in float32; a gap of the best two logits below this may fall either way."""


def tiny_model(*, vocab_size: int = 61, max_positions: int = 64, seed: int = 3) -> LoadedModel:
    """Two layers, grouped heads; weights large enough that its answers are not one token over and over."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=max_positions,
    )
    model = random_model(config, device="cpu", dtype=torch.float32, seed=seed)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return model


@attrs.frozen
class Reference:
    """A greedy answer, and how far the best logit was ahead of the next at each token."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    def agrees(self, token_ids: Sequence[int]) -> bool:
        """Equal ids, or a near-tie at the first difference."""
        if len(token_ids) > len(self.token_ids):
            return False
        for ours, theirs, gap in zip(token_ids, self.token_ids, self.gaps, strict=False):
            if ours != theirs:
                return gap < TIE
        return True


def logits_of(model: LoadedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Next-token logits (vocabulary,) of one sequence, computed from nothing, with full attention."""
    decoder, shape = model.decoder, model.config
    count = len(token_ids)
    cache = [
        tuple(torch.zeros(2, count, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        for _ in range(shape.num_layers)
    ]

    def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        repeat = shape.num_heads // shape.num_kv_heads
        k, v = (x[1].repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    places = torch.arange(count)
    with torch.no_grad():
        hidden = decoder.embed(torch.tensor(token_ids))
        # In block 1: rows in block 0 would be padding.
        hidden = decoder(hidden, positions=places, slots=places + count, kv=cache, attend=attend)
        return decoder.logits(hidden[-1:])[0]


def greedy_reference(model: LoadedModel, prompt: Sequence[int], *, max_tokens: int) -> Reference:
    """The greedy continuation of a prompt, one whole forward per token."""
    tokens, gaps = list(prompt), []
    for _ in range(max_tokens):
        best = logits_of(model, tokens).topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Reference(tuple(tokens[len(prompt) :]), tuple(gaps))
