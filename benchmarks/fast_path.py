"""Prefill steps of the fast path: attention in breaks and captured, eager, and transformers beside them, on a GPU.

    python benchmarks/fast_path.py --out benchmarks/results/fast_path_h200.json [--shapes 135M,1B,8B]

Random weights in bfloat16; T new tokens of one request, or of 8 requests of T/8 each. A step takes token
ids to hidden rows (the logits are outside of the graphs), host arrays to launched device work, planning included.

- *single*: a step between two synchronisations, nothing overlapped.
- *period*: steps launched one behind the other without waiting, time for each: the host plans step n+1 while the device
  runs n.
- *host*: until a step returns to the host, launched while the one before it runs.

Subjects: *eager*: our decoder without graphs; *break*: each layer's attention a break; *captured*: attention in the
graph; *captured part*: that graph's replay alone, as planned before; *hf eager*: transformers' own body with sdpa, 8
requests as a batch; *hf break* and *hf captured*: transformers' body through the adapter. Graphs were proven against
their eager twin bit for bit (`verify="first"`) before they are timed, and break, captured and eager are compared on the
timed batch. Host-clock milliseconds, medians over `--repeats`, fewer where a step takes long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.shapes import SHAPES
from breakgraph import eager_step
from breakgraph.models.attention import BatchLayout, Placement
from breakgraph.models.decoder import Decoder
from breakgraph.models.huggingface_probe import adapt
from breakgraph.models.weights import random_model
from breakgraph.serving.config import EngineConfig, Sizes
from breakgraph.serving.device_state import DeviceState
from breakgraph.serving.kv_cache import KVCache, slots_of
from breakgraph.serving.logits_tail import LogitsTail
from breakgraph.serving.prefill_step import PrefillStep, prefill_body
from breakgraph.serving.startup import make_attention_for

TOKENS = (16, 64, 128, 512, 1024, 2048, 4096)
REQUESTS = (1, 8)
BLOCK = 16
IN_A_ROW = 12


def single(step: Callable[[], Any], *, repeats: int) -> float:
    """Milliseconds of a step with a synchronisation before and after it."""
    times = []
    for number in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(1000 * (time.perf_counter() - begin))
    return round(statistics.median(times), 4)


def period(step: Callable[[], Any], *, repeats: int) -> float:
    """Milliseconds of a step among `IN_A_ROW` of them without a wait in between."""
    times = []
    for number in range(repeats + 1):
        step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            step()
        torch.cuda.synchronize()
        if number:
            times.append(1000 * (time.perf_counter() - begin) / IN_A_ROW)
    return round(statistics.median(times), 4)


def host(step: Callable[[], Any], *, repeats: int) -> float:
    """Milliseconds until a step returns, behind one that is still running."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        step()
        begin = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - begin))
    return round(statistics.median(times), 4)


def transformers_model(name: str) -> Any:
    """The same shape as transformers has it, random weights on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tie_word_embeddings,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation("sdpa")
    return model.eval()


class Subject:
    """A decoder with its cache and the prefill runners of both placements, captured."""

    def __init__(self, decoder: Decoder, *, tokens: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
        config = EngineConfig(
            max_batch_size=max(REQUESTS),
            max_num_tokens=max(tokens),
            max_seq_len=max(tokens) + 1,
            block_size=BLOCK,
            prefill_sizes=tokens,
            measure="never",
        )
        attention = make_attention_for(decoder, config=config)
        blocks = max(REQUESTS) + max(tokens) // BLOCK + 2
        sizes = Sizes.resolve(
            config, num_blocks=blocks, max_positions=max(tokens) + 1, device_type="cuda", plans=attention.plans_decode
        )
        cache = KVCache(blocks, block_size=BLOCK, shapes=decoder.kv_shapes, dtype=decoder.dtype, device=decoder.device)
        with torch.inference_mode(mode=False):
            last = torch.zeros(max(REQUESTS) + 1, dtype=torch.int64, device="cuda")
        self.state = DeviceState(decoder=decoder, attention=attention, cache=cache, last_token=last)
        self.steps: dict[Placement, PrefillStep] = {}
        for placement in placements:
            step = PrefillStep(
                self.state, tail=LogitsTail(self.state), sizes=sizes, config=attrs.evolve(config, placement=placement)
            )
            step.capture()
            if step.runner.dropped:
                raise RuntimeError(f"dropped: {step.runner.dropped}")
            self.steps[placement] = step

    def forget(self) -> None:
        """Give the graphs back."""
        for step in self.steps.values():
            step.runner.clear()


class Batch:
    """`tokens` new tokens, shared by a number of requests."""

    def __init__(self, *, tokens: int, requests: int, vocabulary: int) -> None:
        count = tokens // requests
        per = -(-count // BLOCK)
        tables = [np.arange(1 + per * i, 1 + per * (i + 1), dtype=np.int32) for i in range(requests)]
        self.layout = BatchLayout(np.full(requests, count, np.int32), np.zeros(requests, np.int32), tables)
        slots = [slots_of(table.tolist(), start=0, count=count, block_size=BLOCK) for table in tables]
        self.inputs = {
            "ids": torch.randint(vocabulary, (tokens,)),
            "positions": torch.arange(count).repeat(requests),
            "slots": torch.from_numpy(np.concatenate(slots)),
        }
        self.device = {name: tensor.to("cuda") for name, tensor in self.inputs.items()}
        self.tokens, self.requests = tokens, requests

    def replay(self, step: PrefillStep) -> torch.Tensor:
        """A step through the runner, as the engine makes it."""
        result = step.runner.run(self.inputs, size=self.tokens, live=step.live(self.layout))
        if not result.replayed:
            raise RuntimeError(f"not replayed: {result.reason} {result.detail}")
        return result.output  # type: ignore[no-any-return]

    def eager(self, subject: Subject) -> torch.Tensor:
        """The same without a graph: attention as FlashInfer plans it."""
        body = prefill_body(subject.state, layers=subject.state.cache.layers)
        batch = subject.state.attention.plan_prefill(self.layout)
        with eager_step({"batch": batch}, valid_rows=self.tokens, padded_rows=self.tokens):
            return body(**self.device, batch=batch)


def timed(step: Callable[[], Any], *, repeats: int) -> dict[str, float]:
    """All three clocks."""
    return {
        "single_ms": single(step, repeats=repeats),
        "period_ms": period(step, repeats=max(repeats // 6, 2)),
        "host_ms": host(step, repeats=max(repeats // 3, 4)),
    }


def ours_case(subject: Subject, *, tokens: int, requests: int, repeats: int) -> dict[str, Any]:
    """Eager, break, captured, and the captured part alone."""
    batch = Batch(tokens=tokens, requests=requests, vocabulary=subject.state.decoder.vocab_size)
    outputs = {placement: batch.replay(step).clone() for placement, step in subject.steps.items()}
    expected = batch.eager(subject)
    row: dict[str, Any] = {
        "equal_to_eager": {p.value: bool(torch.equal(out, expected)) for p, out in outputs.items()},
        "eager": timed(lambda: batch.eager(subject), repeats=max(repeats // 3, 5)),
    }
    for placement, step in subject.steps.items():

        def replay(step: PrefillStep = step) -> torch.Tensor:
            return batch.replay(step)

        row[placement.value] = timed(replay, repeats=repeats)
    if (captured := subject.steps.get(Placement.CAPTURED)) is not None:
        batch.replay(captured)
        graph = next(graph for key, graph in captured.runner.graphs.items() if key.tokens == tokens)
        live = captured.live(batch.layout)
        row["captured part"] = timed(lambda: graph.replay(live), repeats=repeats)
    return row


def hf_case(model: Any, *, tokens: int, requests: int, repeats: int) -> dict[str, Any]:
    """Transformers' own body with sdpa, requests as a batch of equal lengths."""
    count = tokens // requests
    hidden = torch.randn(requests, count, model.config.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    positions = torch.arange(count, device="cuda").expand(requests, -1)

    def step() -> Any:
        return model.model(inputs_embeds=hidden, position_ids=positions, use_cache=False)[0]

    return timed(step, repeats=max(repeats // 3, 5))


def fewer(repeats: int, *, tokens: int) -> int:
    """Repeats for steps that take long by themselves: they vary less."""
    return max(6, repeats * 512 // max(tokens, 512))


def run_shape(name: str, *, repeats: int, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """All sizes of one shape."""
    rows = [{"tokens": count, "requests": requests} for requests in REQUESTS for count in tokens]
    both = (Placement.BREAK, Placement.CAPTURED)
    subject = Subject(
        random_model(SHAPES[name], device="cuda", dtype=torch.bfloat16, seed=1).decoder, tokens=tokens, placements=both
    )
    for row in rows:
        few = fewer(repeats, tokens=row["tokens"])
        row.update(ours_case(subject, tokens=row["tokens"], requests=row["requests"], repeats=few))
    subject.forget()
    del subject
    torch.cuda.empty_cache()
    model = transformers_model(name)
    for row in rows:
        few = fewer(repeats, tokens=row["tokens"])
        row["hf eager"] = hf_case(model, tokens=row["tokens"], requests=row["requests"], repeats=few)
    adapted = Subject(adapt(model).decoder, tokens=tokens, placements=both)
    for row in rows:
        batch = Batch(tokens=row["tokens"], requests=row["requests"], vocabulary=adapted.state.decoder.vocab_size)
        for placement, step in adapted.steps.items():

            def replay(step: PrefillStep = step, batch: Batch = batch) -> torch.Tensor:
                return batch.replay(step)

            row[f"hf {placement.value}"] = timed(replay, repeats=fewer(repeats, tokens=row["tokens"]) // 2)
    adapted.forget()
    for row in rows:
        print(name, row, flush=True)
    return rows


def main() -> None:
    """Measure and write the results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="135M,1B,8B")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    tokens = tuple(int(count) for count in options.tokens.split(","))
    results: dict[str, Any] = {**provenance(options.commit), "shapes": {}}
    with torch.no_grad():
        for name in options.shapes.split(","):
            begin = time.perf_counter()
            results["shapes"][name] = run_shape(name, repeats=options.repeats, tokens=tokens)
            torch.cuda.empty_cache()
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
