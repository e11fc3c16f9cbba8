"""The serving loop on a GPU: every step of every graph against its eager twin, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.serving import LLM, Graphs, SamplingParams

pytestmark = pytest.mark.gpu


def small_model(*, group: int, head_dim: int, dtype: torch.dtype) -> LoadedModel:
    """Three layers with head counts that FlashInfer has kernels for."""
    config = DecoderConfig(
        model_type="llama",
        vocab_size=211,
        hidden_size=256,
        intermediate_size=512,
        num_layers=3,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        max_positions=512,
    )
    model = random_model(config, device=torch.device("cuda"), dtype=dtype, seed=5)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 150 tokens."""
    rng = random.Random(count)
    return [[rng.randrange(211) for _ in range(rng.randrange(1, 151))] for _ in range(count)]


@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (4, 64), (4, 128)])
def test_every_step_equals_its_eager_twin_bit_for_bit(group: int, head_dim: int) -> None:
    """REQ-H5, FAULT-P7: with verify="always" each replay of 40 mixed requests is compared with eager; none differs.

    Prompts are chunked, batches change at every step, greedy and sampled rows mix; bf16, FlashInfer.
    """
    model = small_model(group=group, head_dim=head_dim, dtype=torch.bfloat16)
    llm = LLM(
        model,
        max_batch_size=12,
        max_num_tokens=128,
        max_seq_len=256,
        prefill_sizes=(8, 32, 128),
        verify="always",
        seed=1,
    )
    llm.start()
    assert llm.engine.state.attention.kind == "flashinfer"
    params = [SamplingParams(max_tokens=1 + i % 17, temperature=0.7 * (i % 3), top_k=i % 5, seed=i) for i in range(40)]
    answers = llm.generate(prompts(40), params)
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
    assert [len(answer.token_ids) for answer in answers] == [p.max_tokens for p in params]


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_graphs_and_eager_give_the_same_tokens(attention: str) -> None:
    """Float32 in plain torch, bf16 in FlashInfer: the same ids with graphs and without, the host one step ahead."""
    dtype = torch.float32 if attention == "torch" else torch.bfloat16
    model = small_model(group=4, head_dim=64, dtype=dtype)
    options = {"max_batch_size": 4, "max_num_tokens": 64, "max_seq_len": 256, "attention": attention, "seed": 1}
    work = prompts(12)
    params = SamplingParams(max_tokens=24)
    with_graphs = LLM(model, **options)
    alone = [with_graphs.generate([prompt], params)[0].token_ids for prompt in work]
    assert with_graphs.statistics.eager == {}
    assert with_graphs.generate([work[0]], params)[0].token_ids == alone[0]
    without = LLM(model, graphs=Graphs.OFF, **options)
    differing = sum(
        without.generate([prompt], params)[0].token_ids != ids for prompt, ids in zip(work, alone, strict=True)
    )
    # An eager step is not padded, so the matmuls of bf16 may tile differently: near-ties can fall either way.
    assert differing <= (0 if dtype is torch.float32 else 3)


def test_a_seed_gives_the_same_tokens_in_any_row_and_batch() -> None:
    """The draw of a row depends on its seed and position only, in captured sampling too."""
    model = small_model(group=4, head_dim=64, dtype=torch.float32)
    llm = LLM(model, max_batch_size=8, max_num_tokens=256, max_seq_len=256, attention="torch", seed=3)
    params = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=77)
    prompt = prompts(1)[0]
    alone = llm.generate([prompt], params)[0].token_ids
    others = [SamplingParams(max_tokens=16, temperature=1.0, seed=i) for i in range(3)]
    batch = llm.generate([*prompts(3), prompt], [*others, params])
    assert batch[3].token_ids == alone
    assert llm.statistics.eager == {}
