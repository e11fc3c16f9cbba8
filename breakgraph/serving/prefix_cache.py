"""Prefix reuse: full blocks are found again by a digest of their tokens and of all tokens before them.

Keys and values of a token depend on the tokens up to it and on nothing else, so a request can take over the blocks of any
other that began with the same tokens: a system prompt, the turns of a conversation so far, or its own after a preemption.
The digest of a block is taken over that of the block before and over its own token ids, so equal digests mean equal
beginnings. Only full blocks are shared, and a full block is never written again: nothing has to be copied on a write.

A block is published as soon as the step that fills it is on the stream. Whoever finds it runs in a later step of the same
stream, and reads what is written by then.
"""

from __future__ import annotations

import enum
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from breakgraph.errors import InternalError
from breakgraph.serving.kv_cache import BlockAllocator
from breakgraph.serving.requests import Request

__all__ = ["PrefixCache", "PrefixReuse", "block_digest"]

_DIGEST_BYTES = 16  # at 128 bits nobody finds two beginnings with one digest, not even on purpose
_NO_PARENT = bytes(_DIGEST_BYTES)


class PrefixReuse(enum.Enum):
    """Whether requests take over blocks of others that began with the same tokens."""

    ON = "on"
    OFF = "off"
    """Every token is computed; nothing is hashed."""


def block_digest(token_ids: npt.NDArray[np.int64], *, parent: bytes | None) -> bytes:
    """Names what lies in a block. Cost: one hash of 8 bytes a token.

    Args:
        token_ids: Of the block, ``(block_size,)`` int64.
        parent: Digest of the block before; None for the first.

    Returns:
        16 bytes.
    """
    return blake2b((parent or _NO_PARENT) + token_ids.tobytes(), digest_size=_DIGEST_BYTES).digest()


class PrefixCache:
    """Finds and publishes the full blocks of requests; with reuse off it does neither.

    Args:
        allocator: Where blocks are published.
        block_size: Tokens per block.
        reuse: On or off.

    Attributes:
        cached_tokens: Prompt tokens that requests found when they were first admitted.
    """

    def __init__(self, allocator: BlockAllocator, *, block_size: int, reuse: PrefixReuse) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._enabled = reuse is PrefixReuse.ON
        self.cached_tokens = 0

    def find(self, request: Request) -> list[int]:
        """Published blocks with the first tokens of a request.

        At least one token is left to compute: its logits are needed. Cost: a look-up a block, and for blocks that were never
        looked for a digest.

        Args:
            request: A waiting one, whose tokens the host knows.

        Returns:
            The longest chain, in order; nothing is held yet.
        """
        blocks: list[int] = []
        if self._enabled:
            for index in range((request.length - 1) // self._block_size):
                block = self._allocator.find(self._digest(request, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def admit(self, request: Request, *, shared: int) -> None:
        """Starts a request behind the blocks that it shares.

        Args:
            request: It holds its blocks.
            shared: How many of the first ones are from ``find``.
        """
        prefix = request.prefix
        prefix.published, prefix.twins = shared, False
        request.computed = shared * self._block_size
        if prefix.reused is None:
            prefix.reused = request.computed
            self.cached_tokens += request.computed

    def publish(self, request: Request) -> None:
        """Publishes those full blocks whose tokens are known and computed, as far as launched steps go.

        Cost: of each new block, a digest.

        Args:
            request: Any; one that holds nothing, or has nothing new, is left alone.
        """
        prefix = request.prefix
        full = min(request.computed, request.known) // self._block_size
        if full <= prefix.published or prefix.spoilt or not self._enabled:
            return
        for index in range(prefix.published, full):
            digest = self._digest(request, index)
            prefix.twins |= not self._allocator.publish(request.blocks[index], digest=digest)
        prefix.published = full

    def spoil(self, request: Request) -> None:
        """Publishes no more of a request: a step that was to write its blocks failed.

        Args:
            request: It may go on to hold its blocks, those that it shares too.
        """
        request.prefix.spoilt = True

    def release(self, request: Request) -> None:
        """Gives the blocks of a request back; the last ones of its chain are to be used first.

        Args:
            request: It holds blocks, and no step in flight uses them.
        """
        prefix = request.prefix
        self._allocator.free(request.blocks)
        if prefix.twins:
            # Blocks in front of its own are another's, and may have been idle for longer than what follows on them.
            for digest in reversed(prefix.digests[: prefix.published]):
                self._allocator.touch(digest)
        prefix.published = 0

    def check_write(self, request: Request, *, start: int) -> None:
        """Makes sure that a step writes to no block that others may read.

        Args:
            request: Whose blocks are written.
            start: Position of the first token written.

        Raises:
            InternalError: It lies in a published block.
        """
        if start < request.prefix.published * self._block_size:
            raise InternalError(f"position {start} was to be written, in a block that others may read.")

    def _digest(self, request: Request, index: int) -> bytes:
        digests, size = request.prefix.digests, self._block_size
        while len(digests) <= index:
            ids = request.known_ids(len(digests) * size, count=size)
            digests.append(block_digest(ids, parent=digests[-1] if digests else None))
        return digests[index]
