"""What happens to answers at the edges: interrupts, iterators that are not read, steps that raise, text that breaks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.serving import LLM, FinishReason, SamplingParams
from breakgraph.serving.device_state import PendingTokens
from breakgraph.serving.engine_thread import EngineThread, Ticket, Update
from breakgraph.serving.kv_cache import BlockAllocator
from breakgraph.serving.prefix_cache import PrefixCache
from breakgraph.serving.scheduler import Scheduler
from breakgraph.serving.text import Detokenizer, OutputText
from tests.serving_reference import greedy_reference, tiny_model
from tests.test_serving_llm import OPTIONS
from tests.test_serving_text import BYTES, PIECES

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    """A fresh engine without graphs; whatever a test does to it, all blocks come back and it answers again."""
    made = LLM(tiny_model(), **{**OPTIONS, "graphs": False})
    made.start()
    yield made
    while made.engine.has_work:
        made.engine.step()
    assert made.engine.free_blocks == made.engine.usable_blocks
    assert made.engine.load().running == 0
    reference = greedy_reference(made.model, [5, 9, 2], max_tokens=6)
    assert reference.agrees(made.generate([5, 9, 2], SamplingParams(max_tokens=6))[0].token_ids)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockAllocator, "allocate"),
        (BlockAllocator, "free"),
        (BlockAllocator, "hold"),
        (PrefixCache, "admit"),
        (PrefixCache, "publish"),
        (PrefixCache, "release"),
        (Scheduler, "schedule"),
        (Scheduler, "release"),
        (Scheduler, "finish"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("after", [True, False])
def test_an_interrupt_anywhere_leaves_a_usable_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    """Ctrl-C before or behind any change of blocks and rows reaches the caller as it is; nothing is lost, however often."""
    real = getattr(owner, name)
    for at in (1, 3, 6):
        calls = iter(range(10_000))

        def interrupted(self: Any, *args: Any, at: int = at, calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            here = next(calls) == at
            if here and not after:
                raise KeyboardInterrupt
            result = real(self, *args, **kwargs)
            if here:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, name, interrupted)
            for _ in range(30):
                llm.generate([[1, 2, 3, 4, 5], [7] * 9, [1, 2, 3, 4, 6]], SamplingParams(max_tokens=12))
        assert llm.engine.free_blocks == llm.engine.usable_blocks


def test_a_stream_that_was_not_read_ends_when_it_is_closed_or_dropped(llm: LLM) -> None:
    """Closed before its first piece, or dropped without a look: nothing waits or runs for it any more."""
    llm.stream([1, 2], LONG).close()  # type: ignore[attr-defined]
    for _ in range(5):
        llm.stream([1, 2], LONG)
    gc.collect()
    load = llm.engine.load()
    assert (load.waiting, load.running) == (0, 0)


def test_a_stream_raises_what_ended_it_whoever_made_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step fails while another answer is read: a loop over the stream does not take it for a whole answer."""
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    launch = llm.engine.decode.launch

    def fails(step: Any) -> Any:
        monkeypatch.setattr(llm.engine.decode, "launch", launch)
        raise RuntimeError("no luck")

    monkeypatch.setattr(llm.engine.decode, "launch", fails)
    with pytest.raises(RuntimeError, match="no luck"):
        llm.generate([4, 4], SamplingParams(max_tokens=4))
    with pytest.raises(RuntimeError, match="no luck"):
        list(stream)


def test_an_answer_that_had_ended_is_no_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind its stop token raises: the answer is whole, and says stop."""
    tokens = llm.generate([1, 2, 3], SamplingParams(max_tokens=8))[0].token_ids
    launch, steps = llm.engine.decode.launch, iter(range(100))

    def fails(step: Any) -> Any:
        if next(steps) == tokens.index(tokens[4]):
            raise RuntimeError("a step too far")
        return launch(step)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.decode, "launch", fails)
        (answer,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=30, stop_token_ids=[tokens[4]]))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == tokens[: tokens.index(tokens[4]) + 1]


def test_the_exception_of_a_launch_is_seen_though_the_step_before_fails_too(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A break raises, and then the tokens in flight cannot be read: the first of the two reaches the caller, with a note."""
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)

    def fails(step: Any) -> Any:
        raise RuntimeError("the break is broken")

    def gone(self: PendingTokens) -> list[int]:
        raise OSError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.decode, "launch", fails)
        patched.setattr(PendingTokens, "wait", gone)
        with pytest.raises(RuntimeError, match="the break is broken") as raised:
            list(stream)
    assert any("the device is gone" in note for note in raised.value.__notes__)


def test_a_foreign_failure_is_not_raised_by_an_answer_that_is_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's own request fails while `generate` cleans up: its answers are returned, the request has the error."""
    launch = llm.engine.decode.launch
    own = llm.engine.add([4, 4, 4], params=LONG)

    def fails(step: Any) -> Any:
        if len(step.requests) == 1:
            raise RuntimeError("not yours")
        return launch(step)

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.decode, "launch", fails)
        (answer,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
    assert len(answer.token_ids) == 4
    assert str(own.error) == "not yours"


def test_a_text_that_cannot_be_begun_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer raises before the request is there: the engine never hears of it."""

    def breaks(*_: object) -> None:
        raise ValueError("no text")

    with monkeypatch.context() as patched, pytest.raises(ValueError, match="no text"):
        patched.setattr(llm._answer_loop, "_new_text", breaks)
        llm.generate([1, 2, 3])
    assert not llm.engine.has_work


def test_a_tokenizer_that_raises_ends_its_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream's text cannot be made: it gets the exception, the other all its tokens."""
    llm = LLM(attrs.evolve(tiny_model(vocab_size=257), tokenizer=BYTES), **{**OPTIONS, "graphs": False})
    expected = llm.generate([7, 7], LONG)[0].token_ids
    push = OutputText.push

    def raises(self: OutputText, *tokens: int) -> str:
        if self is poisoned and self.position > 3:
            raise ValueError("no such token")
        return push(self, *tokens)

    bad, good = llm.stream([60, 1], LONG), llm.stream([7, 7], LONG)
    pieces = [next(bad), next(good)]
    poisoned = next(
        a.text
        for a in llm._answer_loop._answers.values()
        if a.request.prompt_ids == (60, 1)  # type: ignore[misc]
    )
    monkeypatch.setattr(OutputText, "push", raises)
    with pytest.raises(ValueError, match="no such token"):
        list(bad)
    assert (*pieces[1].token_ids, *(token for chunk in good for token in chunk.token_ids)) == expected
    assert llm.engine.free_blocks == llm.engine.usable_blocks


def test_a_stream_collected_in_the_middle_of_a_step_disturbs_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run anywhere; what an abandoned iterator gives back is given back behind the step."""
    holder: dict[str, Any] = {"stream": llm.stream([1, 2, 3], LONG)}
    holder["itself"] = holder
    next(holder["stream"])
    del holder
    prepare = llm.engine.decode.prepare

    def collects(batch: Any) -> Any:
        gc.collect()
        return prepare(batch)

    monkeypatch.setattr(llm.engine.decode, "prepare", collects)
    answer = llm.generate([7, 7, 7], SamplingParams(max_tokens=10))[0]
    assert greedy_reference(llm.model, [7, 7, 7], max_tokens=10).agrees(answer.token_ids)
    assert llm.statistics.failed_steps == 0


def test_a_reset_ends_what_streams_wait_for(llm: LLM) -> None:
    """Who resets an engine ends its answers with ABORT, which their readers see."""
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    llm.engine.reset()
    assert [chunk.finish_reason for chunk in stream][-1] is FinishReason.ABORT


@pytest.mark.parametrize("token", [61, -1, 10**6])
def test_the_engine_refuses_tokens_that_have_no_embedding(llm: LLM, token: int) -> None:
    """In the engine too, whoever calls it: on a GPU such a token ends the whole process."""
    for refuses in (llm.engine.check, llm.engine.add):
        with pytest.raises(ConfigError, match=f"token {token}; the model's tokens are 0 to 60"):
            refuses([1, token], params=LONG)


def test_a_refused_batch_draws_no_seeds() -> None:
    """Two engines of one seed answer alike, though one of them refused a batch before."""
    options = {**OPTIONS, "graphs": False, "seed": 3}
    first, second = LLM(tiny_model(), **options), LLM(tiny_model(), **options)
    hot = SamplingParams(max_tokens=8, temperature=1.5)
    with pytest.raises(ConfigError):
        second.generate([[1, 2], [3] * 500], hot)
    assert second.statistics.prompt_tokens == 0
    assert first.generate([1, 2], hot)[0].token_ids == second.generate([1, 2], hot)[0].token_ids


# Text.


@settings(deadline=None, max_examples=60)
@given(tokens=st.lists(st.integers(3, len(PIECES) - 1), max_size=12))
def test_a_whole_answer_has_the_text_of_its_stream(tokens: list[int]) -> None:
    """With fallback bytes as well, where decoding everything at once breaks characters that a stream gives out whole."""
    model = attrs.evolve(tiny_model(vocab_size=len(PIECES)), tokenizer=PIECES)
    llm = LLM(model, **{**OPTIONS, "graphs": False})
    llm.start()
    forced = [SamplingParams(max_tokens=len(tokens) or 1, ignore_eos=True)]
    made = iter(tokens or [3])
    read = llm.engine._read

    def writes(step: Any) -> Any:
        found = read(step)
        for token in found:
            token.token_id = token.request.output_ids[-1] = next(made)
        return found

    llm.engine._read = writes  # type: ignore[method-assign]
    whole = llm.generate([5], forced)[0].text
    made = iter(tokens or [3])
    assert "".join(chunk.text for chunk in llm.stream([5], forced[0])) == whole


@pytest.mark.parametrize("token", [BYTES.convert_tokens_to_ids("<end>"), 173], ids=["special", "no character"])
def test_tokens_without_whole_text_cost_no_more_than_others(token: int) -> None:
    """Three thousand of them are decoded in windows that do not grow."""
    longest = 0

    class Watched:
        def decode(self, token_ids: list[int], *args: Any, **kwargs: Any) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return BYTES.decode(token_ids, *args, **kwargs)  # type: ignore[no-any-return]

    detokenizer = Detokenizer(Watched(), prompt_ids=[70])
    text = "".join(detokenizer.push(token) for _ in range(3000)) + detokenizer.flush()
    assert len(text) in (0, 3000)
    assert longest < 60


def test_a_stop_string_in_front_of_half_a_character_is_found() -> None:
    """What precedes bytes that are no character yet is given out, and looked at, at once."""
    text = OutputText(BYTES, prompt_ids=[70], stop=["W"])
    (half,) = BYTES.encode("\u20ac", add_special_tokens=False)[:1]
    (letter,) = BYTES.encode("W", add_special_tokens=False)
    text.push(letter, half)
    assert text.stopped


def test_the_context_is_whole_where_the_prompt_ends_in_several_characters() -> None:
    """A prompt that ends in two characters of fallback bytes does not cost the answer its leading space."""
    prompt = [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\u4f60\u597d".encode()]
    cat = PIECES.convert_tokens_to_ids("\u2581cat")
    detokenizer = Detokenizer(PIECES, prompt_ids=prompt)
    assert detokenizer.push(cat) + detokenizer.flush() == " cat"


# The engine's thread.


def _ticket(deliver: Callable[[Update], None]) -> Ticket:
    return Ticket(prompt_ids=[1, 2], params=SamplingParams(max_tokens=8), deliver=deliver)


def test_a_caller_that_raises_costs_the_others_nothing(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """One `deliver` raises: the updates behind it in the same step arrive, and the thread goes on."""
    thread = EngineThread(llm.engine, post=lambda function: function())
    ended, updates = threading.Event(), []

    def raises(update: Update) -> None:
        raise RuntimeError("a bug of the caller")

    def takes(update: Update) -> None:
        updates.append(update)
        if update.finish_reason is not None:
            ended.set()

    thread.submit(_ticket(raises))
    thread.submit(_ticket(takes))
    thread.start()
    assert ended.wait(10)
    assert len(updates) == 8
    assert thread.is_alive
    thread.stop()
    assert "could not be delivered" in caplog.text


def test_an_event_loop_that_is_gone_leaves_no_call_waiting(llm: LLM) -> None:
    """`post` raises: calls get their results, and the thread ends as it should."""

    def gone(function: Callable[[], None]) -> None:
        raise RuntimeError("the loop is closed")

    thread = EngineThread(llm.engine, post=gone)
    thread.start()
    thread.submit(_ticket(lambda update: None))
    assert thread.call(lambda engine: 5).result(10) == 5
    thread.stop()
    assert thread.failure is None


def test_a_thread_stopped_before_it_was_started_refuses(llm: LLM) -> None:
    """Requests and calls that come afterwards are told, not kept."""
    thread = EngineThread(llm.engine, post=lambda function: function())
    thread.stop()
    updates: list[Update] = []
    thread.submit(_ticket(updates.append))
    assert isinstance(updates[0].error, InternalError)
    with pytest.raises(InternalError):
        thread.call(lambda engine: 1).result(1)


def test_the_thread_may_be_stopped_from_a_delivery(llm: LLM) -> None:
    """It does not wait for itself; who started it waits."""
    thread = EngineThread(llm.engine, post=lambda function: function())
    stopped = threading.Event()

    def stops(update: Update) -> None:
        thread.stop()
        stopped.set()

    thread.submit(_ticket(stops))
    thread.start()
    assert stopped.wait(10)
    thread.stop()
    assert not thread.is_alive
    assert thread.failure is None
