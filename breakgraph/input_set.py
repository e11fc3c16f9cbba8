"""The declared inputs of a runner together, and the strict check of what a step gives, before it is copied in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from breakgraph.errors import ConfigError, StaticInputError
from breakgraph.static_buffers import MISSING, Axis, Extent, Missing, StaticInput

__all__ = ["InputSet"]


class InputSet:
    """All declared inputs of a runner and the strict check of what a step gives.

    Args:
        inputs: The declarations; names must be unique.
        device: Device of the runner, with an index on CUDA.

    Raises:
        ConfigError: Two inputs share a name, or a device buffer lies elsewhere.
    """

    def __init__(self, inputs: Iterable[StaticInput], *, device: torch.device) -> None:
        self.all = tuple(inputs)
        if odd := [declared for declared in self.all if not isinstance(declared, StaticInput)]:
            raise ConfigError(
                f"inputs has {odd}; expected StaticInputs.",
                why="Name, shape, dtype and padding of each input are fixed before a graph reads it by address.",
                fix='Pass inputs=[StaticInput("ids", shape=(TOKENS,)), ...].',
            )
        self.device = device
        self.copied = tuple(declared for declared in self.all if declared.source == "host")
        self.device_fed = {d.name: d.buffer for d in self.all if d.buffer is not None}
        axes = [(d, d.axis, d.shape[d.axis]) for d in self.copied if d.axis is not None]
        self._by_request = tuple(
            (d, position, axis) for d, position, axis in axes if isinstance(axis, Axis) and axis.of == "REQUESTS"
        )
        self.has_requests = bool(self._by_request)
        names = [declared.name for declared in self.all]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"static inputs {names} are not unique.",
                why="forward receives them by keyword.",
                fix="Give each input its own name.",
            )
        elsewhere = {name: buffer.device for name, buffer in self.device_fed.items() if buffer.device != device}
        if elsewhere:
            raise ConfigError(
                f"buffers of device-fed inputs are on {elsewhere}; the runner is on {device}.",
                why="The graph reads and writes them by address.",
                fix="Allocate them on the runner's device.",
            )

    def requests(self, inputs: Mapping[str, torch.Tensor], *, most: int, where: str) -> int:
        """Read the real number of requests off the first given input that has a REQUESTS axis.

        Args:
            inputs: What the step gives.
            most: The runner's `max_requests`.
            where: Name of the step, for the message.

        Returns:
            The number of requests; `most` when no given input has that axis.

        Raises:
            StaticInputError: More requests than `most`, or less than none.
        """
        self._check_kind(inputs, where)
        for declared, position, axis in self._by_request:
            tensor = inputs.get(declared.name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= position:
                continue  # check() says what is wrong with it
            found = tensor.shape[position] - axis.offset
            if 0 <= found <= most:
                return found
            raise StaticInputError(
                f"input {declared.name!r} of {where} has shape {tuple(tensor.shape)}, that is {found} requests; "
                f"expected {declared.shape_text} with 0 to {most} requests.",
                why="Its static buffer has room for max_requests.",
                fix="Raise max_requests, or put fewer requests into a step.",
            )
        return most

    def check(self, inputs: Mapping[str, torch.Tensor], extent: Extent, *, where: str) -> None:
        """Hold what a step gives to the declarations. Changes nothing.

        Args:
            inputs: What the step gives: tensors on the host or on the runner's device.
            extent: Real sizes of the step.
            where: Name of the step, for messages.

        Raises:
            StaticInputError: An input is missing and has no default, is unknown, is not a tensor, or has
                another shape, dtype or device. Costs about 0.6 us per input.
        """
        self._check_kind(inputs, where)
        found = 0
        for declared in self.copied:
            tensor = inputs.get(declared.name)
            if tensor is None:
                if declared.default is MISSING or declared.name in inputs:
                    self._refuse_absent(declared, inputs, where)
                continue
            found += 1
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.shape == declared.resolve(extent)
                and tensor.dtype is declared.dtype
                and tensor.layout is torch.strided
                and (tensor.is_cpu or tensor.device == self.device)
            ):
                self._refuse(declared, tensor, extent, where)
        if found != len(inputs):
            self._refuse_unknown(inputs, where)

    def ready(self, inputs: Mapping[str, torch.Tensor], extent: Extent) -> dict[str, torch.Tensor]:
        """Make the arguments of an unpadded eager run: own copies of host tensors, defaults filled in.

        Host tensors are copied, since the caller may refill them before the step is launched.

        Args:
            inputs: Checked inputs of the step.
            extent: Real sizes of the step.

        Returns:
            One tensor on the runner's device for each declared input.
        """
        return {**dict(self._ready(inputs, extent)), **self.device_fed}

    def _ready(self, inputs: Mapping[str, torch.Tensor], extent: Extent) -> Iterator[tuple[str, torch.Tensor]]:
        for declared in self.copied:
            tensor = inputs.get(declared.name)
            if tensor is None:
                fill = declared.default
                assert not isinstance(fill, Missing)  # check() refused it
                tensor = torch.full(declared.resolve(extent), fill, dtype=declared.dtype, device=self.device)
            elif tensor.is_cpu:
                tensor = tensor.to(self.device, copy=True)
            yield declared.name, tensor

    def _check_kind(self, inputs: Any, where: str) -> None:
        if type(inputs) is dict or isinstance(inputs, Mapping):  # the first is ten times as fast
            return
        raise StaticInputError(
            f"the inputs of {where} are a {type(inputs).__name__}; expected a mapping of names to tensors.",
            why="Each declared input has a static buffer of its own.",
            fix=f"Pass one tensor for each of {[declared.name for declared in self.copied]}.",
        )

    def _refuse_absent(self, declared: StaticInput, inputs: Mapping[str, torch.Tensor], where: str) -> None:
        given = "is None" if declared.name in inputs else f"is missing; given: {sorted(inputs, key=str)}"
        raise StaticInputError(
            f"input {declared.name!r} of {where} {given}.",
            why="Its static buffer would keep the values of an earlier step.",
            fix="Give it, or declare default= to be able to leave it out.",
        )

    def _refuse_unknown(self, inputs: Mapping[str, torch.Tensor], where: str) -> None:
        known = [declared.name for declared in self.copied]
        unknown = [name for name in inputs if name not in known]
        fed = [name for name in unknown if name in self.device_fed]
        if fed:
            raise StaticInputError(
                f"{where} got inputs {fed}, which are device-fed.",
                why="The steps themselves write them, and nothing is copied into them.",
                fix="Leave them out, and write to their buffers.",
            )
        near = {name: close for name in unknown for close in difflib.get_close_matches(str(name), known, n=1)}
        raise StaticInputError(
            f"{where} got inputs {unknown}; declared are {known}.",
            why="The graph would not see them.",
            fix="Declare a StaticInput for each, or pass what only breaks need through live=."
            + "".join(f" Did you mean {close!r} for {name!r}?" for name, close in near.items()),
        )

    def _refuse(self, declared: StaticInput, tensor: object, extent: Extent, where: str) -> None:
        expected = f"shape {declared.resolve(extent)}, {declared.dtype}, on {self.device} or the host"
        got = f"is a {type(tensor).__name__}"
        if isinstance(tensor, torch.Tensor):
            dense = "" if tensor.layout is torch.strided else f"{tensor.layout}, "
            got = f"has shape {tuple(tensor.shape)}, {dense}{tensor.dtype}, on {tensor.device}"
        sizes = f"TOKENS is {extent.tokens} and REQUESTS {extent.requests} in this step"
        raise StaticInputError(
            f"input {declared.name!r} of {where} {got}; expected {expected} (declared {declared.shape_text}; {sizes}).",
            why="Its static buffer has the declared shape and dtype; anything else would be broadcast, cast or cut, silently.",
            fix="Give the declared shape and dtype; or correct the sizes of the step, which come from its key or its size=.",
        )
