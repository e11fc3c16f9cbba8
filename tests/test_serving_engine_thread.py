"""The engine in a thread: commands between steps, one delivery a step, and an end that leaves nobody waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from breakgraph.errors import ConfigError, InternalError
from breakgraph.serving import LLM, FinishReason, SamplingParams
from breakgraph.serving.engine import Engine
from breakgraph.serving.engine_thread import EngineThread, Ticket, Update
from tests.serving_reference import tiny_model
from tests.test_serving_llm import OPTIONS

PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """An engine without graphs: it is the thread that is tested."""
    made = LLM(tiny_model(), **{**OPTIONS, "graphs": False})
    made.start()
    return made


@pytest.fixture
def thread(llm: LLM) -> Iterator[EngineThread]:
    """A running one; updates are delivered where they are made."""
    made = EngineThread(llm.engine, post=lambda function: function())
    made.start()
    yield made
    made.stop()
    assert not made.is_alive
    assert llm.engine.free_blocks == llm.engine.usable_blocks


class Reader:
    """Collects the updates of one request."""

    def __init__(self, thread: EngineThread, prompt: list[int], params: SamplingParams = PARAMS) -> None:
        self.updates: list[Update] = []
        self.ended = threading.Event()
        self.ticket = Ticket(prompt_ids=prompt, params=params, deliver=self._take)
        thread.submit(self.ticket)

    def _take(self, update: Update) -> None:
        self.updates.append(update)
        if update.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        """Waits for the end and returns the tokens."""
        assert self.ended.wait(20)
        return [update.token_id for update in self.updates if update.token_id is not None]


def test_requests_of_several_threads_get_what_they_get_alone(llm: LLM) -> None:
    """Eight threads hand over requests at the same time; each gets all its tokens in order, and nobody another's."""
    prompts = [[1 + index, 7, 3] for index in range(8)]
    expected = [list(answer.token_ids) for answer in llm.generate(prompts, PARAMS)]
    thread = EngineThread(llm.engine, post=lambda function: function())
    thread.start()
    readers: dict[int, Reader] = {}
    threads = [
        threading.Thread(target=lambda index=index: readers.update({index: Reader(thread, prompts[index])}))
        for index in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [readers[index].tokens for index in range(8)] == expected
    thread.stop()


def test_one_call_a_step(llm: LLM) -> None:
    """Four requests in a batch are delivered in one call a step, not in one a token."""
    calls: list[None] = []

    def post(function: Callable[[], None]) -> None:
        calls.append(None)
        function()

    thread = EngineThread(llm.engine, post=post)
    thread._run_commands = lambda run=thread._run_commands: run() if hold.is_set() else None  # type: ignore[method-assign]
    hold = threading.Event()
    readers = [Reader(thread, [2, 3, index]) for index in range(4)]
    hold.set()
    thread.start()
    tokens = [reader.tokens for reader in readers]
    assert [len(one) for one in tokens] == [12] * 4
    assert len(calls) <= 14
    thread.stop()


def test_a_cancelled_request_gets_nothing_more(llm: LLM, thread: EngineThread) -> None:
    """Cancelled before it is there, while it runs, and after its end: no update follows, and its blocks come back."""
    running = Reader(thread, [4, 4], SamplingParams(max_tokens=40, ignore_eos=True))
    while not running.updates:
        time.sleep(0.001)
    thread.cancel(running.ticket)
    thread.call(lambda engine: None).result(10)
    count = len(running.updates)
    early: list[Reader] = []

    def come_and_go(engine: Engine) -> None:  # between two steps, so that no step can lie between them
        early.append(Reader(thread, [5]))
        thread.cancel(early[0].ticket)

    thread.call(come_and_go).result(10)
    finished = Reader(thread, [6])
    assert finished.tokens
    thread.cancel(finished.ticket)
    thread.call(lambda engine: None).result(10)
    assert len(running.updates) == count
    assert not running.ended.is_set()
    assert early[0].updates == []


def test_what_the_engine_refuses_ends_with_its_error(thread: EngineThread) -> None:
    """A prompt that never fits is an update with the ConfigError; the next one is answered."""
    refused = Reader(thread, [1] * 100)
    assert refused.tokens == []
    assert isinstance(refused.updates[0].error, ConfigError)
    assert Reader(thread, [1, 2]).tokens


def test_a_failing_step_ends_its_requests_only(llm: LLM, thread: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception itself comes with the update; a request that waits for its prefill meanwhile is answered."""
    error = RuntimeError("no luck")
    prepare = llm.engine.decode.prepare
    failures = iter([error])

    def fails(batch: Any) -> Any:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return prepare(batch)

    first = Reader(thread, [9, 9])
    monkeypatch.setattr(llm.engine.decode, "prepare", fails)
    second = Reader(thread, [8, 8])
    assert first.ended.wait(10)
    assert second.ended.wait(10)
    errors = [reader.updates[-1].error for reader in (first, second)]
    assert error in errors
    assert Reader(thread, [7]).tokens
    assert llm.statistics.failed_steps >= 1


def test_calls_run_between_steps_and_carry_errors(thread: EngineThread) -> None:
    """A call gets its result, or what it raised, also while requests run."""
    Reader(thread, [3])
    calls = [thread.call(lambda engine, n=n: (n, engine.load().usable_blocks)) for n in range(20)]
    wait(calls, timeout=10)
    assert [call.result(0)[0] for call in calls] == list(range(20))
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(10)


def test_stopping_ends_what_runs_and_refuses_what_comes(llm: LLM) -> None:
    """A request that runs, one that comes afterwards and a call all get an error: nobody waits for ever."""
    thread = EngineThread(llm.engine, post=lambda function: function())
    thread.start()
    running = Reader(thread, [1, 1], SamplingParams(max_tokens=40, ignore_eos=True))
    while not running.updates:
        time.sleep(0.001)
    thread.stop()
    late = Reader(thread, [2])
    for reader in (running, late):
        assert reader.ended.wait(10)
        assert reader.updates[-1].finish_reason is FinishReason.ERROR
        assert isinstance(reader.updates[-1].error, InternalError)
    with pytest.raises(InternalError, match="has ended"):
        thread.call(lambda engine: None).result(10)
    thread.stop()  # does nothing the second time
    assert llm.generate([1, 2], PARAMS)[0].token_ids  # the engine is the caller's again


def test_a_device_that_fails_for_good_ends_the_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device fails after a failed step, everybody is told, and the thread says why it ended."""
    gone = RuntimeError("the device is gone")

    def dies(*_: object) -> None:
        raise gone

    thread = EngineThread(llm.engine, post=lambda function: function())
    monkeypatch.setattr(llm.engine.prefill, "launch", dies)
    monkeypatch.setattr(llm.engine, "check_device", dies)
    thread.start()
    readers = [Reader(thread, [index]) for index in range(6)]
    assert all(reader.ended.wait(10) for reader in readers)
    assert thread.failure is gone
    assert not thread.is_alive
    late = Reader(thread, [1])
    assert late.ended.wait(10)
    monkeypatch.undo()
    llm.engine.reset()
