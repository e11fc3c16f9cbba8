"""The server with OpenAI's own client: completions, chat, streams, log-probabilities, models, metrics."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import openai
import pytest

from breakgraph.server.answers import Answer
from breakgraph.server.token_texts import TokenTexts
from breakgraph.serving import LLM, FinishReason, SamplingParams
from breakgraph.serving.engine_thread import Ticket, Update
from tests.server_rig import OPTIONS, Rig, serving, speaking_model
from tests.test_serving_text import BYTES, PIECES

GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The same model, asked directly and without graphs."""
    return LLM(speaking_model(), **{**OPTIONS, "graphs": False, "prefix_reuse": False})


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One server for all tests here."""
    with serving(LLM(speaking_model(), **OPTIONS)) as made:
        yield made
        made.wait_until_idle()


@pytest.mark.parametrize("prompt", ["Once upon", "", "é€𝄞"])
def test_a_completion_is_that_of_the_engine(rig: Rig, alone: LLM, prompt: str) -> None:
    """Text, finish reason and usage are what `LLM.generate` gives; an empty prompt is refused by both."""
    if not prompt:
        with pytest.raises(openai.BadRequestError) as refused:
            rig.openai.completions.create(prompt=prompt, **GREEDY)
        assert refused.value.param == "prompt"
        return
    answer = rig.openai.completions.create(prompt=prompt, **GREEDY)
    (expected,) = alone.generate(prompt, SamplingParams(max_tokens=12))
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, expected.finish_reason.value, 0)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(prompt.encode()),
        len(expected.token_ids),
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "tiny", "cmpl-")


def test_all_four_kinds_of_prompts(rig: Rig, alone: LLM) -> None:
    """A text, a list of texts, token ids, and a list of those; choices have the order of the prompts."""
    ids = [alone.encode("abc"), alone.encode("xyz!")]
    expected = [one.text for one in alone.generate(["abc", "xyz!"], SamplingParams(max_tokens=12))]
    for prompt, wanted in (("abc", expected[:1]), (["abc", "xyz!"], expected), (ids[0], expected[:1]), (ids, expected)):
        answer = rig.openai.completions.create(prompt=prompt, **GREEDY)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


def test_a_chat_is_the_completion_of_its_template(rig: Rig, alone: LLM) -> None:
    """The template makes the prompt; text parts are joined with line breaks; the answer is a message of the assistant."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    answer = rig.openai.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=9, temperature=0)
    (expected,) = alone.generate("system:be brief;user:one\ntwo;assistant:", SamplingParams(max_tokens=9))
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_a_chat_without_a_bound_goes_on_to_the_models_length(rig: Rig) -> None:
    """Without `max_completion_tokens` prompt and answer fill the model's length, unless the model ends before."""
    answer = rig.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "go"}], temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == OPTIONS["max_seq_len"] == rig.service.room


@pytest.mark.parametrize("usage", [False, True])
def test_a_streamed_completion_joins_to_the_whole_one(rig: Rig, usage: bool) -> None:
    """The texts of all chunks are the text; the last choice has the reason; usage comes in a chunk of its own, if at all."""
    whole = rig.openai.completions.create(prompt="stream me", **GREEDY)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(rig.openai.completions.create(prompt="stream me", stream=True, **options, **GREEDY))
    if usage:
        last = chunks.pop()
        assert (last.choices, last.usage) != ([], None)
        assert last.usage is not None
        assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_streams_in_one_response(rig: Rig) -> None:
    """Chunks of several prompts come mixed, each with its index, and join to the texts of the whole answer."""
    prompts = ["first", "second one", "x"]
    whole = rig.openai.completions.create(prompt=prompts, **GREEDY)
    texts = [""] * 3
    for chunk in rig.openai.completions.create(prompt=prompts, stream=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_streamed_chat_begins_with_the_role(rig: Rig) -> None:
    """The first delta says who speaks, the others carry text, and it ends with a reason."""
    options = {"model": "tiny", "messages": [{"role": "user", "content": "hey"}], "max_tokens": 8, "temperature": 0}
    whole = rig.openai.chat.completions.create(**options)
    chunks = list(rig.openai.chat.completions.create(stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_wire_format_of_a_stream(rig: Rig) -> None:
    """Events are lines of `data:` with JSON, whole characters in each, and the last is `[DONE]`."""
    body = {**GREEDY, "prompt": "€", "stream": True, "temperature": 1.0, "seed": 5, "max_tokens": 40}
    with rig.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    whole = rig.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
    assert text == whole
    assert len(chunks) <= 40


def test_stop_strings_end_the_text_and_are_held_back(rig: Rig) -> None:
    """The stop string is in neither kind of answer, the reason is stop, and the tokens end there."""
    text = rig.openai.completions.create(prompt="stop me", **GREEDY).choices[0].text
    stop = text[3:6]
    whole = rig.openai.completions.create(prompt="stop me", stop=[stop, "never"], **GREEDY)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    chunks = list(rig.openai.completions.create(prompt="stop me", stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"
    rig.wait_until_idle()


def test_a_seed_repeats_an_answer(rig: Rig) -> None:
    """Same seed, same text; another seed, another text."""
    options = {**GREEDY, "temperature": 1.5, "prompt": "dice", "max_tokens": 24}
    texts = [rig.openai.completions.create(seed=seed, **options).choices[0].text for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_logprobs_of_a_completion(rig: Rig, alone: LLM) -> None:
    """Each token has its name, its log-probability and the likeliest ones; streamed they are the same."""
    answer = rig.openai.completions.create(prompt="how likely", logprobs=3, **GREEDY)
    (expected,) = alone.generate("how likely", SamplingParams(max_tokens=12, logprobs=3))
    assert expected.logprobs is not None
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.top_logprobs is not None
    assert len(told.tokens) == 12 == len(told.text_offset or [])
    for ours, theirs, top in zip(told.token_logprobs or [], expected.logprobs, told.top_logprobs, strict=True):
        assert ours == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(top) == 3  # greedy: the chosen one is the likeliest
    chunks = list(rig.openai.completions.create(prompt="how likely", logprobs=3, stream=True, **GREEDY))
    streamed = [value for chunk in chunks for value in (chunk.choices[0].logprobs.token_logprobs or [])]  # type: ignore[union-attr]
    assert streamed == pytest.approx(told.token_logprobs, abs=1e-4)


def test_logprobs_of_a_chat(rig: Rig) -> None:
    """The bytes of all tokens are the text's; the chosen token is the first of the likeliest when greedy."""
    answer = rig.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "é"}],
        max_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 10
    raw = b"".join(bytes(one.bytes or []) for one in content)
    assert raw.decode(errors="replace") == choice.message.content
    for one in content:
        assert len(one.top_logprobs) == 2
        assert one.top_logprobs[0].logprob == one.logprob >= one.top_logprobs[1].logprob
        assert 0 < math.exp(one.logprob) <= 1


def test_penalties_and_bias_reach_the_engine(rig: Rig, alone: LLM) -> None:
    """A bias forces a token; penalties give what they give in the engine."""
    token = alone.encode("Z")[0]
    forced = rig.openai.completions.create(prompt="bias", logit_bias={str(token): 100}, **GREEDY)
    assert forced.choices[0].text == "Z" * 12
    penalised = rig.openai.completions.create(
        prompt="aaaa", frequency_penalty=1.5, presence_penalty=0.5, extra_body={"repetition_penalty": 1.3}, **GREEDY
    )
    params = SamplingParams(max_tokens=12, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    assert penalised.choices[0].text == alone.generate("aaaa", params)[0].text


def test_models(rig: Rig) -> None:
    """The one model is listed and found by its name; another name is 404."""
    (model,) = rig.openai.models.list().data
    assert model.id == rig.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no model 'big'"):
        rig.openai.models.retrieve("big")


def test_health_and_metrics_add_up(rig: Rig) -> None:
    """A request shows in the counters of requests, tokens, steps and replays, and leaves nothing in use."""
    rig.wait_until_idle()
    names = ("requests_total", "prompt_tokens_total", "completion_tokens_total", "time_to_first_token_seconds_count")
    labels = {"requests_total": {"endpoint": "/v1/completions", "outcome": "200"}}
    before = [rig.metric(name, **labels.get(name, {})) for name in names]
    between = rig.metric("time_between_tokens_seconds_count")
    replays = rig.metric("graph_replays_total", phase="decode")
    rig.openai.completions.create(prompt="count me", **GREEDY)
    after = [rig.metric(name, **labels.get(name, {})) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 8, 12, 1]
    assert rig.metric("time_between_tokens_seconds_count") - between == 11
    assert rig.metric("graph_replays_total", phase="decode") - replays >= 11
    assert rig.http.get("/health").json() == {"status": "ok"}
    rig.wait_until_idle()
    parts = [
        rig.metric("step_seconds_total", part=part) for part in ("schedule", "prepare", "launch", "wait", "process")
    ]
    assert all(seconds > 0 for seconds in parts)


def test_the_second_turn_of_a_chat_reuses_the_first(rig: Rig) -> None:
    """The usage says how many tokens of the prompt came from the cache."""
    messages = [{"role": "user", "content": "tell me something long enough"}]
    options = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    first = rig.openai.chat.completions.create(messages=messages, **options)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    second = rig.openai.chat.completions.create(messages=messages, **options)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


# Answers, without a server.


def _updates(count: int) -> list[Update]:
    """So many tokens, the last with a reason."""
    reasons = [None] * (count - 1) + [FinishReason.LENGTH]
    return [Update(token_id=index, at=float(index), finish_reason=reason) for index, reason in enumerate(reasons)]


def _answer(*, quiet: bool, pause: float) -> tuple[Answer, list[float]]:
    between: list[float] = []
    ticket = Ticket(prompt_ids=[1], params=SamplingParams(), deliver=lambda update: None)
    made = Answer(
        ticket, text=None, cancel=lambda ticket: None, on_token=between.append, quiet=quiet, pause=lambda: pause
    )
    return made, between


def test_tokens_before_an_error_come_first() -> None:
    """A reader that finds tokens and an error behind them gets the tokens as a piece, and then the error."""

    async def read() -> list[int]:
        answer, _ = _answer(quiet=False, pause=0.0)
        for update in _updates(3)[:2]:
            answer.take(update)
        answer.fail(RuntimeError("too late"))
        counts = []
        with pytest.raises(RuntimeError, match="too late"):
            async for piece in answer.pieces():
                counts.append(len(piece.token_ids))  # noqa: PERF401
        return counts

    assert asyncio.run(read()) == [2]


def test_names_of_tokens_keep_their_spaces_and_bytes() -> None:
    """A word of a tokenizer that writes spaces as part of words has its space; bytes that are no text are named as bytes."""
    texts = TokenTexts(PIECES)
    the, cat, byte = PIECES.convert_tokens_to_ids(["\u2581the", "\u2581cat", "<0xE2>"])
    assert (texts.text(the), texts.raw(the), texts.name(cat)) == (" the", b" the", " cat")
    assert (texts.raw(byte), texts.name(byte)) == (b"\xe2", "bytes:\\xe2")
    assert texts.by_name({the: -1.0, cat: -2.0}) == {" the": -1.0, " cat": -2.0}
    euro = TokenTexts(BYTES)
    assert euro.name(BYTES.encode("\u20ac", add_special_tokens=False)[0]) == "bytes:\\xe2"


@pytest.mark.parametrize(("quiet", "pause", "pieces"), [(False, 0.0, 6), (False, 0.05, 2), (True, 0.0, 1)])
def test_tokens_gather_while_a_reader_pauses(quiet: bool, pause: float, pieces: int) -> None:
    """A piece a token where few read; where many do, what comes in a pause is one piece; a whole answer is one at its end."""

    async def read() -> list[int]:
        answer, between = _answer(quiet=quiet, pause=pause)

        async def deliver() -> None:
            for update in _updates(6):
                answer.take(update)
                await asyncio.sleep(0.002)

        delivering = asyncio.create_task(deliver())
        counts = [len(piece.token_ids) async for piece in answer.pieces()]
        await delivering
        assert between == [1.0] * 5
        return counts

    counts = asyncio.run(read())
    assert sum(counts) == 6
    assert len(counts) == pieces
