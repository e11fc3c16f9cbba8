"""Forwards with one planted fault each, and the same forwards mended. The comment `FAULT: KIND` stands on the line at fault.

A factory returns a forward and its inputs; `mended` ones must give no failure.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from breakgraph import current_replay, eager_on_graph

Case = tuple[Callable[..., Any], tuple[Any, ...]]
FAULTS: dict[str, tuple[Callable[[], Case], Callable[[], Case]]] = {}


def fault(mended: Callable[[], Case]) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Registers a factory of a forward with a fault beside its mended twin."""

    def register(planted: Callable[[], Case]) -> Callable[[], Case]:
        FAULTS[planted.__name__.removeprefix("_planted_")] = (planted, mended)
        return planted

    return register


def x() -> torch.Tensor:
    """Rows of a step."""
    return torch.arange(12.0).view(4, 3) - 4


@eager_on_graph
def in_a_break(function: Callable[..., Any], *args: Any) -> Any:
    """Runs anything as a break."""
    return function(*args)


def breaking(function: Callable[..., Any], *inputs: Any) -> Callable[[], Case]:
    """The same forward, called in a break."""
    return lambda: (functools.partial(in_a_break, function), inputs)


# Host syncs.


def _item(h: torch.Tensor) -> torch.Tensor:
    scale = h.abs().max().item()  # FAULT: HOST_SYNC
    return h / scale


@fault(lambda: (lambda h: h / h.abs().max(), (x(),)))
def _planted_item() -> Case:
    return _item, (x(),)


def _tolist(h: torch.Tensor) -> torch.Tensor:
    for value in h[0].tolist():  # FAULT: HOST_SYNC
        h = h + value
    return h


@fault(breaking(_tolist, x()))
def _planted_tolist() -> Case:
    return _tolist, (x(),)


def _cpu(h: torch.Tensor) -> torch.Tensor:
    kept = h.cpu()  # FAULT: HOST_SYNC
    return kept + 1


@fault(breaking(_cpu, x()))
def _planted_cpu() -> Case:
    return _cpu, (x(),)


def _numpy(h: torch.Tensor) -> torch.Tensor:
    peak = h.numpy().max()  # FAULT: HOST_SYNC
    return h * float(peak)


@fault(breaking(_numpy, x()))
def _planted_numpy() -> Case:
    return _numpy, (x(),)


def _printed(h: torch.Tensor) -> torch.Tensor:
    h = h + 1
    print(h)  # FAULT: HOST_SYNC
    return h


@fault(breaking(_printed, x()))
def _planted_printed() -> Case:
    return _printed, (x(),)


def _upload(h: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0])  # FAULT: HOST_SYNC
    return h @ weights


@fault(lambda: (lambda h, weights: h @ weights, (x(), torch.ones(3))))
def _planted_upload() -> Case:
    return _upload, (x(),)


def _inverse(h: torch.Tensor) -> torch.Tensor:
    square = h.T @ h + torch.eye(3)
    return torch.linalg.inv(square)  # FAULT: HOST_SYNC


@fault(lambda: (lambda h: torch.linalg.inv_ex(h.T @ h + torch.eye(3)).inverse, (x(),)))
def _planted_inverse() -> Case:
    return _inverse, (x(),)


class Helped(nn.Module):
    """The fault lies in a helper, reached through a property and a decorator."""

    @property
    def limit(self) -> Callable[[torch.Tensor], float]:
        return lambda h: float(h.max())  # FAULT: HOST_SYNC

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h.clamp(max=self.limit(h))


@fault(lambda: (lambda h: torch.minimum(h, h.max()), (x(),)))
def _planted_helper() -> Case:
    return Helped(), (x(),)


# Shapes that depend on data.


def _nonzero(h: torch.Tensor) -> torch.Tensor:
    rows = h.sum(1).nonzero()  # FAULT: DATA_DEPENDENT_SHAPE
    return h[rows[:, 0]]


@fault(breaking(_nonzero, x()))
def _planted_nonzero() -> Case:
    return _nonzero, (x(),)


def _mask(h: torch.Tensor) -> torch.Tensor:
    return h[h > 0].sum()  # FAULT: DATA_DEPENDENT_SHAPE


@fault(lambda: (lambda h: torch.where(h > 0, h, 0.0).sum(), (x(),)))
def _planted_mask() -> Case:
    return _mask, (x(),)


def _unique(h: torch.Tensor) -> torch.Tensor:
    return torch.unique(h.round()) + 1  # FAULT: DATA_DEPENDENT_SHAPE


@fault(breaking(_unique, x()))
def _planted_unique() -> Case:
    return _unique, (x(),)


def _repeat(h: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(  # FAULT: DATA_DEPENDENT_SHAPE
        h, counts, dim=0
    )


@fault(lambda: (lambda h, n: torch.repeat_interleave(h, n, dim=0, output_size=8), (x(), torch.tensor([1, 2, 3, 2]))))
def _planted_repeat() -> Case:
    return _repeat, (x(), torch.tensor([1, 2, 3, 2]))


# Branches on values of tensors.


def _if_value(h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:  # FAULT: HOST_BRANCH
        return h + 1
    return h - 1


@fault(lambda: (lambda h: torch.where(h.sum() > 0, h + 1, h - 1), (x(),)))
def _planted_if_value() -> Case:
    return _if_value, (x(),)


def _while_value(h: torch.Tensor) -> torch.Tensor:
    while h.abs().max() > 1:  # FAULT: HOST_BRANCH
        h = h / 2
    return h


@fault(breaking(_while_value, x()))
def _planted_while_value() -> Case:
    return _while_value, (x(),)


def _assert_value(h: torch.Tensor) -> torch.Tensor:
    assert h.isfinite().all()  # FAULT: HOST_BRANCH
    return h + 1


@fault(breaking(_assert_value, x()))
def _planted_assert_value() -> Case:
    return _assert_value, (x(),)


# Branches and loops on host data of the inputs.


def _if_length(h: torch.Tensor, length: int) -> torch.Tensor:
    half = length // 2
    if half > 1:  # FAULT: HOST_BRANCH
        h = h * 2
    return h


@fault(lambda: (functools.partial(_if_length, length=5), (x(),)))  # bound: one graph for each length
def _planted_if_length() -> Case:
    return _if_length, (x(), 5)


def _loop_lengths(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    for _ in lengths:  # FAULT: HOST_BRANCH
        h = h + 1
    return h


@fault(breaking(_loop_lengths, x(), [2, 2]))
def _planted_loop_lengths() -> Case:
    return _loop_lengths, (x(), [2, 2])


def _loop_range(h: torch.Tensor, steps: int) -> torch.Tensor:
    return sum((h for _ in range(steps)), start=h)  # FAULT: HOST_BRANCH


@fault(breaking(_loop_range, x(), 3))
def _planted_loop_range() -> Case:
    return _loop_range, (x(), 3)


@dataclass(frozen=True)
class Metadata:
    """What a serving loop hands over."""

    lengths: tuple[int, ...]
    longest: int


def _if_metadata(h: torch.Tensor, metadata: Metadata) -> torch.Tensor:
    return h * 2 if metadata.longest >= 3 else h  # FAULT: HOST_BRANCH


@fault(breaking(_if_metadata, x(), Metadata((1, 3), 3)))
def _planted_if_metadata() -> Case:
    return _if_metadata, (x(), Metadata((1, 3), 3))


def _count_requests(h: torch.Tensor, metadata: Metadata) -> torch.Tensor:
    return h if len(metadata.lengths) > 1 else -h  # FAULT: HOST_BRANCH


@fault(breaking(_count_requests, x(), Metadata((1, 3), 3)))
def _planted_count_requests() -> Case:
    return _count_requests, (x(), Metadata((1, 3), 3))


@attrs.frozen(eq=False)
class Layout:
    """Lengths as an array."""

    lengths: np.ndarray[Any, Any]


def _loop_array(h: torch.Tensor, layout: Layout) -> torch.Tensor:
    start = 0
    for length in layout.lengths:  # FAULT: HOST_BRANCH
        start += int(length)  # FAULT: HOST_DATA
    return h


@fault(breaking(_loop_array, x(), Layout(np.array([1, 3]))))
def _planted_loop_array() -> Case:
    return _loop_array, (x(), Layout(np.array([1, 3])))


# Host data in device work.


def _slice(h: torch.Tensor, rows: int) -> torch.Tensor:
    return h[: rows + 1]  # FAULT: HOST_DATA


@fault(breaking(_slice, x(), 2))
def _planted_slice_bound() -> Case:
    return _slice, (x(), 2)


def _shape(h: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
    width = options["width"]
    return h.sum() + h.new_zeros(2, width)  # FAULT: HOST_DATA


@fault(breaking(_shape, x(), {"width": 7}))
def _planted_shape() -> Case:
    return _shape, (x(), {"width": 7})


def _scalar(h: torch.Tensor, temperature: float) -> torch.Tensor:
    inverse = 1.0 / max(temperature, 0.0)  # FAULT: HOST_BRANCH
    return h * inverse  # FAULT: HOST_DATA


@fault(lambda: (lambda h, temperature: h / temperature, (x(), torch.tensor(0.5))))
def _planted_scalar() -> Case:
    return _scalar, (x(), 0.5)


# Python state.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.stats = {"calls": 0}
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Augmented(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # FAULT: ATTRIBUTE
        return h + self.calls


class CountingOnDevice(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.count[...] = self.count * 1
        return h + self.count


@fault(lambda: (CountingOnDevice(), (x(),)))
def _planted_attribute() -> Case:
    return Augmented(), (x(),)


class Appending(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.seen.append(h.shape[0])  # FAULT: ATTRIBUTE
        return h + 1


class AppendingToItsOwn(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        seen = []
        seen.append(h.shape[0])
        return h + len(seen)


@fault(lambda: (AppendingToItsOwn(), (x(),)))
def _planted_appended() -> Case:
    return Appending(), (x(),)


class Tallying(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.stats["calls"] += 1  # FAULT: ATTRIBUTE
        return h + 1


@fault(lambda: (functools.partial(in_a_break, Tallying()), (x(),)))
def _planted_item_of_a_dict() -> Case:
    return Tallying(), (x(),)


class Setting(Counting):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for name in ("calls",):
            setattr(self, name, getattr(self, name) + 1)  # FAULT: ATTRIBUTE
        return h + 1


@fault(lambda: (functools.partial(in_a_break, Setting()), (x(),)))
def _planted_set_by_name() -> Case:
    return Setting(), (x(),)


class OfTheClass(Counting):
    total = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        type(self).total += 1  # FAULT: ATTRIBUTE
        getattr(self, "seen").append(1)  # FAULT: ATTRIBUTE  # noqa: B009
        return h + 1


@fault(lambda: (functools.partial(in_a_break, OfTheClass()), (x(),)))
def _planted_looked_up() -> Case:
    return OfTheClass(), (x(),)


steps = 0


def _global(h: torch.Tensor) -> torch.Tensor:
    global steps
    steps += 1  # FAULT: ATTRIBUTE
    return h + 1


@fault(breaking(_global, x()))
def _planted_global_variable() -> Case:
    return _global, (x(),)


def _closure() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def forward(h: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1  # FAULT: ATTRIBUTE
        return h + 1

    return forward


def _inner_closure(h: torch.Tensor) -> torch.Tensor:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    count()
    return h + calls


@fault(lambda: (_inner_closure, (x(),)))
def _planted_enclosing_variable() -> Case:
    _closure()
    return _closure(), (x(),)


# Tensors that outlive the forward.


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[torch.Tensor] = []
        self.register_buffer("keys", torch.zeros(0, 3))
        self.register_buffer("last", torch.zeros(4, 3))
        self.workspace: torch.Tensor | None = None


class KeepsLast(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 2
        self.last = h  # FAULT: KEPT_TENSOR
        return h + 1


class CopiesLast(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 2
        self.last.copy_(h)
        return h + 1


@fault(lambda: (CopiesLast(), (x(),)))
def _planted_kept() -> Case:
    return KeepsLast(), (x(),)


class KeepsHistory(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.history.append(h * 2)  # FAULT: KEPT_TENSOR
        return h + 1


class ClearsHistory(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.history.append(h * 2)
        return h + self.history.pop()


@fault(lambda: (ClearsHistory(), (x(),)))
def _planted_kept_in_a_list() -> Case:
    return KeepsHistory(), (x(),)


class GrowingCache(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, h])  # FAULT: KEPT_TENSOR
        return h @ self.keys.T


class FixedCache(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.last[:2] = h[:2]
        return h @ self.last.T


@fault(lambda: (FixedCache(), (x(),)))
def _planted_growing_cache() -> Case:
    return GrowingCache(), (x(),)


def _memoised() -> Callable[[torch.Tensor], torch.Tensor]:
    @functools.lru_cache
    def table(width: int) -> torch.Tensor:
        return torch.arange(width) * 2.0  # FAULT: KEPT_TENSOR

    return lambda h: h + table(h.shape[1])


@fault(lambda: (lambda h, table: h + table, (x(), torch.arange(3) * 2.0)))
def _planted_memoised() -> Case:
    return _memoised(), (x(),)


class LazyWorkspace(Remembering):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.workspace is None:
            self.workspace = torch.empty(8, 3).view(2, 4, 3)  # FAULT: WORKSPACE
        torch.add(h, 1, out=self.workspace[0])
        return self.workspace[0] * 2


class EarlyWorkspace(LazyWorkspace):
    def __init__(self) -> None:
        super().__init__()
        self.workspace = torch.empty(2, 4, 3)


@fault(lambda: (EarlyWorkspace(), (x(),)))
def _planted_workspace() -> Case:
    return LazyWorkspace(), (x(),)


# Numbers that a replay would not draw or read anew.


def _python_random(h: torch.Tensor) -> torch.Tensor:
    return h * random.random()  # FAULT: RANDOM


@fault(lambda: (lambda h: h * torch.rand(()), (x(),)))
def _planted_python_random() -> Case:
    return _python_random, (x(),)


def _numpy_random(h: torch.Tensor) -> torch.Tensor:
    rng = np.random.default_rng(1)  # FAULT: RANDOM
    return h * float(rng.random())  # FAULT: RANDOM


@fault(breaking(_numpy_random, x()))
def _planted_numpy_random() -> Case:
    return _numpy_random, (x(),)


def _own_generator() -> Case:
    generator = torch.Generator()
    return lambda h: h + torch.rand(3, generator=generator), (x(),)  # FAULT: RANDOM


@fault(lambda: (lambda h: h + torch.rand(3), (x(),)))
def _planted_own_generator() -> Case:
    return _own_generator()


def _seeded(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)  # FAULT: RANDOM
    return h + torch.rand(3)


@fault(breaking(_seeded, x()))
def _planted_seeded() -> Case:
    return _seeded, (x(),)


def _clock(h: torch.Tensor) -> torch.Tensor:
    return h * (time.time() % 2)  # FAULT: HOST_CODE


@fault(breaking(_clock, x()))
def _planted_clock() -> Case:
    return _clock, (x(),)


@torch.library.custom_op("lint_faults::double", mutates_args=())
def double(h: torch.Tensor) -> torch.Tensor:
    """A custom operator in Python."""
    return h * 2


def _custom(h: torch.Tensor) -> torch.Tensor:
    return double(h) + 1  # FAULT: HOST_CODE


@fault(breaking(_custom, x()))
def _planted_custom_operator() -> Case:
    return _custom, (x(),)


def live_length(h: torch.Tensor) -> torch.Tensor:
    """Reads live data outside of a break; run inside `eager_step`."""
    return h[: current_replay().live["length"]]  # FAULT: HOST_DATA


@eager_on_graph
def live_length_in_a_break(h: torch.Tensor) -> torch.Tensor:
    """The same in a break."""
    return h[: current_replay().live["length"]]
