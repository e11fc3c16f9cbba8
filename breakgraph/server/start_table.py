"""What there is when a server has started: graphs, memory, and how long a request may be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.table import Column, Table

from breakgraph.graph_key import GraphKey, PrefillKey
from breakgraph.serving.config import Graphs
from breakgraph.serving.engine import Engine
from breakgraph.serving.llm import LLM

__all__ = ["start_lines", "start_table"]

_MIB = 1 << 20
_GIB = 1 << 30


def start_table(engine: Engine) -> Table:
    """Buckets, graphs, and what they take, a line for prefill and one for decode.

    Args:
        engine: Captured.
    """
    table = Table(
        "phase",
        Column("buckets", overflow="fold"),
        Column("graphs", justify="right"),
        Column("segments", justify="right"),
        Column("breaks", justify="right"),
        Column("MiB", justify="right"),
        Column("dropped", justify="right"),
        box=box.SIMPLE_HEAD,
    )
    for name, step in (("prefill", engine.prefill), ("decode", engine.decode)):
        graphs = [graph.stats() for graph in step.runner.graphs.values()]
        memory = sum(report.memory_bytes for report in step.runner.statistics.reports.values())
        table.add_row(
            name,
            _sizes(step.runner.graphs),
            str(len(graphs)),
            _range(one.segments for one in graphs),
            _range(one.breaks for one in graphs),
            f"{memory / _MIB:,.0f}",
            str(len(step.runner.dropped)),
        )
    return table


def start_lines(llm: LLM) -> Iterator[str]:
    """What else there is to say, a line each.

    Args:
        llm: Started.
    """
    engine = llm.engine
    sizes, attention = engine.sizes, engine.state.attention
    yield f"{llm.model.served}; attention: {attention.kind}, of prefills {engine.prefill.placement.value}"
    tokens = engine.usable_blocks * sizes.block_size
    shapes, dtype = engine.state.decoder.kv_shapes, engine.state.decoder.dtype
    size = engine.state.cache.block_bytes(block_size=sizes.block_size, shapes=shapes, dtype=dtype) * sizes.num_blocks
    yield (
        f"KV cache: {engine.usable_blocks:,} blocks of {sizes.block_size}, {tokens:,} tokens, {size / _GIB:.2f} GiB; at most"
        f" {sizes.max_batch_size} requests at a time, of at most {engine.longest_request:,} tokens"
    )
    yield from _beyond_ladders(llm)
    split = engine.memory
    if split is not None:
        yield (
            f"memory, GiB: {split.total / _GIB:.1f} in all; {split.occupied / _GIB:.1f} weights and what was there,"
            f" {split.activations / _GIB:.1f} activations, {split.graphs / _GIB:.1f} kept for graphs,"
            f" {split.cache / _GIB:.1f} left for the cache"
        )


def _beyond_ladders(llm: LLM) -> Iterator[str]:
    """Steps without a graph, and buckets that were asked for and that no step reaches."""
    sizes, config = llm.engine.sizes, llm.config
    for name, noun, ladder, most, asked in (
        ("prefill", "tokens", sizes.prefill, sizes.max_num_tokens, config.prefill_sizes),
        ("decode", "requests", sizes.decode, sizes.max_batch_size, config.decode_sizes),
    ):
        if config.graphs is Graphs.ON and ladder.largest < most:
            yield f"{name} steps of {ladder.largest + 1} to {most} {noun} run eagerly: the largest bucket is {ladder.largest}"
        above = [size for size in asked or () if size > most]
        if above:
            yield f"{name} buckets {above} are above the most {noun} of a step, {most}: {ladder.largest} stands for them"


def _sizes(keys: Iterable[PrefillKey | GraphKey]) -> str:
    sizes = sorted({key.tokens if isinstance(key, PrefillKey) else key.batch_size for key in keys})
    return ", ".join(map(str, sizes)) if sizes else "none: every step runs eagerly"


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
