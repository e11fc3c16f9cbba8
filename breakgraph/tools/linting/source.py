"""What a line of source does, by its syntax tree: where it stores, what it calls, what it loops over."""

from __future__ import annotations

import ast
import functools
import linecache
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

__all__ = ["CallOf", "GlobalStore", "Header", "LineUse", "Source", "Store", "With", "own_nodes", "source_of"]

_MUTATORS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear"),
        *("add", "discard", "update", "setdefault", "sort", "reverse", "rotate", "fill", "intersection_update"),
    }
)
_SETTERS = frozenset({"register_buffer", "register_parameter", "__setattr__"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.AsyncFor


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


LineUse = Store | GlobalStore | CallOf | Header | With


class Source:
    """The syntax tree of a file, by line.

    Args:
        tree: Its tree.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        self._starting: dict[int, list[ast.stmt]] = defaultdict(list)
        self._covering: dict[int, ast.stmt] = {}
        for node in ast.walk(tree):  # outer statements come first
            if isinstance(node, ast.stmt):
                self._starting[node.lineno].append(node)
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._covering[line] = node
        self._uses: dict[int, tuple[LineUse, ...]] = {}

    def statement(self, lineno: int) -> ast.stmt | None:
        """The outermost statement that starts at a line, such as an `if` with all that is in it, else the innermost around it."""
        for statement in self._starting.get(lineno, ()):
            if not isinstance(statement, _Function | ast.ClassDef):
                return statement
        return self._covering.get(lineno)

    def chain(self, lineno: int) -> list[ast.AST]:
        """The statement at a line and everything around it, the module last."""
        node: ast.AST | None = self.statement(lineno)
        found: list[ast.AST] = []
        while node is not None:
            found.append(node)
            node = self._parents.get(node)
        return found

    def function_at(self, lineno: int) -> _Function | None:
        """The innermost function whose body covers a line."""
        for node in self.chain(lineno):
            if isinstance(node, _Function) and lineno >= min(statement.lineno for statement in node.body):
                return node
        return None

    def is_guard(self, lineno: int) -> bool:
        """True where a line only decides whether to raise: an `assert`, or an `if` that holds nothing but a `raise`."""
        statement = self.statement(lineno)
        if isinstance(statement, ast.If):
            return not statement.orelse and all(isinstance(each, ast.Raise) for each in statement.body)
        return isinstance(statement, ast.Assert)

    def only_unpacks(self, lineno: int) -> bool:
        """True where a line takes a sequence apart into names or arguments, and neither loops nor hands it on."""
        statement = self.statement(lineno)
        nodes = [] if statement is None else list(own_nodes(statement))
        if isinstance(statement, _Loop) or any(isinstance(node, ast.comprehension) for node in nodes):
            return False
        if any(isinstance(node, ast.Starred) for node in nodes):
            return True
        return isinstance(statement, ast.Assign) and not any(isinstance(node, ast.Call) for node in nodes)

    def uses(self, lineno: int) -> tuple[LineUse, ...]:
        """What the statements that start at a line do; of a compound one only its head counts."""
        found = self._uses.get(lineno)
        if found is None:
            found = tuple(use for statement in self._starting.get(lineno, ()) for use in self._uses_of(statement))
            self._uses[lineno] = found
        return found

    def _uses_of(self, statement: ast.stmt) -> Iterator[LineUse]:
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield With()
        if isinstance(statement, _Loop):
            yield Header(_references(statement.iter), "a loop")
        for target in _targets(statement):
            yield from self._stores(target, statement)
        for node in own_nodes(statement):
            if isinstance(node, ast.comprehension):
                yield Header(_references(node.iter), "a loop")
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                yield Header(_references(node.slice), "an index", node.value)
            elif isinstance(node, ast.NamedExpr):
                yield from self._stores(node.target, statement)
            elif isinstance(node, ast.Call):
                yield from _calls(node)

    def _stores(self, target: ast.expr, statement: ast.stmt) -> Iterator[LineUse]:
        if isinstance(target, ast.Attribute):
            yield Store(target.value, target.attr)
        elif isinstance(target, ast.Subscript):
            yield Store(target.value, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                yield from self._stores(each, statement)
        elif isinstance(target, ast.Starred):
            yield from self._stores(target.value, statement)
        elif isinstance(target, ast.Name):
            function = self.function_at(statement.lineno)
            for node in _own_statements(function) if function is not None else ():
                if isinstance(node, ast.Global | ast.Nonlocal) and target.id in node.names:
                    yield GlobalStore(target.id, isinstance(node, ast.Global))
                    return


def _own_statements(function: _Function) -> Iterator[ast.stmt]:
    """The statements of a function, not those of functions in it."""
    stack = list(function.body)
    while stack:
        statement = stack.pop()
        yield statement
        if not isinstance(statement, _Function | ast.ClassDef):
            stack += [
                inner
                for child in ast.iter_child_nodes(statement)
                for inner in ([child] if isinstance(child, ast.stmt) else ast.iter_child_nodes(child))
                if isinstance(inner, ast.stmt)
            ]


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign | ast.Delete):
        return list(statement.targets)
    if isinstance(statement, ast.AugAssign | ast.For | ast.AsyncFor):
        return [statement.target]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target] if statement.value is not None else []
    if isinstance(statement, ast.With | ast.AsyncWith):
        return [item.optional_vars for item in statement.items if item.optional_vars is not None]
    return []


def _calls(node: ast.Call) -> Iterator[LineUse]:
    function = node.func
    if isinstance(function, ast.Name | ast.Attribute):
        yield CallOf(function, node.args)
    if isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
        yield Store(function.value, None)
    if isinstance(function, ast.Attribute) and function.attr in _SETTERS and node.args:
        yield Store(function.value, node.args[0])
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and len(node.args) > 1:
        yield Store(node.args[0], node.args[1])


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement's own expressions: not those of the statements in it, nor of functions that it defines."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, _Function | ast.ClassDef):
            continue
        stack += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]


def _references(expression: ast.expr) -> tuple[ast.expr, ...]:
    return tuple(
        node
        for node in ast.walk(expression)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load)
    )


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> Source | None:
    try:
        return Source(ast.parse(text))
    except (SyntaxError, ValueError, RecursionError):  # not Python as this interpreter reads it: a notebook's magics
        return None


def source_of(filename: str, module_globals: dict[str, Any] | None = None) -> Source | None:
    """The parsed source of a file; None where there is none.

    Args:
        filename: Of a code object.
        module_globals: Of its module, through which sources in archives are found.
    """
    lines = linecache.getlines(filename, module_globals)
    return _parsed("".join(lines)) if lines else None
