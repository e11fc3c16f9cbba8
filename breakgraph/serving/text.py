"""From tokens to text while they arrive: whole characters only, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decodes", "Detokenizer", "OutputText", "StopStrings"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokenizers with a prefix space (SentencePiece) strip it from the first token that they decode; behind a few
# prompt tokens it is kept. Five are enough to hold one that is not special.
_PROMPT_CONTEXT = 5


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str:
        """Turns tokens into text."""
        ...


class Detokenizer:
    """Decodes tokens one at a time.

    A token may end inside a character; its text is held until the character is complete. Only the tokens
    since the last complete character and the few before them are decoded again, so the cost of a token does
    not grow with the text.

    Args:
        tokenizer: Does the decoding.
        prompt_ids: What came before; its last tokens are context.
    """

    def __init__(self, tokenizer: Decodes, *, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        context = list(prompt_ids[-_PROMPT_CONTEXT:])
        if self._decode(context).endswith(_BROKEN):
            context = []  # the prompt ends inside a character: it could not be told from the output's first
        self._window = context
        self._done = len(context)

    def push(self, *tokens: int) -> str:
        """Takes the next tokens and returns the text that is complete now; may be empty."""
        self._window.extend(tokens)
        text = self._new_text()
        if not text or text.endswith(_BROKEN):
            return ""
        self._forget()
        return text

    def flush(self) -> str:
        """Returns what is still held, broken characters as U+FFFD; call it once, at the end."""
        text = self._new_text()
        self._forget()
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._done])
        return self._decode(self._window)[len(before) :]

    def _forget(self) -> None:
        # The tokens of the text just given out stay as context of the next.
        self._window = self._window[self._done :]
        self._done = len(self._window)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and holds back what might become one.

    Args:
        strings: The stop strings; none of them empty.

    Attributes:
        matched: Whether one was found.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Takes more text and returns what certainly comes before every stop string; empty after a match."""
        if self.matched:
            return ""
        text = self._held + text
        places = [place for place in (text.find(string) for string in self._strings) if place >= 0]
        if places:
            self.matched = True
            self._held = ""
            return text[: min(places)]
        hold = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Returns what was held back; no stop string can follow any more."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one request as it grows: a detokenizer, then its stop strings.

    Args:
        tokenizer: Does the decoding.
        prompt_ids: The request's prompt.
        stop: Its stop strings.
    """

    def __init__(self, tokenizer: Decodes, *, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched

    def push(self, *tokens: int) -> str:
        """Takes tokens that belong to the text and returns new text.

        Several at once cost little more than one, and give the same text; but where a stop string is found among them, the ones
        behind it were taken as well.
        """
        return self._stop.push(self._detokenizer.push(*tokens))

    def finish(self) -> str:
        """Returns the rest of the text; call it once, when no token follows."""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string`` and is shorter than it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
