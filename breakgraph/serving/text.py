"""From tokens to text while they arrive: whole characters only, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["BROKEN", "Decodes", "Detokenizer", "OutputText", "StopStrings"]

BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokenizers with a prefix space (SentencePiece) strip it from the first token that they decode; behind a few
# prompt tokens it is kept. Five are enough to hold one that is not special.
_PROMPT_CONTEXT = 5
_SILENT = 16  # tokens without text, such as special ones: they would be decoded again with each that follows
_LONGEST_BROKEN = 3  # bytes of a character that lacks one


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
        context: list[
            int
        ] = []  # where the prompt ends inside a character, it could not be told from the output's first
        for count in (_PROMPT_CONTEXT, 2 * _PROMPT_CONTEXT, 4 * _PROMPT_CONTEXT):  # it may only begin inside one
            last = list(prompt_ids[-count:])
            if not self._decode(last).endswith(BROKEN):
                context = last
                break
        self._window = context
        self._done = len(context)
        self._given = 0  # characters of the text behind the context

    def push(self, *tokens: int) -> str:
        """Takes the next tokens and returns the text that is complete now; may be empty."""
        self._window.extend(tokens)
        text = self._new_text()
        broken = len(text) - len(text.rstrip(BROKEN))
        # Bytes that are no character stay so, however the text goes on, but for the last few. A tokenizer with fallback bytes
        # breaks a whole run of them while its last character is incomplete, those of the context as well.
        held = self._done + _LONGEST_BROKEN
        sure = len(text) - min(broken, held)
        new = text[self._given : sure]
        self._given = max(self._given, sure)
        if (not broken and text) or (not text and len(self._window) > self._done + _SILENT):
            self._forget()
        elif broken > held + 2 * _PROMPT_CONTEXT:
            self._shorten(held)
        return new

    def flush(self) -> str:
        """Returns what is still held, broken characters as U+FFFD; call it once, at the end."""
        text = self._new_text()[self._given :]
        self._forget()
        return text

    def _shorten(self, held: int) -> None:
        """Forgets tokens that stay broken, all but those of the characters held: the window would grow with each of them."""
        self._done = min(_PROMPT_CONTEXT, self._done)
        self._window = self._window[-(self._done + held) :]
        self._given = max(len(self._new_text()) - held, 0)

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._done])
        return self._decode(self._window)[len(before) :]

    def _forget(self) -> None:
        # The tokens of the text just given out stay as context of the next.
        self._window = self._window[self._done :]
        self._done, self._given = len(self._window), 0

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

    Attributes:
        position: Whole characters so far, those that are held back included.
    """

    def __init__(self, tokenizer: Decodes, *, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)
        self._stop = StopStrings(stop)
        self.position = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched

    def push(self, *tokens: int) -> str:
        """Takes tokens that belong to the text and returns new text.

        Several at once cost little more than one, and give the same text; but where a stop string is found among them, the ones
        behind it were taken as well.
        """
        text = self._detokenizer.push(*tokens)
        self.position += len(text)
        return self._stop.push(text)

    def finish(self) -> str:
        """Returns the rest of the text; call it once, when no token follows."""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string`` and is shorter than it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
