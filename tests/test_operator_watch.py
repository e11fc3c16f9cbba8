"""The rules of a capture over code that is only run: everything is found in one run, and nothing is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from breakgraph.backends.operator_watch import watched_operators

CPU = torch.device("cpu")


def test_every_read_is_reported_with_its_line_and_the_code_runs_on() -> None:
    """REQ-H5: host reads and shapes that depend on data are all named in one run, with the user's line."""
    found: list[tuple[str, str]] = []
    x = torch.arange(6.0)
    with torch.no_grad(), watched_operators(lambda what, line: found.append((what, line)), device=CPU):
        values = x.tolist()
        picked = x[x > 2]
        places = torch.nn.functional.one_hot(x.long()).nonzero()
        total = (x * 2).sum()
    assert values == [0, 1, 2, 3, 4, 5]
    assert (len(picked), len(places), float(total)) == (3, 6, 30.0)
    what = "; ".join(each for each, _ in found)
    assert "Tensor.tolist()" in what
    assert "indexing with a boolean mask" in what
    assert "nonzero" in what
    assert all("test_operator_watch.py" in line for _, line in found)


def test_a_split_at_places_of_a_tensor_is_reported() -> None:
    """FAULT-F3: `tensor_split` reads the places on the host and dispatches nothing for it; a list of numbers is no read."""
    found: list[str] = []
    x, places = torch.arange(6.0), torch.tensor([1, 2])
    with watched_operators(lambda what, line: found.append(what), device=CPU):
        x.tensor_split((1, 2))
        torch.tensor_split(input=x, indices=(1, 2))
        assert found == []
        x.tensor_split(places)
        torch.tensor_split(x, tensor_indices_or_sections=places)
    assert found == ["tensor_split(...) at places that a tensor holds"] * 2


def test_reads_inside_composites_are_found() -> None:
    """FAULT-F3: in inference mode an operator arrives whole that waits inside."""
    found: list[str] = []
    with torch.inference_mode(), watched_operators(lambda what, line: found.append(what), device=CPU):
        torch.arange(3.0).allclose(torch.arange(3.0))
    assert found


def test_a_kernel_that_waits_is_reported_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT-F3: where torch says that an operator waits, it is reported, its result is right and the mode is as before."""
    mode: list[Any] = [0]

    def relu(x: torch.Tensor) -> torch.Tensor:
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return x.clamp_min(0)

    library = torch.library.Library("watched_by_a_test", "DEF")
    library.define("relu(Tensor x) -> Tensor")
    library.impl("relu", relu, "CPU")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda value: mode.__setitem__(0, value))
    monkeypatch.setattr("breakgraph.backends.operator_watch.illegal", lambda *_: None)
    found: list[str] = []
    with watched_operators(lambda what, line: found.append(what), device=torch.device("cuda")):
        result = torch.ops.watched_by_a_test.relu(torch.tensor([-1.0, 2.0]))
    assert result.tolist() == [0.0, 2.0]
    assert [what for what in found if "waits" in what] == ["relu, which waits for the device,"]
    assert mode == [0]
