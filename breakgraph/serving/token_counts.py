"""Which tokens each request has used, counted on the device: what penalties are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from breakgraph.errors import InternalError
from breakgraph.serving.device_state import upload
from breakgraph.serving.requests import Request

__all__ = ["TokenCounts"]


class TokenCounts:
    """Two tables with a row for each row of the engine and a column for each token.

    They live on the device, since the host launches a step before it has read the tokens of the one before. What is in the row of
    a request without penalties means nothing: it is what the row's last owner left. Everything is put on the current stream; the
    host waits for nothing.

    Cost: five bytes a row and token, taken at the first penalised request; 20 MB for 32 rows and 128,000 tokens.

    Args:
        rows: Rows of the engine, that of padding included.
        vocab_size: Width of the logits.
        device: Where the logits are.
    """

    def __init__(self, rows: int, *, vocab_size: int, device: torch.device) -> None:
        self._shape = (rows, vocab_size)
        self._device = device
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def allocated(self) -> bool:
        """Whether a penalised request has been there."""
        return self._tables is not None

    def begin(self, requests: Sequence[Request]) -> None:
        """Writes the rows of requests whose tokens the host knows: all of them, and no others, are in the row afterwards.

        After a preemption the tokens of the answer so far are counted again, so that it goes on as if nothing had been.

        Args:
            requests: Requests with rows, of which no token is in flight but the one that is about to be sampled.
        """
        if not requests:
            return
        if self._tables is None:
            self._tables = self._allocate()
        outputs, prompts = self._tables
        rows = upload(np.array([_row(request) for request in requests], dtype=np.int64), device=self._device)
        outputs.index_fill_(0, rows, 0)
        prompts.index_fill_(0, rows, False)
        known = [self._places(request, request.prompt_ids)[0] for request in requests]
        prompts.view(-1).index_fill_(0, upload(np.concatenate(known), device=self._device), True)
        answered = [self._places(request, request.output_ids) for request in requests if request.output_ids]
        if answered:
            places, counts = (upload(np.concatenate(part), device=self._device) for part in zip(*answered, strict=True))
            outputs.view(-1).index_copy_(0, places, counts)

    def of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How often each token is in the answers, and whether it is in the prompts.

        Args:
            rows: ``(requests,)`` int64, on the device.

        Returns:
            ``(requests, vocabulary)`` int32, and bool.
        """
        outputs, prompts = self._written()
        return outputs.index_select(0, rows), prompts.index_select(0, rows)

    def add(self, rows: torch.Tensor, *, tokens: torch.Tensor) -> None:
        """Counts one more token of each row.

        Args:
            rows: ``(requests,)`` int64, no row twice.
            tokens: ``(requests,)`` int64.
        """
        flat = self._written()[0].view(-1)
        places = rows * self._shape[1] + tokens
        flat.index_copy_(0, places, flat.index_select(0, places) + 1)  # no row twice, so no place twice

    def _written(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tables is None:
            raise InternalError("tokens of penalised requests are asked for, and none has begun.")
        return self._tables

    def _allocate(self) -> tuple[torch.Tensor, torch.Tensor]:
        # A caller's inference_mode would make tensors that no later step outside of it may write.
        with torch.inference_mode(mode=False):
            return (
                torch.zeros(self._shape, dtype=torch.int32, device=self._device),
                torch.zeros(self._shape, dtype=torch.bool, device=self._device),
            )

    def _places(self, request: Request, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Where tokens of a request are in a flat table, int64, and how often each of them occurs, int32."""
        vocabulary, ids = self._shape[1], np.array(token_ids, dtype=np.int64)
        # A prompt may have tokens that are embedded and never generated, of an image for example: they have no logit.
        tokens, counts = np.unique(ids[ids < vocabulary], return_counts=True)
        return _row(request) * vocabulary + tokens, counts.astype(np.int32)


def _row(request: Request) -> int:
    if request.row is None:
        raise InternalError("a request without a row was to be penalised.")
    return request.row
