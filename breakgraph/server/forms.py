"""OpenAI's two forms of an answer: completions, and messages of a chat; whole, or as chunks of a stream."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs

from breakgraph.server.answers import Answer, Piece
from breakgraph.server.token_texts import TokenTexts
from breakgraph.serving.requests import FinishReason, TokenLogprobs

__all__ = ["ChatForm", "CompletionForm", "Form", "usage"]


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """The tokens of a request.

    Args:
        answers: One for each of its prompts, as far as they are.
    """
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in answers)},
    }


@attrs.define(eq=False)
class _Choice:
    """What was sent of an answer.

    Attributes:
        texts: Its text, in pieces.
        logprobs: Of its tokens.
        offsets: Characters before each of them.
        finish_reason: None until the end.
    """

    texts: list[str] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    offsets: list[int] = attrs.field(factory=list)
    finish_reason: FinishReason | None = None


class Form(abc.ABC):
    """Gives answers the form of one endpoint.

    Args:
        model: What clients call the model.
        tokens: The texts of tokens; None where no log-probabilities are wanted.
    """

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, *, model: str, tokens: TokenTexts | None) -> None:
        self._tokens = tokens
        self._head = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices: dict[int, _Choice] = {}

    def add(self, index: int, piece: Piece) -> None:
        """Takes a piece of the whole answer.

        Args:
            index: Of its prompt.
            piece: The next one.
        """
        choice = self._choice(index)
        choice.texts.append(piece.text)
        choice.logprobs += piece.logprobs
        choice.offsets += piece.offsets
        choice.finish_reason = piece.finish_reason

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed.

        Args:
            answers: At their end; all their pieces were added.
        """
        choices = [self._whole(index, choice) for index, choice in sorted(self._choices.items())]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(answers)}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a stream; None where there is nothing to say yet.

        Args:
            index: Of its prompt.
            piece: The next one.
        """
        if not (piece.text or piece.finish_reason or (self._tokens and piece.logprobs)):
            return None
        return self._frame([self._part(index, piece)])

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first piece."""
        return []

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The last chunk of a stream that includes its usage.

        Args:
            answers: At their end.
        """
        return {**self._frame([]), "usage": usage(answers)}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    @abc.abstractmethod
    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _part(self, index: int, piece: Piece) -> dict[str, Any]: ...


class CompletionForm(Form):
    """`/v1/completions`."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        told = self._logprobs(choice.logprobs, choice.offsets)
        return self._body(index, "".join(choice.texts), told, choice.finish_reason)

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._body(index, piece.text, self._logprobs(piece.logprobs, piece.offsets), piece.finish_reason)

    def _body(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if reason is None else reason.value,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]) -> dict[str, Any] | None:
        tokens = self._tokens
        if tokens is None:
            return None
        return {
            "tokens": [tokens.name(one.token_id) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [tokens.by_name({one.token_id: one.logprob, **dict(one.top)}) for one in logprobs],
            "text_offset": list(offsets),
        }


class ChatForm(Form):
    """`/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self) -> list[dict[str, Any]]:
        """The chunk that says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self._frame([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        reason = choice.finish_reason
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": None if reason is None else reason.value,
        }

    def _part(self, index: int, piece: Piece) -> dict[str, Any]:
        reason = piece.finish_reason
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text or piece.logprobs else {},
            "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
            "finish_reason": None if reason is None else reason.value,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        tokens = self._tokens
        if tokens is None:
            return None

        def told(token_id: int, logprob: float) -> dict[str, Any]:
            raw = tokens.raw(token_id)
            return {
                "token": tokens.text(token_id),
                "logprob": logprob,
                "bytes": None if raw is None else list(raw),
            }

        content = [
            told(one.token_id, one.logprob) | {"top_logprobs": [told(*pair) for pair in one.top]} for one in logprobs
        ]
        return {"content": content, "refusal": None}
