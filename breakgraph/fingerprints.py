"""A number for the bits of a tensor, so that many can be compared without keeping copies of them."""

from __future__ import annotations

import torch

__all__ = ["fingerprint", "is_marked", "mark"]

_CHUNK = 1 << 22  # words: 32 MiB at a time
_GOLDEN = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """64 bits that depend on every bit of a tensor and on its place.

    Words are weighted by odd numbers that look random and added up, modulo 2**64: one changed word always changes the sum, and
    two tensors that differ in more agree by chance once in about 10**19.

    Args:
        tensor: Any strided tensor, on any device.

    Returns:
        A 0-dimensional int64 tensor on its device; None for one without plain memory (sparse, a wrapper). Cost: reads it once
        and takes 64 MiB besides; no host sync.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    with torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if rest := flat.numel() % 8:
            flat = torch.nn.functional.pad(flat, (0, 8 - rest))
        words = flat.view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK]
            weight = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device) * _GOLDEN
            total += (part * ((weight ^ (weight >> 29)) | 1)).sum()
        return total


# A NaN that no arithmetic makes, in every float of two bytes or more: where it lies, nobody has written.
_MARKS = {
    2: (torch.int16, 0x7FFE),
    4: (torch.int32, 0x7FFEFEFE),
    8: (torch.int64, 0x7FFEFEFEFEFEFEFE),
}


def mark(tensor: torch.Tensor) -> None:
    """Fill a tensor with a NaN that arithmetic does not make; integers with ones, since -1 as an index ends a CUDA context.

    Args:
        tensor: Any strided tensor; floats of one byte get zeros.
    """
    words = _words(tensor)
    if words is not None:
        words.fill_(_MARKS[words.element_size()][1])
    elif not tensor.is_quantized and not tensor.is_floating_point():
        tensor.fill_(tensor.dtype is not torch.bool)
    elif not tensor.is_quantized:
        tensor.zero_()


def is_marked(tensor: torch.Tensor) -> torch.Tensor | None:
    """Which elements still hold what `mark` filled in.

    Args:
        tensor: Any tensor.

    Returns:
        Booleans of its shape; None for a dtype that has no mark.
    """
    words = _words(tensor)
    if words is None:
        return None
    found = words == _MARKS[words.element_size()][1]
    return found.any(dim=-1) if tensor.is_complex() else found


def _words(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.element_size() not in _MARKS:
        return None
    return tensor.view(_MARKS[tensor.element_size()][0])
