"""The padding request of decode: one block of the paged KV cache, and the row of the token table that nobody owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from breakgraph.errors import InternalError
from breakgraph.serving.device_state import PADDING_ROW
from breakgraph.serving.kv_cache import NULL_BLOCK, BlockAllocator

__all__ = ["PaddingRequest"]


class PaddingRequest:
    """Gives the padding rows of a decode step a block of their own: a sequence of one token that is computed anew at each step.

    A `DummyProvider`. Its storage comes from the same allocator as that of real requests, so that a block can never be both.

    Args:
        allocator: The blocks.
        block_size: Tokens per block.
        max_blocks: Columns of the block tables; None where the attention takes none.

    Attributes:
        block: The block that it holds, the null block while it holds none.
    """

    def __init__(self, allocator: BlockAllocator, *, block_size: int, max_blocks: int | None) -> None:
        self.block = NULL_BLOCK
        self._allocator = allocator
        self._block_size = block_size
        self._max_blocks = max_blocks

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Takes a block; see `DummyProvider`.

        Args:
            draft_len: 0: the engine drafts nothing.
        """
        if draft_len or self.block != NULL_BLOCK:
            raise InternalError(f"a padding request of draft length {draft_len}, while block {self.block} is held.")
        blocks = self._allocator.allocate(1)
        if blocks is None:
            return None
        self.block = blocks[0]
        arrays: dict[str, npt.NDArray[Any]] = {
            "rows": np.array([PADDING_ROW]),
            "positions": np.zeros(1, dtype=np.int64),
            "slots": np.array([self.block * self._block_size]),
        }
        if self._max_blocks is not None:
            arrays["block_tables"] = np.full((1, self._max_blocks), NULL_BLOCK, dtype=np.int32)
            arrays["block_tables"][0, 0] = self.block
            arrays["seq_lens"] = np.ones(1, dtype=np.int32)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def release(self, *, draft_len: int) -> None:
        """Gives the block back.

        Args:
            draft_len: As in `allocate`.
        """
        block, self.block = self.block, NULL_BLOCK
        self._allocator.free([block])
