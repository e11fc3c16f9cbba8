"""Which requests run in the next step: continuous batching with chunked prefill.

A step is either a **prefill** of prompt chunks or a **decode** of one token per request, never both. When both are possible
they take turns, a few prefills to a decode: prompts delay the tokens of others by so many chunks at a time.

The scheduler works on *launched* counts: a step counts as done when it was handed to the device, because
the host does not wait for its tokens. Whatever needs tokens that the host has not read, which is only
preemption, asks for the device to be drained first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

import attrs

from breakgraph.errors import ConfigError, InternalError
from breakgraph.serving.kv_cache import BlockAllocator, blocks_for
from breakgraph.serving.prefix_cache import PrefixCache, PrefixReuse
from breakgraph.serving.requests import Request, RequestState

__all__ = ["DecodeBatch", "Drain", "PrefillBatch", "PrefillChunk", "Scheduler", "check_prompt"]


@attrs.frozen
class PrefillChunk:
    """Part of one request's tokens, to be put into the cache.

    Attributes:
        request: Whose tokens.
        start: Position of the first one.
        count: How many.
        completes: Whether these are the last: then a token is sampled behind them.
    """

    request: Request
    start: int
    count: int
    completes: bool


@attrs.frozen
class PrefillBatch:
    """Chunks that are computed in one step, at most one per request."""

    chunks: tuple[PrefillChunk, ...]

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests of the step, in row order."""
        return tuple(chunk.request for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sampled(self) -> tuple[Request, ...]:
        """Requests that get a token in this step, in row order."""
        return tuple(chunk.request for chunk in self.chunks if chunk.completes)


@attrs.frozen
class DecodeBatch:
    """Requests that get one more token.

    Attributes:
        requests: In order of arrival.
        lengths: For each, the tokens that attention sees: the cached ones and this step's input.
    """

    requests: tuple[Request, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step: one per request."""
        return len(self.requests)

    @property
    def sampled(self) -> tuple[Request, ...]:
        """Requests that get a token in this step, in row order."""
        return self.requests


@attrs.frozen
class Drain:
    """No step can be formed before the steps in flight have been read."""


class Scheduler:
    """Forms steps, gives out rows and blocks, and takes them back.

    Args:
        allocator: The blocks.
        block_size: Tokens per block.
        max_batch_size: Most requests that hold a row at a time; rows are 1 .. ``max_batch_size``, row 0 is for padding.
        max_num_tokens: Most tokens of a prefill step.
        max_seq_len: Most tokens of prompt and output of one request.
        reserved_blocks: Blocks of the allocator that requests can never have, since padding requests hold them.
        max_chunks: Most requests of a prefill step; None: no limit but the others.
        prefill_burst: Most prefill steps in a row while a request could have its next token.
        prefix_reuse: Whether requests take over blocks of others with the same first tokens.

    Attributes:
        prefixes: What full blocks can be found again.
        preemptions: How often a request lost its blocks and had to start again.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        reserved_blocks: int = 0,
        max_chunks: int | None = None,
        prefill_burst: int = 1,
        prefix_reuse: PrefixReuse = PrefixReuse.OFF,
    ) -> None:
        self.prefixes = PrefixCache(allocator, block_size=block_size, reuse=prefix_reuse)
        self._allocator = allocator
        self._reserved_blocks = reserved_blocks
        self._block_size = block_size
        self._max_num_tokens = max_num_tokens
        self._max_chunks = max_chunks
        self._max_seq_len = max_seq_len
        self._max_batch_size = max_batch_size
        self._free_rows = list(range(max_batch_size, 0, -1))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._prefill_burst = prefill_burst
        self._prefills = 0  # since the last decode
        self.preemptions = 0

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold together."""
        return self._allocator.num_usable - self._reserved_blocks

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs; finished ones that still hold blocks do not count."""
        return bool(self._waiting) or any(request.wants_token for request in self._running)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Requests that wait or run, running ones first."""
        running = (request for request in self._running if request.state is not RequestState.FINISHED)
        return (*running, *self._waiting)

    def check(self, prompt: int, *, max_new_tokens: int) -> None:
        """Refuses what could never run; may be called from any thread.

        Args:
            prompt: Tokens of the prompt.
            max_new_tokens: Most tokens of the answer.

        Raises:
            ConfigError: No room for one token, or more blocks than there are.
        """
        check_prompt(prompt, max_seq_len=self._max_seq_len)
        # The last token is returned, never cached.
        most = prompt + max_new_tokens - 1
        blocks = blocks_for(most, block_size=self._block_size)
        if blocks > self.usable_blocks:
            raise ConfigError(
                f"the request can grow to {most} cached tokens, {blocks} blocks; the cache has {self.usable_blocks}.",
                why="Even alone it would run out of memory before it ends.",
                fix="Lower max_tokens, shorten the prompt, or give the cache more blocks.",
            )

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks or rows."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queues a request.

        Args:
            request: A new one.

        Raises:
            ConfigError: It could never run: no room for one token, or more blocks than there are.
        """
        self.check(len(request.prompt_ids), max_new_tokens=request.max_new_tokens)
        self._waiting.append(request)

    def schedule(self, *, drained: bool) -> PrefillBatch | DecodeBatch | Drain | None:
        """Forms the next step and counts it as launched.

        Args:
            drained: Whether the host has read every launched token.

        Returns:
            The step; Drain when a request must be preempted first and that needs a drained device; None when
            there is nothing to launch.
        """
        decodable = [r for r in self._running if r.state is RequestState.DECODE and r.wants_token]
        if self._prefills < self._prefill_burst or not decodable:
            chunks = tuple(islice(self._chunks(), self._max_chunks))
            if chunks:
                self._prefills += 1
                return PrefillBatch(chunks)
        if not decodable:
            return None
        if not self._make_room(decodable, drained=drained):
            return Drain()
        batch = tuple(request for request in decodable if request.state is RequestState.DECODE)
        if not batch:  # all of them made room for an older prompt that is still being computed
            return self.schedule(drained=drained)
        lengths = tuple(request.length for request in batch)
        for request in batch:
            request.computed = request.length
            request.launched += 1
        self._prefills = 0
        return DecodeBatch(batch, lengths)

    def launched(self, batch: PrefillBatch | DecodeBatch) -> None:
        """Notes that a step is on the stream: what it fills with prompts can be found by the next one.

        What it fills with generated tokens is not known yet; it is published when the request takes a further block or ends.
        Cost: of each new block, a digest.

        Args:
            batch: From ``schedule``.
        """
        if isinstance(batch, PrefillBatch):
            for chunk in batch.chunks:
                self.prefixes.publish(chunk.request)

    def spoil(self, batch: PrefillBatch | DecodeBatch) -> None:
        """Notes that the launch of a step failed: blocks that it was to fill are never published; end its requests.

        Args:
            batch: From ``schedule``, and not ``launched``. What fails after later steps were launched is for ``clear``.
        """
        for request in batch.requests:
            self.prefixes.spoil(request)

    def finish(self, request: Request) -> None:
        """Ends a request: no step will hold it again. Its row and blocks stay until ``release``.

        Args:
            request: One that was added and is not finished.
        """
        self.prefixes.publish(request)
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED

    def release(self, request: Request) -> None:
        """Takes back the row and the blocks of a finished request; no step in flight may use them.

        Args:
            request: A finished one; one that holds nothing is left alone.
        """
        if request.state is not RequestState.FINISHED:
            raise InternalError("a request was released before it was finished.")
        if request.row is not None:
            self._take_back(request)

    def rename_blocks(self, moves: Mapping[int, int]) -> None:
        """Follows blocks that were moved, for every request that holds some, finished ones included.

        Args:
            moves: Old block to new block.
        """
        for request in self._running:
            request.blocks = [moves.get(block, block) for block in request.blocks]

    def clear(self, *, keep: Collection[int] = ()) -> None:
        """Ends every request, takes everything back and forgets what was published, whatever an interrupt left half done.

        Args:
            keep: Blocks that are no request's: those of padding.
        """
        for request in (*self._running, *self._waiting):
            request.state, request.row, request.blocks = RequestState.FINISHED, None, []
        self._running, self._waiting = [], deque()
        self._free_rows = list(range(self._max_batch_size, 0, -1))
        self._allocator.reset(keep=keep)

    def _chunks(self) -> Iterator[PrefillChunk]:
        budget = self._max_num_tokens
        for request in self._running:
            if request.state is RequestState.PREFILL and budget:
                chunk = self._chunk(request, budget=budget)
                budget -= chunk.count
                yield chunk
        while budget and self._waiting and self._admit(self._waiting[0]):
            chunk = self._chunk(self._running[-1], budget=budget)
            budget -= chunk.count
            yield chunk

    def _chunk(self, request: Request, *, budget: int) -> PrefillChunk:
        start = request.computed
        self.prefixes.check_write(request, start=start)
        count = min(request.length - start, budget)
        request.computed += count
        completes = request.computed == request.length
        if completes:
            request.launched += 1
            request.state = RequestState.DECODE
        return PrefillChunk(request, start, count, completes)

    def _admit(self, request: Request) -> bool:
        # The whole prompt's blocks are taken at once: two half-done prompts could otherwise wait for one
        # another's blocks. One block per running request stays free, so that admitting this one does not force
        # a preemption at the next block boundary. What can be shared costs nothing where others hold it.
        if not self._free_rows:
            return False
        shared = self.prefixes.find(request)
        own = blocks_for(request.length, block_size=self._block_size) - len(shared)
        if own + self._allocator.count_idle(shared) + len(self._running) > self._allocator.num_free:
            return False
        self._allocator.hold(shared)  # first: an idle block could be given away otherwise
        blocks = self._allocator.allocate(own)
        if blocks is None:
            raise InternalError(f"{own} blocks were free and could not be had.")
        self._running.append(request)  # first: `clear` knows it by that
        self._waiting.popleft()
        request.blocks = shared + blocks
        self.prefixes.admit(request, shared=len(shared))
        request.row = self._free_rows.pop()
        request.state = RequestState.PREFILL
        return True

    def _make_room(self, batch: list[Request], *, drained: bool) -> bool:
        """Gives every request of the batch a block for its next token, oldest first; False: drain first."""
        for request in batch:
            while request.state is RequestState.DECODE and len(request.blocks) * self._block_size < request.length:
                blocks = self._allocator.allocate(1)
                if blocks is not None:
                    # All blocks before are full, and the host knows all tokens but the one that goes into the new block.
                    self.prefixes.publish(request)
                    request.blocks.extend(blocks)
                elif not drained:
                    return False
                else:
                    self._preempt(self._running[-1])
        return True

    def _preempt(self, request: Request) -> None:
        # Recomputed later from all its tokens. With a seed per position it draws the same tokens again.
        if request.launched != len(request.output_ids):
            raise InternalError("a request was preempted while one of its tokens was in flight.")
        self.prefixes.publish(request)
        self._take_back(request)
        request.computed = 0
        request.state = RequestState.WAITING
        self._waiting.appendleft(request)
        self.preemptions += 1

    def _take_back(self, request: Request) -> None:
        if request.row is None:
            raise InternalError("a request without a row was among the running ones.")
        self.prefixes.release(request)
        self._free_rows.append(request.row)
        self._running.remove(request)
        request.blocks = []
        request.row = None


def check_prompt(
    tokens: int, *, max_seq_len: int, fix: str = "Shorten the prompt, or raise max_seq_len as far as the model goes."
) -> None:
    """Refuses a prompt that leaves no room for a single new token.

    Args:
        tokens: Its length.
        max_seq_len: Most tokens of prompt and answer.
        fix: What to do where it is too long.

    Raises:
        ConfigError: It is empty or too long.
    """
    if tokens < 1:
        raise ConfigError(
            "the prompt has no tokens.",
            why="The first token is predicted from the one before it.",
            fix="Give a prompt of at least one token.",
        )
    if tokens >= max_seq_len:
        raise ConfigError(
            f"the prompt has {tokens} tokens; at most {max_seq_len - 1} fit.",
            why=f"Prompt and answer share {max_seq_len} positions, and one is kept for the first new token.",
            fix=fix,
        )
