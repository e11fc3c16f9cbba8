"""One recorded segment of the emulated backend: its operators, and the tensors that they write."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from breakgraph.backends.base import Piece, Segment
from breakgraph.backends.emulated_rules import tensors_in
from breakgraph.streams import StreamUse
from breakgraph.structure import storage_address

__all__ = ["EmulatedSegment", "Operator"]


class Forgets(Protocol):
    """What a segment tells its backend."""

    def forget(self, segment: EmulatedSegment) -> None:
        """It is being reset.

        Args:
            segment: The segment.
        """
        ...


@attrs.frozen(eq=False, slots=True)
class Operator:
    """One recorded operator call: `fresh` pairs an index into the flat results with the captured tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]
    line: str

    def run(self) -> None:
        """Run it again on the captured tensors; its results go into the captured storage."""
        result = self.function(*self.args, **self.kwargs)
        if not self.fresh:
            return
        if isinstance(result, torch.Tensor):
            self.fresh[0][1].copy_(result)
        else:
            flat = tensors_in(result)
            for index, captured in self.fresh:
                captured.copy_(flat[index])


class EmulatedSegment(Segment):
    """Recorded operators of one segment.

    Args:
        operators: In order; views and uninitialised allocations are not among them, since nothing runs for them.
        made: Every tensor that the segment allocated: its share of the pool.
        backend: Whose pool it is.
    """

    def __init__(self, operators: list[Operator], *, made: list[torch.Tensor], backend: Forgets) -> None:
        self.operators = operators
        self.made = made
        self.addresses = {storage_address(tensor) for tensor in made}
        self.unwritten: list[torch.Tensor] = []
        self._backend = backend

    def bound(self) -> Callable[[], None]:
        """Runs the operators on the captured tensors; they read and write the captured storage."""
        return self._launch

    def _launch(self) -> None:
        with _below_autograd():
            for operator in self.operators:
                operator.run()

    def reset(self) -> None:
        """Drop the operators and every intermediate."""
        self._backend.forget(self)
        self.operators = []
        self.made = self.unwritten = []
        self.addresses = set()

    def describe(self) -> str:
        """The count of operators."""
        return f"{len(self.operators)} operator{'' if len(self.operators) == 1 else 's'}"

    def kernels(self) -> Mapping[str, int]:
        """Operators by name."""
        return Counter(operator.function.name() for operator in self.operators)

    def pieces(self) -> tuple[Piece, ...]:
        """One for each operator."""
        return tuple(
            Piece(operator.function.name(), functools.partial(_run_alone, operator), operator.line)
            for operator in self.operators
        )

    @property
    def size(self) -> int:
        """The count of operators."""
        return len(self.operators)

    @property
    def instantiate_seconds(self) -> float:
        """None: operators are launchable as they are."""
        return 0.0

    @property
    def streams(self) -> StreamUse:
        """Nothing: a CPU has one stream."""
        return StreamUse()

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing: a CPU has one stream."""
        return ()


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """What was recorded lies below autograd and autocast, so neither may act again.

    Inference mode also lets results go into tensors that were made in it; it never changes a tensor that was not.
    """
    with contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode())
        yield


def _run_alone(operator: Operator) -> None:
    with _below_autograd():
        operator.run()
