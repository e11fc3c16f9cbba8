"""Two hundred requests at a time over loopback: every answer that arrives is the one alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import httpx
import openai
import pytest

from breakgraph.serving import LLM, SamplingParams
from tests.server_rig import OPTIONS, Rig, serving, speaking_model
from tests.serving_reference import TIE

REQUESTS = 200
NEW = 10


@attrs.frozen
class Alone:
    """What a prompt gets when it is the only one.

    Attributes:
        prompt: The prompt.
        texts: Its answer after each number of tokens.
        gaps: How far the best logit was ahead of the next at each token.
    """

    prompt: str
    texts: tuple[str, ...]
    gaps: tuple[float, ...]

    @classmethod
    def of(cls, llm: LLM, prompt: str) -> Alone:
        """Asks an engine that does nothing else."""
        (answer,) = llm.generate(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2))
        assert answer.logprobs is not None
        tokenizer = llm.model.tokenizer
        texts = [
            tokenizer.decode(answer.token_ids[:count], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for count in range(NEW + 1)
        ]
        gaps = [one.top[0][1] - one.top[1][1] for one in answer.logprobs]
        return cls(prompt, tuple(texts), tuple(gaps))

    def agrees(self, text: str, *, tokens: int) -> bool:
        """Equal text, or a near-tie where it parts: at a token whose best two logits are as good as equal."""
        if text == self.texts[tokens]:
            return True
        same = max(count for count in range(tokens) if text.startswith(self.texts[count].rstrip("\ufffd")))
        return min(self.gaps[max(same - 1, 0) : same + 2]) < TIE


@pytest.fixture(
    params=[
        pytest.param("tiny", id="tiny"),
        pytest.param("tiny on a GPU", id="tiny on a GPU", marks=pytest.mark.gpu),
        pytest.param("demo", id="demo", marks=pytest.mark.demo),
    ],
    scope="module",
)
def llms(request: pytest.FixtureRequest) -> tuple[LLM, LLM]:
    """An engine to serve, with too few blocks for a full batch, and one to ask alone, without graphs."""
    if request.param.startswith("tiny"):
        options = {**OPTIONS, "num_blocks": 60, "max_batch_size": 8}
        model = speaking_model()
        if request.param != "tiny":
            model.decoder.to("cuda")
            options |= {"attention": "torch", "measure": "never"}
        return LLM(model, **options), LLM(speaking_model(), **{**options, "graphs": False})
    options = {
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "max_seq_len": 160,
        "num_blocks": 40,
        "prefill_sizes": [64],
        "contexts": [],
        "sampling": "greedy",
        "verify": "never",
    }
    return LLM("demo", **options), LLM("demo", **{**options, "graphs": False})


@pytest.fixture
def rig(llms: tuple[LLM, LLM]) -> Iterator[Rig]:
    """The server; after the test as many files are open as before it."""
    before = len(os.listdir("/proc/self/fd"))
    with serving(llms[0]) as made:
        yield made
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # an event loop that is collected later keeps two


def test_two_hundred_requests_at_a_time(llms: tuple[LLM, LLM], rig: Rig) -> None:
    """Random lengths, whole and streamed, a fifth given up or cut off: the others' answers are those that they get alone."""
    draw = random.Random(5)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "one", "lazy", "dog", "while", "seven", "wizards", "box"]
    prompts = [" ".join(draw.choices(words, k=draw.randint(1, 8))) for _ in range(12)]
    alone = [Alone.of(llms[1], prompt) for prompt in prompts]
    outcomes = asyncio.run(_all(rig, alone, seed=6))
    counted = Counter(outcomes)
    assert counted["wrong"] == 0, counted
    assert counted["right"] >= REQUESTS // 2
    assert counted["given up"] >= REQUESTS // 20
    rig.wait_until_idle()
    assert not rig.service._answers
    _check_metrics(rig, counted)


async def _all(rig: Rig, alone: Sequence[Alone], *, seed: int) -> list[str]:
    draw = random.Random(seed)
    limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=0)
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(limits=limits, timeout=200),
    ) as client:
        return await asyncio.gather(
            *(
                _one(client, rig.service.name, draw.choice(alone), random.Random(seed + index))
                for index in range(REQUESTS)
            )
        )


async def _one(client: openai.AsyncOpenAI, model: str, alone: Alone, draw: random.Random) -> str:
    """One request of a random kind: right, wrong or given up."""
    tokens = draw.randint(1, NEW)
    options: dict[str, Any] = {
        "model": model,
        "prompt": alone.prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    kind = draw.choices(("whole", "stream", "cancelled", "cut off"), weights=(5, 3, 1, 1))[0]
    await asyncio.sleep(draw.random())
    if kind == "whole":
        answer = await client.completions.create(**options)
        assert answer.usage is not None
        fits = answer.usage.completion_tokens == tokens
        return "right" if fits and alone.agrees(answer.choices[0].text, tokens=tokens) else "wrong"
    if kind == "cancelled":
        task = asyncio.ensure_future(client.completions.create(**options))
        done, _ = await asyncio.wait({task}, timeout=draw.random() * 2)
        task.cancel()
        return "right" if done else "given up"
    stream = await client.completions.create(stream=True, **options)
    text, most = "", draw.randint(0, 3) if kind == "cut off" else NEW + 1
    async with stream:
        count = 0
        async for chunk in stream:
            text += chunk.choices[0].text
            count += 1
            if count > most:
                return "given up"
    return "right" if alone.agrees(text, tokens=tokens) else "wrong"


def _check_metrics(rig: Rig, counted: Counter[str]) -> None:
    """The counters add up: each request has one outcome, each first token one latency, each later one another."""
    endpoint = "/v1/completions"
    outcomes = {name: rig.metric("requests_total", endpoint=endpoint, outcome=name) for name in ("200", "disconnect")}
    assert counted["right"] <= outcomes["200"]
    # A request that was cancelled before it was sent never came.
    assert REQUESTS - counted["given up"] <= sum(outcomes.values()) <= REQUESTS
    firsts = rig.metric("time_to_first_token_seconds_count")
    assert counted["right"] <= firsts <= REQUESTS
    tokens = rig.metric("completion_tokens_total")
    assert rig.metric("time_between_tokens_seconds_count") == tokens - firsts
    made = rig.metric("step_tokens_total", phase="decode") + firsts
    assert tokens <= made
    assert rig.metric("queue_seconds_count") == rig.metric("answer_seconds_count") == firsts
    assert rig.metric("failed_steps_total") == 0
