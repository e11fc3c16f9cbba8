"""From prompts to token ids, with or without a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from breakgraph.errors import ConfigError
from breakgraph.models.weights import LoadedModel

__all__ = ["encode", "has_chat_template"]


def encode(model: LoadedModel, prompt: str | Sequence[int], *, chat: bool) -> list[int]:
    """Turns a prompt into token ids.

    A plain text gets the special tokens that the tokenizer adds, such as BOS. A chat template writes them
    itself, so nothing is added to it: a second BOS would be a token that the model never saw there.

    Args:
        model: Its tokenizer does the work, its vocabulary is the limit.
        prompt: Text, or token ids that are checked and used as they are.
        chat: Put a text into the chat template, as one message of a user.

    Raises:
        ConfigError: It is empty, out of the vocabulary, or the model has no tokenizer or no template.
    """
    if not isinstance(prompt, str):
        return _checked_ids(prompt, vocabulary=model.config.vocab_size)
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
        return ids
    if not has_chat_template(model):
        raise ConfigError(
            f"{model.source} has no chat template.",
            why="How a conversation is written down is different for every model.",
            fix="Use chat=False and write the whole prompt yourself, or use an instruction-tuned model.",
        )
    messages = [{"role": "user", "content": prompt}]
    templated: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return templated


def has_chat_template(model: LoadedModel) -> bool:
    """Whether the model's tokenizer comes with a chat template."""
    return model.tokenizer is not None and bool(model.tokenizer.chat_template)


def _checked_ids(prompt: Sequence[int], *, vocabulary: int) -> list[int]:
    ids = [int(token) for token in prompt]
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(
            f"the prompt has token {wrong[0]}; the model's tokens are 0 to {vocabulary - 1}.",
            why="It has no row in the embedding; on a GPU reading past the table stops the whole process.",
            fix="Encode the prompt with this model's tokenizer.",
        )
    return ids
