"""What every results file says about where its figures come from."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import torch

__all__ = ["provenance"]

_PACKAGES = ("torch", "transformers", "flashinfer-python", "cuda-bindings", "triton")


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Command, commit, date, versions and GPU.

    Args:
        commit: The commit, where the machine has no git; asked from git by default.
    """
    if commit is None:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        commit = asked.stdout.strip()
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "versions": versions,
    }
