"""The client of `benchmarks/server_speed.py`, a process of its own: sends a case's requests at once and notes what each saw.

    python benchmarks/server_client.py URL COUNT stream|whole SEED

It imports little, so that it starts at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

import httpx

__all__ = ["NEW", "PROMPT", "VOCABULARY"]

PROMPT, NEW, VOCABULARY = 128, 128, 32_000


async def client(url: str, *, count: int, stream: bool, seed: int) -> dict[str, Any]:
    """Sends all requests at once; medians of what they saw."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(count)]
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:

        async def one(ids: list[int]) -> tuple[float, float, int]:
            body = {"model": "random", "prompt": ids, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
            begin = time.perf_counter()
            if not stream:
                answer = (await http.post("/v1/completions", json=body)).json()
                if answer["usage"]["completion_tokens"] != NEW:
                    raise RuntimeError(answer)
                end = time.perf_counter() - begin
                return end, end, 1
            first, chunks = 0.0, 0
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chunks += 1
                        first = first or time.perf_counter() - begin
            return first, time.perf_counter() - begin, chunks

        begin = time.perf_counter()
        rows = await asyncio.gather(*map(one, prompts))
        seconds = time.perf_counter() - begin
    firsts, ends, chunks = zip(*rows, strict=True)
    return {
        "seconds": round(seconds, 4),
        "tokens_per_s": round(count * NEW / seconds, 1),
        "first_ms": round(1e3 * statistics.median(firsts), 2),
        "last_ms": round(1e3 * statistics.median(ends), 2),
        "chunks": sum(chunks),
    }


if __name__ == "__main__":
    address, number, kind, seed = sys.argv[1:]
    print(json.dumps(asyncio.run(client(address, count=int(number), stream=kind == "stream", seed=int(seed)))))
