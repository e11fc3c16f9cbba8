"""`MODULE:FUNCTION` of the command line: import it, call it, and say what is wrong with it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from breakgraph.errors import ConfigError, add_note

__all__ = ["call_target", "ended", "load_target"]


def load_target(target: str) -> Callable[..., Any]:
    """Import a function that was named on a command line.

    Args:
        target: `package.module:function`, or `path/to/file.py:function`; attributes of attributes may follow, such as
            `module:Class.make`. The current folder is looked in first, as `python -m` does.

    Returns:
        The function.

    Raises:
        ConfigError: There is no such module or attribute, or it cannot be called.
        BaseException: Whatever the module raised while it was imported, unchanged, with a note.
    """
    name, colon, path = target.partition(":") if not target.endswith(".py") else (target, "", "")
    if not colon or not name or not path:
        raise ConfigError(
            f"{target!r} names no function; expected MODULE:FUNCTION or FILE.py:FUNCTION.",
            why="It is imported and called without arguments.",
            fix="Write it like mymodel.checks:prefill or checks.py:prefill.",
        )
    found: Any = _module(name, target=target)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(
                f"{target!r}: {type(found).__name__} {getattr(found, '__name__', '')!r} has no attribute {part!r}.",
                why="What is named behind the colon is called without arguments.",
                fix=f"Name a function that {name} defines.",
            ) from None
    if not callable(found):
        raise ConfigError(
            f"{target!r} is a {type(found).__name__}; expected a function.",
            why="What is named behind the colon is called without arguments.",
            fix="Write a function that returns it.",
        )
    return found  # type: ignore[no-any-return]


def call_target(target: str) -> Any:
    """Import a function and call it without arguments.

    Args:
        target: See `load_target`.

    Returns:
        What it returned. What it prints goes to stderr: stdout is the command's.

    Raises:
        ConfigError: See `load_target`.
        BaseException: Whatever it raised, unchanged, with a note.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            function = load_target(target)
            _refuse_arguments(function, target)
        except SystemExit as error:
            raise ended(target, error) from error
        try:
            return function()
        except SystemExit as error:
            raise ended(target, error) from error
        except BaseException as error:
            add_note(error, f"raised by {target}, which was called without arguments")
            raise


def ended(target: str, error: SystemExit) -> ConfigError:
    """The error for code of the user's that ends the program: whoever runs the command would take its status for the answer.

    Args:
        target: What was named on the command line.
        error: What it raised.
    """
    return ConfigError(
        f"{target!r} ended the program with {error.code!r} (sys.exit, or argparse that refused the command line).",
        why="Its status would be taken for that of this command.",
        fix="Let the function return, and keep what parses arguments below: if __name__ == '__main__'.",
    )


def _refuse_arguments(function: Callable[..., Any], target: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one in C may have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise ConfigError(
            f"{target!r} cannot be called without arguments: {error}; it is defined as {target.rpartition(':')[2]}{signature}.",
            why="What is named behind the colon is called without arguments.",
            fix="Name a function without arguments that calls it, or give its arguments defaults.",
        ) from None


def _module(name: str, *, target: str) -> Any:
    path = Path(name)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise ConfigError(
            f"{target!r}: there is no file {name} in {Path.cwd()}.",
            why="It is imported to find the function.",
            fix="Name a file, or a module that Python can import.",
        )
    where = str(path.resolve().parent if is_file else Path.cwd())
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        return _file_as_module(path) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"{target!r}: there is no module {error.name!r}.",
                why=f"It is looked for in {Path.cwd()} and where Python looks.",
                fix="Run the command from the folder that holds it, install it, or name a file: FILE.py:FUNCTION.",
            ) from None
        add_note(error, f"raised while {name} was imported for {target}")
        raise
    except BaseException as error:
        add_note(error, f"raised while {name} was imported for {target}")
        raise


def _file_as_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"{path} cannot be imported.",
            why="It is imported to find the function.",
            fix="Name a Python file.",
        )
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(path.stem)
    sys.modules[path.stem] = module  # dataclasses and pickles of the file look it up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = previous
        raise
    return module
