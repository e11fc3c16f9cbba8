"""What a run of a forward leaves behind: Python state that it changed, and tensors that are alive after it."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from breakgraph.tools.linting.host_data import has_stand_in
from breakgraph.tools.linting.places import Place
from breakgraph.tools.linting.values import UNKNOWN, attribute_of, is_readable

__all__ = ["Change", "Changes", "KeptTensor", "MadeTensors", "is_container", "refill"]

_MISSING = object()
_CONTAINERS = (list, dict, set, deque, np.ndarray)


def is_container(value: Any) -> bool:
    """True for what can be changed in place and is host data; a tensor is device data."""
    return isinstance(value, _CONTAINERS)


@attrs.define(eq=False)
class Change:
    """One attribute, variable or container that was written.

    Attributes:
        owner: The object, the container, or the dict of the variables.
        name: Of the attribute or variable; None for a container.
        before: Its value before the first write, a copy for a container.
        places: The lines that wrote it, and how, in words.
        is_lasting: Whether it was another value after the run.
        has_stand_in: Whether that was a stand-in for host data of the inputs.
        tensors: The `id` of each tensor that it held then.
        is_readable: False where the attribute's value cannot be known without code of the user's.
    """

    owner: Any
    name: str | None
    before: Any
    places: dict[Place, str] = attrs.field(factory=dict)
    is_lasting: bool = False
    has_stand_in: bool = False
    tensors: tuple[int, ...] = ()
    is_readable: bool = True

    def settle(self) -> None:
        """Takes down how it is at the end of the run."""
        now = self.now()
        self.is_readable = self.name is None or isinstance(self.owner, dict) or is_readable(self.owner, self.name)
        try:
            self.is_lasting = not _same(self.before, now)
        except RecursionError:  # it holds itself
            self.is_lasting = True
        self.has_stand_in = has_stand_in(now)
        self.tensors = _tensors(now)

    def now(self) -> Any:
        """The value as it is."""
        if self.name is None:
            return self.owner
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, _MISSING)
        found = attribute_of(self.owner, self.name)
        return _MISSING if found is UNKNOWN else found

    def undo(self) -> None:
        """Puts the value back, as far as the object lets others write it."""
        with contextlib.suppress(Exception):
            if self.name is None:
                refill(self.owner, self.before)
            elif isinstance(self.owner, dict):
                _put(self.owner, self.name, self.before)
            elif self.before is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.before)


class Changes:
    """The Python state that a run wrote, of objects that are older than the run.

    An object of this run is young: collection is off while it runs, so none has been moved to an older generation.

    Args:
        inputs: Of the forward.
    """

    def __init__(self, *, inputs: Iterable[Any] = ()) -> None:
        self.all: dict[tuple[int, str | None], Change] = {}
        self._inputs = tuple(inputs)
        self._old: dict[int, Any] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Tells old objects from new ones inside a `with` block."""
        was_enabled = gc.isenabled()
        gc.disable()
        gc.collect(0)
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()

    def is_old(self, value: Any, *, owner: Any = UNKNOWN) -> bool:
        """Whether an object is older than the run.

        Args:
            value: The object.
            owner: What it was read from: containers of plain values are unknown to the collector, and as old as that.
        """
        # What was written in this run is known; a dict of plain values is new to the collector when it gets an object.
        if any(value is each for each in self._inputs) or any(value is each.owner for each in self.all.values()):
            return True
        if not gc.is_tracked(value):
            return id(value) in self._old or (owner is not UNKNOWN and self.is_old(owner))
        return not any(value is each for each in gc.get_objects(generation=0))

    def note_old(self, value: Any) -> None:
        """Remembers that a container of plain values is older than the run, under whatever name it is met later.

        Args:
            value: What an old object holds.
        """
        if is_container(value) and not gc.is_tracked(value) and not self._was_put(value):
            self._old[id(value)] = value

    def is_held_by_old(self, value: Any) -> bool:
        """Whether something older than the run holds a container of plain values. Cost: a walk over all objects.

        Args:
            value: The container.
        """
        for referrer in gc.get_referrers(value):
            kind = type(referrer)
            if kind is not types.FrameType and self.is_old(referrer) and not self._was_put(value):
                return True
        return False

    def _was_put(self, value: Any) -> bool:
        """Whether this run itself made an old object hold a value."""
        for change in self.all.values():
            if change.name is not None and change.before is not value and change.now() is value:
                return True
        return False

    def wrote(self, owner: Any, name: str | None, *, label: str, place: Place) -> None:
        """Notes a write that is about to happen.

        Args:
            owner: The object, the container, or the dict of the variables.
            name: Of the attribute or variable; None for a container.
            label: In words.
            place: The line.
        """
        key = (id(owner), name)
        change = self.all.get(key)
        if change is None:
            change = self.all[key] = Change(owner, name, _MISSING)
            change.before = _copied(owner) if name is None else change.now()
        change.places.setdefault(place, label)

    def wrote_data(self, tensor: torch.Tensor, *, label: str, place: Place) -> None:
        """Notes that a tensor is about to get other memory, by `tensor.data = ...`.

        Args:
            tensor: The tensor.
            label: In words.
            place: The line.
        """
        is_first = (id(tensor), "data") not in self.all
        self.wrote(tensor, "data", label=label, place=place)
        if is_first:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.all[id(tensor), "data"].before = tensor.detach()

    def undo(self) -> None:
        """Puts everything back, the latest first."""
        for change in reversed(self.all.values()):
            change.undo()

    def settle(self) -> None:
        """Takes down how everything is at the end of the run."""
        for change in self.all.values():
            change.settle()


@attrs.frozen
class KeptTensor:
    """A tensor of a run that is alive after it.

    Attributes:
        place: Where it was made.
        holder: Who holds it, in words; None where it cannot be seen.
        shape: Its shape.
        is_allocated: Whether an allocation made it, and not a computation.
        address: The `id` of the tensor.
    """

    place: Place
    holder: str | None
    shape: tuple[int, ...]
    is_allocated: bool
    address: int


@attrs.frozen(eq=False)
class _Made:
    reference: weakref.ref[torch.Tensor]
    place: Place
    is_allocated: bool


class MadeTensors:
    """The tensors that operators of a run made."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}

    def add(self, tensor: torch.Tensor, *, place: Place, is_allocated: bool) -> None:
        """Notes a tensor.

        Args:
            tensor: The result of an operator.
            place: The line that called it.
            is_allocated: Whether it holds no computed values.
        """
        self._made[id(tensor)] = _Made(weakref.ref(tensor), place, is_allocated)

    def is_allocated(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was made here, by an allocation."""
        made = self._made.get(id(tensor))
        return made is not None and made.reference() is tensor and made.is_allocated

    def alive(self) -> list[KeptTensor]:
        """The tensors that are alive now. Cost, where there are any: a walk over all objects for each, or several."""
        if all(made.reference() is None for made in self._made.values()):
            return []
        gc.collect(0)  # a cycle of the run may hold what nobody needs
        found = self._held()
        if any(tensor.holder is None for tensor in found):
            gc.collect()  # or an older one
            found = self._held()
        return found

    def _held(self) -> list[KeptTensor]:
        kept: list[KeptTensor] = []
        for made in self._made.values():
            tensor = made.reference()
            if tensor is not None:
                shape = tuple(tensor.shape)
                holder = _path_to(tensor) if len(kept) < _MOST_SOUGHT else _NOT_SOUGHT
                kept.append(KeptTensor(made.place, holder, shape, made.is_allocated, address=id(tensor)))
        return kept


_MODULE_TABLES = ("._buffers", "._parameters", "._modules")
_MOST_HOPS = 3
_MOST_SOUGHT = 32
_NOT_SOUGHT = "one of many holders"


def _path_to(value: Any, *, hops: int = _MOST_HOPS) -> str | None:
    """A way to a value from an object or a module, such as `Rotary.table` or `Model.history[...]`; None where there is none."""
    containers: list[tuple[Any, Any]] = []
    for referrer in gc.get_referrers(value):
        kind = type(referrer)  # not `isinstance`, which asks objects for their class: any object may be among them
        if kind is types.CellType:
            return "a closure"
        if issubclass(kind, dict):
            owner, name = _owner(referrer), _name_in(referrer, value)
            if issubclass(type(owner), types.ModuleType):
                return f"{owner.__name__}.{name}"
            if owner is not None:
                return f"{type(owner).__name__}.{name}"
            containers.append((referrer, name))
        elif issubclass(kind, list | tuple | set | deque):
            containers.append((referrer, None))
        elif kind is not types.FrameType and kind is not types.FunctionType:
            name = _name_in(_attributes(referrer), value)
            if name is not None:
                return f"{kind.__name__}.{name}"
    for container, name in containers if hops else ():
        outer = _path_to(container, hops=hops - 1)
        if outer is not None:
            table = next((table for table in _MODULE_TABLES if outer.endswith(table)), None)
            return (
                f"{outer.removesuffix(table)}.{name}" if table else f"{outer}[{'...' if name is None else repr(name)}]"
            )
    return None


def _owner(table: dict[Any, Any]) -> Any:
    """The object whose attributes a dict is."""
    return next((o for o in gc.get_referrers(table) if _attributes(o) is table), None)


def _attributes(value: Any) -> Any:
    """The dict of an object's attributes, without code of the user's; an empty one where it has none."""
    try:
        return object.__getattribute__(value, "__dict__")
    except Exception:
        return {}


def _name_in(table: dict[Any, Any], value: Any) -> Any:
    return next((key for key, held in list(table.items()) if held is value), None)


def _tensors(value: Any, *, depth: int = 4) -> tuple[int, ...]:
    """The `id` of each tensor in containers; a list of the user's may hold itself, so not at any depth."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return (id(value),)
    items: Iterable[Any] = ()
    if issubclass(kind, dict):
        items = value.values()
    elif issubclass(kind, list | tuple | set | deque):
        items = value
    return tuple(address for item in items for address in _tensors(item, depth=depth - 1)) if depth else ()


def _same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    kind = type(now)
    if issubclass(kind, torch.Tensor) or type(before) is not kind:
        return False
    if issubclass(kind, list | deque):
        return len(before) == len(now) and all(_same(a, b) for a, b in zip(before, now, strict=True))
    if issubclass(kind, dict):
        return list(before) == list(now) and all(_same(before[key], now[key]) for key in now)
    try:
        return bool(np.array_equal(before, now) if issubclass(kind, np.ndarray) else before == now)
    except Exception:  # an object that cannot be compared is another one
        return False


def _copied(container: Any) -> Any:
    return container.copy() if is_container(container) else container


def refill(container: Any, before: Any) -> None:
    """Gives a container the items that it had.

    Args:
        container: A list, dict, set, deque or array.
        before: A copy of it from before.
    """
    if isinstance(container, np.ndarray):
        container[...] = before
        return
    if isinstance(container, dict):  # not by methods of the user's, which may refuse
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in before.items():
            base.__setitem__(container, key, value)
        return
    container.clear()
    if isinstance(container, set):
        container.update(before)
    else:
        container.extend(before)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(name, None)
    else:
        table[name] = value
