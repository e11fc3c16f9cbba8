"""A prefill step: prompt chunks through a breakable graph, then one token for each prompt that is complete.

The graph holds embedding and body of the decoder, token ids in and hidden states out; attention is a break of it or lies in it.
The logits of the last rows and their sampling stay outside: their row counts follow the batch, and they are a handful of
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.gates import Gate
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import BatchLayout, KVLayer, Placement
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.serving.config import EngineConfig, Graphs, Sizes
from breakgraph.serving.device_state import DeviceState, PendingTokens, upload
from breakgraph.serving.kv_cache import NULL_BLOCK, blocks_for, slots_of
from breakgraph.serving.logits_tail import LogitsTail
from breakgraph.serving.prefill_attention import (
    MOST_CAPTURED_REQUESTS,
    CapturedAttention,
    PrefillLive,
    break_attend,
    captured_attend,
)
from breakgraph.serving.scheduler import PrefillBatch
from breakgraph.static_buffers import TOKENS, Pad, StaticInput
from breakgraph.step import Prepared

__all__ = ["PrefillStep", "prefill_body"]


@attrs.frozen(eq=False)
class PreparedPrefill:
    """A step whose host work is done.

    Attributes:
        batch: Its chunks.
        prepared: For the runner.
    """

    batch: PrefillBatch
    prepared: Prepared[PrefillKey]


class PrefillStep:
    """Builds the prefill runner and feeds it batches.

    Args:
        state: Model, cache and token table.
        tail: Ends steps on their logits; the one of decode as well.
        sizes: The engine's sizes.
        config: Graphs on or off, when to verify, and where the attention stands, as `choose` decided.
        progress: Called after each key of each capture phase.

    Attributes:
        runner: The runner; its statistics count the steps.
        placement: Where the attention stands: captured, or a break.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        tail: LogitsTail,
        sizes: Sizes,
        config: EngineConfig,
        progress: Callable[[CaptureProgress], None] | None = None,
    ) -> None:
        self._state = state
        self._tail = tail
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(0)
        self.placement = config.placement
        captured = self.placement is Placement.CAPTURED
        self._captured = CapturedAttention(state.attention, sizes=sizes) if captured else None
        self.runner = PrefillRunner(
            prefill_body(state, layers=state.cache.layers, placement=self.placement),
            inputs=[
                StaticInput("ids", shape=(TOKENS,)),
                StaticInput("positions", shape=(TOKENS,)),
                StaticInput("slots", shape=(TOKENS,), pad=Pad.keep_out(NULL_BLOCK * sizes.block_size)),
            ],
            buckets=sizes.prefill,
            example=self._example,
            device=state.device,
            modules=(state.decoder,),
            verify=config.verify,
            measure=config.measure,
            memory_budget=config.graph_budget,
            expect_breaks={**({} if captured else {"attention": len(state.decoder.variants)}), **state.decoder.breaks},
            plan=None if self._captured is None else self._captured.plan,
            hooks=() if self._captured is None else (self._captured.hold,),
            gates=() if self._captured is None else (Gate("requests", self._captured.check),),
            check_addresses=config.check_addresses,
            progress=progress,
            enabled=config.graphs is Graphs.ON,
        )

    def capture(self) -> None:
        """Captures all buckets. The cache must be empty: the blocks of future requests are written."""
        if self._state.decoder.eager_prefill is not None:
            return
        with self.runner.capture_window():
            self.runner.capture()

    @property
    def most_requests(self) -> int | None:
        """Most requests of a step that its graphs take; None: any number."""
        return None if self._captured is None else MOST_CAPTURED_REQUESTS

    def live(self, layout: BatchLayout) -> Mapping[str, object]:
        """Live data of a step; as a break the attention is planned now, captured in `prepare`.

        Args:
            layout: Rows and pages of each request.
        """
        return {
            "batch": PrefillLive(layout) if self._captured is not None else self._state.attention.plan_prefill(layout)
        }

    def prepare(self, batch: PrefillBatch) -> PreparedPrefill:
        """Does the host work of a step: ids, positions, slots, planning, staging.

        Args:
            batch: Its chunks.
        """
        state, size = self._state, self._sizes.block_size
        chunks = batch.chunks
        ids = np.concatenate([c.request.known_ids(c.start, count=c.count) for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + c.count, dtype=np.int64) for c in chunks])
        tables = [np.array(c.request.blocks, dtype=np.int32) for c in chunks]
        slots = [
            slots_of(table, start=c.start, count=c.count, block_size=size)
            for table, c in zip(tables, chunks, strict=True)
        ]
        layout = BatchLayout(
            np.array([c.count for c in chunks], dtype=np.int32),
            np.array([c.start for c in chunks], dtype=np.int32),
            tables,
        )
        prepared = self.runner.prepare(
            {
                "ids": torch.from_numpy(ids),
                "positions": torch.from_numpy(positions),
                "slots": torch.from_numpy(np.concatenate(slots)),
            },
            size=len(ids),
            live=self.live(layout),
            opt_out=state.decoder.eager_prefill,
        )
        return PreparedPrefill(batch, prepared)

    def launch(self, step: PreparedPrefill) -> PendingTokens | None:
        """Puts a step on the stream.

        Args:
            step: From `prepare`.

        Returns:
            The tokens of ``batch.sampled``, in that order; None when no prompt is complete yet.
        """
        batch, chunks = step.batch, step.batch.chunks
        hidden: torch.Tensor = self.runner.launch(step.prepared).output
        ends = np.cumsum([c.count for c in chunks], dtype=np.int64)
        last_rows = np.array([end - 1 for c, end in zip(chunks, ends, strict=True) if c.completes], dtype=np.int64)
        if not len(last_rows):
            return None
        logits = self._state.decoder.logits(hidden.index_select(0, upload(last_rows, device=self._state.device)))
        # The token that is drawn here was counted when the step was formed.
        drawn = np.array([request.length - 1 for request in batch.sampled], dtype=np.int64)
        return self._tail.first(logits, batch.sampled, positions=drawn)

    def run(self, batch: PrefillBatch) -> PendingTokens | None:
        """`prepare`, then `launch`.

        Args:
            batch: Its chunks.
        """
        return self.launch(self.prepare(batch))

    def _example(self, key: PrefillKey) -> Example:
        """A full bucket of new prompts, each as long as a request may be, in the blocks of the empty cache."""
        sizes = self._sizes
        layout = example_layout(key.tokens, sizes=sizes)
        counts = layout.query_lens.tolist()
        slots = [
            slots_of(blocks, start=0, count=count, block_size=sizes.block_size)
            for blocks, count in zip(layout.block_tables, counts, strict=True)
        ]
        return Example(
            inputs={
                "ids": torch.randint(self._state.decoder.vocab_size, (key.tokens,), generator=self._generator),
                "positions": torch.from_numpy(np.concatenate([np.arange(count, dtype=np.int64) for count in counts])),
                "slots": torch.from_numpy(np.concatenate(slots)),
            },
            live=self.live(layout),
        )


def prefill_body(
    state: DeviceState, *, layers: Sequence[KVLayer], placement: Placement = Placement.BREAK
) -> Callable[..., torch.Tensor]:
    """Makes the forward of a prefill step: token ids in, hidden states after the final norm out.

    Args:
        state: Model and attention.
        layers: The caches to write and read.
        placement: Where the attention stands, as `choose` decided.

    Returns:
        ``forward(ids, positions, slots, batch)``, int64 ``(tokens,)`` each; ``batch`` is from ``plan_prefill``, or a planned
        ``PrefillLive`` where the attention is captured.
    """
    decoder, attention = state.decoder, state.attention
    attend = captured_attend if placement is Placement.CAPTURED else break_attend

    def forward(*, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: Any) -> torch.Tensor:
        result: torch.Tensor = decoder(
            decoder.embed(ids), positions=positions, slots=slots, kv=layers, attend=attend(attention, decoder, batch)
        )
        return result

    return forward


def example_layout(tokens: int, *, sizes: Sizes) -> BatchLayout:
    """New prompts that fill ``tokens`` rows, as long as a request may be, in consecutive blocks from 1 on."""
    longest, block_size = sizes.max_seq_len - 1, sizes.block_size
    if longest > block_size:  # whole blocks: then the prompts need no more blocks than the cache has
        longest -= longest % block_size
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    tables, first = [], NULL_BLOCK + 1
    for count in counts:
        following = first + blocks_for(count, block_size=block_size)
        tables.append(np.arange(first, following, dtype=np.int32))
        first = following
    return BatchLayout(np.array(counts, dtype=np.int32), np.zeros(len(counts), dtype=np.int32), tables)
