"""What a model's author says about generating from it: where to stop and how to sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from breakgraph.errors import ConfigError

__all__ = ["GenerationDefaults"]

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@attrs.frozen
class GenerationDefaults:
    """Sampling defaults and special tokens; None means that the author says nothing.

    Attributes:
        eos_token_ids: Every token that ends an answer, in the author's order; Llama 3 has three.
        bos_token_id: Token that begins a sequence.
        pad_token_id: Padding token.
        do_sample: Sample by default; False means greedy.
        temperature: Divisor of the logits.
        top_k: Only the k likeliest tokens.
        top_p: Only the likeliest tokens that together have this probability.
        min_p: Only tokens at least this likely, relative to the likeliest.
        repetition_penalty: Divisor of the logits of tokens that were already used.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_folder(cls, folder: Path, *, config: Any, tokenizer: Any = None) -> GenerationDefaults:
        """Read `generation_config.json`; what it leaves out comes from the configuration, then the tokenizer.

        Args:
            folder: The model's folder.
            config: Its transformers configuration.
            tokenizer: Its tokenizer, if it has one.

        Raises:
            ConfigError: The file is there and is no JSON object, the end of an answer is no token, or a default is no number.
        """
        values = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
        fallback = config.to_dict()
        for name in NUMBERS:
            value = values.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ConfigError(
                    f"{folder}: {name} is {value!r:.80}; expected a number.",
                    why="Answers are sampled with it where a caller says nothing.",
                    fix=f"Correct {name} in generation_config.json, or take it out.",
                )

        def token(name: str) -> Any:
            for source in (values.get(name), fallback.get(name), getattr(tokenizer, name, None)):
                if source is not None:
                    return source
            return None

        return cls(
            eos_token_ids=_ids(token("eos_token_id"), folder),
            bos_token_id=token("bos_token_id"),
            pad_token_id=token("pad_token_id"),
            do_sample=bool(values.get("do_sample") or False),
            temperature=values.get("temperature"),
            top_k=values.get("top_k"),
            top_p=values.get("top_p"),
            min_p=values.get("min_p"),
            repetition_penalty=values.get("repetition_penalty"),
        )


def _ids(value: Any, folder: Path) -> tuple[int, ...]:
    if value is None:
        return ()
    ids: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise ConfigError(
            f"{folder}: eos_token_id is {value!r:.80}; expected a whole number, or a list of them.",
            why="These tokens end an answer; without them it would run on.",
            fix="Correct eos_token_id in generation_config.json, or in config.json where that file is silent.",
        )
    return tuple(dict.fromkeys(ids))


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object from a model's folder.

    Raises:
        ConfigError: It cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.",
            why="It says what the model is and how to use it.",
            fix="Download the file again.",
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds a {type(values).__name__}, not an object.",
            why="It says what the model is and how to use it.",
            fix="Download the file again.",
        )
    return values
