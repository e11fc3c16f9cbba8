"""Which decoders of transformers the adapter serves: every causal language model type, small and random, on a CPU.

    python benchmarks/transformers_models.py --out benchmarks/results/transformers_models.json [--kinds llama,gemma2]

Each type is adapted, which compares packed, chunked and decoded logits with the model's own attention; one that passes then
answers two prompts through the engine on the emulated backend, where every prefill and decode step must be a replay and
every token the model's own choice. About 4 s a type.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.small_transformers import OPTIONS, TooLargeError, kinds, small_model
from breakgraph.errors import ConfigError
from breakgraph.models.huggingface_load import load_transformers
from breakgraph.models.huggingface_probe import adapt
from breakgraph.models.weights import LoadedModel
from breakgraph.serving import LLM, SamplingParams

PROMPTS = [list(range(5, 27)), [11, 12, 13]]
NEW = 6
TIE = 1e-3


def served(loaded: LoadedModel, model: Any) -> tuple[str, str]:
    """What becomes of a model in the engine, and why."""
    llm = LLM(loaded, **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    model.set_attn_implementation("eager")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        for row, token in zip(logits, answer.token_ids, strict=True):
            if float(row.max() - row[token]) > TIE * float(row.abs().max()):
                return "passed the probe, then differed", "its tokens are not the model's own"
    statistics = llm.statistics
    if statistics.dropped or statistics.eager:
        known = [reason for reason in (loaded.decoder.eager_prefill, loaded.decoder.eager_decode) if reason]
        reasons = dict.fromkeys(known + [reason.split("\n")[0] for reason in statistics.dropped.values()])
        return "right, but eager", re.sub(r"\S+/(?=transformers/)", "", "; ".join(reasons))
    assert statistics.prefill_replays, statistics
    assert statistics.decode_replays, statistics
    return "served", ""


def one(kind: str) -> dict[str, Any]:
    """What becomes of a type."""
    begin = time.perf_counter()
    try:
        model = small_model(kind)
    except TooLargeError as error:
        return {"outcome": "not made", "reason": f"no small configuration: {error}"}
    except Exception as error:
        return {
            "outcome": "not made",
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
    try:
        probed = adapt(model)
    except ConfigError as error:
        return {"outcome": "refused", "reason": error.what.partition("own code: ")[2] or error.what}
    row: dict[str, Any] = {"error": float(f"{probed.error:.1e}"), "calls": len(probed.decoder.sites)}
    if probed.decoder.breaks:
        row["breaks"] = dict(probed.decoder.breaks)
    if probed.decoder.experts is not None:
        row["experts"] = probed.decoder.experts.kind
    try:
        outcome, reason = served(load_transformers(model), model)
    except Exception as error:
        outcome, reason = "passed the probe, then differed", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    row |= {"outcome": outcome, "seconds": round(time.perf_counter() - begin, 1)}
    return row | ({"reason": reason} if reason else {})


def main() -> None:
    """Try all types and write the results file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kinds", help="by default all")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {**provenance(options.commit), "models": {}}
    for kind in options.kinds.split(",") if options.kinds else kinds():
        results["models"][kind] = one(kind)
        print(kind, results["models"][kind], flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()


if __name__ == "__main__":
    main()
