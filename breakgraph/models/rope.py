"""Rotary embedding: the angles are computed once, in float32, for every position that will be served."""

from __future__ import annotations

import torch

from breakgraph.models.config import DecoderConfig

__all__ = ["inverse_frequencies", "rope_table"]


def inverse_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Frequencies of a head's channel pairs, and the factor that cosine and sine are scaled by.

    The scaled kinds come from transformers' own functions, so that a new release cannot disagree with us.

    Returns:
        float32 (head_dim / 2,) on the CPU, and the attention scaling (1.0 except for yarn).
    """
    rope = config.rope
    if rope.kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Any configuration class would do: the functions read the head dimension, the positions and the rope
    # parameters. Llama's is used because it has no layer types that would ask for nested parameters.
    carrier = LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters},
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.kind](carrier, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def rope_table(config: DecoderConfig, *, positions: int) -> torch.Tensor:
    """Cosine and sine of every position.

    Args:
        config: Shape of the decoder.
        positions: Rows of the table, the longest sequence that will be served.

    Returns:
        float32 (positions, head_dim) on the CPU: cosines in the first half, sines in the second. Costs
        `4 * positions * head_dim` bytes (64 MiB for 131,072 positions of 128 channels).
    """
    frequencies, scaling = inverse_frequencies(config)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos() * scaling, angles.sin() * scaling), dim=-1)
