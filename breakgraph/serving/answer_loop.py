"""The answers that are being made: handed to the engine, fed with the tokens of its steps, and ended whatever happens."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import attrs

from breakgraph.errors import InternalError
from breakgraph.serving.engine import Engine
from breakgraph.serving.in_flight import Token
from breakgraph.serving.requests import Chunk, Completion, FinishReason, Request, TokenLogprobs
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.text import BROKEN, OutputText

__all__ = ["Answer", "AnswerLoop"]

_LOG = logging.getLogger(__name__)


@attrs.define(eq=False)
class Answer:
    """A request and what of its answer has not been handed out.

    Attributes:
        request: The request.
        text: Its text; None for a model without tokenizer.
        whole: Whether its text is made at the end, which is cheaper than for each token; stop strings must be looked for in each.
        chunks: Pieces that wait for the caller; of a whole one, a single piece at its end.
        logprobs: Of a whole one, those of its tokens so far.
    """

    request: Request
    text: OutputText | None
    whole: bool
    chunks: deque[Chunk] = attrs.field(factory=deque)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)

    def completion(self) -> Completion:
        """The whole answer."""
        chunks, request = self.chunks, self.request
        if request.finish_reason is None:
            raise InternalError("a request left the engine without a reason.")
        logprobs = tuple(one for chunk in chunks for one in chunk.logprobs or ())
        return Completion(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
            finish_reason=request.finish_reason,
            prompt_token_ids=request.prompt_ids,
            logprobs=logprobs if request.params.logprobs is not None else None,
            cached_tokens=request.cached_tokens,
        )


_BEGUN = Chunk(text="", token_ids=())


class AnswerLoop:
    """Makes answers, in the thread of whoever waits for one.

    Args:
        engine: Captured; others may use it as well, by turns.
        new_text: Begins the text behind a prompt; None where the model has no tokenizer.
    """

    def __init__(
        self, engine: Engine, *, new_text: Callable[[Sequence[int], SamplingParams], OutputText | None]
    ) -> None:
        self._engine = engine
        self._new_text = new_text
        self._answers: dict[Request, Answer] = {}
        self._in_step = False
        self._late: list[Answer] = []

    def submit(self, ids: Sequence[int], *, params: SamplingParams, whole: bool) -> Answer:
        """Hands a prompt to the engine.

        Args:
            ids: Its tokens.
            params: How to go on from it.
            whole: Whether nobody looks at the answer before it is whole.

        Returns:
            Its answer, for `wait` or `pieces`; `abandon` it in any case.

        Raises:
            ConfigError: It could never run.
        """
        text = self._new_text(ids, params)  # first: where it raises, nothing has begun
        request = self._engine.add(ids, params=params)
        answer = self._answers[request] = Answer(request, text, whole)
        return answer

    def wait(self, answers: Sequence[Answer]) -> None:
        """Makes steps until all of these are whole.

        Args:
            answers: From `submit`.

        Raises:
            Exception: What ended one of them, unchanged.
        """
        while any(answer.request in self._answers for answer in answers):
            if self._pump():
                _raise_error(answers)

    def pieces(self, answer: Answer) -> Iterator[Chunk]:
        """The pieces of an answer as they are read; what is not read is ended when the iterator is closed or dropped.

        Args:
            answer: From `submit`, not whole.
        """
        made = self._pieces(answer)
        next(made)  # a generator that has not begun is not ended by being closed
        return made

    def _pieces(self, answer: Answer) -> Iterator[Chunk]:
        try:
            yield _BEGUN
            while answer.chunks or answer.request in self._answers:
                while answer.chunks:
                    yield answer.chunks.popleft()
                if answer.request in self._answers:
                    self._pump()
            _raise_error([answer])
        finally:
            self.abandon([answer])

    def _pump(self) -> bool:
        """Makes a step and takes its tokens. True: it raised, and answers have ended by that."""
        engine = self._engine
        if not engine.has_work:
            if self._close_finished():  # the engine was reset by somebody
                return True
            raise InternalError("answers are waited for, and the engine has nothing to do.")
        self._in_step = True
        try:
            return self._step(engine)
        finally:
            self._in_step = False
            late, self._late = self._late, []
            if late:
                self.abandon(late)

    def _step(self, engine: Engine) -> bool:
        raised = False
        try:
            tokens = engine.step()
        except Exception as error:
            closed = self._close_finished()
            if not closed:  # it hit requests of the engine's own callers, who look at it, or some that had ended before
                _LOG.error("a step failed that no answer was waited for in: %s", error, exc_info=error)
            return closed
        except BaseException:
            self._end_all()
            raise
        try:
            for token in tokens:
                raised |= self._take_or_fail(token)
        except BaseException:
            self._end_all()
            raise
        return raised

    def _end_all(self) -> None:
        """After an interrupt: a step may be half launched, tokens half handed out; nothing that runs can be trusted to go on."""
        self._engine.reset()
        for answer in tuple(self._answers.values()):
            self._close(answer, token_ids=(), reason=FinishReason.ABORT)

    def _close_finished(self) -> bool:
        """Closes answers that the engine ended without a token: whoever reads one gets its exception. False: there is none."""
        ended = (FinishReason.ERROR, FinishReason.ABORT)
        found = [a for a in self._answers.values() if a.request.finish_reason in ended]
        for answer in found:
            assert answer.request.finish_reason is not None
            self._close(answer, token_ids=(), reason=answer.request.finish_reason)
        return bool(found)

    def _take_or_fail(self, token: Token) -> bool:
        """Takes a token; where that raises, as a tokenizer may, the answer ends with it, and the others do not notice."""
        try:
            self._take(token)
        except Exception as error:
            request = token.request
            self._engine.finish(request, reason=FinishReason.ERROR, error=error)
            request.finish_reason, request.error = FinishReason.ERROR, error
            self._answers.pop(request, None)
            return True
        return False

    def _take(self, token: Token) -> None:
        request = token.request
        answer = self._answers.get(request)
        if answer is None:  # added to the engine directly: its caller finds the token in output_ids
            return
        if answer.whole:
            if token.logprobs is not None:
                answer.logprobs.append(token.logprobs)
            if request.finish_reason is not None:
                self._close(answer, token_ids=(), reason=request.finish_reason)
            return
        text = ""
        if answer.text is not None and token.token_id not in request.stop_ids:
            text = answer.text.push(token.token_id)
            if answer.text.stopped:
                self._engine.finish(request, reason=FinishReason.STOP)
                request.finish_reason = FinishReason.STOP  # also where the same token was the last one allowed
        logprobs = None if token.logprobs is None else (token.logprobs,)
        if request.finish_reason is None:
            answer.chunks.append(Chunk(text=text, token_ids=(token.token_id,), logprobs=logprobs))
        else:
            self._close(answer, token_ids=(token.token_id,), reason=request.finish_reason, text=text, logprobs=logprobs)

    def _close(
        self,
        answer: Answer,
        *,
        token_ids: tuple[int, ...],
        reason: FinishReason,
        text: str = "",
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> None:
        del self._answers[answer.request]  # first: what follows may raise
        answer.request.finish_reason = reason
        if reason is FinishReason.ERROR:
            return  # whoever reads it gets the exception
        if answer.whole:
            token_ids, logprobs = tuple(answer.request.output_ids), tuple(answer.logprobs) or None
            text = self._whole_text(answer, token_ids)
        elif answer.text is not None:
            text += answer.text.finish()
            if answer.text.stopped and reason is FinishReason.LENGTH:
                answer.request.finish_reason = reason = FinishReason.STOP  # in what was held until the end
        answer.chunks.append(Chunk(text=text, token_ids=token_ids, finish_reason=reason, logprobs=logprobs))

    def _whole_text(self, answer: Answer, token_ids: tuple[int, ...]) -> str:
        if answer.text is None:
            return ""
        ended = bool(token_ids) and token_ids[-1] in answer.request.stop_ids
        spoken = token_ids[:-1] if ended else token_ids
        text = answer.text.push(*spoken) + answer.text.finish()
        if BROKEN not in text:
            return text
        # A tokenizer with fallback bytes breaks a whole run of them for one that is no character: as a stream it does not.
        again = self._new_text(answer.request.prompt_ids, answer.request.params)
        assert again is not None
        return "".join(again.push(token) for token in spoken) + again.finish()

    def abandon(self, answers: Sequence[Answer]) -> None:
        """Ends what of these is still running; where nothing else runs, reads what is in flight and gives all back."""
        engine = self._engine
        if self._in_step:  # an iterator that is collected in the middle of a step
            self._late += answers
            return
        for answer in answers:
            if self._answers.pop(answer.request, None) is not None:
                engine.finish(answer.request, reason=FinishReason.ABORT)
        try:
            while not self._answers and engine.has_work:
                try:
                    engine.step()
                except Exception as error:  # of requests that nobody here waits for; the step has ended them
                    _LOG.error("a step failed that no answer was waited for in: %s", error, exc_info=error)
        except BaseException:
            self._end_all()
            raise


def _raise_error(answers: Sequence[Answer]) -> None:
    for answer in answers:
        if answer.request.error is not None:
            raise answer.request.error
