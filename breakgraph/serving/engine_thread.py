"""The engine in a thread of its own, for callers that must not wait: an event loop, for example.

Only that thread touches the engine. Others leave commands, which it carries out between two steps, and get what a step made in
one call a step, however many requests it had: `post` is the event loop's `call_soon_threadsafe`. A queue for each token was
rejected: at 128 requests it is 128 wake-ups a step, and each takes the interpreter's lock away from the engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import attrs

from breakgraph.errors import InternalError
from breakgraph.serving.engine import Engine, Token
from breakgraph.serving.requests import FinishReason, Request, TokenLogprobs
from breakgraph.serving.sampling_params import SamplingParams

__all__ = ["EngineThread", "Ticket", "Update"]

_LOG = logging.getLogger(__name__)

R = TypeVar("R")


@attrs.frozen(kw_only=True)
class Update:
    """What a step did for a request.

    Attributes:
        token_id: The new token; None where the request ended without one.
        logprobs: Of the token, where they were asked for.
        finish_reason: Set in the last update.
        error: What ended the request, with `FinishReason.ERROR`.
        at: When the host had the token, `time.perf_counter()`.
        cached_tokens: Tokens of the prompt that came from the cache.
        queued: Seconds until its first step was launched.
    """

    token_id: int | None
    at: float
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    cached_tokens: int = 0
    queued: float = 0.0


@attrs.define(eq=False, kw_only=True)
class Ticket:
    """A request, as the thread that made it sees it.

    Attributes:
        prompt_ids: The prompt's tokens.
        params: How to go on from it.
        deliver: Called with each update, where `post` runs things.
        submitted: When it was handed over, `time.perf_counter()`.
        request: Inside the engine; None until it is there. Only the engine's thread looks at it.
        cancelled: Whether the caller gave up. Only the engine's thread looks at it.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    deliver: Callable[[Update], None]
    submitted: float = attrs.field(factory=time.perf_counter)
    request: Request | None = None
    cancelled: bool = False


class EngineThread:
    """Runs an engine until it is stopped.

    Args:
        engine: It belongs to the thread from `start` to `stop`: nobody else may call it, `check` excepted.
        post: Runs a function in the callers' thread, soon, and returns at once.

    Attributes:
        failure: What ended the thread, where something did that no request is to blame for.
    """

    def __init__(self, engine: Engine, *, post: Callable[[Callable[[], None]], object]) -> None:
        self._engine = engine
        self._post = post
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = self._ended = False
        self._tickets: dict[Request, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="breakgraph-engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every request that is left, then the thread, and waits for it. The engine is the caller's again."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
            never = self._thread.ident is None
            self._ended |= never
        if never:
            self._run_commands()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be answered."""
        return self._thread.is_alive() and self.failure is None

    def submit(self, ticket: Ticket) -> None:
        """Hands a request over; a request that `Engine.check` refuses ends with that error.

        Args:
            ticket: A new one.
        """
        self._command(lambda: self._add(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, whatever it is doing; its blocks are free after the step in flight. No update follows.

        Args:
            ticket: One that was submitted; one that has ended already is left alone.
        """
        self._command(lambda: self._cancel(ticket))

    def call(self, function: Callable[[Engine], R]) -> Future[R]:
        """Runs a function between two steps.

        Args:
            function: Called with the engine; it must not keep it.

        Returns:
            Its result, when it is there; an `InternalError` where the thread has ended.
        """
        future: Future[R] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self._require_engine()
                future.set_result(function(self._engine))
            except BaseException as error:
                future.set_exception(error)

        self._command(command)
        return future

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            if not self._ended:
                self._commands.append(command)
                self._wake.notify()
                return
        command()  # nobody else would, and it finds that the engine is gone

    # All below runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._work():
                pass
        except BaseException as error:
            self.failure = error
            _LOG.critical("the engine's thread ends: %s: %s", type(error).__name__, error, exc_info=error)
            self._close_all(error)
            with contextlib.suppress(Exception):  # it waits for the device, which may be what failed
                self._engine.reset()
        finally:
            with self._wake:
                self._ended = True
            self._run_commands()  # what came since: it finds that the engine is gone

    def _work(self) -> bool:
        """One turn: commands, then a step. False at the end."""
        engine = self._engine
        with self._wake:
            while not (self._commands or self._stopping or engine.has_work):
                self._wake.wait()
        self._run_commands()
        if self._stopping:
            self._fail(InternalError("the engine was stopped."))
            engine.reset()
            return False
        if engine.has_work:
            self._step()
        return True

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _step(self) -> None:
        engine = self._engine
        try:
            tokens = engine.step()
        except Exception as error:
            # The engine has ended the requests that it hit, with their error; the others go on.
            _LOG.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._deliver_failed()
            engine.check_device()  # an error that has come to stay ends the thread
            return
        if tokens:
            self._deliver(tokens)

    def _deliver(self, tokens: Sequence[Token]) -> None:
        now = time.perf_counter()
        updates = []
        for token in tokens:
            request = token.request
            ended = request.finish_reason is not None
            ticket = self._tickets.pop(request, None) if ended else self._tickets.get(request)
            if ticket is not None:
                updates.append((ticket, _update(ticket, request, at=now, token=token)))
        self._hand_over(updates)

    def _deliver_failed(self) -> None:
        now = time.perf_counter()
        failed = [request for request in self._tickets if request.finish_reason is FinishReason.ERROR]
        tickets = [(self._tickets.pop(request), request) for request in failed]
        self._hand_over([(ticket, _update(ticket, request, at=now)) for ticket, request in tickets])

    def _hand_over(self, updates: Sequence[tuple[Ticket, Update]]) -> None:
        def deliver() -> None:
            for ticket, update in updates:
                try:
                    ticket.deliver(update)
                except Exception:
                    _LOG.exception("an update could not be delivered; the others are")

        if not updates:
            return
        try:
            self._post(deliver)
        except Exception:  # such as an event loop that is closed: nobody is there any more
            _LOG.exception("%d updates could not be handed over", len(updates))

    def _add(self, ticket: Ticket) -> None:
        if ticket.cancelled:
            return
        try:
            self._require_engine()
            ticket.request = self._engine.add(ticket.prompt_ids, params=ticket.params)
        except Exception as error:
            update = Update(token_id=None, at=time.perf_counter(), finish_reason=FinishReason.ERROR, error=error)
            self._hand_over([(ticket, update)])
            return
        self._tickets[ticket.request] = ticket

    def _require_engine(self) -> None:
        if self._stopping or self.failure is not None:
            raise InternalError("the engine's thread has ended.")

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        request = ticket.request
        if request is not None and self._tickets.pop(request, None) is not None:
            self._engine.finish(request, reason=FinishReason.ABORT)

    def _fail(self, error: BaseException) -> None:
        for request in self._tickets:
            self._engine.finish(request, reason=FinishReason.ERROR, error=error)
        self._deliver_failed()

    def _close_all(self, error: BaseException) -> None:
        """Tells all callers, without touching the engine."""
        tickets, self._tickets = list(self._tickets.values()), {}
        told = error if isinstance(error, Exception) else InternalError(f"{type(error).__name__}: {error}")
        update = Update(token_id=None, at=time.perf_counter(), finish_reason=FinishReason.ERROR, error=told)
        self._hand_over([(ticket, update) for ticket in tickets])


def _update(ticket: Ticket, request: Request, *, at: float, token: Token | None = None) -> Update:
    return Update(
        token_id=None if token is None else token.token_id,
        at=at,
        logprobs=None if token is None else token.logprobs,
        finish_reason=request.finish_reason,
        error=request.error,
        cached_tokens=request.cached_tokens,
        queued=0.0 if request.started is None else max(request.started - ticket.submitted, 0.0),
    )
