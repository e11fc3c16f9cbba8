"""Turns the steps of a sealed graph into an `Explanation`: asks segments for their kernels and breaks for their bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from breakgraph.backends import Backend
from breakgraph.copy_back import LeafKind
from breakgraph.explanation import Explanation, StepExplained, StepTime, Traffic
from breakgraph.graph_advice import advice_for
from breakgraph.replay_program import BreakCall, Step, StepKind
from breakgraph.structure import flatten, storage_address

__all__ = ["explained"]


def explained(
    name: str,
    steps: Sequence[Step],
    *,
    backend: Backend,
    live_names: tuple[str, ...],
    padded_rows: int | None,
    totals: Mapping[str, float],
    times: Mapping[int, StepTime],
    small: int,
) -> Explanation:
    """Ask each step what it holds.

    Args:
        name: Of the graph.
        steps: In the order of a replay.
        backend: Whose segments they are.
        live_names: Live data that a replay needs.
        padded_rows: Captured length of the token axis.
        totals: Counts and bytes of the graph.
        times: Measured times by place.
        small: Segments with fewer kernels are marked.
    """
    rows = tuple(_explained(step, index=index, time=times.get(index)) for index, step in enumerate(steps))
    hoistable = {
        index: text for index, step in enumerate(steps) if (text := _free_of_the_forward(step, steps, backend))
    }
    return Explanation(
        name=name,
        steps=rows,
        live_names=live_names,
        padded_rows=padded_rows,
        totals=totals,
        advice=advice_for(rows, hoistable=hoistable, launch_us=_launch_us(rows, backend), small=small),
        small=small,
    )


def _launch_us(steps: Sequence[StepExplained], backend: Backend) -> float | None:
    """What the launch of a segment costs the host; None where it was not measured, or where a launch is the work itself."""
    times = [step.time.host_us for step in steps if step.kind is StepKind.SEGMENT and step.time is not None]
    return statistics.median(times) if times and backend.device.type != "cpu" else None


def _explained(step: Step, *, index: int, time: StepTime | None) -> StepExplained:
    if step.segment is not None:
        return StepExplained(
            index,
            step.kind,
            step.name,
            step.line,
            why=step.why,
            kernels=dict(step.segment.kernels()),
            streams=step.segment.streams,
            notes=step.segment.notes,
            time=time,
        )
    call = step.call
    assert call is not None
    return StepExplained(
        index,
        step.kind,
        step.name,
        step.line,
        traffic=_traffic(call),
        live=tuple(sorted(call.spec.live.values())),
        returns=""
        if call.contract.returns_none
        else ", ".join(f"{leaf.path or 'return'}: {leaf.kind.value}" for leaf in call.contract.leaves),
        time=time,
    )


def _traffic(call: BreakCall) -> Traffic:
    received = {id(tensor): tensor.nbytes for _, tensor in _tensors(call)}
    copied = call.contract.bridge_bytes
    written = {
        id(call.bound[name]): call.bound[name].nbytes for name in call.spec.writes if call.bound[name] is not None
    }
    in_place = [leaf.captured for leaf in call.contract.leaves if leaf.kind is LeafKind.IN_PLACE]
    addresses = {call.bound[name].data_ptr() for name in call.spec.writes if call.bound[name] is not None}
    extra = sum(tensor.nbytes for tensor in in_place if tensor.data_ptr() not in addresses)
    return Traffic(read=sum(received.values()), written=sum(written.values()) + extra + copied, copied=copied)


def _tensors(call: BreakCall) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors that a break receives, with memory of their own."""
    for path, leaf in _leaves(call):
        if isinstance(leaf, torch.Tensor) and storage_address(leaf):
            yield path, leaf


def _leaves(call: BreakCall) -> Iterable[tuple[str, Any]]:
    """What a break receives, live data aside: that is another object at each replay."""
    live = {call.bound.places[parameter] for parameter in call.spec.live}
    values: list[tuple[str, Any]] = [
        (str(index), value) for index, value in enumerate(call.bound.args) if index not in live
    ]
    values += [(name, value) for name, value in call.bound.kwargs.items() if name not in live]
    for name, value in values:
        for path, leaf in flatten(value)[0]:
            yield name + path, leaf


def _free_of_the_forward(step: Step, steps: Sequence[Step], backend: Backend) -> str:
    """What an ordinary break receives, where no other step makes or touches it, as far as can be seen; else nothing.

    A break that returns nothing is there for what it does to objects or buffers, and one that takes an object, other than its own
    module, may read anything of it: only their authors know when they may run.
    """
    call = step.call
    if call is None or step.kind is not StepKind.BREAK or step is steps[0] or call.contract.returns_none:
        return ""
    if call.spec.writes or call.rows is not None or (not call.spec.live and not call.bound.args):
        return ""
    leaves = list(_leaves(call))
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(leaf, (torch.Tensor, torch.nn.Module, *_VALUES)) for _, leaf in leaves):
        return ""
    others = {
        storage_address(leaf)
        for other in steps
        if other.call is not None and other is not step
        for _, leaf in _leaves(other.call)
        if isinstance(leaf, torch.Tensor)
    }
    for tensor in tensors:
        made = call.contract.arena.holds(tensor) or backend.made_by_a_segment(tensor)
        if made or storage_address(tensor) in others:
            return ""
    parts = ["live data"] if call.spec.live else []
    parts += [f"{len(tensors)} tensors from outside the forward"] if tensors else []
    return " and ".join(parts) or "no tensors"


_VALUES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device)
