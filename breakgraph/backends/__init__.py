"""The only modules that touch graphs of a device."""

from __future__ import annotations

import torch

from breakgraph.backends.base import Backend, Piece, Segment
from breakgraph.errors import ConfigError

__all__ = ["Backend", "Piece", "Segment", "make_backend"]


def make_backend(kind: str, *, device: torch.device | None = None, stream: torch.cuda.Stream | None = None) -> Backend:
    """Make a backend.

    Args:
        kind: `"cuda"`, `"emulated"`, or `"auto"`: CUDA where a CUDA device is the current one, else emulated. A
            `device` given with `"auto"` decides.
        device: Device of the graph; the current CUDA device or the CPU by default.
        stream: Capture stream; CUDA only, a new one by default.

    Raises:
        ConfigError: Unknown kind, or CUDA where there is none.
    """
    if kind == "auto":
        on_cuda = device.type == "cuda" if device is not None else torch.cuda.is_available()
        kind = "cuda" if on_cuda else "emulated"
    if kind == "emulated":
        from breakgraph.backends.emulated import EmulatedBackend

        return EmulatedBackend()
    if kind != "cuda":
        raise ConfigError(
            f"backend={kind!r} is not known.",
            why="A backend is what records and launches segments.",
            fix="Use 'auto', 'cuda' or 'emulated'.",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "backend='cuda' was asked for, and torch sees no CUDA device.",
            why="CUDA graphs need one.",
            fix="Use backend='auto' or 'emulated', or install a torch build for your GPU.",
        )
    # Imported here: it needs cuda-bindings, which a CPU machine does not have.
    from breakgraph.backends.cuda import CudaBackend

    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    return CudaBackend(torch.device("cuda", index), stream=stream)
