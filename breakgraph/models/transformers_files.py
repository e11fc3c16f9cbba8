"""What transformers reads of a model's folder besides the weights: the configuration and the tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breakgraph.errors import ConfigError
from breakgraph.models.generation import read_json

__all__ = ["check_causal", "one_line", "quiet_transformers", "read_config", "read_tokenizer", "text_config"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read_config(folder: Path) -> Any:
    """The configuration of a folder.

    Args:
        folder: Holds config.json. Code that came with it is not run.

    Raises:
        ConfigError: It cannot be read, or transformers does not know the model's type.
    """
    file = folder / "config.json"
    if not read_json(file).get("model_type"):
        raise ConfigError(
            f"{file} names no model_type.",
            why="It says which family the model is of, and so which code runs it.",
            fix="Use the config.json that came with the weights.",
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with errors of several libraries
        raise ConfigError(
            f"{file} is refused by transformers: {one_line(error)}",
            why="It says what the model is.",
            fix="Use the config.json that came with the weights, or a newer transformers.",
        ) from error


def check_causal(config: Any) -> None:
    """Refuse what is no causal language model for transformers, before its weights are read.

    Args:
        config: Of transformers.

    Raises:
        ConfigError: It is none.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # with what was registered
        raise ConfigError(
            f"Model type {config.model_type!r} has no causal language model in transformers {transformers.__version__}.",
            why="An answer is written token by token, each from those before it.",
            fix="Use a decoder-only language model: breakgraph models lists them.",
        )


def text_config(config: Any) -> Any:
    """The part of a configuration that speaks of the text decoder.

    Args:
        config: Of transformers.

    Raises:
        ConfigError: It has several such parts, or does not say how many tokens there are.
    """
    try:
        text = config.get_text_config()
        int(text.vocab_size)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{config.model_type}: the configuration does not describe one text decoder: {one_line(error)}",
            why="Prompts are checked against its vocabulary before the weights are read.",
            fix="Use a decoder-only language model: breakgraph models lists them.",
        ) from error
    return text


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; None where it has none.

    Args:
        folder: Of transformers.

    Raises:
        ConfigError: Its files cannot be read.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ConfigError(
            f"The tokenizer of {folder} cannot be read: {one_line(error)}",
            why="Without it text cannot become tokens.",
            fix="Download the tokenizer files again, or remove them all to use token ids only.",
        ) from error


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


@contextlib.contextmanager
def quiet_transformers(*, warnings: bool) -> Iterator[None]:
    """Progress is ours to show: transformers' own bars stay off meanwhile.

    Args:
        warnings: Let its warnings through.
    """
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    if not warnings:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
