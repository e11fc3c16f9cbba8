"""A model in memory: what the serving loop takes, whoever wrote its decoder."""

from __future__ import annotations

from typing import Any

import attrs

from breakgraph.models.config import DecoderConfig
from breakgraph.models.decoder import Decoder
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.via import Served

__all__ = ["LoadedModel"]


@attrs.frozen(eq=False)
class LoadedModel:
    """A model and what is needed to use it.

    Attributes:
        decoder: The weights, ready to run.
        config: Its shape.
        tokenizer: Of transformers; None for a folder without one.
        generation: Where to stop and how to sample by default.
        max_positions: Longest sequence that may be served, in tokens.
        source: Where it came from, for people.
        served: Whose code runs it, and why.
    """

    decoder: Decoder
    config: DecoderConfig
    tokenizer: Any
    generation: GenerationDefaults
    max_positions: int
    source: str
    served: Served

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.config.vocab_size
