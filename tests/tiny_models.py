"""Tiny models of transformers, and a driver that runs our decoder over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from breakgraph.models.attention import Attention, BatchLayout, KVLayer, make_attention
from breakgraph.models.weights import LoadedModel
from breakgraph.replay_context import eager_step

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPARSE_FAMILIES = ("mixtral", "qwen3_moe")

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


def tiny_config(family: str, **overrides: Any) -> Any:
    """A configuration of transformers; the heads of Qwen3 and Qwen3-MoE are wider than their hidden size says."""
    import transformers

    values = {**TINY, **overrides}
    if family == "mistral":
        values.setdefault("sliding_window", None)
    if family in ("qwen3", "qwen3_moe"):
        values.setdefault("head_dim", 16)
    if family == "mixtral":
        values = {"num_local_experts": 4, "num_experts_per_tok": 2, **values}
    if family == "qwen3_moe":
        values = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, **values}
    name = "".join(part.capitalize() for part in family.split("_"))
    return getattr(transformers, f"{name}Config")(**values)


def tiny_hf(family: str, folder: Path, *, shard_size: str = "40KB", seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of transformers, saved to `folder` in several shards."""
    import transformers

    config = tiny_config(family, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms of exactly one and biases of exactly zero would hide that they are loaded at all.
            if name.endswith(("norm.weight", "bias")) or "layernorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(4.0)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def save_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of 257 tokens, the bytes and <end>, with a chat template and without EOS, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    template = "<end>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)


def hf_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits (len(ids), vocab) of the whole sequence at once."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


class PagedModel:
    """Our decoder with a paged cache: block tables are the caller's, slots are computed here."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int = 64, block_size: int = 4, attention: Attention | None = None
    ) -> None:
        config = model.config
        self.decoder = model.decoder
        self.block_size = block_size
        device, dtype = self.decoder.device, self.decoder.dtype
        self.attention = attention or make_attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv: list[KVLayer] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(config.num_layers)
        ]

    def slots(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        """Slots of positions start .. stop-1."""
        size = self.block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]

    @torch.no_grad()
    def prefill(self, chunks: Sequence[tuple[Sequence[int], int, Sequence[int]]], *, padding: int = 0) -> torch.Tensor:
        """Logits of packed rows: (ids, tokens cached before, block table) of each request, and padding rows."""
        device = self.decoder.device
        ids = [token for chunk, _, _ in chunks for token in chunk]
        positions = [p for chunk, context, _ in chunks for p in range(context, context + len(chunk))]
        slots = [s for chunk, context, table in chunks for s in self.slots(table, context, context + len(chunk))]
        rows = len(ids)
        layout = BatchLayout(
            np.array([len(chunk) for chunk, _, _ in chunks], dtype=np.int32),
            np.array([context for _, context, _ in chunks], dtype=np.int32),
            [np.array(table, dtype=np.int32) for _, _, table in chunks],
        )
        batch = self.attention.plan_prefill(layout)

        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            out = torch.full_like(q, float("nan"))
            self.attention.prefill(q, k_cache, v_cache, out, batch)
            return out

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values + [0] * padding, device=device)

        with eager_step(live={"batch": batch}, valid_rows=rows, padded_rows=rows + padding):
            hidden = self.decoder(
                self.decoder.embed(tensor(ids)),
                positions=tensor(positions),
                slots=tensor(slots),
                kv=self.kv,
                attend=attend,
            )
        return self.decoder.logits(hidden[:rows])

    @torch.no_grad()
    def decode(
        self, ids: Sequence[int], contexts: Sequence[int], tables: Sequence[Sequence[int]], *, max_context: int = 128
    ) -> torch.Tensor:
        """Logits of one token of each sequence; contexts are the tokens cached before it."""
        device = self.decoder.device
        state = self.attention.decode_state(batch_size=len(ids), max_context=max_context)
        block_tables = np.zeros((len(ids), state.max_blocks), dtype=np.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
        seq_lens = np.array(contexts, dtype=np.int32) + 1
        self.attention.plan_decode(state, block_tables=block_tables, seq_lens=seq_lens)
        device_tables, device_lens = torch.from_numpy(block_tables).to(device), torch.from_numpy(seq_lens).to(device)

        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return self.attention.decode(q, k_cache, v_cache, state, device_tables, device_lens)

        slots = [self.slots(table, context, context + 1)[0] for table, context in zip(tables, contexts, strict=True)]
        hidden = self.decoder(
            self.decoder.embed(torch.tensor(list(ids), device=device)),
            positions=torch.tensor(list(contexts), device=device),
            slots=torch.tensor(slots, device=device),
            kv=self.kv,
            attend=attend,
        )
        return self.decoder.logits(hidden)
