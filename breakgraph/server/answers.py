"""The answer to one prompt while it grows, on the event loop's side: updates of the engine in, pieces of text out.

Text is made here and not in the engine's thread: at 128 requests it would take longer than a step. A reader that is slower than
the engine finds several tokens at once and gets one piece for them. Where many read, each waits a little after a piece: the event
loop shares the interpreter with the engine, and a piece costs it as much whether it has one token or ten.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing

import attrs

from breakgraph.errors import InternalError
from breakgraph.serving.engine_thread import Ticket, Update
from breakgraph.serving.requests import FinishReason, TokenLogprobs
from breakgraph.serving.text import OutputText

__all__ = ["Answer", "Piece", "merged"]


@attrs.frozen(kw_only=True)
class Piece:
    """Part of an answer; the texts of all pieces joined are its text.

    Attributes:
        text: New text; empty while a character or a possible stop string is still incomplete.
        token_ids: The tokens since the last piece.
        logprobs: One for each token, where they were asked for.
        offsets: Of those tokens, the characters of the answer's text before them.
        finish_reason: None until the last piece.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@attrs.define(eq=False)
class Times:
    """When what happened, `time.perf_counter()`.

    Attributes:
        submitted: Handed to the engine.
        queued: Seconds until its first step.
        first: First token; None before it.
        last: Newest token; None before the first.
    """

    submitted: float
    queued: float = 0.0
    first: float | None = None
    last: float | None = None


class Answer:
    """One prompt's answer.

    Args:
        ticket: The request; its `deliver` is `take`.
        text: Makes text of tokens; None makes none.
        cancel: Ends the request in the engine.
        on_token: Called with seconds since the token before, for each token but the first.
        quiet: Whether nobody looks at it before its end: then nothing wakes up for its tokens.
        pause: How long a reader lets tokens gather after each piece, seconds.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of them, those that came from the cache.
        completion_tokens: Tokens of the answer so far.
        times: For the metrics.
    """

    def __init__(
        self,
        ticket: Ticket,
        *,
        text: OutputText | None,
        cancel: Callable[[Ticket], None],
        on_token: Callable[[float], None],
        quiet: bool,
        pause: Callable[[], float],
    ) -> None:
        self._ticket = ticket
        self._text = text
        self._cancel = cancel
        self._on_token = on_token
        self._quiet = quiet
        self._pause = pause
        self._updates: deque[Update] = deque()
        self._arrived = asyncio.Event()
        self._ended = False
        self.prompt_tokens = len(ticket.prompt_ids)
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.times = Times(ticket.submitted)

    def take(self, update: Update) -> None:
        """Notes what the engine made; called on the event loop.

        Args:
            update: The next one.
        """
        self._updates.append(update)
        if not self._quiet or update.finish_reason is not None:
            self._arrived.set()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer, piece by piece; the last has a finish reason. Closing the iterator early ends the request.

        Raises:
            BaseException: What ended the request in the engine, unchanged.
        """
        try:
            while not self._ended:
                await self._arrived.wait()
                self._arrived.clear()
                piece = self._piece()
                self._ended = piece.finish_reason is not None
                yield piece
                if not self._ended and (seconds := self._pause()):
                    await asyncio.sleep(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Ends the request where it has not ended; nothing comes of it any more."""
        if not self._ended:
            self._ended = True
            self._cancel(self._ticket)

    def fail(self, error: BaseException) -> None:
        """Ends the request; whoever reads the pieces gets the error.

        Args:
            error: Why.
        """
        self._cancel(self._ticket)
        self.take(Update(token_id=None, at=time.perf_counter(), finish_reason=FinishReason.ERROR, error=error))

    def _piece(self) -> Piece:
        texts: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        offsets: list[int] = []
        reason: FinishReason | None = None
        while self._updates and reason is None:
            update = self._updates.popleft()
            if update.error is not None:
                if tokens:  # what was made before comes first
                    self._updates.appendleft(update)
                    self._arrived.set()
                    break
                self._ended = True
                raise update.error
            reason = update.finish_reason
            if update.token_id is None:
                continue
            self._note(update)
            tokens.append(update.token_id)
            if update.logprobs is not None:
                logprobs.append(update.logprobs)
                offsets.append(0 if self._text is None else self._text.position)
            if self._text is None or (reason is FinishReason.STOP):
                continue  # a stop token is no part of the text
            texts.append(self._text.push(update.token_id))
            if self._text.stopped:
                if reason is None:
                    self._cancel(self._ticket)
                reason = FinishReason.STOP
        if reason is not None and self._text is not None:
            texts.append(self._text.finish())
            if self._text.stopped:  # in what was held until the end
                reason = FinishReason.STOP
        return Piece(
            text="".join(texts),
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            offsets=tuple(offsets),
            finish_reason=reason,
        )

    def _note(self, update: Update) -> None:
        times = self.times
        if times.last is None:
            times.first, times.queued = update.at, update.queued
            self.cached_tokens = update.cached_tokens
        else:
            self._on_token(update.at - times.last)
        times.last = update.at
        self.completion_tokens += 1


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with the number of its answer.

    One piece of each answer waits at most: while the reader is busy, the next ones grow.

    Args:
        answers: At least one.
    """
    if len(answers) == 1:  # by far the commonest case, and each piece would change hands twice
        try:
            async with aclosing(answers[0].pieces()) as pieces:
                async for one in pieces:
                    yield 0, one
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise _wrapped(error) from error
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue(1)

    async def pump(index: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                await queue.put((index, piece))
        except Exception as error:
            await queue.put((index, error))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # such as a panic in the tokenizer: whoever reads must not wait for ever
            await queue.put((index, _wrapped(error)))

    tasks = [asyncio.create_task(pump(index, answer)) for index, answer in enumerate(answers)]
    left = len(answers)
    try:
        while left:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece.finish_reason is not None
            yield index, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _wrapped(error: BaseException) -> Exception:
    return InternalError(f"{type(error).__name__}: {error}")
