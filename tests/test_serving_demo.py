"""The real thing: SmolLM2-135M through the whole package, against transformers."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from typer.testing import CliRunner

from breakgraph.cli import app
from breakgraph.models.demo import demo_gguf
from breakgraph.models.gguf_cache import gguf_folder
from breakgraph.models.weights import LoadedModel, load_model
from breakgraph.serving import LLM, Graphs, SamplingParams, SamplingPaths
from tests.serving_reference import Reference

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 34, 55, 64, 65, 89, 128, 200, 257, 300, 377, 512, 600)
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def folder() -> Path:
    """The demo weights as a folder of transformers."""
    return gguf_folder(demo_gguf())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """The demo model in float32 on the CPU."""
    return load_model("demo", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model: LoadedModel) -> list[list[int]]:
    """Twenty pieces of English prose of 1 to 600 tokens."""
    text = " ".join(pydoc_data.topics.topics[name] for name in ("with", "class", "function", "import"))
    ids = model.tokenizer(text).input_ids
    return [ids[37 * index :][:length] for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def references(folder: Path, prompts: list[list[int]]) -> list[Reference]:
    """What `generate` of transformers answers, and by how much each token won."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    return [_generate(reference, prompt) for prompt in prompts]


def _generate(reference: Any, prompt: list[int]) -> Reference:
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [logits[0].float().topk(2).values for logits in out.logits]
    return Reference(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(float(top[0] - top[1]) for top in best))


@pytest.mark.parametrize("graphs", Graphs)
@pytest.mark.parametrize("batch", [1, 8])
def test_twenty_prompts_give_the_tokens_of_transformers(
    model: LoadedModel, prompts: list[list[int]], references: list[Reference], graphs: Graphs, batch: int
) -> None:
    """Greedy ids equal Hugging Face `generate`, alone and in batches of 8, with graphs and without; ties may fall."""
    llm = LLM(
        model,
        max_batch_size=batch,
        max_seq_len=640,
        graphs=graphs,
        sampling=SamplingPaths.GREEDY,
    )
    answers = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS))
    for prompt, answer, reference in zip(prompts, answers, references, strict=True):
        assert reference.agrees(answer.token_ids), (len(prompt), answer.token_ids, reference)
        assert len(answer.token_ids) == len(reference.token_ids)
    statistics = llm.statistics
    steps = statistics.prefill.steps + statistics.decode.steps
    assert statistics.eager == ({} if graphs is Graphs.ON else {"DISABLED": steps})


def test_twenty_prompts_through_the_adapter_give_the_same_tokens(
    folder: Path, prompts: list[list[int]], references: list[Reference]
) -> None:
    """Forced through transformers' own code, in batches of 8 with graphs: the ids of `generate`; every step is a replay."""
    llm = LLM(
        folder,
        via="adapter",
        device="cpu",
        dtype=torch.float32,
        max_batch_size=8,
        max_seq_len=640,
        sampling=SamplingPaths.GREEDY,
        max_num_tokens=64,  # one small graph, and prompts of up to ten chunks
        prefill_sizes=[64],
        contexts=[],
    )
    for prompt, answer, reference in zip(
        prompts, llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS)), references, strict=True
    ):
        assert reference.agrees(answer.token_ids), (len(prompt), answer.token_ids, reference)
        assert len(answer.token_ids) == len(reference.token_ids)
    assert llm.statistics.eager == {}
    assert llm.statistics.dropped == {}
    assert llm.statistics.as_dict()["served_via"] == "adapter"


def test_the_capital_of_france() -> None:
    """`breakgraph generate` names Paris, and every prefill and decode step was a replay."""
    result = CliRunner().invoke(app, ["generate", "What is the capital of France?", "--device", "cpu", "--stats"])
    assert result.exit_code == 0, result.output
    assert "Paris" in result.stdout
    stats = json.loads(result.stdout.splitlines()[-1])
    assert stats["eager"] == {}
    assert (stats["prefill_replays"], stats["decode_replays"]) == (stats["prefill_steps"], stats["decode_steps"])
    assert stats["decode_replays"] >= 5


def test_sampled_answers_repeat_with_their_seed(model: LoadedModel) -> None:
    """Two sampled chats in one batch: the same seeds give the same texts alone, with graphs and without."""
    questions = ["Tell me a story about a cat.", "What is a graph?"]
    params = [SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=seed) for seed in (1, 2)]
    texts = []
    for graphs in Graphs:
        llm = LLM(
            model,
            max_batch_size=2,
            max_seq_len=96,
            graphs=graphs,
            sampling=SamplingPaths.SAMPLED,
            prefill_sizes=[48, 96],
        )
        texts.append([answer.text for answer in llm.generate(questions, params, chat=True)])
        texts.append([llm.generate(q, p, chat=True)[0].text for q, p in zip(questions, params, strict=True)])
    assert all(text == texts[0] for text in texts)
    assert texts[0][0] != llm.generate(questions[0], attrs.evolve(params[0], seed=3), chat=True)[0].text
