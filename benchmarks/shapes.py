"""The three shapes that measurements are made on."""

from __future__ import annotations

from breakgraph.models.config import DecoderConfig, RopeConfig

__all__ = ["SHAPES"]

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

SHAPES: dict[str, DecoderConfig] = {
    # SmolLM2-135M
    "135M": DecoderConfig(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8192,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=100_000.0),
    ),
    # Llama-3.2-1B
    "1B": DecoderConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_positions=131_072,
        tie_word_embeddings=True,
        rope=RopeConfig("llama3", 500_000.0, {**_LLAMA3_ROPE, "factor": 32.0}),
    ),
    # Llama-3.1-8B
    "8B": DecoderConfig(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131_072,
        rope=RopeConfig("llama3", 500_000.0, {**_LLAMA3_ROPE, "factor": 8.0}),
    ),
}
