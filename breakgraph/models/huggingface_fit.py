"""How an adapted model fits graphs, found out before anything is captured: its experts, its breaks, what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph.backends.operator_watch import watched_row_numbers
from breakgraph.models.attention import KVLayer
from breakgraph.models.experts import ExpertsChoice
from breakgraph.models.huggingface import AdaptedDecoder, body_of
from breakgraph.models.huggingface_breaks import Fit, ModuleBreak, Still, choose_breaks
from breakgraph.models.huggingface_watch import Sync, Watch, changed_since, state_of

__all__ = ["experts_of", "find_fit", "held_still", "moved", "numbers_rows", "rope_lengths"]

_COUNTS = (11, 13)  # tokens of two runs: what differs between them is an axis of rows
_GATHERED = 1 << 30  # most bytes of weights that batched experts may copy for a step of _ROWS rows
_ROWS = 512


def find_fit(decoder: AdaptedDecoder) -> tuple[Fit, ExpertsChoice | None]:
    """Choose how a model's experts are computed and which modules run as breaks.

    Args:
        decoder: The adapter, with nothing but `still` in its fit. Its model's experts are what was chosen
            afterwards.

    Returns:
        The fit, and the choice of the experts where the model has any that can be chosen.
    """
    fit = decoder.fit
    with torch.no_grad():
        try:
            return _found(decoder, fit)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # what runs and cannot be watched, such as tensors with operators of their own
            why = f"what it does could not be watched: {type(error).__name__}: {error}"
            return attrs.evolve(fit, prefill=why, decode=why), None


def _found(decoder: AdaptedDecoder, fit: Fit) -> tuple[Fit, ExpertsChoice | None]:
    small, experts = _with_experts(decoder)
    embedding, head = _Run(decoder, _COUNTS[0]).embedding(), _Run(decoder, _COUNTS[0]).head()
    breaks: tuple[ModuleBreak, ...] = ()
    against: str | None = None
    if small.syncs:
        large = _Run(decoder, _COUNTS[1]).body()
        breaks, against = choose_breaks(small, large, root=body_of(decoder.model), still=fit.still)
        if against is None:
            again = _Run(decoder.fitted(attrs.evolve(fit, breaks=breaks)), _COUNTS[0]).body()
            against = _first(again.syncs)
    breaks = breaks if against is None else ()
    # Graphs of prefill hold the embedding, those of decode the head as well.
    prefill = against or _first(embedding.syncs)
    return attrs.evolve(fit, breaks=breaks, prefill=prefill, decode=prefill or _first(head.syncs)), experts


def _first(syncs: list[Sync]) -> str | None:
    return f"it uses {syncs[0].what.rstrip(',')} at {syncs[0].line}" if syncs else None


class _Run:
    """One run of a decoder under a watch, over an attention that returns zeros."""

    def __init__(self, decoder: AdaptedDecoder, tokens: int) -> None:
        self.decoder = decoder
        self.tokens = tokens
        self.watch = Watch(decoder.model, tokens=tokens, device=decoder.device)
        self.ids = (
            torch.arange(3, 3 + tokens, device=decoder.device) % decoder.model.config.get_text_config().vocab_size
        )

    def body(self) -> Watch:
        """Watch the body."""
        with self._made() as made, self.watch.watching():
            self.decoder(made[0], **made[1])
        return self.watch

    def plain(self, around: AbstractContextManager[None] | None = None) -> None:
        """Run the body inside a context manager, unwatched."""
        with self._made() as made, around or nullcontext():
            self.decoder(made[0], **made[1])

    def embedding(self) -> Watch:
        """Watch the embedding."""
        with self.watch.watching():
            self.decoder.embed(self.ids)
        return self.watch

    def head(self) -> Watch:
        """Watch the head."""
        with self._made() as made:
            hidden = self.decoder(made[0], **made[1])
            with self.watch.watching():
                self.decoder.logits(hidden)
        return self.watch

    @contextmanager
    def _made(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        decoder, tokens = self.decoder, self.tokens
        caches: list[KVLayer] = [
            tuple(
                torch.zeros(1, tokens, shape.heads, dim, dtype=decoder.dtype, device=decoder.device)
                for dim in (shape.key_dim, shape.value_dim)
            )  # type: ignore[misc]
            for shape in decoder.kv_shapes
        ]
        at = torch.arange(tokens, device=decoder.device)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.watch.attention()
            return q.new_zeros(*q.shape[:2], v.shape[-1])

        yield decoder.embed(self.ids), {"positions": at, "slots": at, "kv": caches, "attend": attend}


def _with_experts(decoder: AdaptedDecoder) -> tuple[Watch, ExpertsChoice | None]:
    """A watched run with the first implementation of the experts that needs no host, or with the model's own."""
    model = decoder.model
    modules = [module for module in model.modules() if _is_experts(module)]
    seen = _Run(decoder, _COUNTS[0]).body()
    if not modules:
        return seen, None
    own = str(modules[0].config._experts_implementation)
    if _quiet(seen, modules):
        return seen, ExpertsChoice(own, "as the model has it, and it reads nothing on the host")
    before = experts_of(model)
    for name in ("grouped_mm", "batched_mm"):
        if name == own or (name == "batched_mm" and _gathered(modules[0], model) > _GATHERED):
            continue
        try:
            model.set_experts_implementation(name)
            other = _Run(decoder, _COUNTS[0]).body()
        except Exception:  # not of this model, or not on this device
            continue
        if _quiet(other, modules):
            return other, ExpertsChoice(name, f"the model's own, {own}, reads data on the host")
    if before is not None:
        model.set_experts_implementation(before)
    return seen, ExpertsChoice(own, "it reads data on the host, as does or is too large whatever else transformers has")


def _is_experts(module: nn.Module) -> bool:
    """Whether transformers lets the implementation of a module's forward be chosen."""
    return all(hasattr(module, name) for name in ("has_gate", "is_transposed", "config")) and hasattr(
        module.config, "_experts_implementation"
    )


def _quiet(watch: Watch, modules: list[nn.Module]) -> bool:
    held = set(modules)
    return not any(held & set(sync.stack) for sync in watch.syncs)


def experts_of(model: Any) -> Any:
    """How the experts of a model and its parts are computed; None where that cannot be chosen.

    Args:
        model: The model.
    """
    return model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None


def _gathered(module: nn.Module, model: Any) -> int:
    """Bytes of weights that batched experts copy for a step: those of each chosen expert, for each row."""
    config = model.config.get_text_config()
    held = sum(each.numel() * each.element_size() for each in module.parameters())
    chosen = next(
        (
            getattr(config, name)
            for name in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
            if getattr(config, name, None)
        ),
        8,
    )
    return held // int(getattr(module, "num_experts", 1)) * int(chosen) * _ROWS


def held_still(model: nn.Module) -> tuple[Still, ...]:
    """Rotary embeddings that look at the longest position of each step to decide on their frequencies, with that put off.

    Up to the length that `rope_lengths` tells the answer is always the same. Beyond it the frequencies of a sequence would
    follow the other sequences of its batch, and keys in the cache would have been turned by others. The frequencies are
    copies: a long sequence that the model runs by itself changes its own.

    Args:
        model: The model, after a short forward: then its frequencies are those of short sequences.
    """
    found: list[Still] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and any(map(_changes, kind.values())):
            fixed: Any = {layer: "default" if _changes(one) else one for layer, one in kind.items()}
        elif _changes(kind):
            fixed = "default"
        else:
            continue
        values = {name: value.clone() for name, value in module.named_buffers() if name.endswith("inv_freq")}
        scales = {name: value for name, value in vars(module).items() if name.endswith("attention_scaling")}
        found.append((module, {"rope_type": fixed, **values, **scales}))
    return tuple(found)


def _changes(kind: Any) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_lengths(model: nn.Module) -> list[int]:
    """Lengths up to which rotary embeddings keep their frequencies, of those that change them.

    Args:
        model: The model.
    """
    return [
        int(length)
        for module, _ in held_still(model)
        if (length := getattr(module, "original_max_seq_len", None)) is not None
    ]


def numbers_rows(decoder: AdaptedDecoder) -> str | None:
    """Where a model computes with the numbers of a step's rows in place of their positions; None where it does not.

    Args:
        decoder: Of which every step is right.
    """
    lines: list[list[str]] = [[], []]
    with torch.no_grad():
        for tokens, found in zip(_COUNTS, lines, strict=True):
            _Run(decoder, tokens).plain(watched_row_numbers(found.append, rows=tokens))
    return next((line for line in lines[0] if line in lines[1]), None)


def moved(decoder: AdaptedDecoder, *, longest: int) -> str | None:
    """What forwards of different lengths leave changed in the model; None where they leave nothing.

    Args:
        decoder: Was run before with the longest, so that what is made once is made.
        longest: Tokens of the longest run.
    """
    before = state_of(decoder.model)
    with torch.no_grad():
        for tokens in (_COUNTS[0], longest, _COUNTS[0] + 1):
            _Run(decoder, tokens).plain()
            changed = changed_since(decoder.model, before)
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                return f"a forward leaves {changed[0]}{more} changed, which a replay would not"
    return None
