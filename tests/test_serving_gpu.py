"""The serving loop on a CUDA device: real graphs, FlashInfer, the host really ahead of the device."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving import LLM, Graphs, SamplingParams
from breakgraph.serving.engine_thread import EngineThread, Ticket, Update
from tests.serving_reference import Reference, greedy_reference, tiny_model

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"max_batch_size": 4, "max_num_tokens": 128, "seed": 1, "num_blocks": 200}
PROMPTS = [[5, 9, 2], [7] * 200, list(range(1, 50)), [60], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
MIXED = [SamplingParams(max_tokens=24, temperature=0.8 * (i % 2), top_p=0.9, seed=i) for i in range(len(PROMPTS))]


def _model(dtype: torch.dtype) -> LoadedModel:
    """Four layers with heads that FlashInfer has kernels for."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=512,
    )
    return random_model(config, device="cuda", dtype=dtype, seed=5)


def test_float32_tokens_equal_those_of_the_cpu() -> None:
    """Plain torch attention in float32: graphs, eager steps and the CPU's plain loop give the same greedy tokens."""
    on_cpu = tiny_model()
    references = [greedy_reference(on_cpu, prompt[:40], max_tokens=12) for prompt in PROMPTS]
    on_cpu.decoder.to("cuda")
    for graphs in Graphs:
        llm = LLM(on_cpu, graphs=graphs, attention="torch", **OPTIONS)
        answers = llm.generate([prompt[:40] for prompt in PROMPTS], SamplingParams(max_tokens=12))
        for answer, reference in zip(answers, references, strict=True):
            assert _agrees(reference, answer.token_ids)
        assert bool(llm.statistics.eager) == (graphs is Graphs.OFF)
        assert llm.statistics.dropped == {}


def _agrees(reference: Reference, token_ids: tuple[int, ...]) -> bool:
    return len(token_ids) == len(reference.token_ids) and reference.agrees(token_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_step_equals_its_eager_twin(dtype: torch.dtype) -> None:
    """Each prefill and decode step, greedy and sampled, padded or not, is compared with eager bit for bit."""
    llm = LLM(_model(dtype), verify="always", **OPTIONS)
    llm.generate(PROMPTS, MIXED)
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=20))
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
    assert statistics.prefill_replays == statistics.prefill.steps
    assert statistics.decode_replays == statistics.decode.steps


def test_the_same_answers_twice_and_in_any_order() -> None:
    """A hundred steps with the host ahead, twice: the same tokens, all blocks back, and none from the device's past."""
    # Without reuse: the second time prompts would be computed in other chunks, and a draw may follow the rounding.
    llm = LLM(_model(torch.float32), prefix_reuse="off", **OPTIONS)
    first = llm.generate(PROMPTS * 3, MIXED * 3)
    assert [a.token_ids for a in llm.generate(PROMPTS * 3, MIXED * 3)] == [a.token_ids for a in first]
    assert llm.engine.free_blocks == llm.engine.usable_blocks == 198
    assert llm.statistics.eager == {}


def test_the_cache_is_sized_by_the_memory_fraction() -> None:
    """Without num_blocks the cache takes what all requests can use, as far as the fraction allows."""
    small = LLM(_model(torch.bfloat16), max_batch_size=2, max_seq_len=256, max_num_tokens=128)
    small.start()
    assert small.engine.sizes.num_blocks == 2 * 16 + 2
    answer = small.generate(PROMPTS[2], SamplingParams(max_tokens=5))[0]
    assert len(answer.token_ids) == 5


def test_the_engine_in_a_thread_of_its_own() -> None:
    """Captured here, replayed by the engine's thread, with requests from eight others: the tokens of the CPU's plain loop."""
    on_cpu = tiny_model()
    references = [greedy_reference(on_cpu, prompt[:40], max_tokens=12) for prompt in PROMPTS]
    on_cpu.decoder.to("cuda")
    llm = LLM(on_cpu, attention="torch", **OPTIONS)
    llm.start()
    thread = EngineThread(llm.engine, post=lambda function: function())
    thread.start()
    updates: list[list[Update]] = [[] for _ in range(40)]
    submit = [
        threading.Thread(
            target=lambda part=part: [
                thread.submit(
                    Ticket(
                        prompt_ids=PROMPTS[index % 5][:40],
                        params=SamplingParams(max_tokens=12),
                        deliver=updates[index].append,
                    )
                )
                for index in range(part, 40, 8)
            ]
        )
        for part in range(8)
    ]
    for one in submit:
        one.start()
    end = time.monotonic() + 60
    while not all(one and one[-1].finish_reason is not None for one in updates):
        assert time.monotonic() < end
        time.sleep(0.01)
    thread.stop()
    for index, made in enumerate(updates):
        assert _agrees(references[index % 5], tuple(update.token_id for update in made if update.token_id is not None))
    assert llm.statistics.eager == {}
    assert llm.engine.free_blocks == llm.engine.usable_blocks


def test_a_failing_break_ends_its_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A break raises between segments that are on the device already: its request ends with that, the others are unharmed."""
    on_cpu = tiny_model()
    reference = greedy_reference(on_cpu, PROMPTS[0], max_tokens=20)
    on_cpu.decoder.to("cuda")
    llm = LLM(on_cpu, attention="torch", placement="break", **OPTIONS)
    llm.start()
    attention = llm.engine.state.attention
    attend, calls = attention.attend, []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("the break is broken")
        attend(*args, **kwargs)

    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=20))
    tokens = list(next(stream).token_ids)
    monkeypatch.setattr(attention, "attend", fails)
    with pytest.raises(RuntimeError, match="the break is broken"):
        llm.generate(PROMPTS[2])
    assert llm.generate(PROMPTS[3], SamplingParams(max_tokens=3))[0].token_ids
    for chunk in stream:
        tokens += chunk.token_ids
    assert _agrees(reference, tuple(tokens))
    assert llm.statistics.failed_steps == 1
    assert llm.engine.free_blocks == llm.engine.usable_blocks
