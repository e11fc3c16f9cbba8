"""A model's tokenizer, for an event loop: text to tokens in a thread of its own, tokens to text on the loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from breakgraph.server.token_texts import TokenTexts
from breakgraph.serving.text import OutputText

__all__ = ["Tokenizing"]

R = TypeVar("R")

_DROPPED = 4  # of as many characters, a tokenizer that normalises its text may leave one


class Tokenizing:
    """Shares a tokenizer between threads.

    A fast tokenizer may not be changed by one thread while another one uses it, and encoding changes its settings: so one thread
    encodes, and the event loop decodes with a copy.

    Args:
        tokenizer: Of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def encode(self, function: Callable[[], R]) -> R:
        """Runs what uses the tokenizer in its thread.

        Args:
            function: Makes token ids of something.
        """
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function)

    def text(self, prompt_ids: Sequence[int], *, stop: Sequence[str]) -> OutputText:
        """Begins the text behind a prompt.

        Args:
            prompt_ids: The prompt.
            stop: What ends the text.
        """
        return OutputText(self._decoding, prompt_ids=prompt_ids, stop=stop)

    @cached_property
    def tokens(self) -> TokenTexts:
        """Texts, names and bytes of single tokens, for log-probabilities."""
        return TokenTexts(self._decoding)

    def most_characters(self, tokens: int) -> int:
        """Characters beyond which no text fits, however few tokens it makes.

        Args:
            tokens: That there is room for.
        """
        return tokens * self._longest * _DROPPED

    def close(self) -> None:
        """Ends the thread; what waits for it is cancelled."""
        self._encoder.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _encoder(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="breakgraph-encode")

    @cached_property
    def _decoding(self) -> Any:
        return copy.deepcopy(self._tokenizer)

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)
