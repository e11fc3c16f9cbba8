"""A model of transformers by itself: its own attention, its own logits, and how far it is from itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from breakgraph.models.huggingface import ATTENTION

__all__ = ["Attentions", "Own", "Said"]


class Attentions:
    """Which attention each part of a model has: the model, and each configuration inside its own.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parts = [(config, config._attn_implementation) for config in _configs(model.config)]

    @property
    def text(self) -> str:
        """Of the part for text."""
        return self._model.config.get_text_config()._attn_implementation or "eager"

    def choose(self, name: str) -> None:
        """Give the part for text another one.

        Args:
            name: Of transformers, or ours.
        """
        config = self._model.config
        text = config.get_text_config()
        key = next((key for key in config.sub_configs if getattr(config, key, None) is text), None)
        self._model.set_attn_implementation(name if key is None else {key: name})

    def back(self) -> None:
        """Give every part the one that it had."""
        for config, name in self._parts:  # a configuration hands its own on to those inside it, which come after it
            config._attn_implementation = name


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for key in config.sub_configs:
        if (inner := getattr(config, key, None)) is not None:
            yield from _configs(inner)


@attrs.frozen(eq=False)
class Said:
    """What a model says of some sequences.

    Attributes:
        inputs: Token ids of each, and the keywords of its call.
        logits: (tokens of all, vocabulary), float32.
    """

    inputs: Sequence[tuple[torch.Tensor, dict[str, Any]]]
    logits: torch.Tensor


class Own:
    """Runs a model with its own attention.

    Args:
        model: The model, with our attention chosen outside of calls.
        attentions: Of it.
        reference: Name of its own attention.
        others: Other attentions of its own that must give the same.
    """

    def __init__(self, model: Any, attentions: Attentions, *, reference: str, others: Sequence[str]) -> None:
        self.model = model
        self.attentions = attentions
        self.reference = reference
        self.others = tuple(name for name in others if name != reference)

    def say(self, sequences: Sequence[torch.Tensor], *, positions: Sequence[torch.Tensor] | None = None) -> Said:
        """Logits of sequences, each by itself.

        Args:
            sequences: Token ids of each.
            positions: Of their tokens; None: 0, 1, 2, ...
        """
        words = [{} for _ in sequences] if positions is None else [{"position_ids": at[None]} for at in positions]
        inputs = list(zip(sequences, words, strict=True))
        return Said(inputs, self._logits(inputs))

    def spread(self, said: Said, measure: Callable[[torch.Tensor], float], *, exact: bool) -> float:
        """How far the model is from itself: with another attention, with sequences cut in half, with other roundings.

        In half precision nothing is cut: so much is allowed there that what a wrong model makes of fewer rows would count as
        rounding; and its embeddings are rounded otherwise only where it has no other attention.

        Args:
            said: What it says.
            measure: Distance of logits from those, as of ours.
            exact: Its type is float32 or float64.
        """
        found: list[float] = []
        for name in self.others:
            with contextlib.suppress(ValueError, RuntimeError):  # it has no such one
                found.append(measure(self._logits(said.inputs, attention=name)))
        if exact:
            found.append(measure(self._cut(said)))
        if exact or not found:
            with self._rounded():
                found.append(measure(self._logits(said.inputs)))
        return max(found)

    def _logits(
        self, inputs: Sequence[tuple[torch.Tensor, dict[str, Any]]], *, attention: str | None = None
    ) -> torch.Tensor:
        self.attentions.choose(attention or self.reference)
        try:
            found = [
                self.model(input_ids=ids[None], use_cache=False, **words).logits[0].float() for ids, words in inputs
            ]
        finally:
            self.attentions.choose(ATTENTION)
        return torch.cat(found)

    def _cut(self, said: Said) -> torch.Tensor:
        """Logits of the first half of each sequence, and those of the rest as they were."""
        found: list[torch.Tensor] = []
        for (ids, words), rows in zip(
            said.inputs, said.logits.split([len(ids) for ids, _ in said.inputs]), strict=True
        ):
            half = len(ids) // 2
            found += [
                self._logits([(ids[:half], {name: value[:, :half] for name, value in words.items()})]),
                rows[half:],
            ]
        return torch.cat(found)

    @contextlib.contextmanager
    def _rounded(self) -> Iterator[None]:
        """Embeddings that are another rounding of numbers close by, as any step before could have left them."""
        generator = torch.Generator().manual_seed(0)

        def change(_: Any, __: Any, rows: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(rows.shape, generator=generator).to(rows.device) - 0.5
            return (rows.float() * (1 + torch.finfo(rows.dtype).eps * noise)).to(rows.dtype)

        handle = self.model.get_input_embeddings().register_forward_hook(change)
        try:
            yield
        finally:
            handle.remove()
