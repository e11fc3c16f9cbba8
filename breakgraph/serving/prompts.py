"""From prompts to token ids, with or without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import cast

import numpy as np

from breakgraph.errors import ConfigError
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.weights import OpenedModel

__all__ = ["Prompt", "check_tokens", "encode", "encode_chat", "has_chat_template", "prompts_of"]

Prompt = str | Sequence[int]


def prompts_of(given: object) -> list[Prompt]:
    """Makes a list of prompts of what a caller gave: one text, one list of token ids, or a list of either.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(given, str):
        return [given]
    items = _items(given, what="the prompts are", kinds=(Sequence, Iterator))
    if _are_integers(items):
        return [cast("Prompt", items)]
    tokens = [item for item in items if isinstance(item, Integral)]
    if tokens and len(tokens) < len(items):
        raise ConfigError(
            f"token {tokens[0]} stands among {len(items) - len(tokens)} prompts.",
            why="One prompt is a text or a list of token ids; several are a list of those.",
            fix="Put the token ids of one prompt into a list of their own.",
        )
    prompts = [cast("Prompt", items)] if tokens else [cast("Prompt", item) for item in items]
    for prompt in prompts:
        _check_kind(prompt)
    return prompts


def _check_kind(prompt: object) -> None:
    """Refuses what is neither a text nor token ids, before a model is loaded for it."""
    if isinstance(prompt, str) or _are_integers(prompt):
        return
    for token in _items(prompt, what="a prompt is"):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ConfigError(
                f"a prompt has token {token!r} of type {type(token).__name__}.",
                why="Token ids are integers.",
                fix="Give a text, or a list of integers: generate([[1, 2, 3]]). Several texts are a list of texts.",
            )


def _are_integers(given: object) -> bool:
    """Whether it is a list of plain integers: looked at in C: a loop over a long prompt takes longer than its step."""
    return isinstance(given, (list, tuple)) and set(map(type, given)) == {int}


def _items(given: object, *, what: str, kinds: tuple[type, ...] = (Sequence,)) -> list[object]:
    if isinstance(given, np.ndarray) and given.ndim:
        return list(given)
    if isinstance(given, kinds) and not isinstance(given, (str, bytes, bytearray)):
        return list(cast("Iterable[object]", given))
    raise ConfigError(
        f"{what} of type {type(given).__name__}: {given!r:.80}.",
        why="A prompt is a text or a list of token ids; anything else might be read in more than one way.",
        fix="Give texts or lists of integers, of a tensor its tolist(): generate([[1, 2, 3]]), generate([text]).",
    )


def encode(model: LoadedModel | OpenedModel, prompt: Prompt, *, chat: bool) -> list[int]:
    """Turns a prompt into token ids.

    A plain text gets the special tokens that the tokenizer adds, such as BOS. A chat template writes them
    itself, so nothing is added to it: a second BOS would be a token that the model never saw there.

    Args:
        model: Its tokenizer does the work, its vocabulary is the limit.
        prompt: Text, or token ids that are checked and used as they are.
        chat: Put a text into the chat template, as one message of a user.

    Raises:
        ConfigError: It is no prompt, is empty, out of the vocabulary, or the model has no tokenizer or no template.
    """
    if not isinstance(prompt, str):
        return _checked_ids(prompt, vocabulary=model.vocab_size)
    if not prompt:
        raise ConfigError(
            "the prompt is empty.",
            why="There is nothing to go on from.",
            fix="Give a prompt of at least one character.",
        )
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{model.source} has no tokenizer.",
            why="A text has to become tokens first.",
            fix="Give lists of token ids.",
        )
    if not chat:
        ids: list[int] = tokenizer(prompt).input_ids
        check_tokens(ids, vocabulary=model.vocab_size, fix="Leave its text out: the model has no embedding for it.")
        return ids
    return encode_chat(model, [{"role": "user", "content": prompt}])


def encode_chat(model: LoadedModel | OpenedModel, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Turns a conversation into token ids, up to where the model's answer begins.

    Args:
        model: With a tokenizer.
        messages: Each with a role and a content.

    Raises:
        ConfigError: There is no tokenizer or no template, or the template refuses the messages.
    """
    tokenizer = model.tokenizer
    if not has_chat_template(model):
        raise ConfigError(
            f"{model.source} has no {'tokenizer' if tokenizer is None else 'chat template'}.",
            why="How a conversation is written down is different for every model.",
            fix="Write the whole prompt yourself, as a text, or use an instruction-tuned model.",
        )
    try:
        templated: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program of the model's author: what it raises is about these messages
        raise ConfigError(
            f"the chat template of {model.source} refuses the messages: {type(error).__name__}: {error}.",
            why="A model knows the roles, and their order, that it was trained on.",
            fix="Change the messages accordingly.",
        ) from error
    check_tokens(templated, vocabulary=model.vocab_size, fix="Leave its text out: the model has no embedding for it.")
    return templated


def has_chat_template(model: LoadedModel | OpenedModel) -> bool:
    """Whether the model's tokenizer comes with a chat template."""
    return model.tokenizer is not None and bool(model.tokenizer.chat_template)


def _checked_ids(prompt: Sequence[int], *, vocabulary: int) -> list[int]:
    if _are_integers(prompt):
        ids = list(prompt)
    else:
        _check_kind(prompt)
        ids = [int(token) for token in prompt]
    check_tokens(ids, vocabulary=vocabulary)
    return ids


def check_tokens(
    ids: Sequence[int], *, vocabulary: int, fix: str = "Encode the prompt with this model's tokenizer."
) -> None:
    """Refuses tokens that have no embedding.

    Args:
        ids: Of a prompt.
        vocabulary: Token ids are below this.
        fix: What to do where one is not.

    Raises:
        ConfigError: There is one.
    """
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        wrong = next(token for token in ids if not 0 <= token < vocabulary)
        raise ConfigError(
            f"the prompt has token {wrong}; the model's tokens are 0 to {vocabulary - 1}.",
            why="It has no row in the embedding; on a GPU reading past the table stops the whole process.",
            fix=fix,
        )
