"""Text that arrives token by token: whole characters, kept spaces, nothing past a stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from breakgraph.serving.text import Detokenizer, OutputText, StopStrings


def _byte_level() -> Any:
    """One token per byte, as the byte-level BPE of SmolLM2, Llama 3 and Qwen without merges, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _sentence_piece() -> Any:
    """Word pieces behind a prefix space, bytes as fallback, as Llama 2 and Mistral."""
    words = ["\u2581the", "\u2581cat", "s", "\u2581sat", "\u2581"]
    vocabulary = {word: i for i, word in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = _byte_level()
PIECES = _sentence_piece()


def _pieces(tokenizer: Any, tokens: list[int], *, prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=8))
def test_pieces_join_to_the_text_and_hold_whole_characters(text: str, prompt: str) -> None:
    """Any text, one byte per token: no piece has a broken character, and joined they are the text."""
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    tokens = BYTES.encode(text, add_special_tokens=False)
    pieces = _pieces(BYTES, tokens, prompt=BYTES.encode(prompt, add_special_tokens=False))
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_give_the_text_of_decoding_them_at_once(tokens: list[int]) -> None:
    """Bytes that are no UTF-8 come out as U+FFFD exactly where decoding everything at once has them."""
    assert "".join(_pieces(BYTES, tokens, prompt=[])) == BYTES.decode(tokens)


def test_a_character_split_over_tokens_is_held_until_complete() -> None:
    """The four bytes of an emoji give nothing, nothing, nothing, then the emoji."""
    tokens = BYTES.encode("a\N{GRINNING FACE}b", add_special_tokens=False)
    assert _pieces(BYTES, tokens, prompt=[]) == ["a", "", "", "", "\N{GRINNING FACE}", "b", ""]


def test_an_unfinished_character_is_shown_as_broken_at_the_end_only() -> None:
    """The output ends inside a character: one U+FFFD, with the last piece."""
    tokens = BYTES.encode("x\N{EURO SIGN}", add_special_tokens=False)[:-1]
    assert _pieces(BYTES, tokens, prompt=[]) == ["x", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_special_tokens_are_left_out() -> None:
    """A special token adds no text and disturbs none."""
    end = BYTES.convert_tokens_to_ids("<end>")
    tokens = BYTES.encode("ab", add_special_tokens=False)
    assert "".join(_pieces(BYTES, [tokens[0], end, tokens[1], end], prompt=[end])) == "ab"


def test_the_leading_space_of_a_sentence_piece_is_kept() -> None:
    """Behind a prompt the first word keeps its space, though the tokenizer strips it when it decodes it alone."""
    the, cat, plural, sat = PIECES.convert_tokens_to_ids(["\u2581the", "\u2581cat", "s", "\u2581sat"])
    assert PIECES.decode([cat]) == "cat"
    assert _pieces(PIECES, [cat, plural, sat], prompt=[the]) == [" cat", "s", " sat", ""]


def test_fallback_bytes_of_neighbouring_characters() -> None:
    """Two three-byte characters in fallback bytes: a tokenizer that breaks the whole run while it is incomplete."""
    tokens = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\u4f60\u597d".encode()]
    assert _pieces(PIECES, tokens, prompt=[]) == ["", "", "\u4f60", "", "", "\u597d", ""]


def test_a_prompt_that_ends_inside_a_character_does_not_disturb_the_output() -> None:
    """The prompt's last token is half a character: the output's own text comes out whole."""
    half = BYTES.encode("\N{EURO SIGN}", add_special_tokens=False)[:1]
    assert "".join(_pieces(BYTES, BYTES.encode("ok", add_special_tokens=False), prompt=half)) == "ok"


@given(data=st.data())
def test_stop_strings_cut_at_the_first_and_hold_back_no_more_than_needed(data: st.DataObject) -> None:
    """For any way a text is cut into pieces, what comes out ends at the first stop string.

    At no time is a part of one already out, and no text is held back that could not begin one.
    """
    letters = st.text(alphabet="ab", min_size=1, max_size=4)
    stops = data.draw(st.lists(letters, max_size=3))
    pieces = data.draw(st.lists(st.text(alphabet="abc", max_size=4), max_size=12))
    text = "".join(pieces)
    finder = StopStrings(stops)
    out = ""
    for index, piece in enumerate(pieces):
        out += finder.push(piece)
        so_far = "".join(pieces[: index + 1])
        found = [so_far.find(stop) for stop in stops if stop in so_far]
        if finder.matched:
            assert out == so_far[: min(found)]
            assert finder.flush() == ""
            return
        assert not found
        held = so_far[len(out) :]
        assert so_far.startswith(out)
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(so_far.endswith(stop[:n]) for stop in stops for n in range(len(held) + 1, len(stop)))
    assert out + finder.flush() == text


@pytest.mark.parametrize(("stop", "expected"), [((), "one. Two. "), (("Two",), "one. "), ((". ", "ne"), "o")])
def test_output_text_joins_both(stop: tuple[str, ...], expected: str) -> None:
    """Tokens in, text before the stop string out; what was held back follows at the end when nothing stopped it."""
    output = OutputText(BYTES, prompt_ids=[], stop=stop)
    text = ""
    for token in BYTES.encode("one. Two. ", add_special_tokens=False):
        text += output.push(token)
        if output.stopped:
            break
    assert text + output.finish() == expected
    assert output.stopped == bool(stop)
