"""Whose line is it? The innermost frame of the code under test, outside torch, numpy, Python's own library and this package."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import attrs
import numpy as np
import torch

__all__ = ["Place", "is_user_file", "place_of", "user_frame"]

_PACKAGE = Path(__file__).resolve().parents[2]
_CORE = (_PACKAGE, _PACKAGE / "backends")
_TOOLS = _PACKAGE / "tools"
_LIBRARIES = tuple(Path(module.__file__ or "").resolve().parent for module in (torch, np))
_STANDARD = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
_HELPERS = frozenset({"attr", "attrs", "mpmath", "sympy", "typing_extensions"})
"""Packages that torch and data classes call."""
_TYPED_IN = ("<string>", "<stdin>", "<ipython")
"""Code that was typed in has no file; all else in angle brackets was generated or is frozen."""


@attrs.frozen
class Place:
    """A line of the code under test.

    Attributes:
        path: The file.
        lineno: The line, from 1.
        function: The function, as `Class.method`.
        module: The module.
    """

    path: str
    lineno: int
    function: str
    module: str

    def __str__(self) -> str:
        return f"{self.path}:{self.lineno}"


@functools.lru_cache(maxsize=8192)
def is_user_file(filename: str) -> bool:
    """False for torch, numpy, Python's own library and the core of this package; models and serving count as a user's code.

    Args:
        filename: Of a code object.
    """
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = Path(filename).resolve()  # an installed package may be reached through a link
    if is_core_file(filename) or any(root in path.parents for root in _LIBRARIES):
        return False
    for root in _STANDARD:
        if root in path.parents:  # installed packages lie below Python's own library
            within = path.relative_to(root).parts
            return within[0] in _INSTALLED and within[1] not in _HELPERS
    return not any(parent.name in _HELPERS and parent.parent.name in _INSTALLED for parent in path.parents)


@functools.lru_cache(maxsize=8192)
def is_core_file(filename: str) -> bool:
    """True for the core of this package, and for the tools.

    Args:
        filename: Of a code object.
    """
    path = Path(filename).resolve()
    return path.parent in _CORE or _TOOLS in path.parents


def user_frame(*, outermost: FrameType | None) -> FrameType | None:
    """The innermost frame of the code under test.

    Args:
        outermost: The frame that called the forward; nothing at it or above it counts.

    Returns:
        The frame; where only torch's own code runs, such as a bare `nn.Linear`, the last frame below `outermost`; None where
        nothing of it is Python, and outside of the forward, as in another thread.
    """
    frame: FrameType | None = sys._getframe(1)
    below: FrameType | None = None
    while frame is not None and frame is not outermost:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            return frame
        if not is_core_file(filename):
            below = frame
        frame = frame.f_back
    return below if frame is outermost else None


def place_of(frame: FrameType) -> Place:
    """The line that a frame is at.

    Args:
        frame: Any frame.
    """
    code = frame.f_code
    name = code.co_qualname.replace("<locals>.", "")
    module = frame.f_globals.get("__name__", "")
    return Place(code.co_filename, frame.f_lineno, name, str(module))
