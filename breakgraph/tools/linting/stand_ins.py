"""Example inputs with stand-ins in place of their host data: copies of the containers around it, and the way back."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from breakgraph.tools.linting.host_data import plain, stand_in_of

__all__ = ["StandIns"]

_OPTIONS = (
    *(type(None), bool, str, bytes, type, enum.Enum, torch.Tensor, nn.Module, np.bool_),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.cuda.Stream),
)
"""What holds no host data of a step."""


class StandIns:
    """Makes example inputs with stand-ins in place of their host data.

    Attributes:
        count: How many leaves of the inputs have one.
        unfollowed: The types of values that may hold host data and have none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.unfollowed: set[str] = set()
        self._copies: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        self._held: list[Any] = []

    def of(self, value: Any) -> Any:
        """A copy of a nesting: containers, dataclasses and attrs objects are copied, once each; tensors are the same.

        Args:
            value: An input.
        """
        made = stand_in_of(value)
        if made is not value:
            self.count += 1
            return self._remember(value, made)
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if kind is list:
            copied: Any = self._remember(value, [])
            copied.extend(self.of(item) for item in value)
            return copied
        if isinstance(value, tuple) and (kind is tuple or _is_named_tuple(kind)):
            items = [self.of(item) for item in value]
            return self._remember(value, tuple(items) if kind is tuple else kind._make(items))
        if isinstance(value, dict | collections.UserDict):
            return self._dict_of(value)
        names = _fields(value)
        if not names:
            self._note_unfollowed(value)
            return value
        with contextlib.suppress(Exception):  # an object that cannot be copied goes in as it is
            copied = copy.copy(value)
            self._remember(value, copied)
            for name in names:
                object.__setattr__(copied, name, self.of(getattr(value, name)))
            return copied
        self._note_unfollowed(value)
        return value

    def _dict_of(self, value: Any) -> Any:
        """A copy of a dict of any class, in place of whose values stand their stand-ins."""
        with contextlib.suppress(Exception):
            copied = copy.copy(value)
            self._remember(value, copied)
            for key, item in value.items():
                made = self.of(item)
                if made is not item:
                    copied[key] = made
            return copied
        self._note_unfollowed(value)
        return value

    def _note_unfollowed(self, value: Any) -> None:
        if not isinstance(value, _OPTIONS) and not callable(value) and not _is_empty(value):
            self.unfollowed.add(type(value).__qualname__)

    def made(self, value: Any) -> bool:
        """True for a copy of an input that was made here, which holds host data or is next to some.

        Args:
            value: Any object.
        """
        return id(value) in self._originals

    def original(self, value: Any) -> Any:
        """The input that a copy stands for, or the value without stand-ins.

        Args:
            value: An argument of a break.
        """
        if id(value) in self._originals:
            return self._originals[id(value)]
        kind = type(value)
        if kind is not list and kind is not tuple and kind is not dict:
            return plain(value)
        items = list(value.values()) if kind is dict else list(value)
        found = [self.original(item) for item in items]
        if all(item is original for item, original in zip(items, found, strict=True)):
            return value  # the break may write it
        return dict(zip(value, found, strict=True)) if kind is dict else kind(found)

    def _remember(self, original: Any, made: Any) -> Any:
        self._held += (original, made)  # so that their ids stay theirs
        if not isinstance(made, int | float):
            self._copies[id(original)] = made
        self._originals[id(made)] = original
        return made


def _is_named_tuple(kind: type) -> bool:
    """True for a named tuple."""
    return isinstance(getattr(kind, "_fields", None), tuple)


def _fields(value: Any) -> list[str]:
    if isinstance(value, type | torch.Tensor):
        return []
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return []


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset | collections.deque) and not value
