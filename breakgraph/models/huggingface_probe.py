"""Does a model of transformers give its own numbers through our attention? Found out by running it, before it may serve."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph.errors import BreakgraphError, ConfigError
from breakgraph.models.attention import AttentionVariant
from breakgraph.models.huggingface import (
    ATTENTION,
    AdaptedDecoder,
    Site,
    body_of,
    dispatched,
    register,
    unknown_keywords,
)
from breakgraph.models.huggingface_breaks import Fit
from breakgraph.models.huggingface_fit import experts_of, find_fit, held_still, moved, numbers_rows, rope_lengths
from breakgraph.models.huggingface_packed import Packed
from breakgraph.models.transformers_files import one_line

__all__ = ["Probed", "adapt", "position_limit"]

_LOG = logging.getLogger(__name__)
_LIMITS = ("max_position_embeddings", "max_target_positions")
_UNLIMITED = 1 << 20  # positions, where nothing says how many there are
_LONGEST = 96  # tokens that a sequence of the probe may always have
_EXACT = (torch.float32, torch.float64)
_TOLERANCE = 1e-5
_MOST = 1e-4  # however far the model's own attentions are from each other
_FAR = 1e-3  # of a sequence at the last positions, whose large angles are rounded
_COARSE = 5e-2  # of half precision
# In a long sequence a rounding that sends rows to other experts carries on: gpt_oss in bfloat16 reaches 0.2, and 0.03 in the
# short ones. Logits of another row are 0.45 and more away.
_CARRIED = 10
_CARRIED_MOST = 0.3
_WORK = {"cpu": 5e10, "cuda": 1e14}  # floating point operations for which the long sequence is worth about a second
_LOGITS = {"cpu": 1 << 27, "cuda": 6 << 27}  # most logits at a time
_SCORES = {"cpu": 1 << 25, "cuda": 1 << 29}  # most scores of one layer's attention at a time
_SOME_ROWS = 8
_CHUNKS = 8  # of the long sequence: the model sees many more rows at once than a step has


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
    experts = experts_of(model)
    register()
    try:
        return _Probe(model, reference=reference).run()
    except BaseException as error:
        model.set_attn_implementation(before)
        if experts is not None and experts != experts_of(model):
            model.set_experts_implementation(experts)
        if isinstance(error, BreakgraphError | torch.OutOfMemoryError) or not isinstance(error, Exception):
            raise  # says nothing of the model
        raise _refusal(model, f"its forward raised {type(error).__name__}: {one_line(error)}") from error


def position_limit(config: Any) -> int:
    """Longest sequence that a configuration promises, in tokens.

    Args:
        config: Of transformers, the part for text.
    """
    said = [value for name in _LIMITS if type(value := getattr(config, name, None)) is int and value > 0]
    return min(said, default=_UNLIMITED)


def _refusal(model: Any, reason: str, *, fix: str | None = None) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be served through its own code: {reason}.",
        why="It would run without an error and write wrong text.",
        fix=fix or "Use a model that `breakgraph models` lists with a decoder or the adapter, or transformers itself.",
    )


class _Probe:
    def __init__(self, model: Any, *, reference: str) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.reference = reference
        self.device = next(model.parameters()).device

    def run(self) -> Probed:
        """All tests, cheap ones first."""
        if training := [path for path, module in self.model.named_modules() if module.training]:
            raise _refusal(self.model, f"{training[0] or 'it'} is in training mode", fix="Call eval() on it first.")
        if self.model.get_output_embeddings() is None:
            raise _refusal(
                self.model,
                "it has no language model head",
                fix="Load it with AutoModelForCausalLM.from_pretrained(...).",
            )
        if getattr(self.config, "is_encoder_decoder", False):
            raise _refusal(self.model, "it has an encoder")
        with torch.no_grad():
            self.model.set_attn_implementation(ATTENTION)
            sites = self._sites()
            if any(site.variant.softcap is not None or site.variant.sinks is not None for site in sites):
                self.reference = "eager"  # the one that has them in every version of transformers
            decoder = AdaptedDecoder(self.model, sites=sites, fit=Fit(still=held_still(self.model)))
            affordable = self._affordable(sites)
            longest = self._longest(sites, affordable=affordable)
            positions = self._positions(sites, longest)
            sequences = [self._tokens(longest), self._tokens(7), self._repeated(6)]
            error = self._compared(decoder, sequences)
            before = experts_of(self.model)
            fit, experts = find_fit(decoder)
            decoder = decoder.fitted(fit, experts=experts)
            if fit.breaks or experts_of(self.model) != before:
                error = self._compared(decoder, sequences)
            self._compare_far(decoder, positions)
            long = self._compare_long(decoder, min(affordable, positions), longest=longest, short=error)
            if (line := numbers_rows(decoder)) is not None:
                # Steps up to that length were right, so what it makes of its numbers begins later, if at all.
                begins = int(getattr(self.config, "floor_scale", None) or 0) - 1
                positions = min(positions, max(long, begins))
                _LOG.warning("sequences end at %d tokens: the model numbers the rows of a step at %s", positions, line)
            against = moved(decoder, longest=long)
            if against is not None:
                fit = attrs.evolve(fit, prefill=fit.prefill or against, decode=fit.decode or against)
                decoder = decoder.fitted(fit, experts=experts)
        return Probed(decoder, positions, error)

    def _compared(self, decoder: AdaptedDecoder, sequences: Sequence[torch.Tensor]) -> float:
        """How far our logits are from the model's own; refused where they are too far."""
        ours = torch.cat(Packed(decoder, sequences).logits())
        expected = torch.cat([self._own(ids) for ids in sequences])
        exact = decoder.dtype in _EXACT
        # In half precision a rounding may send a row to other experts: a quarter of the rows may be off. What a wrong window or a
        # leaking state changes is more than that.
        error = _difference(ours, expected, share=1.0 if exact else 0.75)
        allowed = _TOLERANCE if exact else _COARSE
        if exact and _TOLERANCE < error <= _MOST:
            # A deep recurrence multiplies the last bit: what lies as close as the model's own attentions do is no fault.
            allowed = max(allowed, min(2 * self._spread(sequences, expected), _MOST))
        if not error <= allowed:
            raise _refusal(
                self.model,
                f"packed, chunked and decoded, its logits differ from its own {self.reference} attention by {error:.2g} of the "
                f"largest; {allowed:.0e} is allowed",
            )
        return error

    def _compare_far(self, decoder: AdaptedDecoder, positions: int) -> None:
        """A sequence at the last positions beside one at the first: each must be what it is alone."""
        near, far = self._tokens(9), self._tokens(8)
        start = positions - len(far)
        if start <= 0 or positions == _UNLIMITED:
            return
        at = torch.arange(start, positions, device=self.device)[None]
        try:
            expected = [self._own(near), self._own(far, position_ids=at)]
        except TypeError:  # its positions cannot be chosen
            return
        ours = Packed(decoder, [near, far], starts=[0, start]).logits()
        exact = decoder.dtype in _EXACT
        error = _difference(torch.cat(ours), torch.cat(expected), share=1.0 if exact else 0.75)
        if not error <= (_FAR if exact else _COARSE):
            raise _refusal(
                self.model,
                f"beside a sequence at position {positions - 1} its logits differ by {error:.2g} of the largest",
            )

    def _affordable(self, sites: Sequence[Site]) -> int:
        """Tokens of a sequence that takes about a second, and not too much memory."""
        kind = self.device.type if self.device.type in _WORK else "cpu"
        operations = 2 * sum(parameter.numel() for parameter in self.model.parameters())
        scores = math.isqrt(_SCORES[kind] // max(site.heads for site in sites))
        return min(int(_WORK[kind] // operations), _LOGITS[kind] // int(self.config.vocab_size), scores)

    def _compare_long(self, decoder: AdaptedDecoder, tokens: int, *, longest: int, short: float) -> int:
        """A sequence as long as can be afforded, up to the last position: what begins at a length shows. Returns the length.

        A rounding may send a row to other experts, and the rows that look at it follow: what is compared is the middle of
        every few rows. `short` is the error of the short sequences.
        """
        if tokens <= longest or self._limit() == _UNLIMITED:  # nothing says where it ends: how long would be long?
            return longest
        ids = self._tokens(tokens)
        ours, expected = Packed(decoder, [ids]).logits(chunks=_CHUNKS)[0], self._own(ids)
        rows = (ours - expected).abs().amax(-1) / expected.abs().max().clamp_min(1e-9)
        error = max(float(some.median()) for some in rows.split(_SOME_ROWS))
        coarse = max(_COARSE, min(_CARRIED * short, _CARRIED_MOST))
        if not error <= (_MOST if decoder.dtype in _EXACT else coarse):
            raise _refusal(
                self.model,
                f"in a sequence of {tokens} tokens its logits differ from its own by {error:.2g} of the largest",
            )
        return tokens

    def _own(self, ids: torch.Tensor, *, attention: str | None = None, **keywords: Any) -> torch.Tensor:
        self.model.set_attn_implementation(attention or self.reference)
        try:
            logits: torch.Tensor = self.model(input_ids=ids[None], use_cache=False, **keywords).logits[0].float()
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return logits

    def _spread(self, sequences: Sequence[torch.Tensor], expected: torch.Tensor) -> float:
        """How far the model is from itself: with another attention of its own, and with the end of a sequence cut off."""
        half = len(sequences[0]) // 2
        found = [_difference(self._own(sequences[0][:half]), expected[:half], share=1.0)]
        for name in {"eager", "sdpa"} - {self.reference}:
            with contextlib.suppress(ValueError, RuntimeError):  # it has no such one
                other = torch.cat([self._own(ids, attention=name) for ids in sequences])
                found.append(_difference(other, expected, share=1.0))
        return max(found)

    def _repeated(self, count: int) -> torch.Tensor:
        """One token again and again: a router sends all its rows to the same experts."""
        return self._tokens(count)[:1].expand(count)

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

    def _longest(self, sites: Sequence[Site], *, affordable: int) -> int:
        """Tokens of the probe: twice past every window and chunk that can be afforded, so that a wrong one shows."""
        small = [bound for bound in self._bounds(sites) if 2 * bound + 3 <= max(_LONGEST, affordable)]
        return max([2 * bound + 3 for bound in small], default=0) or 19

    def _limit(self) -> int:
        """Positions that the model has."""
        tables = [
            module.num_embeddings
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and "pos" in path.rpartition(".")[2]
        ]
        return min([position_limit(self.config), *tables])

    def _positions(self, sites: Sequence[Site], longest: int) -> int:
        untested = [bound for bound in (*self._bounds(sites), *self._unread()) if bound >= longest]
        return min([self._limit(), *untested])

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
        return windows + rope_lengths(self.model) + [int(length) for length in long if length]


def _difference(ours: torch.Tensor, expected: torch.Tensor, *, share: float) -> float:
    """Largest difference of a logit, relative to the largest logit, in the best `share` of the rows."""
    if ours.shape != expected.shape or not bool(torch.isfinite(ours).all()):
        return float("inf")
    rows = (ours - expected).abs().amax(-1).sort().values
    last = max(math.ceil(share * len(rows)) - 1, 0)
    return float(rows[last] / expected.abs().max().clamp_min(1e-9))
