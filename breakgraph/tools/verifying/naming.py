"""What people call a tensor: the parameter, buffer or attribute of a module that holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from breakgraph.structure import flatten, storage_address

__all__ = ["OUTSIDE", "tensor_name"]

OUTSIDE = "a tensor from outside"


def tensor_name(tensor: torch.Tensor, modules: Sequence[torch.nn.Module]) -> str:
    """Name a tensor.

    Args:
        tensor: The tensor.
        modules: Roots that may hold it.

    Returns:
        Such as `Model.layers.0.weight`; `OUTSIDE` where no module holds it.
    """
    address = storage_address(tensor)
    for root in modules:
        for path, module in root.named_modules():
            for name, value in (*module._parameters.items(), *module._buffers.items(), *vars(module).items()):
                leaves = flatten(value)[0] if isinstance(value, list | tuple | dict) else [("", value)]
                if any(isinstance(leaf, torch.Tensor) and storage_address(leaf) == address for _, leaf in leaves):
                    return ".".join(part for part in (type(root).__name__, path, name) if part)
    return OUTSIDE
