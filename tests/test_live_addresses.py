"""Addresses of tensors in live data: segments read them where they lay at capture, so a runner compares them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import MovedBufferError
from breakgraph.graph_key import PrefillKey
from breakgraph.prefill_runner import Example, PrefillRunner
from tests.test_runner_proof import captured


class Inner:
    """Something that live data holds."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.ones(16, device=device)


class Meta:
    """Live data kept by the engine and given to every step."""

    def __init__(self, device: torch.device) -> None:
        self.table = torch.full((16,), 2.0, device=device)
        self.inner = Inner(device)
        self.layers = [torch.zeros(1, device=device)]


def scaled(ids: torch.Tensor, meta: Meta) -> torch.Tensor:
    """A segment that reads live data by address."""
    return ids * meta.table[: ids.shape[0]] * meta.inner.scale[: ids.shape[0]]


def live_runner(device: torch.device, meta: Meta, **options: Any) -> PrefillRunner:
    """A captured runner over a live object that stays the same."""

    def example(key: PrefillKey) -> Example:
        return Example({"ids": torch.randn(key.tokens)}, {"meta": meta})

    runner = captured(scaled, device=device, **{"sizes": (4, 8), "example": example, **options})
    assert not runner.dropped
    return runner


def rebind(meta: Meta, *, what: str) -> None:
    """Replace one tensor of live data."""
    if what == "meta.table":
        meta.table = meta.table.clone()
    elif what == "meta.table=None":
        meta.table = None  # type: ignore[assignment]
    elif what == "meta.inner.scale":
        meta.inner.scale = meta.inner.scale.clone()
    elif what == "meta.inner":
        meta.inner = Inner(meta.table.device)
    else:
        meta.layers[0] = meta.layers[0].clone()


@pytest.mark.parametrize("what", ["meta.table", "meta.table=None", "meta.inner.scale", "meta.inner", "meta.layers[0]"])
def test_rebound_live_data_is_named(device: torch.device, what: str) -> None:
    """FAULT-L7, REQ-E4: an attribute of the captured live object that is another tensor or None now is refused by name."""
    meta = Meta(device)
    runner = live_runner(device, meta, check_addresses="always")
    meta.table.mul_(3)
    inputs = {"ids": torch.ones(4)}
    assert runner.run(inputs, size=4, live={"meta": meta}).output.tolist() == [6.0] * 4
    rebind(meta, what=what)
    with pytest.raises(MovedBufferError) as caught:
        runner.run(inputs, size=4, live={"meta": meta})
    assert f"live data {what.removesuffix('=None')}" in str(caught.value)
    assert runner.statistics.replays == 1


def test_live_data_is_checked_first_or_never(device: torch.device) -> None:
    """REQ-E4: "first" looks before the first replay of each graph, "never" does not look."""
    for when in ("first", "never"):
        meta = Meta(device)
        runner = live_runner(device, meta, check_addresses=when)
        runner.run({"ids": torch.ones(4)}, size=4, live={"meta": meta})
        rebind(meta, what="meta.table")
        assert runner.run({"ids": torch.ones(4)}, size=4, live={"meta": meta}).replayed
        if when == "first":
            with pytest.raises(MovedBufferError, match="meta.table"):
                runner.run({"ids": torch.ones(8)}, size=8, live={"meta": meta})


def test_tensors_of_a_class_count_as_attributes(device: torch.device) -> None:
    """FAULT-L7: a table that the class holds until an instance replaces it is watched too."""

    class Shared:
        table = torch.ones(16, device=device)
        inner = Inner(device)

    shared: Any = Shared()
    runner = live_runner(device, shared, check_addresses="always")
    shared.table = torch.zeros(16, device=device)
    with pytest.raises(MovedBufferError, match="meta.table"):
        runner.run({"ids": torch.ones(4)}, size=4, live={"meta": shared})


def test_live_data_of_another_object_is_nobodys_address(device: torch.device) -> None:
    """REQ-E4, FAULT-F1: where each step brings its own live object, there is nothing to compare."""

    @eager_on_graph(live=("meta",))
    def scale(x: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x * meta.table[: x.shape[0]]

    def example(key: PrefillKey) -> Example:
        return Example({"ids": torch.randn(key.tokens)}, {"meta": Meta(device)})

    runner = captured(
        lambda ids, meta: scale(ids + 0, meta) + 0, device=device, example=example, check_addresses="always"
    )
    for _ in range(3):
        assert runner.run({"ids": torch.ones(4)}, size=4, live={"meta": Meta(device)}).output.tolist() == [2.0] * 4


def test_what_the_example_itself_rebinds_is_not_watched(device: torch.device) -> None:
    """REQ-E4: an object whose tensors example() replaces is read by breaks only, or the proof had failed."""
    meta = Meta(device)

    @eager_on_graph(live=("meta",))
    def scale(x: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x * meta.table[: x.shape[0]]

    def example(key: PrefillKey) -> Example:
        meta.table = torch.randn(16, device=device)
        return Example({"ids": torch.randn(key.tokens)}, {"meta": meta})

    runner = captured(
        lambda ids, meta: scale(ids + 0, meta) + 0,
        device=device,
        sizes=(4, 8),
        example=example,
        check_addresses="always",
    )
    assert not runner.dropped
    for size in (4, 8):
        meta.table = torch.full((16,), 5.0, device=device)
        assert runner.run({"ids": torch.ones(size)}, size=size, live={"meta": meta}).output.tolist() == [5.0] * size
    meta.layers[0] = torch.ones(1, device=device)
    with pytest.raises(MovedBufferError, match=r"meta.layers\[0\]"):
        runner.run({"ids": torch.ones(4)}, size=4, live={"meta": meta})
