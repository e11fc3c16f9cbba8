"""Whose code runs a model: a decoder of our own, or transformers' through the adapter."""

from __future__ import annotations

import enum

import attrs

from breakgraph.errors import ConfigError

__all__ = ["Served", "Via"]


class Via(enum.StrEnum):
    """Whose code is to run a model.

    AUTO takes a decoder of our own where there is one that fits the configuration, else the adapter. FAST is a decoder of
    our own and nothing else. ADAPTER is transformers' own code, also where we have a decoder.
    """

    AUTO = "auto"
    FAST = "fast"
    ADAPTER = "adapter"

    @classmethod
    def of(cls, value: object) -> Via:
        """Takes a member or its value.

        Raises:
            ConfigError: It is neither.
        """
        try:
            return cls(value)  # type: ignore[arg-type]
        except ValueError:
            raise ConfigError(
                f"via is {value!r}; expected auto, fast or adapter.",
                why="It says whose code runs the model.",
                fix="Use auto to take the fast path where there is one.",
            ) from None


@attrs.frozen
class Served:
    """Whose code runs a model, and why.

    Attributes:
        model_type: Family as transformers names it.
        via: `Via.FAST` or `Via.ADAPTER`.
        reason: Why the adapter, in words that go on after "because"; empty for a decoder of our own.
    """

    model_type: str
    via: Via
    reason: str = ""

    def __str__(self) -> str:
        """One line for people."""
        if self.via is Via.FAST:
            return f"{self.model_type}: own decoder"
        return f"{self.model_type}: transformers' own code through the adapter, because {self.reason}"
