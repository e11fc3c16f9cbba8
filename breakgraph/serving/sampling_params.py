"""How the tokens of a request are chosen: what a caller may say, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from breakgraph.errors import ConfigError

__all__ = ["SamplingParams"]


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


def _as_pairs(value: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    # A mapping cannot be hashed and may change later. What is none goes on as it is, to the validator.
    given: Any = value.items() if isinstance(value, Mapping) else value
    pairs: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    try:
        return tuple(sorted(pairs))
    except TypeError:
        return pairs


def _as_tokens(value: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    The order is: repetition penalty, frequency and presence penalty, bias, temperature, top-k, top-p, min-p. A penalty, a bias
    or ``logprobs`` costs a few passes over the logits of the whole step, outside of its graph; see ``needs_logits``.

    Attributes:
        max_tokens: Most tokens to generate; at least 1.
        temperature: Divides the logits; 0 always takes the most probable token.
        top_k: Keeps this many most probable tokens; 0 keeps all.
        top_p: Keeps the smallest set of most probable tokens whose share reaches it; in (0, 1], 1 keeps all.
        min_p: Drops tokens less probable than this share of the most probable one; in [0, 1], 0 drops none.
        seed: Makes the draw repeatable: same seed, same prompt, same tokens. None takes one from the engine.
        repetition_penalty: Divides the positive logits of tokens that prompt or answer already have, and multiplies the
            negative ones; above 0, 1 is off.
        frequency_penalty: Taken off a token's logit for each time that the answer has it; in [-2, 2], 0 is off.
        presence_penalty: Taken off the logit of every token that the answer has; in [-2, 2], 0 is off.
        logit_bias: Added to the logits of these tokens, after the penalties: token id -> number in [-100, 100]. -100 all but
            forbids a token, 100 all but forces it. A mapping; kept as pairs, sorted. The tokens are checked when the request
            reaches an engine, which knows the vocabulary.
        logprobs: How many of the most probable tokens are reported with each token, besides the logarithm of its own
            probability; 0 to 20, None reports nothing. See `TokenLogprobs` for the distribution.
        stop: Strings that end the text; they are not part of it. One string or several.
        stop_token_ids: Tokens that end the request, besides those of the model; kept in ``token_ids``, not in the text.
            One or several.
        ignore_eos: Goes on after the model's end-of-sequence tokens.

        penalises: Whether tokens that were used before are treated otherwise than others: then they have to be counted. Follows
            from the others.
        needs_logits: Whether a step of the request ends outside of its graph, on the logits. Follows from the others.

    Raises:
        ConfigError: A value is out of its range or of another type.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_as_pairs)
    logprobs: int | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_tokens)
    ignore_eos: bool = False

    # Asked for each request of each step, so worked out once.
    penalises: bool = attrs.field(init=False, eq=False, repr=False)
    needs_logits: bool = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check()
        penalises = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        object.__setattr__(self, "penalises", penalises)
        object.__setattr__(self, "needs_logits", penalises or bool(self.logit_bias) or self.logprobs is not None)

    def _check(self) -> None:
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
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise _refuse(
                "repetition_penalty",
                self.repetition_penalty,
                expected="a finite number above 0 (1: off)",
                why="Logits are divided or multiplied by it.",
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not _is_number(value := getattr(self, name)) or not -2 <= value <= 2:
                raise _refuse(
                    name,
                    value,
                    expected="a number in [-2, 2] (0: off)",
                    why="It is taken off the logits of used tokens.",
                )
        _check_bias(self.logit_bias)
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= 20):
            raise _refuse(
                "logprobs",
                self.logprobs,
                expected="an integer in [0, 20] or None",
                why="It counts the alternatives that are copied to the host with every token.",
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

    def check_vocabulary(self, size: int) -> None:
        """Refuses a bias of a token that the model does not have.

        Args:
            size: Of the vocabulary.

        Raises:
            ConfigError: There is one.
        """
        if self.logit_bias and self.logit_bias[-1][0] >= size:  # they are sorted
            raise ConfigError(
                f"SamplingParams.logit_bias has token {self.logit_bias[-1][0]}; the model's tokens are 0 to {size - 1}"
                f" (a vocabulary of {size}).",
                why="There is no logit that it could be added to.",
                fix="Take it out; or use the tokenizer of this model to find the token.",
            )


def _check_bias(pairs: tuple[Any, ...]) -> None:
    try:
        tokens = [token for token, _ in pairs]
    except (TypeError, ValueError):
        tokens = [None]
    if not all(_is_int(token) and token >= 0 for token in tokens) or len(set(tokens)) < len(tokens):
        raise _refuse(
            "logit_bias",
            pairs,
            expected="a mapping of token ids, integers of at least 0, to numbers",
            why="Each number is added to the logit of its token.",
        )
    for token, bias in pairs:
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise _refuse(
                f"logit_bias[{token}]",
                bias,
                expected="a number in [-100, 100]",
                why="That is far enough to forbid or to force a token; what is not finite leaves no probabilities.",
            )
