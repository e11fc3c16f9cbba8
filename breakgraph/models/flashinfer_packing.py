"""The index arrays of a FlashInfer plan, packed in one int32 buffer, so that one copy brings them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import lt

import attrs
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.errors import LiveDataError
from breakgraph.models.attention import Int32Array

__all__ = ["HostArrays", "Packing", "blocks_of", "fill_pages", "offsets"]

ALIGNMENT = 64  # int32 elements: arrays in a buffer begin at multiples of 256 bytes, as allocations of their own would


def blocks_of(lens: Int32Array, block_size: int) -> Int32Array:
    """Blocks that hold sequences of these lengths."""
    blocks: Int32Array = (lens + (block_size - 1)) // block_size
    return blocks


def offsets(counts: Int32Array) -> Int32Array:
    """Where each of consecutive runs begins, and the end of the last."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.add.accumulate(counts, dtype=np.int32, out=starts[1:])
    return starts


def fill_pages(out: Int32Array, tables: Sequence[Int32Array], *, blocks: Int32Array, total: int) -> None:
    """Write the pages of requests that each have an array of their own, one behind the other.

    Args:
        out: int32, at least `total` long.
        tables: Pages of each request; more than needed are ignored.
        blocks: int32 (R,), pages that each needs.
        total: Their sum.

    Raises:
        LiveDataError: There are fewer tables or pages than the lengths need.
    """
    counts, held = blocks.tolist(), [len(table) for table in tables]
    if held != counts:
        if len(held) != len(counts) or any(map(lt, held, counts)):
            raise _wrong_pages(f"{len(held)} tables hold {sum(held)} of them for {len(counts)} requests", total)
        tables = [table[:count] for table, count in zip(tables, counts, strict=True)]
    if total:
        np.concatenate(tables, out=out[:total], casting="same_kind")


@attrs.frozen(eq=False)
class Packing:
    """Where the arrays of a plan lie in a packed int32 buffer.

    The sequence lengths come first; only the host reads them. What the device reads follows in one piece.

    Attributes:
        requests: Requests of the plan.
        device: Where the part for the device begins: the start of the query indptr, or of the page indptr without one.
        page_indptr: Where the page indptr begins.
        last_page: Where the tokens in the last pages begin.
        pages: Where the pages begin; they end the buffer.
    """

    requests: int
    device: int
    page_indptr: int
    last_page: int
    pages: int

    @classmethod
    def of(cls, requests: int, *, queries: bool) -> Packing:
        """Lay out the arrays of a number of requests.

        Args:
            requests: Requests of the plan.
            queries: Whether there is a query indptr: requests have any number of rows.
        """
        device = _aligned(requests)
        page_indptr = device + (_aligned(requests + 1) if queries else 0)
        last_page = page_indptr + _aligned(requests + 1)
        return cls(requests, device, page_indptr, last_page, last_page + _aligned(requests))


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@attrs.frozen(eq=False)
class HostArrays:
    """The arrays of a plan in a slot, to write with numpy and to hand to the C++ plan.

    Attributes:
        lens: int32 (R,), tokens of each sequence.
        query_indptr: int32 (R+1,); of a packing without one it is that of the pages.
        query_ends: Its entries from the second on.
        page_indptr: int32 (R+1,).
        page_ends: Its entries from the second on.
        last_page: int32 (R,), tokens in the last page.
        pages: int32, what is left of the slot.
        native: Query indptr, page indptr and lengths as tensors.
    """

    lens: Int32Array
    query_indptr: Int32Array
    query_ends: Int32Array
    page_indptr: Int32Array
    page_ends: Int32Array
    last_page: Int32Array
    pages: Int32Array
    native: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, buffer: torch.Tensor, packing: Packing) -> HostArrays:
        """Views of a buffer on the host.

        Args:
            buffer: int32, on the CPU.
            packing: Where they lie.
        """
        count, array = packing.requests, buffer.numpy()
        starts = (packing.device, packing.page_indptr)
        query, page = (array[start : start + count + 1] for start in starts)
        first, second = (buffer[start : start + count + 1] for start in starts)
        last = array[packing.last_page : packing.last_page + count]
        return cls(
            array[:count],
            query,
            query[1:],
            page,
            page[1:],
            last,
            array[packing.pages :],
            (first, second, buffer[:count]),
        )

    def fill(self, seq_lens: Int32Array, *, blocks: Int32Array, block_size: int) -> None:
        """Write all but query indptr and pages.

        Args:
            seq_lens: int32 (R,), at least 1 each.
            blocks: int32 (R,), pages of each sequence.
            block_size: Tokens of a page.
        """
        self.lens[:] = seq_lens
        self.page_indptr[0] = 0
        np.add.accumulate(blocks, dtype=np.int32, out=self.page_ends)
        np.subtract(self.lens, (blocks - 1) * block_size, out=self.last_page)

    def fill_queries(self, query_lens: Int32Array) -> int:
        """Write the query indptr; returns the number of rows.

        Args:
            query_lens: int32 (R,).
        """
        self.query_indptr[0] = 0
        np.add.accumulate(query_lens, dtype=np.int32, out=self.query_ends)
        return int(self.query_ends[-1])

    def fill_from_rows(self, tables: Sequence[Int32Array], *, blocks: Int32Array, total: int) -> None:
        """Write the pages of requests that each have an array of their own: see `fill_pages`.

        Args:
            tables: Pages of each request.
            blocks: int32 (R,), pages that each needs.
            total: Their sum.
        """
        fill_pages(self.pages, tables, blocks=blocks, total=total)

    def fill_from_table(self, table: Int32Array, *, blocks: Int32Array, total: int, ramp: npt.NDArray[np.intp]) -> None:
        """Write the pages of all rows of a table, the first `blocks[i]` of row i.

        Args:
            table: int32 (R, W).
            blocks: int32 (R,).
            total: Their sum.
            ramp: 0, 1, 2, ... at least `total` of them.

        Raises:
            LiveDataError: The table has too few rows or columns.
        """
        rows, width = table.shape
        if rows != len(blocks) or np.maximum.reduce(blocks) > width:
            raise _wrong_pages(f"the table has {rows} rows of {width} pages for {len(blocks)} requests", total)
        # Of each page: the start of its row, and its place within.
        index = np.repeat(np.multiply(ramp[:rows], width) - self.page_indptr[:-1], blocks)
        index += ramp[:total]
        table.ravel().take(
            index, out=self.pages[:total], mode="wrap"
        )  # with "raise", numpy would write to a copy first


def _wrong_pages(what: str, total: int) -> LiveDataError:
    return LiveDataError(
        f"The lengths of the step need {total} pages; {what}.",
        why="The kernel would read pages that no table names.",
        fix="Pass one table for each request that covers its whole length.",
    )
