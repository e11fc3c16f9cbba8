"""The file of the sizes that steps had, which `breakgraph tune` reads: one line for each phase and size, with its count."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from breakgraph.errors import ConfigError

__all__ = ["checked_size_file", "write_sizes"]


def checked_size_file(path: str | Path) -> Path:
    """Refuses, before anything was counted, a file that could not be written.

    The file itself is left as it is: only a temporary one is made beside it, and removed.

    Args:
        path: Of a `.jsonl` or `.csv` file that may be there already.

    Returns:
        The path, absolute, with links followed: the file that a link names is what is replaced.

    Raises:
        ConfigError: It has another extension, is no regular file, or cannot be written where it is.
    """
    given, made = str(path), Path(path).expanduser()
    if made.suffix.lower() not in (".jsonl", ".csv"):
        raise ConfigError(
            f"sizes cannot be recorded in {given!r}; expected a name that ends in .jsonl or .csv.",
            why="The extension says how they are written, and how breakgraph tune reads them.",
            fix="Name it like sizes.jsonl.",
        )
    try:
        made = made.resolve()
        if made.exists() and not (made.is_file() and os.access(made, os.W_OK)):
            raise OSError("it is there, and no file that can be written")
        beside = _beside(made)
        beside.write_text("")
        beside.unlink()
    except (OSError, RuntimeError, ValueError) as error:  # of a loop of links, of a null byte
        raise ConfigError(
            f"sizes cannot be recorded in {given!r}: {error}.",
            why="It is written as a whole, through a temporary file beside it, while steps run and when they end.",
            fix="Name a file in a folder that exists and that this user may write to.",
        ) from None
    return made


def write_sizes(path: str | Path, *, sizes: Mapping[str, Mapping[int, int]]) -> None:
    """Writes sizes, or replaces those that are there: whoever reads sees the old file or the new one, never a half.

    A process that is killed meanwhile leaves the old file, and perhaps a temporary one beside it. Two that write one file replace
    each other's; give each its own.

    Args:
        path: `.csv` for columns phase, size, count; anything else is one JSON object a line with these keys.
        sizes: Phase to size to count, such as `LLM.statistics.sizes`.

    Raises:
        OSError: It cannot be written; what was there is left.
    """
    target = Path(path)
    rows = [(phase, size, count) for phase, counts in sizes.items() for size, count in sorted(counts.items())]
    text = io.StringIO(newline="")
    if target.suffix.lower() == ".csv":
        csv.writer(text, lineterminator="\n").writerows([("phase", "size", "count"), *rows])
    else:
        text.writelines(
            json.dumps({"phase": phase, "size": size, "count": count}) + "\n" for phase, size, count in rows
        )
    beside = _beside(target)
    try:
        beside.write_text(text.getvalue(), encoding="utf-8", newline="")
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    # Not the process id: two containers may share the folder, and both be process 1.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
