"""The serving loop on a CUDA device: real graphs, FlashInfer, the host really ahead of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving import LLM, Graphs, SamplingParams
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
