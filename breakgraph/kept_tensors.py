"""Tensors that a model keeps although a segment made them, and who holds them.

Memory of a pool is used again by every graph of the pool. A tensor first made inside a segment and kept for later (a lazily
built table or workspace) can lie where an older graph has its temporaries: replaying that one overwrites it, silently.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import torch

__all__ = ["describe_kept", "kept_since"]

_MOST = 3


def kept_since(before: set[tuple[int, int]], *, live: Callable[[], Iterable[tuple[int, int]]]) -> str | None:
    """What lies in blocks of a pool that are held now and were not before.

    Args:
        before: The blocks that were held before.
        live: Gives the blocks that are held now.

    Returns:
        What `describe_kept` says; None where there are none.
    """
    if not set(live()) - before:
        return None
    gc.collect()  # a cycle in the model's code may hold what nobody needs, and collection is off in the window
    blocks = set(live()) - before
    return describe_kept(blocks) if blocks else None


def describe_kept(blocks: Iterable[tuple[int, int]]) -> str:
    """What lies in blocks of memory, and in whose attribute, as far as Python can tell.

    Args:
        blocks: (first address, end) of each.

    Returns:
        Such as `float32 (64, 128) held by Rotary.table`. Cost: a walk over all Python objects; for errors only.
    """
    spans = tuple(blocks)
    tensors = [
        item
        for item in gc.get_objects()
        # By type: `isinstance` asks objects for their class, and proxies of deprecated things warn at that.
        if issubclass(type(item), torch.Tensor) and item.device.type == "cuda" and _lies_in(item, spans)
    ]
    found = []
    for tensor in tensors[:_MOST]:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        found.append(f"{kind} held by {_holder(tensor, others=tensors)}")
    more = f" and {len(tensors) - _MOST} more" if len(tensors) > _MOST else ""
    nbytes = sum(end - start for start, end in spans)
    if not found:
        return (
            f"{nbytes} bytes, of no Python tensor: a library's workspace, such as that of cuBLAS for a stream new to it"
        )
    return f"{nbytes} bytes: {', '.join(found)}{more}"


def _lies_in(tensor: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> bool:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # without a storage of its own
        return False
    return any(start <= address < end for start, end in spans)


def _holder(tensor: torch.Tensor, *, others: list[torch.Tensor]) -> str:
    for referrer in gc.get_referrers(tensor):
        if referrer is others:
            continue
        table = referrer if isinstance(referrer, dict) else getattr(referrer, "__dict__", {})
        names = [key for key, value in table.items() if value is tensor]
        if not names:
            continue
        if referrer is not table:
            return f"{type(referrer).__name__}.{names[0]}"
        owner = next((o for o in gc.get_referrers(table) if getattr(o, "__dict__", None) is table), None)
        return f"{type(owner).__name__}.{names[0]}" if owner is not None else f"a dict under {names[0]!r}"
    return "a local variable or a container"
