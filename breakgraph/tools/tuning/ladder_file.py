"""The file of a tuned ladder: what `breakgraph tune --output` writes and everything that takes a ladder reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError

__all__ = ["check_output", "read_ladder", "write_ladder"]


def check_output(path: Path, *, inputs: Iterable[Path | None]) -> None:
    """Refuses a file that could not be read again, or that is one of the inputs, before anything is computed.

    Args:
        path: Where the ladder is to go.
        inputs: Files that are read, or written besides.

    Raises:
        ConfigError: It ends in something else than `.json`, or is one of the inputs.
    """
    if path.suffix.lower() != ".json":
        raise ConfigError(
            f"the ladder cannot be written to {str(path)!r}; expected a name that ends in .json.",
            why="serve --prefill-sizes knows a file by that.",
            fix="Name it like ladder.json.",
        )
    if any(other is not None and other.resolve() == path.resolve() for other in inputs):
        raise ConfigError(
            f"{str(path)!r} is read, or written otherwise, in the same run.",
            why="The ladder would replace it.",
            fix="Name another file.",
        )


def write_ladder(path: str | Path, *, values: Mapping[str, Any]) -> None:
    """Writes a tuning as one JSON object.

    Args:
        path: The file; one that is there is overwritten.
        values: From `Tuning.as_dict`.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        Path(path).expanduser().write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the ladder cannot be written to {str(path)!r}: {error}.",
            why="It is what the computation was for.",
            fix="Name a file in a folder that exists and that this user may write to.",
        ) from None


def read_ladder(path: str | Path, *, phase: str | None = None) -> Buckets:
    """Reads a ladder for a runner: `PrefillRunner(..., buckets=read_ladder("ladder.json"))`.

    Args:
        path: A file that `breakgraph tune --output` wrote; or any JSON object with a list `ladder`, or that list alone.
        phase: `prefill` or `decode`; a file that says the other one is refused.

    Returns:
        The ladder.

    Raises:
        ConfigError: It cannot be read, has no ladder of one bucket or more, or is of another phase.
    """
    try:
        found = json.loads(Path(path).expanduser().read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RuntimeError) as error:  # RecursionError is one of the last
        raise ConfigError(
            f"the ladder cannot be read from {str(path)!r}: {error}.",
            why="Without it there is no telling which graphs to capture.",
            fix="Name a file that breakgraph tune --output wrote.",
        ) from None
    sizes = found.get("ladder") if isinstance(found, dict) else found
    if not isinstance(sizes, list) or not sizes:
        raise ConfigError(
            f"{str(path)!r} has no ladder; expected an object with a list of buckets, not empty.",
            why="Without it there is no telling which graphs to capture.",
            fix='Write {"ladder": [16, 64]}, or what breakgraph tune --output writes.',
        )
    said = found.get("phase") if isinstance(found, dict) else None
    if phase is not None and said not in (None, phase):
        raise ConfigError(
            f"{str(path)!r} has the ladder of {said} steps; expected one of {phase} steps.",
            why="Tokens of a prefill step and requests of a decode step are different sizes.",
            fix=f"Use a file of breakgraph tune --phase {phase}.",
        )
    return Buckets.of(sizes)
