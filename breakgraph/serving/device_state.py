"""What prefill and decode share on the device, and how small arrays travel between host and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from breakgraph.models.attention import Attention
from breakgraph.models.decoder import Decoder
from breakgraph.serving.kv_cache import KVCache
from breakgraph.serving.requests import Request, TokenLogprobs

__all__ = ["PADDING_ROW", "DeviceState", "PendingLogprobs", "PendingTokens", "sampling_columns", "upload"]

PADDING_ROW = 0
"""The row of the token table that padding rows read and write; no request owns it."""


@attrs.frozen(eq=False, kw_only=True)
class DeviceState:
    """Everything whose address is baked into graphs, besides the runners' own buffers.

    Attributes:
        decoder: The model.
        attention: Its attention.
        cache: Keys and values.
        last_token: ``(rows + 1,)`` int64: each row's newest token. A step reads its input ids from it and writes
            what it sampled back, so the host need not know a token to launch the step that follows it.
    """

    decoder: Decoder
    attention: Attention
    cache: KVCache
    last_token: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where all of it lives."""
        return self.last_token.device


class PendingLogprobs:
    """Log-probabilities on their way to the host.

    Args:
        wanted: For each row, how many alternatives it asked for; None: not even the token's own.
        chosen: ``(rows,)`` float32 on the device, of the tokens.
        top: ``(rows, most)`` int64, the most probable tokens, most probable first.
        top_values: ``(rows, most)`` float32, theirs.
    """

    def __init__(
        self, wanted: Sequence[int | None], *, chosen: torch.Tensor, top: torch.Tensor, top_values: torch.Tensor
    ) -> None:
        self._wanted = tuple(wanted)
        self._chosen, self._top, self._top_values = _to_host(chosen), _to_host(top), _to_host(top_values)

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """What each row asked for. The copies must have arrived.

        Args:
            token_ids: The tokens of the rows.
        """
        columns = (self._chosen.tolist(), self._top.tolist(), self._top_values.tolist())
        return [
            None if wanted is None else TokenLogprobs(token_id, value, tuple(zip(top[:wanted], values, strict=False)))
            for wanted, token_id, value, top, values in zip(self._wanted, token_ids, *columns, strict=True)
        ]


class PendingTokens:
    """Sampled tokens on their way to the host.

    Args:
        tokens: ``(rows,)`` int64 on the device; may be overwritten once this object is made.
        logprobs: On their way already, on the same stream; None where no row asked for them.

    Attributes:
        logprobs: Of each row, after `wait`; None for a row that did not ask for them.
    """

    def __init__(self, tokens: torch.Tensor, *, logprobs: PendingLogprobs | None = None) -> None:
        self._host = _to_host(tokens)
        self._logprobs = logprobs
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
        self.logprobs: list[TokenLogprobs | None] = [None] * len(tokens)

    def wait(self) -> list[int]:
        """Waits until the copies have arrived and returns the tokens."""
        if self._event is not None:
            self._event.synchronize()
        result: list[int] = self._host.tolist()
        if self._logprobs is not None:
            self.logprobs = self._logprobs.read(result)
        return result


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Starts a copy into memory that nothing else writes; from a CPU it has arrived."""
    if not tensor.is_cuda:
        return tensor.clone()
    # Page-locked memory comes from torch's caching allocator; this costs a few microseconds.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


def upload(array: npt.NDArray[Any], *, device: torch.device) -> torch.Tensor:
    """Copies an array to a device without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def sampling_columns(requests: Sequence[Request]) -> dict[str, npt.NDArray[Any]]:
    """The sampling parameters of a batch as one array per parameter, under the names that ``sample`` takes."""
    params = [request.params for request in requests]
    return {
        "temperature": np.array([p.temperature for p in params], dtype=np.float32),
        "top_k": np.array([p.top_k for p in params], dtype=np.int64),
        "top_p": np.array([p.top_p for p in params], dtype=np.float64),
        "min_p": np.array([p.min_p for p in params], dtype=np.float64),
        "seed": np.array([request.seed for request in requests], dtype=np.int64),
    }
