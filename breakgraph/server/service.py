"""Between HTTP and the engine's thread: admits prompts, hands out answers, and ends them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.loaded import LoadedModel
from breakgraph.server.answers import Answer
from breakgraph.server.errors import ApiError, api_error
from breakgraph.server.limits import Limits
from breakgraph.server.metrics import Metrics, snapshot
from breakgraph.server.tokenizing import Tokenizing
from breakgraph.serving.engine import Engine
from breakgraph.serving.engine_thread import EngineThread, Ticket
from breakgraph.serving.sampling_params import SamplingParams

__all__ = ["Service"]

_BODIES = 16  # of the largest size, read or made into tokens at a time
_FEW = 8  # answers whose every token is worth a piece
_PIECE_SECONDS = 0.0002  # for each answer, between two of its pieces: so much of the interpreter is the engine's


class Service:
    """Answers prompts from an event loop.

    Args:
        model: What the engine runs.
        engine: Captured. It belongs to the service from `start` to `stop`.
        name: What clients call the model.
        limits: Bounds.

    Attributes:
        model: As given, but for its source: messages call the model what clients do, and name no path.
        name: As given.
        limits: As given.
        tokenizing: The model's tokenizer.
        metrics: What `/metrics` shows.
        created: When the service was made, seconds since 1970.
    """

    def __init__(self, model: LoadedModel, *, engine: Engine, name: str, limits: Limits) -> None:
        self.model = attrs.evolve(model, source=name)
        self.name = name
        self.limits = limits
        self.tokenizing = Tokenizing(model.tokenizer)
        self.metrics = Metrics()
        self.created = int(time.time())
        self._engine = engine
        self._thread: EngineThread | None = None
        self._draining = False
        self._held: dict[object, int] = {}
        self._answers: dict[Answer, asyncio.TimerHandle] = {}

    async def start(self) -> None:
        """Starts the engine's thread; `stop` ends it. Once for each service.

        Raises:
            ConfigError: The model has no tokenizer.
        """
        require_tokenizer(self.model)
        if self._thread is not None:
            raise InternalError("a service was started twice.")
        self._thread = EngineThread(self._engine, post=asyncio.get_running_loop().call_soon_threadsafe)
        self._thread.start()

    async def stop(self) -> None:
        """Ends what still runs, and the thread."""
        self._draining = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        self.tokenizing.close()

    @property
    def room(self) -> int:
        """Most tokens of prompt and answer that one request can have."""
        return self._engine.longest_request

    @property
    def unfit(self) -> str | None:
        """Why no request is taken now; None where one is."""
        if self._thread is None or not self._thread.is_alive:
            failure = None if self._thread is None else self._thread.failure
            return "the engine has failed" if failure is not None else "the engine is not running"
        return "the server is shutting down" if self._draining else None

    def drain(self) -> None:
        """Takes no more requests, and ends those that still run when the time for that is over; called on the event loop."""
        if not self._draining:
            self._draining = True
            asyncio.get_running_loop().call_later(self.limits.drain_seconds, self.cut_off)

    def cut_off(self) -> None:
        """Ends every answer that still runs with an error; called on the event loop."""
        error = ApiError("The server is shutting down; the answer is not whole.", status=503, code="shutting_down")
        for answer in self._answers:
            answer.fail(error)

    @property
    def running(self) -> int:
        """Answers that wait or run."""
        return len(self._answers)

    @contextmanager
    def held(self, request_bytes: Callable[[], int]) -> Iterator[Callable[[], None]]:
        """Counts the bytes of a body while it is read and made into tokens.

        Args:
            request_bytes: How many there are by now.

        Returns:
            To be called after each part; it raises an `ApiError` (503) where all bodies together are too much.
        """
        mark = object()

        def note() -> None:
            self._held[mark] = request_bytes()
            if sum(self._held.values()) > _BODIES * self.limits.max_body_bytes:
                raise ApiError("Too many long bodies arrive at a time. Try again later.", status=503, code="queue_full")

        try:
            yield note
        finally:
            self._held.pop(mark, None)

    def admit(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, seconds: float, streamed: bool
    ) -> list[Answer]:
        """Hands prompts to the engine, all of them or none.

        Args:
            prompts: Token ids of each.
            params: For each of them.
            seconds: How long an answer may take from now on.
            streamed: Whether somebody looks at the answers before they are whole.

        Returns:
            Their answers. Each must be read to its end, or `release` must be called.

        Raises:
            ApiError: A prompt can never run (400), or the queue is full or the engine does not run (503).
        """
        reason, thread = self.unfit, self._thread
        if reason is not None or thread is None:
            raise ApiError(f"No request is taken: {reason}.", status=503, code="not_serving")
        most = self._engine.sizes.max_batch_size + self.limits.max_queue
        if len(prompts) > most:
            raise ApiError(
                f"The request has {len(prompts)} prompts; at most {most} wait or run at a time. Send several requests.",
                param="prompt",
                code="invalid_value",
            )
        if len(self._answers) + len(prompts) > most:
            raise ApiError(
                f"{len(self._answers)} prompts wait or run already; at most {most} are taken. Try again later.",
                status=503,
                code="queue_full",
            )
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                self._engine.check(prompt, params=wanted)
        except ConfigError as error:
            raise api_error(error) from None
        answers: list[Answer] = []
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                quiet = not streamed and not wanted.stop
                answers.append(self._submit(thread, prompt, wanted, seconds=seconds, quiet=quiet))
        except BaseException:
            self.release(answers)
            raise
        return answers

    def _submit(
        self, thread: EngineThread, prompt: Sequence[int], params: SamplingParams, *, seconds: float, quiet: bool
    ) -> Answer:
        ticket = Ticket(prompt_ids=prompt, params=params, deliver=_nobody)
        answer = Answer(
            ticket,
            text=self.tokenizing.text(prompt, stop=params.stop),
            cancel=thread.cancel,
            on_token=self.metrics.between_tokens,
            quiet=quiet,
            pause=self._pause,
        )
        ticket.deliver = answer.take
        self._answers[answer] = asyncio.get_running_loop().call_later(seconds, answer.fail, self.late())
        thread.submit(ticket)
        return answer

    def _pause(self) -> float:
        return 0.0 if self.running <= _FEW else self.running * _PIECE_SECONDS

    def late(self) -> ApiError:
        """What a client is told whose answer took too long."""
        seconds = self.limits.request_seconds
        return ApiError(f"The answer was not there within {seconds:g} s.", status=504, code="timeout")

    def release(self, answers: Sequence[Answer]) -> None:
        """Ends what of these still runs, and counts them.

        Args:
            answers: From `admit`.
        """
        for answer in answers:
            deadline = self._answers.pop(answer, None)
            if deadline is not None:
                deadline.cancel()
                answer.end()
                self.metrics.answered(answer)

    async def metrics_text(self) -> bytes:
        """Everything that `/metrics` shows.

        Raises:
            ApiError: The engine does not run.
        """
        if self._thread is None:
            raise ApiError("The engine is not running.", status=503, code="not_serving")
        try:
            return self.metrics.text(await asyncio.wrap_future(self._thread.call(snapshot)))
        except InternalError as error:
            raise ApiError(f"The engine does not run: {error.what}", status=503, code="not_serving") from None


def _nobody(update: object) -> None:
    raise InternalError("an update came before its answer was there.")


def require_tokenizer(model: LoadedModel) -> None:
    """Refuses a model that could answer with nothing that a client can read.

    Args:
        model: To be served.

    Raises:
        ConfigError: It has no tokenizer.
    """
    if model.tokenizer is None:
        raise ConfigError(
            f"{model.source} has no tokenizer.",
            why="Answers are texts here; every one would be empty.",
            fix="Put its tokenizer files (tokenizer.json, tokenizer_config.json) into the folder.",
        )
