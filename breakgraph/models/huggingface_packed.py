"""Sequences through an adapted decoder as the serving loop would run them: packed, in chunks, padded, and decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from breakgraph.models.attention import AttentionShape, BatchLayout, KVLayer
from breakgraph.models.attention_torch import TorchAttention, TorchBatch
from breakgraph.models.huggingface import AdaptedDecoder
from breakgraph.replay_context import eager_step

__all__ = ["DECODED", "Packed", "cuts_of"]

_BLOCK = 4
_PADDING = 8  # rows that no sequence has, of each step
DECODED = 4
"""Tokens of each sequence that are decoded."""


def cuts_of(length: int, *, chunks: int) -> list[int]:
    """Where the steps of a sequence begin, and where the last ends: chunks, then the decoded tokens.

    Args:
        length: Its tokens.
        chunks: How many.
    """
    prompt = length - DECODED
    return [*(prompt * part // chunks for part in range(chunks)), *range(prompt, length + 1)]


class Packed:
    """Runs sequences side by side, each step padded with rows that write to the null block.

    Args:
        decoder: The adapter.
        sequences: Token ids of each.
        starts: Position of the first token of each; None: 0.
        padding: Rows of each step that no sequence has.
    """

    def __init__(
        self,
        decoder: AdaptedDecoder,
        sequences: Sequence[torch.Tensor],
        *,
        starts: Sequence[int] | None = None,
        padding: int = _PADDING,
    ) -> None:
        self.decoder = decoder
        self.sequences = sequences
        self.starts = starts or [0] * len(sequences)
        self.padding = padding
        device, site = decoder.device, decoder.sites[0]
        shape = AttentionShape(site.heads, site.kv_heads, site.head_dim, _BLOCK, decoder.dtype, device)
        self._attention = TorchAttention(shape, reason="the probe")
        counts = [-(-len(ids) // _BLOCK) for ids in sequences]
        firsts = np.cumsum([1, *counts])
        self._tables = [
            np.arange(first, first + count, dtype=np.int32) for first, count in zip(firsts, counts, strict=False)
        ]
        self._caches: list[KVLayer] = [
            tuple(
                torch.zeros(int(firsts[-1]), _BLOCK, kv.heads, dim, dtype=decoder.dtype, device=device)
                for dim in (kv.key_dim, kv.value_dim)
            )  # type: ignore[misc]
            for kv in decoder.kv_shapes
        ]

    def logits(self, *, chunks: int = 2) -> torch.Tensor:
        """Logits of all tokens, one sequence after the other: each in chunks, and its last tokens decoded.

        Args:
            chunks: How many.
        """
        return self.steps([cuts_of(len(ids), chunks=chunks) for ids in self.sequences], decoded=DECODED)

    def steps(self, cuts: Sequence[Sequence[int]], *, decoded: int) -> torch.Tensor:
        """Logits of all tokens, one sequence after the other, in steps of one's choice.

        Args:
            cuts: Of each sequence where its steps begin, and where the last ends.
            decoded: How many of the steps, the last, are decode steps.
        """
        logits: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        count = len(cuts[0]) - 1
        for part in range(count):
            spans = [(cut[part], cut[part + 1]) for cut in cuts]
            hidden = self._step(spans, decodes=part >= count - decoded)
            split = self.decoder.logits(hidden).split([high - low for low, high in spans])
            for found, new in zip(logits, split, strict=True):
                found.append(new)
        return torch.cat([torch.cat(parts) for parts in logits])

    def _step(self, spans: Sequence[tuple[int, int]], *, decodes: bool) -> torch.Tensor:
        decoder = self.decoder
        rows = torch.cat([ids[low:high] for ids, (low, high) in zip(self.sequences, spans, strict=True)])
        places = [np.arange(low, high) for low, high in spans]
        slots = [t[p // _BLOCK] * _BLOCK + p % _BLOCK for t, p in zip(self._tables, places, strict=True)]
        positions = [place + start for place, start in zip(places, self.starts, strict=True)]
        layout = BatchLayout(
            np.array([high - low for low, high in spans], dtype=np.int32),
            np.array([low for low, _ in spans], dtype=np.int32),
            self._tables,
        )
        batch = self._attention.plan_prefill(layout)
        attend = self._decode(layout) if decodes else self._prefill(batch)
        hidden = decoder.embed(rows)
        padding = hidden.new_zeros(self.padding, hidden.shape[1])
        with eager_step({"batch": batch}, valid_rows=len(rows), padded_rows=len(rows) + self.padding):
            result: torch.Tensor = decoder(
                torch.cat([hidden, padding]),
                positions=self._padded(positions),
                slots=self._padded(slots),
                kv=self._caches,
                attend=attend,
            )
        return result[: len(rows)]

    def _prefill(self, batch: TorchBatch) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        def prefill(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_empty(*q.shape[:2], v.shape[-1])
            self._attention.prefill(q, k, v, out, batch, self.decoder.sites[index].variant)
            return out

        return prefill

    def _decode(self, layout: BatchLayout) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        widest, count = max(map(len, self._tables)), len(self._tables) + self.padding
        state = self._attention.decode_state(batch_size=count, max_context=widest * _BLOCK)
        padded = np.zeros((count, widest), dtype=np.int32)
        for row, table in enumerate(self._tables):
            padded[row, : len(table)] = table
        lengths = np.concatenate([layout.seq_lens, np.ones(self.padding, dtype=np.int32)])
        tables, lens = (torch.from_numpy(array).to(self.decoder.device) for array in (padded, lengths))

        def decode(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._attention.decode(q, k, v, state, tables, lens, self.decoder.sites[index].variant)

        return decode

    def _padded(self, arrays: Sequence[npt.NDArray[np.integer]]) -> torch.Tensor:
        joined = np.concatenate([*arrays, np.zeros(self.padding)]).astype(np.int64)
        return torch.from_numpy(joined).to(self.decoder.device)
