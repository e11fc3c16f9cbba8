"""Does a model of transformers give its own numbers through our attention? Found out by running it, before it may serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from breakgraph.errors import BreakgraphError, ConfigError
from breakgraph.models.attention import AttentionShape, AttentionVariant, BatchLayout, KVLayer
from breakgraph.models.attention_torch import TorchAttention, TorchBatch
from breakgraph.models.huggingface import (
    ATTENTION,
    AdaptedDecoder,
    Site,
    body_of,
    dispatched,
    register,
    unknown_keywords,
)
from breakgraph.models.transformers_files import one_line
from breakgraph.replay_context import eager_step

__all__ = ["Probed", "adapt", "position_limit"]

_BLOCK = 4
_LONGEST = 96  # tokens of a probe: windows beyond are taken at their word, and sequences end at them
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_COARSE = 5e-2  # of half precision


@attrs.frozen(eq=False)
class Probed:
    """A model that passed.

    Attributes:
        decoder: The adapter.
        max_positions: Longest sequence that was shown to be right, or that the configuration promises.
        error: Largest difference of a logit from the model's own, relative to the largest logit; in half precision that of
            three quarters of the rows.
    """

    decoder: AdaptedDecoder
    max_positions: int
    error: float


def adapt(model: Any) -> Probed:
    """Put a causal model of transformers behind our attention, and compare it with itself.

    Args:
        model: A `PreTrainedModel` with a language model head, on its device, in eval mode. Its attention is ours afterwards.

    Returns:
        The adapter.

    Raises:
        ConfigError: It would give other numbers, or cannot be seen to give the same; the message has the reason. Its
            attention is what it was before.
    """
    before = model.config._attn_implementation or "eager"
    reference = "eager" if before == ATTENTION else before  # adapted before: its own is any but ours
    register()
    try:
        return _Probe(model, reference=reference).run()
    except BaseException as error:
        model.set_attn_implementation(before)
        if isinstance(error, BreakgraphError | torch.OutOfMemoryError) or not isinstance(error, Exception):
            raise  # says nothing of the model
        raise _refusal(model, f"its forward raised {type(error).__name__}: {one_line(error)}") from error


def position_limit(config: Any) -> int:
    """Longest sequence that a configuration promises, in tokens.

    Args:
        config: Of transformers, the part for text.
    """
    return int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def _refusal(model: Any, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be served through its own code: {reason}.",
        why="It would run without an error and write wrong text.",
        fix="Use a model that `breakgraph models` lists as served, or transformers itself.",
    )


class _Probe:
    def __init__(self, model: Any, *, reference: str) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.reference = reference
        self.device = next(model.parameters()).device

    def run(self) -> Probed:
        """All tests, cheap ones first."""
        if self.model.training:
            raise _refusal(self.model, "it is in training mode")
        if getattr(self.config, "is_encoder_decoder", False):
            raise _refusal(self.model, "it has an encoder")
        with torch.no_grad():
            self.model.set_attn_implementation(ATTENTION)
            sites = self._sites()
            decoder = AdaptedDecoder(self.model, sites=sites)
            longest = self._longest(sites)
            first, second = self._tokens(longest), self._tokens(7)
            ours = self._ours(decoder, [first, second])
            self.model.set_attn_implementation(self.reference)
            expected = [self.model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in (first, second)]
            self.model.set_attn_implementation(ATTENTION)
        allowed = _TOLERANCE.get(decoder.dtype)
        # In half precision a rounding may send a row to other experts: a quarter of the rows may be off. What a wrong window or a
        # leaking state changes is more than that.
        share = 1.0 if allowed else 0.75
        allowed = allowed or _COARSE
        error = _difference(torch.cat(ours), torch.cat(expected), share=share)
        if not error <= allowed:
            raise _refusal(
                self.model,
                f"packed, chunked and decoded, its logits differ from its own {self.reference} attention by {error:.2g} of the "
                f"largest; {allowed:.0e} is allowed",
            )
        return Probed(decoder, self._positions(sites, longest), error)

    def _tokens(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(min(3, self.config.vocab_size - 1), self.config.vocab_size, (count,), generator=generator)
        return ids.to(self.device)

    def _sites(self) -> list[Site]:
        """Every attention call of a forward, with what its keywords and the configuration say of it."""
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
            variant = self._variant(module, q, words)
            sites.append(Site(module, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], variant))
            return q.new_zeros(q.shape[2], q.shape[1], v.shape[-1])

        positions = torch.arange(5, device=self.device)
        rows = self.model.get_input_embeddings()(self._tokens(5))
        with dispatched(note):
            body_of(self.model)(inputs_embeds=rows[None], position_ids=positions[None], use_cache=False)
        layers = int(self.config.num_hidden_layers)
        if len(sites) < layers:
            problems.append(
                f"{len(sites)} attention calls for {layers} layers: some go another way, or keep another state"
            )
        if problems:
            raise _refusal(self.model, "; ".join(dict.fromkeys(problems)))
        return sites

    def _variant(self, module: nn.Module, q: torch.Tensor, words: dict[str, Any]) -> AttentionVariant:
        scale = words.get("scaling")
        window = words.get("sliding_window")
        kind = self._layer_kind(module)
        if window is None and kind == "sliding_attention":
            window = getattr(self.config, "sliding_window", None)
        chunk = getattr(self.config, "attention_chunk_size", None) if kind == "chunked_attention" else None
        if window is None and kind is None and getattr(self.config, "use_sliding_window", True):
            window = getattr(self.config, "sliding_window", None)  # a model that tells its masks only
        if scale is not None and abs(scale - q.shape[-1] ** -0.5) < 1e-9:
            scale = None
        return AttentionVariant(
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=words.get("softcap"),
            sinks=words.get("s_aux"),
        )

    def _layer_kind(self, module: nn.Module) -> str | None:
        kinds, index = getattr(self.config, "layer_types", None), getattr(module, "layer_idx", None)
        return kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None

    def _bounds(self, sites: Sequence[Site]) -> list[int]:
        return [b for s in sites for b in (s.variant.window, s.variant.chunk) if b is not None]

    def _longest(self, sites: Sequence[Site]) -> int:
        """Tokens of the probe: past every window and chunk that fits, so that a wrong one shows."""
        small = [bound for bound in self._bounds(sites) if 2 * bound + 3 <= _LONGEST]
        return max([2 * bound + 3 for bound in small], default=0) or 19

    def _positions(self, sites: Sequence[Site], longest: int) -> int:
        untested = [bound for bound in (*self._bounds(sites), *self._unread()) if bound >= longest]
        return min([position_limit(self.config), *untested])

    def _unread(self) -> list[int]:
        """Lengths in the configuration at which a model may begin to do something else that nothing here has read."""
        values = self.config.to_dict()
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
            one.get("original_max_position_embeddings") or original
            for one in kinds
            if one.get("rope_type") == "longrope"
        ]
        return windows + [int(length) for length in long if length]

    def _ours(self, decoder: AdaptedDecoder, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Logits of all tokens: two prompts in one batch, each in two chunks, and the last token of each decoded."""
        site = decoder.sites[0]
        shape = AttentionShape(site.heads, site.kv_heads, site.head_dim, _BLOCK, decoder.dtype, self.device)
        attention = TorchAttention(shape, reason="the probe")
        blocks = [-(-len(ids) // _BLOCK) for ids in sequences]
        starts = np.cumsum([1, *blocks])
        tables = [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, blocks, strict=False)]
        caches: list[KVLayer] = [
            tuple(
                torch.zeros(int(starts[-1]), _BLOCK, s.kv_heads, dim, dtype=decoder.dtype, device=self.device)
                for dim in (s.head_dim, s.value_dim)
            )  # type: ignore[misc]
            for s in decoder.sites
        ]
        logits: list[list[torch.Tensor]] = [[] for _ in sequences]
        cuts = [(0, len(ids) // 2, len(ids) - 1, len(ids)) for ids in sequences]
        for part in range(3):
            spans = [(cut[part], cut[part + 1]) for cut in cuts]
            rows = torch.cat([ids[low:high] for ids, (low, high) in zip(sequences, spans, strict=True)])
            places = [np.arange(low, high) for low, high in spans]
            slots = np.concatenate([t[p // _BLOCK] * _BLOCK + p % _BLOCK for t, p in zip(tables, places, strict=True)])
            layout = BatchLayout(
                np.array([high - low for low, high in spans], dtype=np.int32),
                np.array([low for low, _ in spans], dtype=np.int32),
                tables,
            )
            batch = attention.plan_prefill(layout)
            attend = self._attend(attention, decoder, layout, batch=batch, decodes=part == 2)
            with eager_step({"batch": batch}, valid_rows=len(rows), padded_rows=len(rows)):
                hidden = decoder(
                    decoder.embed(rows),
                    positions=torch.from_numpy(np.concatenate(places)).to(self.device),
                    slots=torch.from_numpy(slots.astype(np.int64)).to(self.device),
                    kv=caches,
                    attend=attend,
                )
            split = decoder.logits(hidden).split([high - low for low, high in spans])
            for found, new in zip(logits, split, strict=True):
                found.append(new)
        return [torch.cat(parts) for parts in logits]

    def _attend(
        self,
        attention: TorchAttention,
        decoder: AdaptedDecoder,
        layout: BatchLayout,
        *,
        batch: TorchBatch,
        decodes: bool,
    ) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        if decodes:
            widest = max(len(table) for table in layout.block_tables)
            state = attention.decode_state(batch_size=len(layout.block_tables), max_context=widest * _BLOCK)
            padded = np.zeros((len(layout.block_tables), widest), dtype=np.int32)
            for row, table in enumerate(layout.block_tables):
                padded[row, : len(table)] = table
            tables, lens = (torch.from_numpy(a).to(self.device) for a in (padded, layout.seq_lens))

            def decode(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                return attention.decode(q, k, v, state, tables, lens, decoder.sites[index].variant)

            return decode

        def prefill(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_empty(*q.shape[:2], v.shape[-1])
            attention.prefill(q, k, v, out, batch, decoder.sites[index].variant)
            return out

        return prefill


def _difference(ours: torch.Tensor, expected: torch.Tensor, *, share: float) -> float:
    """Largest difference of a logit, relative to the largest logit, in the best `share` of the rows."""
    if ours.shape != expected.shape or not bool(torch.isfinite(ours).all()):
        return float("inf")
    rows = (ours - expected).abs().amax(-1).sort().values
    last = max(math.ceil(share * len(rows)) - 1, 0)
    return float(rows[last] / expected.abs().max().clamp_min(1e-9))
