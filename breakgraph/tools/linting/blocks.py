"""Which statements of a function belong together into a break, what they read and set, and whether they can be moved."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from breakgraph.tools.linting.source import Function, Source

__all__ = ["blocks_of", "bound_names", "can_be_moved", "names_of", "parameters_of", "returns_inside", "stored"]

_Loop = ast.For | ast.AsyncFor | ast.While
_Jump = ast.Break | ast.Continue
_Comprehension = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
_Display = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
_Unmovable = (
    ast.Return | ast.Yield | ast.YieldFrom | ast.Await | _Jump | ast.Delete | ast.Global | ast.Nonlocal | ast.Match
)
_CHANGING = frozenset(
    {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "add", "discard", "update", "sort"}
)


@attrs.frozen(eq=False)
class _Seat:
    """Where a statement stands: the list, and the statement that the list is part of."""

    suite: list[ast.stmt]
    owner: ast.stmt


def blocks_of(
    function: Function, linenos: Iterable[int], *, source: Source, derived: Collection[str]
) -> list[list[ast.stmt]]:
    """The statements around some lines, as lists that can leave their function without losing a part of a statement.

    Args:
        function: The function.
        linenos: Its lines that no graph can hold.
        source: Its file.
        derived: Variables that hold what was computed from host data: a block begins where that is computed.
    """
    seats = _seats(function)
    merged: dict[int, tuple[list[ast.stmt], set[int]]] = {}
    for lineno in linenos:
        suite, first, last = _block(function, lineno, source=source, seats=seats, derived=derived)
        merged.setdefault(id(suite), (suite, set()))[1].update(range(first, last + 1))
    blocks = [suite[first : last + 1] for suite, places in merged.values() for first, last in _runs(places)]
    blocks.sort(key=lambda block: (block[0].lineno, -_end(block)))
    kept: list[list[ast.stmt]] = []
    for block in blocks:
        if not kept or _end(block) > _end(kept[-1]):
            kept.append(block)
    return kept


def _runs(places: set[int]) -> Iterator[tuple[int, int]]:
    """Numbers without gaps, as (first, last)."""
    for first in sorted(place for place in places if place - 1 not in places):
        last = first
        while last + 1 in places:
            last += 1
        yield first, last


def _block(
    function: Function, lineno: int, *, source: Source, seats: dict[ast.stmt, _Seat], derived: Collection[str]
) -> tuple[list[ast.stmt], int, int]:
    """The list of statements around a line, and the first and the last of them that belong together."""
    statement = next((node for node in source.chain(lineno) if isinstance(node, ast.stmt) and node in seats), None)
    if statement is None:  # the head of the function, such as a default
        return function.body, 0, len(function.body) - 1
    seat = seats[statement]
    is_case = isinstance(seat.owner, ast.Match) and any(
        case.pattern.lineno <= lineno < case.body[0].lineno or case.body[0].lineno == case.pattern.lineno == lineno
        for case in seat.owner.cases
    )
    if is_case:
        statement = seat.owner
        seat = seats[statement]
    first = last = seat.suite.index(statement)
    made = stored([statement]) if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) else set()
    while True:
        suite = seat.suite
        last = max([last, *(i for i in range(last, len(suite)) if made & set(_loaded([suite[i]])))])
        block = suite[first : last + 1]
        needed = [name for name in names_of(function, block, known=bound_names(function))[0] if name in derived]
        before = [i for i in range(first) if set(needed) & stored([suite[i]])]
        if before:
            first = before[-1]
        elif suite is not function.body and (
            _is_elif(seat) or _has_lost_jump(block) or _is_set(needed, function, block)
        ):
            statement, seat = seat.owner, seats[seat.owner]
            first = last = seat.suite.index(statement)
        else:
            return suite, first, last


def _is_set(names: Sequence[str], function: Function, block: list[ast.stmt]) -> bool:
    """Whether a variable gets its value before a block, in a list of statements further out."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return any(node.id in names and node.lineno < block[0].lineno for node in nodes)


def _seats(function: Function) -> dict[ast.stmt, _Seat]:
    found: dict[ast.stmt, _Seat] = {}
    stack: list[ast.stmt] = [function]
    while stack:
        owner = stack.pop()
        for suite in _suites(owner):
            found.update((statement, _Seat(suite, owner)) for statement in suite)
            stack += suite
    return found


def _suites(statement: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(statement, name, None) for name in ("body", "orelse", "finalbody")]
    parts = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [suite for suite in found if isinstance(suite, list) and suite] + [part.body for part in parts]


def _is_elif(seat: _Seat) -> bool:
    owner, only = seat.owner, seat.suite[0]
    is_else = isinstance(owner, ast.If) and seat.suite is owner.orelse
    return is_else and isinstance(only, ast.If) and only.col_offset == owner.col_offset


def _has_lost_jump(block: Iterable[ast.AST]) -> bool:
    """Whether a `break` or `continue` stands in a block without its loop."""
    for node in block:
        if isinstance(node, _Jump):
            return True
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, _Loop):
            inner = node.orelse
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda) and _has_lost_jump(inner):
            return True
    return False


def returns_inside(block: list[ast.stmt]) -> bool:
    """True where a block returns before its last statement: as a function of its own it would not end its caller."""
    nodes = (node for statement in block for node in ast.walk(statement) if node is not block[-1])
    return any(isinstance(node, ast.Return) for node in nodes)


def can_be_moved(function: Function, block: list[ast.stmt], *, reads: Sequence[str], known: Collection[str]) -> bool:
    """Whether the lines of a block do the same in a function of their own, as they are.

    Args:
        function: The function.
        block: Statements of it.
        reads: The variables that the block reads.
        known: All variables that it may read.
    """
    nodes = [node for statement in block for node in ast.walk(statement)]
    containers = {
        name
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, _Display)
        for name in stored([node])
    }
    outer = {name for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    for node in nodes:
        if isinstance(node, _Unmovable) or (isinstance(node, ast.Name) and node.id in ("super", "__class__", "locals")):
            return False
        if isinstance(node, ast.If) and node.orelse and isinstance(node.orelse[0], ast.If):
            return False
        if _changes_container(node, reads=reads, containers=containers):
            return False
    return not (stored(block) & outer) and set(reads) <= set(known)


def _changes_container(node: ast.AST, *, reads: Sequence[str], containers: set[str]) -> bool:
    """Whether something outside of a block is changed in place: a break that is handed a copy would change that one."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or not isinstance(node.value, ast.Name):
        return False
    name, writes = node.value.id, isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Subscript):
        return writes and name in containers
    return name in reads and (node.attr in _CHANGING or (writes and name != "self"))


def bound_names(*functions: Function) -> set[str]:
    """The variables of functions: arguments, and whatever a statement gives a name to.

    Args:
        *functions: A function, and those around it.
    """
    found: set[str] = set()
    for function in functions:
        found |= parameters_of(function) | stored(function.body)
    return found


def parameters_of(*functions: Function) -> set[str]:
    """The arguments of functions.

    Args:
        *functions: A function, and those around it.
    """
    found: set[str] = set()
    for given in (function.args for function in functions):
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        found |= {argument.arg for argument in arguments if argument is not None}
    return found


def stored(nodes: Iterable[ast.AST]) -> set[str]:
    """The variables that statements give a value to; those of functions and comprehensions in them are others.

    Args:
        nodes: Statements.
    """
    return {name for _, name in _stores(nodes)}


def _stores(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of whatever gives a variable a value."""
    for node in nodes:
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, each.asname or each.name.split(".")[0]) for each in node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None:
            yield node.lineno, node.name
        if not isinstance(node, ast.Lambda | _Comprehension):
            yield from _stores(ast.iter_child_nodes(node))


def names_of(
    function: Function, block: list[ast.stmt], *, known: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a block reads of the variables around it, and what it sets that is read afterwards.

    Args:
        function: The function.
        block: Statements of it.
        known: The variables of the function and of those around it.
    """
    start, end = block[0].lineno, _end(block)
    in_loop = any(
        isinstance(node, _Loop) and node.lineno < start and (node.end_lineno or 0) >= end for node in ast.walk(function)
    )
    own = stored(function.body)
    before = (set(known) - own) | parameters_of(function)
    before |= {name for line, name in _stores(function.body) if line < start or in_loop}
    inside = {id(node) for statement in block for node in ast.walk(statement)}
    after = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and id(node) not in inside and isinstance(node.ctx, ast.Load)
        if node.lineno > end or in_loop
    }
    set_first = _loop_variables(block)
    reads: dict[str, None] = {}
    for statement in block:
        reads.update((name, None) for name in _loaded([statement]) if name in before and name not in set_first)
        if isinstance(statement, ast.Assign | Function | ast.Import | ast.ImportFrom):
            set_first |= stored([statement])
    return tuple(sorted(reads, key=lambda name: name != "self")), tuple(sorted(stored(block) & after))


def _loop_variables(block: list[ast.stmt]) -> set[str]:
    """The variables that a loop in a block sets before anything in the block reads them."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    found: set[str] = set()
    for loop in (node for node in nodes if isinstance(node, ast.For)):
        start = (loop.body[0].lineno, loop.body[0].col_offset)
        read = {node.id for node in loads if (node.lineno, node.col_offset) < start}
        found |= stored([loop.target]) - read
    return found


def _loaded(statements: Iterable[ast.stmt]) -> list[str]:
    """The names that statements read, in order; a name that is changed by `+=` is read."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    changed = {id(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    names.sort(key=lambda node: (node.lineno, node.col_offset))
    return [node.id for node in names if isinstance(node.ctx, ast.Load) or id(node) in changed]


def _end(block: Sequence[ast.stmt]) -> int:
    return block[-1].end_lineno or block[-1].lineno
