"""Buffers of a model that its forward writes: what nobody declared as state is left changed by a capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["versions", "written_since"]

Versions = Mapping[str, tuple[torch.Tensor, int]]


def versions(modules: Iterable[torch.nn.Module]) -> Versions:
    """How often each buffer has been written, by torch's own count.

    Args:
        modules: Their buffers, and those of their submodules.

    Returns:
        By name; inference tensors, which have no count, are left out.
    """
    named = (
        (f"{type(module).__name__}.{name}", buffer) for module in modules for name, buffer in module.named_buffers()
    )
    return {name: (buffer, buffer._version) for name, buffer in named if not buffer.is_inference()}


def written_since(before: Versions, *, declared: Iterable[object]) -> list[str]:
    """Buffers that were written and are no declared state.

    Args:
        before: From `versions`.
        declared: What the caller declared as state. An object that saves and restores may stand for any buffer.

    Returns:
        Their names; none where an object saves and restores state.
    """
    declared = list(declared)
    tensors = [state for state in declared if isinstance(state, torch.Tensor)]
    if len(tensors) < len(declared):
        return []
    kept = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return [
        name
        for name, (buffer, version) in before.items()
        if buffer._version != version and buffer.untyped_storage().data_ptr() not in kept
    ]
