"""The paged KV cache: blocks of token slots, and who holds which.

A block holds ``block_size`` tokens of every layer. Block 0 is the **null block**: it belongs to nobody,
padding rows of a graph write to it and nobody reads it for a result. A token's slot is
``block * block_size + offset``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.attention import KVShape

__all__ = ["NULL_BLOCK", "BlockAllocator", "KVCache", "blocks_for", "slots_of"]

NULL_BLOCK = 0

_MOVED_AT_ONCE = 256  # blocks: bounds the memory of a move


class BlockAllocator:
    """Hands out blocks 1 .. ``num_blocks - 1`` and takes them back.

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
        self._held = [False] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold, free or not."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that are free now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks, or none at all.

        Args:
            count: How many; 0 gives an empty list.

        Returns:
            The blocks, or None when fewer than ``count`` are free.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._held[block] = True
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives blocks back.

        Args:
            blocks: Blocks that ``allocate`` returned and that were not given back since.

        Raises:
            InternalError: A block is not held: two requests would share it. Nothing is freed then.
        """
        if len(set(blocks)) != len(blocks) or not all(0 < b < self._num_blocks and self._held[b] for b in blocks):
            raise InternalError(f"blocks {list(blocks)} were freed, but not all of them are held.")
        for block in blocks:
            self._held[block] = False
        self._free.extend(reversed(blocks))

    def gaps(self) -> dict[int, int]:
        """For each of the highest held blocks, a lower free one, so that after a move held blocks have no gap among them.

        Nothing changes: move the data (`KVCache.move`), then call `compact`, then rename blocks wherever they are held. A
        move that fails half way has touched free blocks only.
        """
        held = sum(self._held)
        below = [block for block in range(1, held + 1) if not self._held[block]]
        above = [block for block in range(held + 1, self._num_blocks) if self._held[block]]
        return dict(zip(above, below, strict=True))

    def compact(self) -> None:
        """Takes the blocks of `gaps`, whose data was moved, and gives up those that they take the place of."""
        for block, other in self.gaps().items():
            self._held[block], self._held[other] = False, True
        self._free = list(range(self._num_blocks - 1, sum(self._held), -1))


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
        both = torch.tensor([list(moves), list(moves.values())], dtype=torch.int64)
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


def slots_of(blocks: Sequence[int], *, start: int, count: int, block_size: int) -> np.ndarray:
    """Slots of ``count`` tokens of one request.

    Args:
        blocks: The request's blocks in order.
        start: Position of the first token.
        count: How many tokens.
        block_size: Tokens per block.

    Returns:
        ``(count,)`` int64.
    """
    positions = np.arange(start, start + count, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[positions // block_size] * block_size + positions % block_size
