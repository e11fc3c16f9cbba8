"""The paged KV cache: blocks of token slots, who holds which, and which can be found again by what lies in them.

A block holds ``block_size`` tokens of every layer. Block 0 is the **null block**: it belongs to nobody,
padding rows of a graph write to it and nobody reads it for a result. A token's slot is
``block * block_size + offset``.

A block may be **published** under a digest of its tokens and of all before them (`prefix_cache`). It can be held several
times then, and when nobody holds it any more it is **idle**: free, but left as it is until its place is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.attention import KVShape

__all__ = ["NULL_BLOCK", "BlockAllocator", "KVCache", "blocks_for", "slots_of"]

NULL_BLOCK = 0

_MOVED_AT_ONCE = 256  # blocks: bounds the memory of a move


class BlockAllocator:
    """Hands out blocks 1 .. ``num_blocks - 1`` and takes them back; remembers what published ones hold.

    Every block but the null block is in one of three places: held, by one or several; idle, published and held by nobody;
    or free and forgotten. The last two count as free; idle ones are used when no other is left, least recently held first.

    Args:
        num_blocks: All blocks, the null block included; at least 2.

    Raises:
        ConfigError: There would be no block to hand out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks; it needs at least 2.",
                why="Block 0 is kept for padding rows, so no request could store a single token.",
                fix="Raise num_blocks or the memory fraction, or lower block_size.",
            )
        self._num_blocks = num_blocks
        # A stack, so that the block freed last is used next: its lines are the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._holders = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one to be used first in front
        self._digests: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold, free or not."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that are free now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_published(self) -> int:
        """Blocks that can be found by their digest, held or idle."""
        return len(self._published)

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks, or none at all.

        Args:
            count: How many; 0 gives an empty list.

        Returns:
            The blocks, or None when fewer than ``count`` are free.
        """
        if count > self.num_free:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back: published ones that nobody else holds stay idle, the last of them to be used first.

        Args:
            blocks: Blocks that ``allocate`` returned or ``hold`` took, in the order of their tokens, and that this holder did
                not give back since.

        Raises:
            InternalError: A block is not held: two requests would share it. Nothing is freed then.
        """
        if len(set(blocks)) != len(blocks) or not all(0 < b < self._num_blocks and self._holders[b] for b in blocks):
            raise InternalError(f"blocks {list(blocks)} were freed, but not all of them are held.")
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                if block in self._digests:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, digest: bytes) -> int | None:
        """The block that was published under a digest; None where there is none."""
        return self._published.get(digest)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are idle: holding them leaves so many fewer free."""
        return sum(block in self._idle for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Takes published blocks, beside whoever holds them already; give them back with ``free``.

        Args:
            blocks: From ``find``, with nothing allocated since.

        Raises:
            InternalError: A block is not published: somebody may be writing it. Nothing is taken then.
        """
        if not all(block in self._digests for block in blocks):
            raise InternalError(f"blocks {list(blocks)} were to be shared, but not all of them are published.")
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def publish(self, block: int, *, digest: bytes) -> bool:
        """Lets a block be found; nobody may write it from now on.

        Args:
            block: Held by one, who wrote all of it.
            digest: Of what lies in it.

        Returns:
            False when another block has the digest, which then keeps it.

        Raises:
            InternalError: The block is not held by exactly one, or is published already.
        """
        if self._holders[block] != 1 or block in self._digests:
            raise InternalError(
                f"block {block} was published with {self._holders[block]} holders, or for a second time."
            )
        if digest in self._published:
            return False
        self._published[digest] = block
        self._digests[block] = digest
        return True

    def touch(self, digest: bytes) -> None:
        """Makes the block of a digest, if it is idle, the last to be used."""
        block = self._published.get(digest)
        if block is not None and block in self._idle:
            self._idle.move_to_end(block)

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Lets blocks be found no more; whoever holds one keeps it, idle ones become free.

        Args:
            blocks: Which; those that are not published are left alone. None: all.
        """
        for block in tuple(self._digests) if blocks is None else blocks:
            digest = self._digests.pop(block, None)
            if digest is None:
                continue
            del self._published[digest]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def reset(self, *, keep: Collection[int] = ()) -> None:
        """Frees and forgets everything, whatever state it is in: also after an interrupt in the middle of any other method.

        Args:
            keep: Blocks that their holder keeps.
        """
        self._holders = [int(block in keep) for block in range(self._num_blocks)]
        self._digests, self._published, self._idle = {}, {}, OrderedDict()
        self._free = [block for block in range(self._num_blocks - 1, NULL_BLOCK, -1) if block not in keep]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._published[self._digests.pop(block)]
        return block

    def gaps(self) -> dict[int, int]:
        """For each of the highest held blocks, a lower free one, so that after a move held blocks have no gap among them.

        Nothing changes: `forget` those that data goes to, since idle ones may be among them, move the data (`KVCache.move`),
        then call `compact`, then rename blocks wherever they are held. A move that fails half way has touched free blocks only.
        """
        held = sum(map(bool, self._holders))
        below = [block for block in range(1, held + 1) if not self._holders[block]]
        above = [block for block in range(held + 1, self._num_blocks) if self._holders[block]]
        return dict(zip(above, below, strict=True))

    def compact(self) -> None:
        """Takes the blocks of `gaps`, whose data was moved, and gives up those that they take the place of.

        Digests follow the data.

        Raises:
            InternalError: A block that data went to is published still. Nothing is changed then.
        """
        moves = self.gaps()
        if not self._digests.keys().isdisjoint(moves.values()):
            raise InternalError("blocks were overwritten by a move, and can still be found by what was in them.")
        for block, other in moves.items():
            self._holders[other], self._holders[block] = self._holders[block], 0
            digest = self._digests.pop(block, None)
            if digest is not None:
                self._digests[other] = digest
                self._published[digest] = other
        held = sum(map(bool, self._holders))
        self._free = [block for block in range(self._num_blocks - 1, held, -1) if block not in self._idle]


class KVCache:
    """The storage of all layers, made once; its addresses are baked into the graphs.

    Args:
        num_blocks: All blocks, the null block included.
        block_size: Tokens per block.
        shapes: What each layer keeps of a token.
        dtype: Of keys and values.
        device: Where they live.

    Attributes:
        layers: One ``(keys, values)`` pair per layer, each ``(num_blocks, block_size, heads, dim)``.
        num_blocks: As given.
        block_size: As given.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(heads: int, dim: int) -> torch.Tensor:
            # Zeros, not empty: attention multiplies masked values by a weight of zero, and zero times NaN is NaN.
            # On a CPU zeros cost no memory until they are written.
            return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

        self.layers = tuple((zeros(s.heads, s.key_dim), zeros(s.heads, s.value_dim)) for s in shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size

    def move(self, moves: Mapping[int, int]) -> None:
        """Copies blocks in all layers, behind whatever was launched on the current stream before.

        Cost: four kernels a layer for each 256 blocks, and memory for 256 blocks of one layer; the host does not wait.

        Args:
            moves: From block to block, as `BlockAllocator.gaps` returns them: no block is in both roles.
        """
        device = self.layers[0][0].device
        both = torch.tensor([list(moves), list(moves.values())], dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            both = both.pin_memory().to(device, non_blocking=True)
        with torch.no_grad():
            for part in both.split(_MOVED_AT_ONCE, dim=1):
                for tensor in (tensor for layer in self.layers for tensor in layer):
                    tensor.index_copy_(0, part[1], tensor.index_select(0, part[0]))

    @staticmethod
    def block_bytes(*, block_size: int, shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
        """Bytes that one block takes in all layers together."""
        return block_size * sum(shape.numbers for shape in shapes) * dtype.itemsize


def blocks_for(tokens: int, *, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def slots_of(
    blocks: Sequence[int] | npt.NDArray[np.integer], *, start: int, count: int, block_size: int
) -> npt.NDArray[np.int64]:
    """Slots of ``count`` tokens of one request.

    Args:
        blocks: The request's blocks in order, ``(blocks,)``.
        start: Position of the first token.
        count: How many tokens.
        block_size: Tokens per block.

    Returns:
        ``(count,)`` int64.
    """
    positions = np.arange(start, start + count, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[positions // block_size] * block_size + positions % block_size
