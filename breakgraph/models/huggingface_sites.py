"""What a model of transformers says of its attention: its calls, what each does, and how many positions there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from breakgraph.errors import ConfigError
from breakgraph.models.attention import AttentionVariant
from breakgraph.models.huggingface import Site, body_of, dispatched, unknown_keywords
from breakgraph.models.huggingface_fit import rope_lengths

__all__ = ["ENDLESS", "bounds", "find_sites", "limit_of", "position_limit", "refusal", "score_operations", "unread"]

_LIMITS = ("max_position_embeddings", "max_target_positions")
ENDLESS = 1 << 20
"""Positions that are served where nothing says how many there are."""
_SCORE = 1024  # operations that a score costs besides its products: it is read and written by some ten kernels


def refusal(model: Any, reason: str, *, fix: str | None = None) -> ConfigError:
    """The error of a model that cannot be served.

    Args:
        model: The model.
        reason: Why.
        fix: What to do; None: use another model.
    """
    return ConfigError(
        f"{type(model).__name__} cannot be served through its own code: {reason}.",
        why="It would run without an error and write wrong text.",
        fix=fix or "Use a model that `breakgraph models` lists with a decoder or the adapter, or transformers itself.",
    )


def position_limit(config: Any) -> int:
    """Longest sequence that a configuration promises, in tokens; `ENDLESS` where it says nothing.

    Args:
        config: Of transformers, the part for text.
    """
    said = _said(config)
    return ENDLESS if said is None else said


def _said(config: Any) -> int | None:
    said = [value for name in _LIMITS if type(value := getattr(config, name, None)) is int and value > 0]
    return min(said, default=None)


def limit_of(model: Any) -> int | None:
    """Positions that a model has; None where nothing says how many.

    Args:
        model: The model.
    """
    tables = [
        module.num_embeddings
        for path, module in body_of(model).named_modules()  # a part for images has a table of its own
        if isinstance(module, nn.Embedding) and "pos" in path.rpartition(".")[2]
    ]
    said = _said(model.config.get_text_config())
    return min(tables if said is None else [said, *tables], default=None)


def find_sites(model: Any, ids: torch.Tensor) -> list[Site]:
    """Every attention call of a forward, with what its keywords and the configuration say of it.

    Args:
        model: The model, with our attention chosen.
        ids: Some tokens.

    Raises:
        ConfigError: A call looks at something else than the rows before its own, or layers go another way.
    """
    config = model.config.get_text_config()
    sites: list[Site] = []
    problems: list[str] = []

    def note(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, words: Any) -> torch.Tensor:
        if words["mask"] is not None:
            problems.append(f"{type(module).__name__} was given a mask")
        if unknown := unknown_keywords(words):
            problems.append(f"{type(module).__name__} was given {unknown}, which nothing here reads")
        if k.shape[-2] != q.shape[-2]:
            problems.append(f"{type(module).__name__} attends to something else than its own rows")
        if words.get("is_causal") is False or not getattr(module, "is_causal", True):
            problems.append(f"{type(module).__name__} is not causal")
        variant = _variant(config, module, q, words)
        sites.append(Site(module, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], variant))
        return q.new_zeros(q.shape[2], q.shape[1], v.shape[-1])

    positions = torch.arange(len(ids), device=ids.device)
    rows = model.get_input_embeddings()(ids)
    with dispatched(note):
        body_of(model)(inputs_embeds=rows[None], position_ids=positions[None], use_cache=False)
    layers = int(config.num_hidden_layers)
    if len(sites) < layers:
        problems.append(f"{len(sites)} attention calls for {layers} layers: some go another way, or keep another state")
    if problems:
        raise refusal(model, "; ".join(dict.fromkeys(problems)))
    return sites


def _variant(config: Any, module: nn.Module, q: torch.Tensor, words: dict[str, Any]) -> AttentionVariant:
    scale = words.get("scaling")
    window = words.get("sliding_window")
    kind = _layer_kind(config, module)
    if window is None and kind == "sliding_attention":
        window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None
    if window is None and kind is None and getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)  # a model that tells its masks only
    if scale is not None and abs(scale - q.shape[-1] ** -0.5) < 1e-9:
        scale = None
    return AttentionVariant(
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=words.get("softcap"),
        sinks=words.get("s_aux"),
    )


def _layer_kind(config: Any, module: nn.Module) -> str | None:
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None


def bounds(sites: Sequence[Site]) -> list[int]:
    """Windows and chunks of attention calls.

    Args:
        sites: The calls.
    """
    return [bound for site in sites for bound in (site.variant.window, site.variant.chunk) if bound is not None]


def score_operations(sites: Sequence[Site]) -> int:
    """Operations of the attention of a forward for each pair of tokens.

    Args:
        sites: Its calls.
    """
    return sum(site.heads * (2 * (site.head_dim + site.value_dim) + _SCORE) for site in sites)


def unread(model: Any) -> list[int]:
    """Lengths in the configuration at which a model may begin to do something else that nothing here has read.

    Args:
        model: The model.
    """
    values = model.config.get_text_config().to_dict()
    windows = [
        value
        for name, value in values.items()
        if ("window" in name or "chunk" in name)
        and name not in ("sliding_window", "attention_chunk_size", "max_window_layers", "chunk_size_feed_forward")
        and type(value) is int
    ]
    # Past the original length longrope takes other frequencies, for a whole batch if one sequence in it is that long.
    rope = values.get("rope_parameters") or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    original = values.get("original_max_position_embeddings")
    long = [
        one.get("original_max_position_embeddings") or original for one in kinds if one.get("rope_type") == "longrope"
    ]
    return windows + rope_lengths(model) + [int(length) for length in long if length]
