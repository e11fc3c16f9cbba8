"""The engine: steps on the device, the host one of them ahead.

``step`` launches step n+1 and only then reads the tokens of step n, so the device never waits for the host. A
request that turns out to have ended at n may thus be in n+1 already: its token of n+1 is thrown away, and its
row and blocks come back when n+1 has been read.

A step that raises ends its own requests, with the exception; the others go on. That is safe without a wait for the device: what
the step had launched of itself runs before whatever is launched next, on one stream, so blocks may change hands at once.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.errors import InternalError
from breakgraph.serving.config import EngineConfig, Graphs, Sizes
from breakgraph.serving.decode_step import DecodeStep
from breakgraph.serving.device_state import DeviceState, PendingTokens
from breakgraph.serving.in_flight import InFlight, Token
from breakgraph.serving.kv_cache import NULL_BLOCK, BlockAllocator
from breakgraph.serving.logits_tail import LogitsTail
from breakgraph.serving.memory import MemorySplit
from breakgraph.serving.prefill_step import PrefillStep
from breakgraph.serving.prompts import check_tokens
from breakgraph.serving.requests import FinishReason, Request, RequestState
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import DecodeBatch, PrefillBatch, Scheduler
from breakgraph.serving.statistics import Counters, Load, Statistics, collect
from breakgraph.serving.step_records import Laps, StepRecord

__all__ = ["Engine", "Token"]

_LOG = logging.getLogger(__name__)


class Engine:
    """Turns requests into tokens.

    Args:
        state: Model, cache and token table.
        sizes: Sizes that agree with them.
        config: The caller's options.
        eos_token_ids: Tokens that end every request that does not ignore them.
        progress: Called as ``progress("prefill" | "decode", event)`` after each key of each capture phase.
        memory: Where the device's memory goes, where that was measured.

    Attributes:
        state: As given.
        sizes: As given.
        memory: As given.
        prefill: Runs prefill steps.
        decode: Runs decode steps.
    """

    def __init__(
        self,
        state: DeviceState,
        *,
        sizes: Sizes,
        config: EngineConfig,
        eos_token_ids: Sequence[int] = (),
        progress: Callable[[str, CaptureProgress], None] | None = None,
        memory: MemorySplit | None = None,
    ) -> None:
        self.state = state
        self.sizes = sizes
        self.memory = memory
        self._eos = frozenset(eos_token_ids)
        self._graphs = config.graphs
        tail = LogitsTail(state)
        self.prefill = PrefillStep(state, tail=tail, sizes=sizes, config=config, progress=_named("prefill", progress))
        self._allocator = BlockAllocator(sizes.num_blocks)
        self.decode = DecodeStep(
            state,
            tail=tail,
            sizes=sizes,
            config=config,
            allocator=self._allocator,
            progress=_named("decode", progress),
        )
        self._scheduler = Scheduler(
            self._allocator,
            block_size=sizes.block_size,
            max_batch_size=sizes.max_batch_size,
            max_num_tokens=sizes.max_num_tokens,
            max_seq_len=sizes.max_seq_len,
            reserved_blocks=self.decode.reserved_blocks,
            max_chunks=self.prefill.most_requests,
            prefill_burst=config.prefill_burst,
            prefix_reuse=config.prefix_reuse,
        )
        self._seeds = random.Random(config.seed)
        self._in_flight: InFlight | None = None
        self._unread: list[Token] = []  # read while a step failed, and not handed out yet
        self._counters = Counters()

    def capture(self) -> None:
        """Captures all graphs; call it once, before the first request."""
        if self._graphs is Graphs.OFF:
            return
        begin = time.perf_counter()
        with torch.no_grad(), self._weights_dtype():
            self.prefill.capture()
            self.decode.capture()
        self._counters.capture_seconds = time.perf_counter() - begin
        self._warn_of_dropped()

    def _weights_dtype(self) -> AbstractContextManager[Any]:
        """Leaves autocast: cache and graphs have the dtype of the weights, and a replay would not follow it anyway."""
        kind = self.state.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    def _warn_of_dropped(self) -> None:
        """Says once what start-up could not make graphs of; the runners go on without, and answers stay right."""
        statistics = self.statistics()
        if not statistics.dropped:
            return
        by_reason: dict[str, list[str]] = {}
        for name, reason in statistics.dropped.items():
            by_reason.setdefault(reason, []).append(name)
        _LOG.warning(
            "%d of %d graphs were dropped; their steps run eagerly, correct and slow:\n%s",
            len(statistics.dropped),
            len(statistics.dropped) + statistics.graphs,
            "\n".join(f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()),
        )

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do something."""
        return self._in_flight is not None or bool(self._unread) or self._scheduler.has_unfinished

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds, those included that may be found again."""
        return self._allocator.num_free

    @property
    def longest_request(self) -> int:
        """Most tokens of prompt and answer that one request can have: what the model, `max_seq_len` and the cache allow."""
        return min(self.sizes.max_seq_len, self.usable_blocks * self.sizes.block_size + 1)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold together; the padding request of decode holds one more where it is needed."""
        return self._scheduler.usable_blocks

    def statistics(self) -> Statistics:
        """What was done since the start."""
        return collect(
            self._counters,
            prefill=self.prefill.runner,
            decode=self.decode.runner,
            preemptions=self._scheduler.preemptions,
            cached_tokens=self._scheduler.prefixes.cached_tokens,
        )

    def load(self) -> Load:
        """What there is to do now."""
        scheduler, usable = self._scheduler, self.usable_blocks
        used = usable - min(self.free_blocks, usable)
        return Load(
            running=scheduler.num_running, waiting=scheduler.num_waiting, used_blocks=used, usable_blocks=usable
        )

    @property
    def recent_steps(self) -> Sequence[StepRecord]:
        """The newest steps that were read, at most 1,024, oldest first."""
        return tuple(self._counters.records.recent)

    def check(self, prompt_ids: Sequence[int], *, params: SamplingParams) -> None:
        """Refuses what `add` would refuse. Changes nothing and looks at nothing that a step changes: for any thread.

        Args:
            prompt_ids: The prompt's tokens.
            params: How to go on from it.

        Raises:
            ConfigError: It could never run, or its bias names a token that the model does not have.
        """
        size = self.state.decoder.vocab_size
        params.check_vocabulary(size)
        check_tokens(prompt_ids, vocabulary=size)
        prompt = len(prompt_ids)
        self._scheduler.check(prompt, max_new_tokens=self._most_new_tokens(prompt, params))

    def _most_new_tokens(self, prompt: int, params: SamplingParams) -> int:
        return min(params.max_tokens, max(self.sizes.max_seq_len - prompt, 0))

    def add(self, prompt_ids: Sequence[int], *, params: SamplingParams) -> Request:
        """Queues a request.

        Args:
            prompt_ids: At least one token.
            params: How to go on from it.

        Returns:
            The request, as a handle.

        Raises:
            ConfigError: It could never run, or its bias names a token that the model does not have.
        """
        prompt = tuple(prompt_ids)
        self.check(prompt, params=params)  # before a seed is drawn: what is refused changes nothing
        request = Request(
            prompt_ids=prompt,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_new_tokens=self._most_new_tokens(len(prompt), params),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
        )
        self._scheduler.add(request)
        self._counters.prompt_tokens += len(prompt)
        return request

    def step(self) -> list[Token]:
        """Launches one more step and reads the one before it.

        Returns:
            The tokens read, at most one per request. A request whose ``finish_reason`` is set gets no more.

        Raises:
            Exception: What the model, a break or the device raised, unchanged. The requests that it hit have ended with
                `FinishReason.ERROR` and that exception: those of the step that was to be launched and that had not ended in the
                step before; or, where the step in flight cannot be read, all. The engine can go on.
        """
        previous, laps = self._in_flight, Laps()
        try:
            batch = self._scheduler.schedule(drained=previous is None)
            if batch is None and previous is None and self._scheduler.has_unfinished:
                raise InternalError("requests wait, nothing is in flight, and no step can be formed.")
        except Exception as error:
            self._fail_all(error)
            raise
        laps.lap("schedule")
        launched: InFlight | None = None
        if isinstance(batch, (PrefillBatch, DecodeBatch)):
            try:
                launched = self._launch(batch, laps)
            except Exception as error:
                # What the step before made of its requests stands: it is read now and handed out by the next call.
                self._in_flight = None
                try:
                    self._unread += [] if previous is None else self._read(previous)
                except Exception as other:
                    error.add_note(
                        f"breakgraph: the step before could not be read either: {type(other).__name__}: {other}"
                    )
                    self._fail_all(error)
                else:
                    self._fail(batch, error)
                raise
        self._in_flight = launched
        try:
            read = [] if previous is None else self._read(previous)
        except Exception as error:
            self._fail_all(error)
            raise
        tokens, self._unread = self._unread + read, []
        return tokens

    def finish(self, request: Request, *, reason: FinishReason, error: BaseException | None = None) -> None:
        """Ends a request now, whatever it is doing; one that has ended already is left alone.

        Args:
            request: From ``add``.
            reason: Why.
            error: With `FinishReason.ERROR`, what happened.
        """
        if request.state is RequestState.FINISHED:
            return
        request.finish_reason, request.error = reason, error
        self._scheduler.finish(request)
        if self._in_flight is not None and self._in_flight.holds(request):
            self._in_flight.releases.append(request)
        else:
            self._scheduler.release(request)

    def check_device(self) -> None:
        """Waits for the device, and raises where it has failed for good."""
        if self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)

    def defragment(self) -> int:
        """Moves blocks so that those that are held have no gap among them; steps may be in flight.

        The padding request of decode gives its block back before and takes another one afterwards: what lies in it is
        worth no move. Nor is what nobody holds: it can be found again where it lies, unless a block takes its place. Cost: four
        kernels a layer, and a copy of the blocks that move; the host waits for nothing.

        Returns:
            How many blocks were moved.
        """
        with self.decode.runner.suspend_dummies():
            moves = self._allocator.gaps()
            self._allocator.forget(moves.values())
            self.state.cache.move(moves)
            self._allocator.compact()
            self._scheduler.rename_blocks(moves)
        return len(moves)

    def reset(self) -> None:
        """Ends everything, also after an exception in the middle of a step, so that new requests can run.

        What lies in the cache cannot be trusted then, and is found no more.
        """
        in_flight, self._in_flight, self._unread = self._in_flight, None, []
        for request in self._scheduler.unfinished:
            request.finish_reason = FinishReason.ABORT
        try:
            if in_flight is not None and in_flight.tokens is not None:
                in_flight.tokens.wait()  # after it nothing on the device uses the blocks
        finally:
            self._clear()

    def _fail(self, batch: PrefillBatch | DecodeBatch, error: Exception) -> None:
        self._counters.failed_steps += 1
        self._scheduler.spoil(batch)  # first: what ends is published as far as it was written
        for request in batch.requests:
            self.finish(request, reason=FinishReason.ERROR, error=error)

    def _fail_all(self, error: Exception) -> None:
        """Ends everything without a wait: the device may be what failed."""
        self._counters.failed_steps += 1
        self._in_flight = None
        unread, self._unread = self._unread, []
        for request in (*self._scheduler.unfinished, *(token.request for token in unread)):
            request.finish_reason, request.error = FinishReason.ERROR, error
        self._clear()

    def _clear(self) -> None:
        padding = self.decode.padding_block
        self._scheduler.clear(keep=() if padding == NULL_BLOCK else (padding,))

    def _launch(self, batch: PrefillBatch | DecodeBatch, laps: Laps) -> InFlight:
        for request in batch.requests:
            if request.started is None:
                request.started = time.perf_counter()
        tokens: PendingTokens | None
        with torch.no_grad(), self._weights_dtype():
            if isinstance(batch, PrefillBatch):
                prefill = self.prefill.prepare(batch)
                laps.lap("prepare")
                tokens = self.prefill.launch(prefill)
            else:
                decode = self.decode.prepare(batch)
                laps.lap("prepare")
                tokens = self.decode.launch(decode)
        self._scheduler.launched(batch)
        laps.lap("launch")
        self._counters.launched(batch, seconds=sum(laps.seconds.values()))
        return InFlight(batch, tokens, laps)

    def _read(self, step: InFlight) -> list[Token]:
        laps = step.laps
        laps.start()
        token_ids = step.tokens.wait() if step.tokens is not None else []
        logprobs = step.tokens.logprobs if step.tokens is not None else []
        self._counters.waited(step.batch, seconds=laps.lap("wait"))
        for request in step.releases:
            self._scheduler.release(request)
        tokens: list[Token] = []
        try:
            for request, token_id, logprob in zip(step.batch.sampled, token_ids, logprobs, strict=True):
                if request.state is RequestState.FINISHED:
                    self._counters.discarded_tokens += 1
                    continue
                request.output_ids.append(token_id)
                tokens.append(Token(request, token_id, logprob))
                if token_id in request.stop_ids:
                    self.finish(request, reason=FinishReason.STOP)
                elif len(request.output_ids) == request.max_new_tokens:
                    self.finish(request, reason=FinishReason.LENGTH)
        except Exception as error:  # nobody is told of these tokens any more
            for token in tokens:
                token.request.finish_reason, token.request.error = FinishReason.ERROR, error
            raise
        self._counters.generated_tokens += len(tokens)
        laps.lap("process")
        self._counters.read(step.batch, laps)
        return tokens


def _named(
    name: str, progress: Callable[[str, CaptureProgress], None] | None
) -> Callable[[CaptureProgress], None] | None:
    return None if progress is None else partial(progress, name)
