"""Where in the user's code something happened: errors and `explain()` name that line."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["UNKNOWN_LINE", "raised_at", "user_line"]

UNKNOWN_LINE = "an unknown line"

_PACKAGE = Path(__file__).resolve().parent
_OURS = (_PACKAGE, _PACKAGE / "backends")
_ABOVE = (_PACKAGE / "tools", _PACKAGE / "cli")
_TORCH = Path(torch.__file__).resolve().parent
_TYPED_IN = ("<string>", "<stdin>", "<ipython")
"""Code that was typed in has no file; all else in angle brackets was generated."""


@functools.lru_cache(maxsize=4096)
def _is_ours(filename: str) -> bool:
    """True for torch and for the core of this package; models and serving count as a user's code."""
    if filename.startswith("<"):
        return not filename.startswith(_TYPED_IN)
    path = Path(filename).resolve()  # an installed package may be reached through a link
    if _TORCH in path.parents:
        return True
    # contextlib and functools carry decorators and context managers; they are nobody's line.
    return (
        path.parent in _OURS
        or any(folder in path.parents for folder in _ABOVE)
        or path.name in ("contextlib.py", "functools.py")
    )


def user_line() -> str:
    """The innermost line of the stack outside torch and the core, as `file.py:12 in forward`.

    Cost: a walk up the Python stack, a few microseconds; called at capture and in errors only.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        code = frame.f_code
        if not _is_ours(code.co_filename):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def raised_at(trace: TracebackType | None) -> str:
    """The innermost line of a traceback outside torch and the core, with its text: `file.py:12 in forward: n = x.item()`.

    Args:
        trace: Traceback of an exception.
    """
    found = UNKNOWN_LINE
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_ours(code.co_filename):
            text = linecache.getline(code.co_filename, trace.tb_lineno).strip()
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}" + (f": {text}" if text else "")
        trace = trace.tb_next
    return found
