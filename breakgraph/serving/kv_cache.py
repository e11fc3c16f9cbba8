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

__all__ = ["NULL_BLOCK", "BlockAllocator", "KVCache", "blocks_for", "slots_of"]

NULL_BLOCK = 0


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

    def compact(self) -> dict[int, int]:
        """Takes the lowest blocks in place of the highest held ones, until those that are held have no gap among them.

        Returns:
            For each block that was given up, the one that was taken for it. The caller moves the data
            (`KVCache.move`) and renames blocks wherever it holds them.
        """
        held = sum(self._held)
        gaps = [block for block in range(1, held + 1) if not self._held[block]]
        above = [block for block in range(held + 1, self._num_blocks) if self._held[block]]
        for block in above:
            self._held[block] = False
        for block in gaps:
            self._held[block] = True
        self._free = list(range(self._num_blocks - 1, held, -1))
        return dict(zip(above, gaps, strict=True))


class KVCache:
    """The storage of all layers, made once; its addresses are baked into the graphs.

    Args:
        num_blocks: All blocks, the null block included.
        block_size: Tokens per block.
        num_layers: Layers, each with a key and a value tensor.
        num_kv_heads: Key and value heads.
        head_dim: Numbers per head.
        dtype: Of both tensors.
        device: Where they live.

    Attributes:
        layers: One ``(keys, values)`` pair per layer, each ``(num_blocks, block_size, num_kv_heads, head_dim)``.
        num_blocks: As given.
        block_size: As given.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: attention multiplies masked values by a weight of zero, and zero times NaN is NaN.
        # On a CPU zeros cost no memory until they are written.
        self.layers = tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        )
        self.num_blocks = num_blocks
        self.block_size = block_size

    def move(self, moves: Mapping[int, int]) -> None:
        """Copies blocks in all layers, behind whatever was launched on the current stream before.

        Cost: four kernels a layer and a copy of these blocks; the host does not wait for the device.

        Args:
            moves: From block to block, as `BlockAllocator.compact` returns them: no block is in both roles.
        """
        if not moves:
            return
        device = self.layers[0][0].device
        both = torch.tensor([list(moves), list(moves.values())])
        if device.type == "cuda":
            both = both.pin_memory().to(device, non_blocking=True)
        with torch.no_grad():
            for tensor in (tensor for layer in self.layers for tensor in layer):
                tensor.index_copy_(0, both[1], tensor.index_select(0, both[0]))

    @staticmethod
    def block_bytes(*, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes in all layers together."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


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
