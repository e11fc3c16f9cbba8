"""Did anything move whose address is baked into a graph? Parameters, buffers, static inputs, tensors of live data.

A graph reads a parameter where it lay at capture. `p.data = ...`, a replaced module or a `.to()` leaves the
graph on memory that somebody else may own by now, silently.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import attrs
import torch

from breakgraph.errors import MovedBufferError
from breakgraph.verification import Path, live_leaves

__all__ = ["AddressWatch", "plain_tensors"]


@attrs.frozen(eq=False)
class _Place:
    """One entry of a module's table of parameters, buffers or submodules, as it was at capture."""

    name: str
    table: Mapping[str, object]
    key: str
    held: object
    address: int


@attrs.frozen(eq=False)
class _LivePlace:
    """A tensor found in live data at capture. It is held: what a segment reads must not be freed."""

    name: str
    path: Path
    address: int
    held: torch.Tensor


@attrs.frozen(eq=False)
class _LiveValue:
    """One live value of a capture, and the tensors in it."""

    name: str
    value: Any
    places: tuple[_LivePlace, ...]


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
        self._live: dict[Hashable, tuple[_LiveValue, ...]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def note_live(self, key: Hashable, live: Mapping[str, Any]) -> None:
        """Note the tensors in the live data that a graph was captured with, two levels deep.

        Args:
            key: Key of the graph.
            live: Live data of its capture.
        """
        found: dict[str, list[_LivePlace]] = {}
        for path, leaf in live_leaves(live):
            if isinstance(leaf, torch.Tensor):
                name = path[0][1]
                text = "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in path[1:])
                found.setdefault(name, []).append(_LivePlace(name + text, path[1:], _address(leaf), leaf))
        self._live[key] = tuple(_LiveValue(name, live[name], tuple(places)) for name, places in found.items())

    def forget_rebound_live(self, key: Hashable) -> None:
        """Drop what `example` itself has rebound since the capture: the proof passed, so only breaks read it.

        Args:
            key: Key of a graph just proven.
        """
        self._live[key] = tuple(
            attrs.evolve(value, places=tuple(place for place in value.places if not _has_moved_live(place, value)))
            for value in self._live.get(key, ())
        )

    def check_live(self, key: Hashable, live: Mapping[str, Any]) -> None:
        """Check that live values which are the very objects of the capture hold their tensors where they were.

        Another object than at capture is not looked at: only breaks can have read that one. About 0.3 us a tensor.

        Args:
            key: Key of the graph about to be replayed.
            live: Live data of the step.

        Raises:
            MovedBufferError: An attribute was rebound, or is None now.
        """
        for value in self._live.get(key, ()):
            if live.get(value.name) is value.value:
                moved = [place for place in value.places if _has_moved_live(place, value)]
                if moved:
                    self._refuse_live(moved, value)

    @staticmethod
    def _refuse_live(moved: list[_LivePlace], value: _LiveValue) -> None:
        now = _follow(value.value, moved[0].path)
        story = f"{_address(now):#x} now" if isinstance(now, torch.Tensor) else f"{type(now).__name__} now"
        raise MovedBufferError(
            f"live data {', '.join(place.name for place in moved[:5])}: no longer where it was at capture "
            f"(address {moved[0].address:#x} then, {story}).",
            why="The live object is the one of the capture, and a segment that reads this tensor reads the old address.",
            fix="Write into it in place (copy_), or pass a new object at each step and read it in breaks only.",
        )

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


_TABLES = ("_parameters", "_buffers", "_modules")


def plain_tensors(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Tensors that modules hold in plain attributes, or in lists, tuples and dicts there: neither parameters nor buffers.

    A cache of the last size is such a one. It may be replaced at any step, so it cannot be watched; it can be held, so that a
    graph that reads it by address finds there what it found at capture.

    Args:
        modules: Roots; their submodules are looked at as well.
    """
    found: dict[int, torch.Tensor] = {}
    for root in modules:
        for module in root.modules():
            for name, value in vars(module).items():
                if name in _TABLES:
                    continue
                values = (
                    value
                    if isinstance(value, list | tuple)
                    else value.values()
                    if isinstance(value, dict)
                    else (value,)
                )
                found.update((id(item), item) for item in values if isinstance(item, torch.Tensor))
    return list(found.values())


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # without a storage of its own: sparse, or a wrapper around other tensors
        return 0


def _follow(value: Any, path: Path) -> Any:
    """What lies at a path of `live_leaves` now; None where it is gone."""
    for kind, key in path:
        if kind == ".":
            value = getattr(value, key, None)
        elif isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = value[key] if isinstance(value, (list, tuple)) and key < len(value) else None
    return value


def _has_moved_live(place: _LivePlace, value: _LiveValue) -> bool:
    now = _follow(value.value, place.path)
    return not isinstance(now, torch.Tensor) or _address(now) != place.address


def _place(name: str, table: Mapping[str, object], key: str) -> _Place:
    held = table[key]
    return _Place(name, table, key, held, _address(held) if isinstance(held, torch.Tensor) else 0)


def _has_moved(place: _Place) -> bool:
    held = place.held
    if place.table.get(place.key) is not held:
        return True
    return isinstance(held, torch.Tensor) and _address(held) != place.address


def _story(place: _Place) -> str:
    now = place.table.get(place.key)
    if now is place.held and isinstance(now, torch.Tensor):
        return f"address {place.address:#x} then, {_address(now):#x} now"
    kinds = [type(value).__name__ for value in (place.held, now)]
    return f"another {kinds[0]} object" if kinds[0] == kinds[1] else f"{kinds[0]} then, {kinds[1]} now"
