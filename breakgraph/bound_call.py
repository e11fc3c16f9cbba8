"""One call of a marked function with its arguments bound to parameters, so that some can be replaced at replay."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["BoundCall", "RowViews"]

_VIEWS_KEPT = 16


class BoundCall:
    """Arguments of one call, addressable by parameter name.

    Args:
        args: Positional arguments as they were given.
        kwargs: Keyword arguments as they were given.
        places: Parameter name -> index into `args` or key of `kwargs`; var-parameters are not addressable.
    """

    __slots__ = ("args", "kwargs", "places")

    def __init__(self, args: list[Any], kwargs: dict[str, Any], *, places: Mapping[str, int | str]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.places = places

    @classmethod
    def bind(
        cls,
        signature: inspect.Signature | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        names: Collection[str] = (),
    ) -> BoundCall:
        """Bind a call, leaving it as it was made; only what is named is looked up.

        Defaults are not passed on otherwise: the function fills them in itself, at every call.

        Raises:
            TypeError: The arguments do not fit the function, exactly as Python would say it.
        """
        call = cls(list(args), dict(kwargs), places={})
        if signature is None or not names:
            return call
        signature.bind(*args, **kwargs)
        places: dict[str, int | str] = {}
        for position, (name, parameter) in enumerate(signature.parameters.items()):
            if parameter.kind is parameter.POSITIONAL_ONLY and position >= len(call.args) and name in names:
                earlier = list(signature.parameters.values())[len(call.args) : position + 1]
                call.args.extend(other.default for other in earlier)
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and position < len(
                call.args
            ):
                places[name] = position
            elif name in names:
                call.kwargs.setdefault(name, parameter.default)
                places[name] = name
        call.places = places
        return call

    def __getitem__(self, parameter: str) -> Any:
        place = self.places[parameter]
        return self.args[place] if isinstance(place, int) else self.kwargs[place]

    def __setitem__(self, parameter: str, value: Any) -> None:
        place = self.places[parameter]
        if isinstance(place, int):
            self.args[place] = value
        else:
            self.kwargs[place] = value

    def copy(self) -> BoundCall:
        """A call whose arguments can be replaced without touching this one."""
        return BoundCall(list(self.args), dict(self.kwargs), places=self.places)


class RowViews:
    """Views of the first n rows, and of the tail, of fixed tensors, kept for the last few n.

    Narrowing costs about a microsecond a tensor; a serving loop meets the same row counts again and again.

    Args:
        tensors: (tensor, row axis) pairs; the tensors never move.
    """

    __slots__ = ("_heads", "_tails", "_tensors")

    def __init__(self, tensors: tuple[tuple[torch.Tensor, int], ...]) -> None:
        self._tensors = tensors
        self._heads: dict[int, list[torch.Tensor]] = {}
        self._tails: dict[int, list[torch.Tensor]] = {}

    def heads(self, rows: int) -> list[torch.Tensor]:
        """Views of rows 0 .. rows-1 of every tensor."""
        views = self._heads.get(rows)
        if views is None:
            views = [tensor.narrow(axis, 0, rows) for tensor, axis in self._tensors]
            _keep(self._heads, rows, views)
        return views

    def zero_tails(self, rows: int) -> None:
        """Fill rows `rows` .. end of every tensor with zeros. Cost: one grouped kernel, no host sync."""
        if not self._tensors:
            return
        views = self._tails.get(rows)
        if views is None:
            views = [tensor.narrow(axis, rows, tensor.shape[axis] - rows) for tensor, axis in self._tensors]
            _keep(self._tails, rows, views)
        if len(views) == 1:
            views[0].zero_()
        else:
            torch._foreach_zero_(views)


def _keep(cache: dict[int, list[torch.Tensor]], rows: int, views: list[torch.Tensor]) -> None:
    if len(cache) >= _VIEWS_KEPT:
        cache.clear()
    cache[rows] = views
