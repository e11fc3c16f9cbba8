"""What a line of source does, by its syntax tree: where it stores, what it calls, what it loops over."""

from __future__ import annotations

import ast
import functools
import linecache
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType
from typing import Any

from breakgraph.tools.linting.line_uses import Alias, CallOf, GlobalStore, Header, LineUse, Store, With

__all__ = ["Function", "Source", "own_nodes", "references", "source_of"]

_MUTATORS = frozenset(
    {
        *("append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "clear"),
        *("add", "discard", "update", "setdefault", "sort", "reverse", "rotate", "fill", "intersection_update"),
        *("__setitem__", "__delitem__", "__iadd__", "__ior__"),
    }
)
_SETTERS = frozenset({"register_buffer", "register_parameter", "__setattr__"})
Function = ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.AsyncFor
_Nested = ast.Attribute | ast.Subscript


_INNER: dict[str, type[ast.expr]] = {
    "<lambda>": ast.Lambda,
    "<genexpr>": ast.GeneratorExp,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
}
"""Functions that stand inside of an expression, by the name of their code."""
_Comprehension = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp


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
        self._inner: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Lambda | _Comprehension):
                self._inner[type(node)].append(node)

    def statement(self, lineno: int) -> ast.stmt | None:
        """The outermost statement that starts at a line, such as an `if` with all that is in it, else the innermost around it."""
        for statement in self._starting.get(lineno, ()):
            if not isinstance(statement, Function | ast.ClassDef):
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

    def function_at(self, lineno: int) -> Function | None:
        """The innermost function whose body covers a line."""
        return next(iter(self.functions_at(lineno)), None)

    def functions_at(self, lineno: int) -> list[Function]:
        """The functions whose bodies cover a line, the innermost first."""
        nodes = self.chain(lineno)
        return [each for each in nodes if isinstance(each, Function) and lineno >= min(s.lineno for s in each.body)]

    def is_guard(self, lineno: int) -> bool:
        """True where a line only decides whether to raise: an `assert`, or an `if` that ends in a `raise`."""
        statement = self.statement(lineno)
        if isinstance(statement, ast.If):
            return not statement.orelse and isinstance(statement.body[-1], ast.Raise)
        return isinstance(statement, ast.Assert)

    def only_unpacks(self, lineno: int) -> bool:
        """True where a line takes a sequence apart into names or arguments, and neither loops nor hands it on."""
        statement = self.statement(lineno)
        nodes = [] if statement is None else list(own_nodes(statement))
        if isinstance(statement, _Loop) or any(isinstance(node, ast.comprehension) for node in nodes):
            return False
        lists = [node for node in nodes if isinstance(node, ast.List | ast.Tuple | ast.Set)]
        if any(
            isinstance(each, ast.Starred) and isinstance(each.ctx, ast.Load) for node in lists for each in node.elts
        ):
            return False
        if any(isinstance(node, ast.Starred) for node in nodes):
            return True
        return isinstance(statement, ast.Assign) and not any(isinstance(node, ast.Call) for node in nodes)

    def uses(self, lineno: int, code: CodeType) -> tuple[LineUse, ...]:
        """What a line of a function does.

        Args:
            lineno: The line.
            code: Of the function. Of a lambda or a comprehension only its own expressions count, all of them at its first line.

        Returns:
            What the statements that start at the line do; of a compound one only its head.
        """
        if code.co_name in _INNER:
            parts = self._parts_of(code) if lineno == _first_line(code) else []
            return tuple(use for part in parts for use in _uses_in(part))
        statements = self._starting.get(lineno, ())
        # At the line `a = self.a; a[0] += 1` there is no `a` yet.
        names = {s.targets[0].id: s.value for s in statements if isinstance(s, ast.Assign) and _names_part(s)}  # type: ignore[attr-defined]
        uses = [use for statement in statements for use in self._uses_of(statement)]
        if len(statements) < 2 or not names:
            return tuple(uses)
        return tuple(
            Store(names[use.owner.id], use.name)
            if isinstance(use, Store) and isinstance(use.owner, ast.Name) and use.owner.id in names
            else use
            for use in uses
        )

    def _parts_of(self, code: CodeType) -> list[ast.AST]:
        """What a lambda or a comprehension runs: of several on a line the one that spans the code's own positions."""
        spans = [
            (first, start, end) for first, _, start, end in code.co_positions() if first and start is not None and end
        ]
        best: ast.AST | None = None
        for node in self._inner[_INNER[code.co_name]]:
            parts = _own_parts(node)
            held = all(any(_covers(part, line, column) for part in (node, *parts)) for line, column, _ in spans[1:])
            inner = best is None or _extent(node) < _extent(best)
            if held and inner and code.co_firstlineno == node.lineno:  # type: ignore[attr-defined]
                best = node
        return [] if best is None else _own_parts(best)

    def _uses_of(self, statement: ast.stmt) -> Iterator[LineUse]:
        if isinstance(statement, ast.With | ast.AsyncWith):
            yield With()
        if isinstance(statement, _Loop):
            yield Header(references(statement.iter), "a loop")
        for target in _targets(statement):
            yield from self._stores(target, statement)
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            yield Store(ast.Name(statement.target.id, ast.Load()), None)  # `+=` changes a list or an array in place
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        for each in value.elts if isinstance(value, ast.Tuple) else [value]:
            if isinstance(each, _Nested):
                yield Alias(each)
        for node in own_nodes(statement):
            if isinstance(node, ast.NamedExpr):
                yield from self._stores(node.target, statement)
        yield from _uses_in(statement)

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


def _own_statements(function: Function) -> Iterator[ast.stmt]:
    """The statements of a function, not those of functions in it."""
    stack = list(function.body)
    while stack:
        statement = stack.pop()
        yield statement
        if not isinstance(statement, Function | ast.ClassDef):
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


def _uses_in(root: ast.AST) -> Iterator[LineUse]:
    """What the expressions of a statement, or of a part of a lambda, do in the frame that they stand in."""
    for node in own_nodes(root, is_frame=True):
        if isinstance(node, ast.comprehension):
            yield Header(references(node.iter), "a loop")
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            yield Header(references(node.slice), "an index", node.value)
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def _names_part(statement: ast.Assign) -> bool:
    """Whether a statement does no more than to name an attribute or an item."""
    return (
        len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, _Nested)
    )


def _own_parts(node: ast.AST) -> list[ast.AST]:
    """What the code of a lambda or comprehension runs itself; the first thing looped over is its caller's."""
    if isinstance(node, ast.Lambda):
        return [node.body]
    if not isinstance(node, _Comprehension):
        return []
    results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    first, *others = node.generators
    return [*results, *first.ifs, *others]


def _first_line(code: CodeType) -> int:
    """The line that a frame of a lambda or comprehension runs first."""
    lines = [line for _, _, line in code.co_lines() if line]
    return lines[1] if len(lines) > 1 and code.co_name == "<lambda>" else lines[0]


def _covers(node: ast.AST, line: int, column: int) -> bool:
    if isinstance(node, ast.comprehension):
        return _covers(node.iter, line, column) or any(_covers(each, line, column) for each in (node.target, *node.ifs))
    first, last = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
    return bool(first <= (line, column) <= last)


def _extent(node: ast.AST) -> tuple[int, int]:
    return (node.end_lineno - node.lineno, node.end_col_offset - node.col_offset)  # type: ignore[attr-defined]


def _calls(node: ast.Call) -> Iterator[LineUse]:
    function = node.func
    if isinstance(function, ast.Name | ast.Attribute):
        yield CallOf(function, node.args)
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        if isinstance(argument, _Nested):
            yield Alias(argument)
    if isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
        yield Store(function.value, None)
    if isinstance(function, ast.Attribute) and function.attr in _SETTERS and len(node.args) == 3:
        yield Store(node.args[0], node.args[1])  # object.__setattr__(self, name, value)
    elif isinstance(function, ast.Attribute) and function.attr in _SETTERS and node.args:
        yield Store(function.value, node.args[0])
    if isinstance(function, ast.Name) and function.id in ("setattr", "delattr") and len(node.args) > 1:
        yield Store(node.args[0], node.args[1])


def own_nodes(statement: ast.AST, *, is_frame: bool = False) -> Iterator[ast.AST]:
    """The nodes of a statement's own expressions: not those of the statements in it, nor of functions that it defines.

    Args:
        statement: A statement, or a part of one.
        is_frame: Leaves out what lambdas and comprehensions in it run, which have frames of their own.
    """
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, Function | ast.ClassDef):
            continue
        if is_frame and isinstance(node, ast.Lambda):
            stack.append(node.args)
            continue
        if is_frame and isinstance(node, _Comprehension):
            stack.append(node.generators[0])
            continue
        if is_frame and isinstance(node, ast.comprehension) and node is not statement:
            stack.append(node.iter)
            continue
        stack += [
            child
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        ]


def references(expression: ast.expr) -> tuple[ast.expr, ...]:
    """The names, attributes and items that an expression reads.

    Args:
        expression: Any expression.
    """
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
