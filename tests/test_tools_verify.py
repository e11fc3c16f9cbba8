"""`verify`: planted faults are found, in the right step, with the right cause; what is right is said to be right."""

from __future__ import annotations

import pytest
import torch

from breakgraph.replay_program import StepKind
from breakgraph.tools import Verification, verify
from tests import verify_faults
from tests.verify_faults import FAULTS, ROWS, WIDTH, Planted, fault_line


def _verified(planted: Planted, backend: str, device: torch.device) -> Verification:
    def example(number: int) -> dict[str, torch.Tensor]:
        if number:
            planted.change(number)
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(ROWS, WIDTH, generator=generator).to(device)}

    return verify(
        planted.forward,
        example=example,
        live=planted.live,
        valid_rows=planted.valid_rows,
        modules=planted.modules,
        backend=backend,
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, backend: str, device: torch.device) -> None:
    """Each planted fault: the right cause, the right step, the line, and what is to blame by name."""
    planted = FAULTS[fault](device)
    found = _verified(planted, backend, device)
    print(found)
    assert found.diagnosis is not None
    assert found.diagnosis.cause is planted.cause
    assert planted.evidence in found.diagnosis.evidence
    step = found.step
    assert step is not None
    if isinstance(planted.step, str):
        assert f"break '{planted.step}'" in found.blamed
    else:
        assert "segment" in found.blamed
        assert sum(kind is not StepKind.SEGMENT for kind in found.kinds[:step]) == planted.step
    if planted.line:
        assert f"{verify_faults.__file__}:{fault_line(planted.line)} " in found.diagnosis.line
