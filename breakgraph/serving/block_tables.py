"""Block tables of all rows, on the host, kept from step to step: only what changed since the last step is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from breakgraph.errors import InternalError
from breakgraph.serving.kv_cache import NULL_BLOCK
from breakgraph.serving.requests import Request

__all__ = ["BlockTables"]


class BlockTables:
    """One table for each row of the engine; entries beyond a request's blocks are the null block.

    A list of blocks that is the one written before has at most grown: whoever moves blocks, or gives a row to another
    request, makes a new list. So a step costs a look at each request, and a write for each new block.

    Args:
        rows: Rows of the engine, that of padding included.
        max_blocks: Blocks of the longest request.
    """

    def __init__(self, rows: int, *, max_blocks: int) -> None:
        self._tables = np.full((rows, max_blocks), NULL_BLOCK, dtype=np.int32)
        self._written: list[tuple[list[int] | None, int]] = [(None, 0)] * rows  # the list itself: an id could come back

    def take(self, requests: Sequence[Request], *, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The tables of a step.

        Args:
            requests: Its requests, each with a row.
            rows: Their rows.

        Returns:
            ``(requests, width)``, the caller's own; the width is that of the longest table among them.
        """
        written = self._written
        width = 0
        for request in requests:
            row, blocks = request.row, request.blocks
            if row is None:
                raise InternalError("a request without a row was in a decode step.")
            held, count = written[row]
            size = len(blocks)
            if held is not blocks or count != size:
                self._write(row, blocks, start=count if held is blocks else 0)
            width = max(width, size)
        return self._tables[rows, :width]

    def _write(self, row: int, blocks: list[int], *, start: int) -> None:
        table = self._tables[row]
        table[start : len(blocks)] = blocks[start:]
        table[len(blocks) :] = NULL_BLOCK
        self._written[row] = (blocks, len(blocks))
