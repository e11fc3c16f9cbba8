"""Did anything move whose address is baked into a graph? Parameters, buffers, static inputs: by pointer and identity.

A graph reads a parameter where it lay at capture. `p.data = ...`, a replaced module or a `.to()` leaves the
graph on memory that somebody else may own by now, silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch

from breakgraph.errors import MovedBufferError

__all__ = ["AddressWatch"]


@attrs.frozen(eq=False)
class _Place:
    """One entry of a module's table of parameters, buffers or submodules, as it was at capture."""

    name: str
    table: Mapping[str, object]
    key: str
    held: object
    address: int


class AddressWatch:
    """Addresses at capture, and the check that they are the same now.

    Args:
        modules: Modules whose parameters, buffers and submodules are watched.
        tensors: Further tensors by name.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], *, tensors: Mapping[str, torch.Tensor]) -> None:
        named = dict(tensors)
        self._places = [_place(f"static input {name!r}", named, name) for name in named]
        roots = tuple(modules)
        for index, root in enumerate(roots):
            label = type(root).__name__ if len(roots) == 1 else f"modules[{index}] ({type(root).__name__})"
            for path, module in root.named_modules():
                start = f"{label}.{path}" if path else label
                tables: tuple[Mapping[str, object], ...] = (module._parameters, module._buffers, module._modules)
                self._places += [_place(f"{start}.{key}", table, key) for table in tables for key in table]

    def __len__(self) -> int:
        return len(self._places)

    def check(self) -> None:
        """Compare identity and address of everything watched. About 0.15 us for each.

        Raises:
            MovedBufferError: Something was replaced or moved; the message names each of the first five.
        """
        moved = [place for place in self._places if _has_moved(place)]
        if not moved:
            return
        names = ", ".join(place.name for place in moved[:5]) + (f" and {len(moved) - 5} more" if moved[5:] else "")
        raise MovedBufferError(
            f"{names}: no longer where it was at capture ({_story(moved[0])}).",
            why="The graphs read and write the old address, whatever lies there now.",
            fix="Change tensors in place (copy_), or clear() the runner and capture again in a window.",
        )


def _place(name: str, table: Mapping[str, object], key: str) -> _Place:
    held = table[key]
    return _Place(name, table, key, held, held.data_ptr() if isinstance(held, torch.Tensor) else 0)


def _has_moved(place: _Place) -> bool:
    held = place.held
    if place.table.get(place.key) is not held:
        return True
    return isinstance(held, torch.Tensor) and held.data_ptr() != place.address


def _story(place: _Place) -> str:
    now = place.table.get(place.key)
    if now is place.held and isinstance(now, torch.Tensor):
        return f"address {place.address:#x} then, {now.data_ptr():#x} now"
    kinds = [type(value).__name__ for value in (place.held, now)]
    return f"another {kinds[0]} object" if kinds[0] == kinds[1] else f"{kinds[0]} then, {kinds[1]} now"
