"""Small random models of any causal language model type of transformers, for the table of what the adapter serves."""

from __future__ import annotations

import warnings
from typing import Any

import torch

__all__ = ["OPTIONS", "TooLargeError", "kinds", "small_model"]

MOST_PARAMETERS = 30_000_000
# A window and a chunk of 8 tokens, so that short sequences go past them; two key-value heads for four query heads.
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "d_model": 32,
    "num_layers": 4,
    "num_heads": 4,
    "ffn_dim": 48,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "rotary_dim": 8,
    "word_embed_proj_dim": 32,
    "ffn_hidden_size": 48,
    "n_inner": 48,
}

# Of an engine for them: steps that are padded, chunked and batched.
OPTIONS: dict[str, Any] = {
    "max_batch_size": 2,
    "max_num_tokens": 32,
    "max_seq_len": 64,
    "block_size": 4,
    "prefill_sizes": [16, 32],
    "contexts": [32],
    "sampling": "greedy",
}


class TooLargeError(Exception):
    """The sizes above do not make a model of this type small."""


def kinds() -> list[str]:
    """Every model type that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_model(
    kind: str, *, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """A random model of a type.

    Args:
        kind: The `model_type`.
        seed: Of its weights, which are large enough that attention matters for the logits.
        device: Where it is made.
        dtype: Of its weights.
        **sizes: In place of `SIZES`.

    Raises:
        TooLargeError: It would have more than 30 million parameters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of configurations that are meant for other sizes
        config_class = type(AutoConfig.for_model(kind))
        known = config_class().to_dict()
        values = {name: value for name, value in {**SIZES, **sizes}.items() if name in known}
        if "kv_lora_rank" in known:  # latent attention has as many key heads as query heads, and a width of its own
            values.pop("head_dim", None)
            values["num_key_value_heads"] = values["num_attention_heads"]
        config = config_class(**values)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if count > MOST_PARAMETERS:
            raise TooLargeError(f"{count:,} parameters")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                spread = 1.7 / parameter.shape[-1] ** 0.5  # rows of about unit size, whatever the width
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model
