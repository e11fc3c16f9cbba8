"""A decode step: one token for every request, from its last token to the next, in one graph.

Embedding, layers, final norm, logits, sampling and the write of the token back to the token table are all
captured. The host hands over rows, positions, slots, block tables and sampling parameters, never a token. Where a request
asks for penalties, a bias or log-probabilities, the graph ends at the logits and `logits_tail` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.decode_runner import DecodeRunner, Example
from breakgraph.errors import InternalError
from breakgraph.graph_key import GraphKey
from breakgraph.models.attention import DecodeState, KVLayer
from breakgraph.serving.block_tables import BlockTables
from breakgraph.serving.config import EngineConfig, Graphs, SamplingPaths, Sizes
from breakgraph.serving.decode_keys import CONTEXT, StepEnd, context_buckets, decode_keys
from breakgraph.serving.device_state import PADDING_ROW, DeviceState, PendingTokens, sampling_columns
from breakgraph.serving.kv_cache import NULL_BLOCK, BlockAllocator, blocks_for
from breakgraph.serving.logits_tail import LogitsTail, needs_logits
from breakgraph.serving.padding import PaddingRequest
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling import greedy, sample
from breakgraph.serving.scheduler import DecodeBatch
from breakgraph.static_buffers import REQUESTS, Pad, StaticInput
from breakgraph.step import Prepared

__all__ = ["DecodeStep", "decode_keys"]


@attrs.define(eq=False)
class DecodeLive:
    """Live data of a step. The graph needs none of it; planning does, and so does an eager run.

    Attributes:
        end: How the step ends.
        context: The context bucket.
        block_tables: int32 ``(requests, blocks of the longest)``.
        seq_lens: int64 ``(requests,)``, this step's token included.
        attention: State of the attention for the rows that the step computes; set by planning.
    """

    end: StepEnd
    context: int
    block_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int64]
    attention: DecodeState | None = None


@attrs.frozen(eq=False)
class PreparedDecode:
    """A step whose host work is done.

    Attributes:
        requests: In row order.
        live: Its live data, planned.
        prepared: For the runner.
    """

    requests: Sequence[Request]
    live: DecodeLive
    prepared: Prepared[GraphKey]


@attrs.define(eq=False)
class _ExampleSlots:
    """The part of the cache that examples write, as state of a capture.

    A step reads what earlier steps wrote, so two runs of an example are equal only if no other example wrote in
    between. The cache is empty until the first request: to put it back is to fill it with zeros. Nothing is copied.

    Attributes:
        layers: Keys and values.
        written: bool, one per slot; None as soon as the cache belongs to requests.
    """

    layers: Sequence[KVLayer]
    written: npt.NDArray[np.bool_] | None

    @classmethod
    def of(cls, layers: Sequence[KVLayer]) -> _ExampleSlots:
        """Nothing is written yet."""
        return cls(layers, np.zeros(layers[0][0].flatten(0, 1).shape[0], dtype=np.bool_))

    def note(self, slots: npt.NDArray[np.int64]) -> None:
        """Adds what an example is about to write."""
        if self.written is not None:
            self.written[slots] = True

    def save(self) -> None:
        """Empties the slots; there is nothing to keep."""
        self.restore(None)

    def restore(self, saved: None) -> None:
        """Empties the slots."""
        if self.written is None or not self.written.any():
            return
        index = torch.from_numpy(np.flatnonzero(self.written)).to(self.layers[0][0].device)
        for tensor in (tensor for layer in self.layers for tensor in layer):
            tensor.flatten(0, 1).index_fill_(0, index, 0)


class DecodeStep:
    """Builds the decode runner and feeds it batches.

    Args:
        state: Model, cache and token table.
        tail: Ends steps on their logits; the one of prefill as well.
        sizes: The engine's sizes.
        config: Graphs on or off, sampling paths, when to verify.
        allocator: Where the padding request gets its block from.
        progress: Called after each key of each capture phase.

    Attributes:
        runner: The runner; its statistics count the steps.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        tail: LogitsTail,
        sizes: Sizes,
        config: EngineConfig,
        allocator: BlockAllocator,
        progress: Callable[[CaptureProgress], None] | None = None,
    ) -> None:
        self._state = state
        self._tail = tail
        self._sizes = sizes
        self._paths = config.sampling
        self._padding = PaddingRequest(
            allocator,
            block_size=sizes.block_size,
            max_blocks=None if state.attention.plans_decode else sizes.max_blocks,
        )
        self._tables = BlockTables(sizes.max_batch_size + 1, max_blocks=sizes.max_blocks)
        self._contexts = {batch: context_buckets(sizes, state.attention, batch=batch) for batch in sizes.decode.sizes}
        self._attention: dict[tuple[int, int], DecodeState] = {}
        self._random = np.random.default_rng(0)
        self._written = _ExampleSlots.of(state.cache.layers)
        self.runner = DecodeRunner(
            self._forward,
            inputs=_declared(state, sizes=sizes),
            keys=decode_keys(sizes, paths=config.sampling, contexts=self._contexts),
            buckets=sizes.decode,
            example=self._example,
            device=state.device,
            dummies=self._padding,
            state=(self._written,),
            modules=(state.decoder,),
            plan=self._plan,
            verify=config.verify,
            check_addresses=config.check_addresses,
            memory_budget=config.graph_budget,
            progress=progress,
            enabled=config.graphs is Graphs.ON,
        )

    @property
    def padding_block(self) -> int:
        """The block that the padding request holds now; the null block where it holds none."""
        return self._padding.block

    @property
    def reserved_blocks(self) -> int:
        """Blocks that the padding request will hold: one where some batch size has no graph of its own."""
        return int(self.runner.enabled and self._sizes.pads_decode)

    def capture(self) -> None:
        """Captures all keys. The cache must be empty: the blocks of future requests are written."""
        if self._state.decoder.eager_decode is None:
            with self.runner.capture_window():
                self.runner.capture()
        self._written.written = None

    def prepare(self, batch: DecodeBatch) -> PreparedDecode:
        """Does the host work of a step: tables, positions, planning, staging.

        Args:
            batch: Its requests.
        """
        requests = batch.requests
        rows = np.array([request.row for request in requests], dtype=np.int64)
        live = DecodeLive(
            end=self._end(requests),
            context=self.context(len(requests), longest=max(batch.lengths)),
            block_tables=self._tables.take(requests, rows=rows),
            seq_lens=np.array(batch.lengths, dtype=np.int64),
        )
        columns = sampling_columns(requests) if live.end is StepEnd.SAMPLED else {}
        prepared = self.runner.prepare(
            self._inputs(rows, live=live, columns=columns),
            key=live.end.key(len(requests), context=live.context),
            live={"step": live},
            opt_out=self._state.decoder.eager_decode,
        )
        return PreparedDecode(requests, live, prepared)

    def launch(self, step: PreparedDecode) -> PendingTokens:
        """Puts a step on the stream.

        Args:
            step: From `prepare`.

        Returns:
            The tokens, in the order of the batch.
        """
        output: torch.Tensor = self.runner.launch(step.prepared).output
        if step.live.end is StepEnd.LOGITS:
            return self._tail.following(output, step.requests, positions=step.live.seq_lens)
        return PendingTokens(output)

    def run(self, batch: DecodeBatch) -> PendingTokens:
        """`prepare`, then `launch`.

        Args:
            batch: Its requests.
        """
        return self.launch(self.prepare(batch))

    def _end(self, requests: Sequence[Request]) -> StepEnd:
        if needs_logits(requests):
            return StepEnd.LOGITS
        greedy_only = all(request.params.temperature == 0 for request in requests)
        return StepEnd.GREEDY if greedy_only and self._paths is not SamplingPaths.SAMPLED else StepEnd.SAMPLED

    def context(self, batch: int, *, longest: int) -> int:
        """The context bucket of a step.

        Args:
            batch: Its requests.
            longest: Tokens of the longest one, the new one included.
        """
        contexts = self._contexts[self._sizes.decode.round_up(batch) or self._sizes.decode.largest]
        return next(context for context in contexts if context >= longest)

    def _forward(
        self,
        *,
        last_token: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        step: DecodeLive,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        **sampling: torch.Tensor,
    ) -> torch.Tensor:
        decoder, attention, planned = self._state.decoder, self._state.attention, step.attention
        if planned is None:
            raise InternalError("a decode step ran that was not planned.")
        tables = None if block_tables is None else block_tables[:, : planned.max_blocks]

        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return attention.decode(q, k_cache, v_cache, planned, tables, seq_lens, decoder.variants[layer])

        hidden = decoder.embed(last_token.index_select(0, rows))
        hidden = decoder(hidden, positions=positions, slots=slots, kv=self._state.cache.layers, attend=attend)
        logits = decoder.logits(hidden)
        if step.end is StepEnd.LOGITS:
            return logits
        greedy_only = step.end is StepEnd.GREEDY
        tokens = greedy(logits) if greedy_only else sample(logits, position=positions + 1, **sampling)
        last_token.index_copy_(0, rows, tokens)
        return tokens

    def _plan(self, key: GraphKey, live: Mapping[str, Any], rows: int) -> None:
        """Plans the attention for the rows that the step computes: the bucket's, or the real ones of an eager step."""
        step: DecodeLive = live["step"]
        state = self._attention.get((rows, step.context))
        if state is None:
            state = self._state.attention.decode_state(batch_size=rows, max_context=step.context)
            self._attention[rows, step.context] = state
        step.attention = state
        if not self._state.attention.plans_decode:
            return
        tables, lengths = step.block_tables, step.seq_lens.astype(np.int32)
        if padding := rows - len(tables):
            rest = np.full((padding, tables.shape[1]), NULL_BLOCK, dtype=np.int32)
            rest[:, 0] = self._padding.block
            tables, lengths = (
                np.concatenate((tables, rest)),
                np.concatenate((lengths, np.ones(padding, dtype=np.int32))),
            )
        self._state.attention.plan_decode(state, block_tables=tables, seq_lens=lengths)

    def _inputs(
        self, rows: npt.NDArray[np.int64], *, live: DecodeLive, columns: Mapping[str, npt.NDArray[Any]]
    ) -> dict[str, torch.Tensor]:
        block_size = self._sizes.block_size
        positions = live.seq_lens - 1
        blocks = live.block_tables[np.arange(len(rows)), positions // block_size].astype(np.int64)
        arrays = {
            "rows": rows,
            "positions": positions,
            "slots": blocks * block_size + positions % block_size,
            **columns,
        }
        if not self._state.attention.plans_decode:
            width = self._sizes.max_blocks - live.block_tables.shape[1]
            arrays["block_tables"] = np.pad(live.block_tables, ((0, 0), (0, width)), constant_values=NULL_BLOCK)
            arrays["seq_lens"] = live.seq_lens.astype(np.int32)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _example(self, key: GraphKey) -> Example:
        """A full batch of sequences of random lengths, in the blocks of the empty cache."""
        sizes, batch = self._sizes, key.batch_size
        context = dict(key.extra)[CONTEXT]
        assert isinstance(context, int)
        share = (sizes.num_blocks - 1) // batch
        longest = min(context, share * sizes.block_size)
        lengths = self._random.integers(1, longest, endpoint=True, size=batch)
        tables = np.full((batch, blocks_for(longest, block_size=sizes.block_size)), NULL_BLOCK, dtype=np.int32)
        for row, length in enumerate(lengths):
            blocks = blocks_for(int(length), block_size=sizes.block_size)
            tables[row, :blocks] = NULL_BLOCK + 1 + row * share + np.arange(blocks)
        live = DecodeLive(end=StepEnd.of(key), context=context, block_tables=tables, seq_lens=lengths)
        columns = self._example_columns(batch) if live.end is StepEnd.SAMPLED else {}
        rows = np.arange(1, batch + 1, dtype=np.int64)
        inputs = self._inputs(rows, live=live, columns=columns)
        self._written.note(inputs["slots"].numpy())
        return Example(inputs=inputs, live={"step": live})

    def _example_columns(self, batch: int) -> dict[str, npt.NDArray[Any]]:
        draw = self._random
        return {
            "temperature": draw.random(batch).astype(np.float32),
            "top_k": draw.integers(0, 50, size=batch),
            "top_p": 1.0 - 0.5 * draw.random(batch),
            "min_p": 0.1 * draw.random(batch),
            "seed": draw.integers(0, 2**62, size=batch),
        }


def _declared(state: DeviceState, *, sizes: Sizes) -> Sequence[StaticInput]:
    """The inputs of the graph. A padding row is the padding request's; while it holds no block, its rows are the null block's."""
    per_request: tuple[Any, ...] = (REQUESTS,)
    null_slot = NULL_BLOCK * sizes.block_size
    tables = StaticInput(
        "block_tables", shape=(REQUESTS, sizes.max_blocks), dtype=torch.int32, pad=Pad.keep_out(NULL_BLOCK)
    )
    lengths = StaticInput("seq_lens", shape=per_request, dtype=torch.int32, pad=Pad.value(1))
    return (
        StaticInput("last_token", source="device", buffer=state.last_token),
        StaticInput("rows", shape=per_request, pad=Pad.keep_out(PADDING_ROW)),
        StaticInput("positions", shape=per_request),
        StaticInput("slots", shape=per_request, pad=Pad.keep_out(null_slot)),
        *(() if state.attention.plans_decode else (tables, lengths)),
        # A step that draws nothing, or takes the most probable tokens, leaves the rest out.
        StaticInput("temperature", shape=per_request, dtype=torch.float32, default=0.0),
        StaticInput("top_k", shape=per_request, default=0),
        StaticInput("top_p", shape=per_request, dtype=torch.float64, pad=Pad.value(1.0), default=1.0),
        StaticInput("min_p", shape=per_request, dtype=torch.float64, default=0.0),
        StaticInput("seed", shape=per_request, default=0),
    )
