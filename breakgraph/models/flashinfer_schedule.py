"""Which tile of which request FlashInfer's FA3 kernel computes on which of its blocks: a schedule made with numpy.

FA3's paged prefill is one persistent kernel, of one block (CTA) on each multiprocessor. Each block walks through *works*: a
tile of query rows of one request under one head. FlashInfer's C++ plan gives the works out one by one, head by head, each to
the block that has least to do, which costs host time for each work (docs/benchmarks.md). Which block computes a work
changes no number, so here they are sorted by length, as all heads' tiles are equally long, and dealt back and forth: block
0, 1, ..., n-1, n-1, ..., 1, 0, 0, 1, ... What remains of the host time are a few operations on arrays. On average this is
more even than FlashInfer's, which does not sort across heads.

The kernel reads seven numbers of each work, each in an array of its own, and where each block's works begin; of the cache it
reads the page numbers. It reads no indptr: every work says itself where its rows and pages begin. Two things follow:

- Rows of padding need no request as long as they are: each tile of them is a work over its own first tokens, whose pages all
  are the null block. They cost as much as one short prompt a tile, not a square.
- Arrays, page numbers included, lie in one buffer, and one copy brings them to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from breakgraph.errors import InternalError
from breakgraph.models.attention_types import BatchLayout, Int32Array
from breakgraph.models.flashinfer_packing import blocks_of, fill_pages

__all__ = ["TILE_ROWS", "Scheduler", "Step", "WorkLayout", "works_of"]

TILE_ROWS = {64: 192, 128: 128, 256: 128}
"""Query rows of a tile, by head dimension."""

_ALIGNMENT = 4  # int32 elements
# Rows of the table of tiles.
_TILE, _FIRST_ROW, _FIRST_PAGE, _ROWS, _TOKENS, _REQUEST = range(6)


@attrs.frozen(eq=False)
class WorkLayout:
    """Where the arrays of a schedule lie in a packed int32 buffer; the page numbers end it.

    In this order: numbers of the tiles, first rows, first pages, rows, tokens, requests, then heads, then where the works of each
    block begin.

    Attributes:
        works: Works that there is room for; the first seven arrays have this length, a multiple of 4.
        blocks: Where it says where the works of each block begin.
        pages: Where the page numbers begin.
        plan_info: What `run()` takes for a plan: where the arrays begin, in bytes and in FlashInfer's order, and that heads have
            schedules of their own.
    """

    works: int
    blocks: int
    pages: int
    plan_info: list[int]

    @classmethod
    def of(cls, works: int, *, ctas: int) -> WorkLayout:
        """Lay the arrays out.

        Args:
            works: Works that there must be room for.
            ctas: Blocks of the kernel.
        """
        room = _aligned(works)
        blocks = 7 * room
        order = (_TILE, _FIRST_ROW, _FIRST_PAGE, _ROWS, _TOKENS, 6, 7, _REQUEST)
        return cls(room, blocks, blocks + _aligned(ctas + 1), [*(4 * room * place for place in order), 0])


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


@attrs.frozen(eq=False)
class Step:
    """A step and what follows from its lengths, worked out once.

    Attributes:
        layout: Rows and pages of each request.
        seq_lens: int32 (R,), tokens of each request, these rows included.
        row_ends: int32 (R,), where the rows of each request end.
        page_counts: int32 (R,), pages of each request.
        page_ends: int32 (R,), where its page numbers end.
        tile_counts: int32 (R,), tiles of each request; None: one each.
        padding: Rows of padding.
        works: Works, padding included.
        pages: Page numbers, those of padding included.
        null_pages: Those of padding alone, in front.
    """

    layout: BatchLayout
    seq_lens: Int32Array
    row_ends: Int32Array
    page_counts: Int32Array
    page_ends: Int32Array
    tile_counts: Int32Array | None
    padding: int
    works: int
    pages: int
    null_pages: int


@attrs.frozen(eq=False)
class _Dealt:
    """How works are dealt that are sorted by length, each tile for all heads before the next.

    Attributes:
        tiles: intp (W,), which tile the works are of, in the order of the blocks.
        heads: int32 (W,).
        blocks: int32 (ctas + 1,), where the works of each block begin.
    """

    tiles: npt.NDArray[np.intp]
    heads: Int32Array
    blocks: Int32Array


@lru_cache(maxsize=1024)
def _dealt(tiles: int, heads: int, ctas: int) -> _Dealt:
    works = tiles * heads
    rounds = -(-works // ctas)
    table = np.arange(rounds * ctas).reshape(rounds, ctas)
    table[1::2] = table[1::2, ::-1]
    held = table < works
    order = table.T[held.T]
    blocks = np.zeros(ctas + 1, dtype=np.int32)
    np.cumsum(held.sum(axis=0), out=blocks[1:])
    return _Dealt(order // heads, (order % heads).astype(np.int32), blocks)


class Scheduler:
    """Makes schedules for one shape of attention, causal.

    Args:
        num_heads: Query heads.
        head_dim: Width of a head, one of `TILE_ROWS`.
        block_size: Tokens of a page.
        ctas: Blocks of the kernel: multiprocessors of the device.

    Attributes:
        ctas: As given.
        null_pages: Page numbers that rows of padding read: those of one tile.
    """

    def __init__(self, *, num_heads: int, head_dim: int, block_size: int, ctas: int) -> None:
        self._heads, self.ctas = num_heads, ctas
        self._tile_rows, self._block_size = TILE_ROWS[head_dim], block_size
        self.null_pages = -(-self._tile_rows // block_size)

    def layout(self, works: int) -> WorkLayout:
        """Where the arrays of so many works lie.

        Args:
            works: How many.
        """
        return WorkLayout.of(works, ctas=self.ctas)

    def most_works(self, *, rows: int, requests: int) -> int:
        """Works of the worst step: every request but one ends with a tile of one row, and so does the padding.

        Args:
            rows: Rows of the step, padding included.
            requests: Most requests.
        """
        return (rows // self._tile_rows + requests + 1) * self._heads

    def step(self, layout: BatchLayout, *, padded: int | None = None) -> Step:
        """Work out what a step needs.

        Args:
            layout: Rows and pages of each request.
            padded: Rows of the graph, at least those of the step; None: there is no padding, and no page numbers for it.
        """
        query_lens, tile = layout.query_lens, self._tile_rows
        requests = len(query_lens)
        seq_lens = layout.seq_lens
        row_ends = np.add.accumulate(query_lens, dtype=np.int32)
        page_counts = blocks_of(seq_lens, self._block_size)
        page_ends = np.add.accumulate(page_counts, dtype=np.int32)
        own, pages = (int(row_ends[-1]), int(page_ends[-1])) if requests else (0, 0)
        tile_counts, tiles = None, requests
        if own > tile and np.maximum.reduce(query_lens) > tile:
            tile_counts = blocks_of(query_lens, tile)
            tiles = int(np.add.reduce(tile_counts))
        padding, null_pages = (0, 0) if padded is None else (padded - own, self.null_pages)
        works = (tiles + -(-padding // tile)) * self._heads
        return Step(
            layout,
            seq_lens,
            row_ends,
            page_counts,
            page_ends,
            tile_counts,
            padding,
            works,
            pages + null_pages,
            null_pages,
        )

    def fill(self, buffer: Int32Array, step: Step, *, layout: WorkLayout) -> int:
        """Write a schedule.

        Args:
            buffer: int32, as long as `layout.pages` and the page numbers.
            step: The step.
            layout: Where the arrays lie, with room for its works.

        Returns:
            Elements that the device needs: the schedule and the page numbers.

        Raises:
            LiveDataError: The tables hold fewer pages than the sequences need.
        """
        if step.works > layout.works:
            raise InternalError(f"a schedule of {step.works} works was to be written to a layout of {layout.works}")
        end, own_pages = layout.pages + step.pages, layout.pages + step.null_pages
        buffer[layout.pages : own_pages] = 0
        fill_pages(
            buffer[own_pages:end], step.layout.block_tables, blocks=step.page_counts, total=step.pages - step.null_pages
        )
        table, ends = self._tiles(step)
        dealt = _dealt(len(ends), self._heads, self.ctas)
        # The longest first; where there is one tile, nothing is to be sorted.
        order = dealt.tiles if len(ends) == 1 else (-ends).argsort(kind="stable").take(dealt.tiles)
        room, count = layout.works, step.works
        for row, values in enumerate(table):
            # "clip" spares numpy the copy in which it would otherwise look for indices out of range.
            values.take(order, out=buffer[row * room : row * room + count], mode="clip")
        buffer[6 * room : 6 * room + count] = dealt.heads
        buffer[layout.blocks : layout.blocks + self.ctas + 1] = dealt.blocks
        return end

    def _tiles(self, step: Step) -> tuple[Int32Array, Int32Array]:
        """Numbers (6, tiles) of all tiles of a head, and up to which token each looks."""
        tile, requests = self._tile_rows, len(step.row_ends)
        pieces = -(-step.padding // tile)
        table = np.zeros((6, requests + pieces), dtype=np.int32)
        _, first, page, lens, tokens, request = table
        if requests:
            lens[:requests], tokens[:requests] = step.layout.query_lens, step.seq_lens
            request[:requests] = _ramp(requests)
            first[1:requests] = step.row_ends[:-1]
            page[:requests] = step.null_pages
            page[1:requests] += step.page_ends[:-1]
        if pieces:  # tiles over their own first tokens, on the null block
            own = int(step.row_ends[-1]) if requests else 0
            first[requests:] = own + tile * _ramp(pieces)
            lens[requests:] = tile
            lens[-1] = step.padding - (pieces - 1) * tile
            tokens[requests:] = lens[requests:]
        if step.tile_counts is None:
            return table, tokens
        tiles = np.concatenate((step.tile_counts, np.ones(pieces, dtype=np.int32)))
        owner = np.repeat(np.arange(len(tiles)), tiles)
        table = table.take(owner, axis=1)
        left = np.add.accumulate(tiles).take(owner) - np.arange(len(owner))  # tiles of the request from this one on
        table[_TILE] = tiles.take(owner) - left
        # A tile looks as far as its last row, the last one of a request as far as that goes.
        ends = table[_TOKENS] - table[_ROWS] + np.minimum((table[_TILE] + 1) * tile, table[_ROWS])
        return table, ends


@lru_cache(maxsize=1024)
def _ramp(count: int) -> Int32Array:
    return np.arange(count, dtype=np.int32)


def works_of(buffer: Int32Array, plan_info: Sequence[int], *, ctas: int) -> Int32Array:
    """The works of a plan in an order that does not hang on who computes them, to compare two plans.

    Args:
        buffer: int32, the int workspace on the host.
        plan_info: Of FA3.
        ctas: Blocks of the kernel.

    Returns:
        int32 (W, 7): tile, first row, first page, rows, tokens, head, request.
    """
    *first, heads, blocks, requests = (offset // 4 for offset in plan_info[:8])
    count = int(buffer[blocks + ctas])
    works = np.stack([buffer[start : start + count] for start in (*first, heads, requests)], axis=1)
    return works[np.lexsort(works.T)]
