"""The same requests through the HTTP server and through `LLM.generate`, on a GPU: what HTTP, JSON and text cost.

    python benchmarks/server_speed.py --out benchmarks/results/server_speed_h200.json [--shape 1B]

Random weights in bfloat16, a vocabulary of 32,000 words, prompts of 128 token ids, 128 new tokens, temperature 0, no prefix
reuse. A client in a process of its own sends all requests of a case at the same time over loopback, whole or streamed; it notes
when each answer's first and last chunk came. *Engine*: `LLM.generate` with as many such prompts. One run not counted, then
one that is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.provenance import provenance
from benchmarks.server_client import NEW, PROMPT, VOCABULARY
from benchmarks.serving_speed import prompts
from benchmarks.shapes import SHAPES

CASES = ((1, True), (32, True), (128, True), (128, False), (256, False))


def words() -> Any:
    """A tokenizer of 32,000 words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({f"\u2581w{index}": index for index in range(VOCABULARY)}, unk_token="\u2581w0")
    )
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def run_case(url: str, *, count: int, stream: bool) -> dict[str, Any]:
    """A case, by a client process."""
    script = Path(__file__).with_name("server_client.py")
    arguments = [sys.executable, str(script), url, str(count), "stream" if stream else "whole", str(count)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=200)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(shape: str) -> dict[str, Any]:
    """All cases: the engine first, then the server over the same engine."""
    from breakgraph.models.weights import random_model
    from breakgraph.server import Limits, Service, create_app, run_server
    from breakgraph.server.run import Running, bind
    from breakgraph.serving import LLM, SamplingParams

    config = attrs.evolve(SHAPES[shape], vocab_size=VOCABULARY)
    model = random_model(config, device=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    llm = LLM(attrs.evolve(model, tokenizer=words()), max_batch_size=256, max_seq_len=512, prefix_reuse="off")
    llm.start()
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    engine = {}
    for count in sorted({count for count, _ in CASES}):
        for seed in range(2):
            ids = prompts(count, length=PROMPT, seed=seed)
            begin = time.perf_counter()
            llm.generate(ids, params)
            engine[count] = time.perf_counter() - begin
    service = Service(llm.model, engine=llm.engine, name="random", limits=Limits())
    ready, found = threading.Event(), []

    def on_ready(running: Running) -> None:
        found.append(running)
        ready.set()

    options = {"service": service, "listener": bind("127.0.0.1", 0), "on_ready": on_ready}
    thread = threading.Thread(target=run_server, args=(create_app(service),), kwargs=options)
    thread.start()
    ready.wait()
    rows = []
    try:
        for count, stream in CASES:
            run_case(found[0].address, count=count, stream=stream)
            row = run_case(found[0].address, count=count, stream=stream)
            rows.append({"requests": count, "streamed": stream, **row, "engine_seconds": round(engine[count], 4)})
            print(rows[-1], flush=True)
    finally:
        found[0].stop()
        thread.join()
    return {"shape": shape, "prompt": PROMPT, "new": NEW, "eager_steps": llm.statistics.eager, "cases": rows}


def main() -> None:
    """Measure and write the results file; or be the client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--commit", help="where the machine has no git")
    options = parser.parse_args()
    results = {**provenance(options.commit), **measure(options.shape)}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
