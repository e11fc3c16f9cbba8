"""What single tokens are called where log-probabilities name them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from breakgraph.serving.text import BROKEN

__all__ = ["TokenTexts"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Byte-level tokenizers write each byte as a character: printable ones as they are, the others from U+0100 on (GPT-2)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_of_character()


class TokenTexts:
    """Texts, names and bytes of tokens, each taken by itself.

    Args:
        tokenizer: Of transformers; no other thread may encode with it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """Its text behind others, special ones by their name; U+FFFD stands for bytes that are no character by themselves.

        Args:
            token_id: The token.
        """
        anchor, before = self._anchor
        return self._decode([*anchor, token_id])[len(before) :]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        """A token to stand before others, and its text: some tokenizers take the space off the first token of a text."""
        last = self._tokenizer("a", add_special_tokens=False).input_ids[-1:]
        return last, self._decode(last)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def raw(self, token_id: int) -> bytes | None:
        """Its bytes; None where they cannot be told: part of a character, from a tokenizer that does not show its bytes.

        Args:
            token_id: The token.
        """
        text = self.text(token_id)
        if BROKEN not in text:
            return text.encode()
        piece: str = self._tokenizer.convert_ids_to_tokens(token_id)
        if (found := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes([int(found[1], 16)])
        if all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        return None

    def name(self, token_id: int) -> str:
        r"""Its text, or ``bytes:\xe2\x82`` where it is no text: two of those would look alike.

        Args:
            token_id: The token.
        """
        text = self.text(token_id)
        if BROKEN not in text:
            return text
        raw = self.raw(token_id)
        return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def by_name(self, logprobs: Mapping[int, float]) -> dict[str, float]:
        """Log-probabilities by name; a second token of the same name is called by its id, since JSON has a name only once.

        Args:
            logprobs: By token.
        """
        made: dict[str, float] = {}
        for token_id, value in logprobs.items():
            name = self.name(token_id)
            made[f"token_id:{token_id}" if name in made else name] = value
        return made
