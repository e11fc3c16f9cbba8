"""Views of device memory that keep nothing alive.

A break of a captured graph is called again and again with the tensors of the capture. Those that a segment made
live in the graph's pool, and later segments may reuse their blocks: holding them would cost gigabytes (32
layers x q, k, v x every bucket). Their address is all that a replay needs.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["borrowed_view"]


class _DeviceBytes:
    """Bytes at a device address, in the form that `torch.as_tensor` takes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def borrowed_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor of the same address, shape, strides and dtype that does not own its memory.

    The caller must know that the memory stays mapped for as long as the view is used; the graph's pool does
    that. Made by torch's private constructors where they do what they did when this was written (a test guards it), else
    through the public `__cuda_array_interface__` on bytes, which works for every dtype and costs 72 us a tensor on an
    H200's host, at capture only.

    Args:
        tensor: A strided CUDA tensor with at least one element.
    """
    try:
        view = _constructed(tensor)
    except (AttributeError, TypeError, RuntimeError):
        view = None
    if view is not None and view.data_ptr() == tensor.data_ptr() and view.stride() == tensor.stride():
        return view
    return public_view(tensor)


def _constructed(tensor: torch.Tensor) -> torch.Tensor:
    storage, device = tensor.untyped_storage(), tensor.device
    address, nbytes = storage.data_ptr(), storage.nbytes()
    bytes_there = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    view: torch.Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        {
            "data_ptr": address,
            "nbytes": nbytes,
            "device": device,
            "size": list(tensor.shape),
            "stride": list(tensor.stride()),
            "storage_offset": tensor.storage_offset(),
            "dtype": tensor.dtype,
        },
        bytes_there,
    )
    return view


def public_view(tensor: torch.Tensor) -> torch.Tensor:
    """`borrowed_view` by public means only."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_tensor(_DeviceBytes(tensor.data_ptr(), span * tensor.element_size()), device=tensor.device)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
