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
from breakgraph.serving.requests import Request

__all__ = ["PADDING_ROW", "DeviceState", "PendingTokens", "sampling_columns", "upload"]

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


class PendingTokens:
    """Sampled tokens on their way to the host.

    Args:
        tokens: ``(rows,)`` int64 on the device; may be overwritten once this object is made.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            # Page-locked memory comes from torch's caching allocator; this costs a few microseconds.
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tokens.clone()

    def wait(self) -> list[int]:
        """Waits until the copy has arrived and returns the tokens."""
        if self._event is not None:
            self._event.synchronize()
        result: list[int] = self._host.tolist()
        return result


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
