"""What a caller asks for, what they get back, and a request's life in between."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import attrs

from breakgraph.errors import ConfigError

__all__ = ["Chunk", "Completion", "FinishReason", "Request", "RequestState", "SamplingParams"]


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` were made, or the model's length is reached."""
    ABORT = "abort"
    """The caller gave up."""


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Holds nothing: new, or preempted."""
    PREFILL = "prefill"
    """Holds a row and blocks; part of its tokens is not in the cache yet."""
    DECODE = "decode"
    """All its tokens but the newest are in the cache, or on their way."""
    FINISHED = "finished"
    """Makes no more tokens; its row and blocks may still wait for a step in flight."""


def _refuse(name: str, got: object, *, expected: str, why: str) -> ConfigError:
    return ConfigError(
        f"SamplingParams.{name} is {got!r}; expected {expected}.", why=why, fix=f"Give {name} as {expected}."
    )


def _why_no_temperature(value: object) -> str:
    if isinstance(value, (int, float)) and value < 0:
        return "The logits are divided by it; a negative one would prefer the least probable tokens."
    return "The logits are divided by it, and what is not a finite number leaves no probabilities to draw from."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _as_strings(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)


def _as_tokens(value: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: Most tokens to generate; at least 1.
        temperature: Divides the logits; 0 always takes the most probable token.
        top_k: Keeps this many most probable tokens; 0 keeps all.
        top_p: Keeps the smallest set of most probable tokens whose share reaches it; in (0, 1], 1 keeps all.
        min_p: Drops tokens less probable than this share of the most probable one; in [0, 1], 0 drops none.
        seed: Makes the draw repeatable: same seed, same prompt, same tokens. None takes one from the engine.
        stop: Strings that end the text; they are not part of it. One string or several.
        stop_token_ids: Tokens that end the request, besides those of the model; kept in ``token_ids``, not in the text.
            One or several.
        ignore_eos: Goes on after the model's end-of-sequence tokens.

    Raises:
        ConfigError: A value is out of its range or of another type.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tokens)
    ignore_eos: bool = False

    def __attrs_post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise _refuse(
                "max_tokens", self.max_tokens, expected="an integer of at least 1", why="Nothing would be generated."
            )
        if not _is_number(self.temperature) or self.temperature < 0:
            raise _refuse(
                "temperature",
                self.temperature,
                expected="a finite number of at least 0",
                why=_why_no_temperature(self.temperature),
            )
        if not _is_int(self.top_k) or not 0 <= self.top_k < 2**63:
            raise _refuse(
                "top_k", self.top_k, expected="an integer of at least 0 (0: off)", why="It counts the tokens to keep."
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _refuse("top_p", self.top_p, expected="a number in (0, 1]", why="It is a share of the probability.")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise _refuse(
                "min_p", self.min_p, expected="a number in [0, 1]", why="It is a share of the largest probability."
            )
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            raise _refuse(
                "seed", self.seed, expected="an integer in [0, 2**63) or None", why="It is hashed as a 64-bit integer."
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _refuse(
                "stop",
                self.stop,
                expected="strings that are not empty",
                why="An empty string stops every text at once.",
            )
        if not all(_is_int(token) and token >= 0 for token in self.stop_token_ids):
            raise _refuse(
                "stop_token_ids", self.stop_token_ids, expected="integers of at least 0", why="They are token ids."
            )


@attrs.frozen(kw_only=True)
class Completion:
    """The whole answer to one prompt.

    Attributes:
        text: Without special tokens and without the stop string.
        token_ids: Every generated token, a stop token included.
        finish_reason: Why it ended.
        prompt_token_ids: What the model was given.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Chunk:
    """A piece of a streamed answer; the texts of all pieces joined are the completion's text.

    Attributes:
        text: New text; empty while a character or a possible stop string is still incomplete.
        token_ids: The tokens since the last piece.
        finish_reason: None until the last piece.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@attrs.define(kw_only=True, eq=False)
class Request:
    """A request inside the engine. The host runs ahead of the device, so launched and known are two counts.

    Attributes:
        prompt_ids: The prompt's tokens.
        params: How to choose tokens.
        seed: ``params.seed``, or the one drawn for it.
        max_new_tokens: ``params.max_tokens``, cut to what the model's length leaves.
        stop_ids: Tokens that end it, the model's own included.
        output_ids: Generated tokens that the host has read.
        launched: Tokens whose sampling has been launched, read or not; at least ``len(output_ids)``.
        computed: Tokens whose keys and values have been launched into the cache.
        blocks: Blocks it holds, in order.
        row: Its row in the engine's tables, None while waiting.
        state: Where it is in its life.
        finish_reason: Set when it is finished.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    output_ids: list[int] = attrs.field(factory=list)
    launched: int = 0
    computed: int = 0
    blocks: list[int] = attrs.field(factory=list)
    row: int | None = None
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.prompt_ids) + self.launched

    @property
    def wants_token(self) -> bool:
        """Whether one more token may be launched."""
        return self.state is not RequestState.FINISHED and self.launched < self.max_new_tokens

    def known_ids(self, start: int, *, count: int) -> list[int]:
        """Token ids at positions ``start .. start + count - 1``; all must have been read by the host."""
        prompt = len(self.prompt_ids)
        if start + count <= prompt:
            return list(self.prompt_ids[start : start + count])
        tokens = [*self.prompt_ids[start:], *self.output_ids] if start < prompt else self.output_ids[start - prompt :]
        return tokens[:count]
