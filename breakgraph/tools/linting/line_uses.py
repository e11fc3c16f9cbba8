"""What a line of source can do that a replay would not do again."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import attrs

__all__ = ["Alias", "CallOf", "GlobalStore", "Header", "LineUse", "Store", "With"]


@attrs.frozen(eq=False)
class Store:
    """A place that a statement writes.

    Attributes:
        owner: The object, as an expression: that of the attribute, or the container.
        name: Expression of the attribute's name, or the name; None for a container.
    """

    owner: ast.expr
    name: str | ast.expr | None


@attrs.frozen(eq=False)
class GlobalStore:
    """A global or outer variable that a statement binds.

    Attributes:
        name: The variable.
        is_global: Whether it is the module's, and not that of an enclosing function.
    """

    name: str
    is_global: bool


@attrs.frozen(eq=False)
class CallOf:
    """A call of a name or an attribute.

    Attributes:
        function: What is called, as an expression.
        arguments: Its positional arguments.
    """

    function: ast.expr
    arguments: Sequence[ast.expr]


@attrs.frozen(eq=False)
class Header:
    """What a loop runs over, or an index of something that is no tensor.

    Attributes:
        names: Names and attributes in it.
        what: In words.
        indexed: What is indexed, as an expression; None for a loop.
    """

    names: tuple[ast.expr, ...]
    what: str
    indexed: ast.expr | None = None


@attrs.frozen(eq=False)
class With:
    """A `with` statement."""


@attrs.frozen(eq=False)
class Alias:
    """An attribute or an item that gets a name, or is handed to a function.

    Attributes:
        value: The attribute or the item, as an expression.
    """

    value: ast.expr


LineUse = Store | GlobalStore | CallOf | Header | With | Alias
