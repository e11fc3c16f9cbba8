"""Whole requests through the engine, and through the continuous batching of transformers with the same weights.

Run by `benchmarks/decode_period.py --hf`. Each case: a batch of requests of 160 prompt tokens, all at once, 64 new tokens each,
greedy; generated tokens over the time from the first `add` to the last token, prefill included. One run that is not counted,
then the median of up to three. transformers has `paged|sdpa`, the attention that needs no other package, in three variants:
without CUDA graphs (its default for this attention), with them, and with them and padding fitted to the batch, since padded keys
cost this attention much. A case that raises, or takes too long, is recorded with what it said.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.engines import MAX_SEQ_LEN, PREFILL, decode_engine
from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import LoadedModel, weight_targets
from breakgraph.serving.engine import Engine
from breakgraph.serving.sampling_params import SamplingParams

BATCHES = (8, 32, 128)
PROMPT = 160
NEW = 64
RUNS = 3
ENOUGH_SECONDS = 8.0  # no further run of a case that has taken as long
RUN_SECONDS = 60.0
HF_BLOCK = 256  # tokens; the default of transformers

VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "graphs off": lambda batch: {"use_cuda_graph": False},
    "graphs on": lambda batch: {"use_cuda_graph": True},
    "graphs on, fitted padding": lambda batch: {
        "use_cuda_graph": True,
        "q_padding_interval_size": batch,
        "kv_padding_interval_size": 32 * batch,
    },
}


def prompts(batch: int, *, vocabulary: int, length: int = PROMPT) -> list[list[int]]:
    """Prompts that share no prefix."""
    return [[(row * 7919 + i * 31) % vocabulary for i in range(length)] for row in range(batch)]


def timed_runs(run: Callable[[], list[list[int]]]) -> tuple[dict[str, Any], list[list[int]]]:
    """Time a run up to RUNS times, after one that is not counted; returns the figures and the tokens of the last run."""
    begin = time.perf_counter()
    outputs = run()
    first = time.perf_counter() - begin
    times: list[float] = []
    while len(times) < RUNS and (not times or time.perf_counter() - begin < ENOUGH_SECONDS):
        start = time.perf_counter()
        outputs = run()
        times.append(time.perf_counter() - start)
    seconds, tokens = statistics.median(times), sum(len(ids) for ids in outputs)
    figures = {
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "runs": [round(value, 4) for value in times],
        "first_run_seconds": round(first, 3),
    }
    return figures, outputs


def engine_run(engine: Engine, ids: Sequence[Sequence[int]], *, new: int) -> list[list[int]]:
    """All requests through the engine; their new tokens."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    requests = [engine.add(prompt, params=params) for prompt in ids]
    while engine.has_work:
        engine.step()
    return [request.output_ids for request in requests]


def hf_model(config: DecoderConfig, *, weights: dict[str, torch.Tensor], device: torch.device) -> Any:
    """The model of transformers with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": config.rope.kind, "rope_theta": config.rope.theta, **config.rope.parameters},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    # Named here, since a plain "sdpa" makes transformers look for a package with flash attention, on the network too.
    with torch.device(device):
        model = LlamaForCausalLM._from_config(hf_config, attn_implementation="paged|sdpa", dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    if unexpected or sorted(set(missing) - set(tied)):
        raise RuntimeError(f"the weights do not fit: {missing} {unexpected}")
    model.tie_weights()
    return model.eval()


def hf_run(manager: Any, ids: Sequence[Sequence[int]], *, new: int) -> list[list[int]]:
    """All requests through a running manager; their new tokens."""
    deadline = time.perf_counter() + RUN_SECONDS
    order = manager.add_requests(inputs=[list(prompt) for prompt in ids], max_new_tokens=new)
    results: dict[str, list[int]] = {}
    while len(results) < len(order):
        result = manager.get_result(timeout=1)
        if result is None:
            if time.perf_counter() > deadline:
                raise TimeoutError(f"{len(results)} of {len(order)} requests after {RUN_SECONDS:.0f} s")
            if not manager.is_running():
                raise RuntimeError(f"the thread ended: {manager.background_thread_status.fatal_error!r}")
        elif result.error is not None:
            raise RuntimeError(result.error)
        elif result.is_finished():
            results[result.request_id] = list(result.generated_tokens)
    return [results[name] for name in order]


def hf_case(
    model: Any, ids: Sequence[Sequence[int]], *, options: dict[str, Any], new: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """One variant of transformers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    batch = len(ids)
    begin = time.perf_counter()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0, num_return_sequences=1
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=HF_BLOCK,
            num_blocks=2 * batch * -(-(len(ids[0]) + new) // HF_BLOCK),
            max_batch_tokens=max(PREFILL),
            max_requests_per_batch=batch,
            allow_block_sharing=False,  # a second run would find the prompts of the first
            **options,
        ),
    )
    # Not its context manager, which waits without an end for a thread that hangs.
    try:
        manager.warmup()
        manager.start()
        warm_up = time.perf_counter() - begin
        figures, outputs = timed_runs(lambda: hf_run(manager, ids, new=new))
    finally:
        manager.stop(block=True, timeout=20, hard_stop=True)
        manager.destroy()
    resolved = manager.continuous_batching_config
    figures["warm_up_seconds"] = round(warm_up, 2)
    figures["use_cuda_graph"] = list(resolved.cuda_graph_booleans)
    figures["padding"] = [resolved.q_padding_interval_size, resolved.kv_padding_interval_size]
    return figures, outputs


def _alike(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """How many requests begin alike; random weights make near ties, so long answers part sooner or later."""
    same = [len(_common(a, b)) for a, b in zip(ours, theirs, strict=True)]
    return {"first_tokens_equal": sum(count > 0 for count in same), "equal_tokens_median": statistics.median(same)}


def _common(a: list[int], b: list[int]) -> list[int]:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return a[:index]
    return a


def engine_cases(
    model: LoadedModel, *, batches: Sequence[int], new: int, prompt: int, max_seq_len: int
) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
    """All batches through the engine, which is gone afterwards: a case for each, and the tokens of each."""
    engine = decode_engine(model, batches=batches, max_seq_len=max_seq_len)
    engine.capture()
    before = engine.statistics()
    cases, tokens = [], []
    for batch in batches:
        ids = prompts(batch, vocabulary=model.config.vocab_size, length=prompt)
        figures, outputs = timed_runs(partial(engine_run, engine, ids, new=new))
        cases.append({"batch": batch, "breakgraph": figures, "transformers": {}})
        tokens.append(outputs)
    after = engine.statistics()
    assert not after.dropped, after.dropped
    assert after.eager == before.eager, after.eager
    return cases, tokens


def run_shape(
    model: LoadedModel,
    *,
    seconds: float,
    batches: Sequence[int] = BATCHES,
    new: int = NEW,
    prompt: int = PROMPT,
    max_seq_len: int = MAX_SEQ_LEN,
) -> dict[str, Any]:
    """The engine and all variants for one model; what does not fit into `seconds` is recorded as skipped."""
    begin = time.perf_counter()
    config, device = model.config, model.decoder.device
    cases, tokens = engine_cases(model, batches=batches, new=new, prompt=prompt, max_seq_len=max_seq_len)
    gc.collect()
    failure, hf = "", None
    try:
        hf = hf_model(config, weights=weight_targets(model.decoder), device=device)
    except Exception as error:  # the figures of the engine stay
        failure = _text(error)
    for case, ours in zip(cases, tokens, strict=True):
        ids = prompts(case["batch"], vocabulary=config.vocab_size, length=prompt)
        for name, options in VARIANTS.items():
            if hf is None or time.perf_counter() - begin > seconds:
                case["transformers"][name] = {"error": failure or "skipped: no time left"}
                continue
            try:
                figures, outputs = hf_case(hf, ids, options=options(case["batch"]), new=new)
                figures |= _alike(ours, outputs)
                figures["ours_to_it"] = round(case["breakgraph"]["tokens_per_s"] / figures["tokens_per_s"], 2)
            except Exception as error:  # the other cases go on
                figures = {"error": _text(error)}
            case["transformers"][name] = figures
            print(case["batch"], name, figures, flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return {"prompt": prompt, "new": new, "cases": cases}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
