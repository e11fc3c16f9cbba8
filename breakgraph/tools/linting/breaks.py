"""Which lines of a function to move into a marked one: from one that no graph can hold to the last use of its result."""

from __future__ import annotations

import ast
import builtins
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType

from breakgraph.tools.linting.places import is_user_file
from breakgraph.tools.linting.report import Finding, Kind, Severity, Suggestion
from breakgraph.tools.linting.source import Source, source_of

__all__ = ["suggestions"]

_MOST = 0.6
"""Share of a function's statements from which on the function itself is to be marked."""
_BREAKABLE = frozenset(
    {
        *(Kind.HOST_SYNC, Kind.DATA_DEPENDENT_SHAPE, Kind.HOST_BRANCH, Kind.HOST_DATA),
        *(Kind.HOST_CODE, Kind.RANDOM),
    }
)
"""What runs right in a break. State and kept tensors have mends of their own."""
_RESULTS = frozenset({Kind.HOST_SYNC, Kind.DATA_DEPENDENT_SHAPE})
"""What leaves a result that depends on the data."""
_READS = frozenset(
    {
        *("item", "tolist", "numpy", "int", "float", "bool"),
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "repeat_interleave"),
    }
)
"""Calls whose own result that is."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def suggestions(
    findings: Iterable[Finding], *, forward: CodeType | None, host_names: Mapping[tuple[str, str], set[str]]
) -> tuple[Suggestion, ...]:
    """What to run as a break, for each function with lines that fail.

    Args:
        findings: Of a run; notes are passed over.
        forward: The code of the forward itself: as one break nothing of it would be in a graph.
        host_names: Variables that hold host data of the step, by path and function: a replay must be handed them anew.
    """
    groups: dict[tuple[str, ast.AST], list[Finding]] = defaultdict(list)
    sources: dict[str, Source] = {}
    for finding in findings:
        if finding.severity is not Severity.FAILS or finding.kind not in _BREAKABLE:
            continue
        source = source_of(finding.path) if is_user_file(finding.path) else None
        function: ast.AST | None = None if source is None else source.function_at(finding.lineno)
        if source is not None and function is not None:
            sources[finding.path] = source
            groups[finding.path, function].append(finding)
    found: list[Suggestion] = []
    for (path, function), group in groups.items():
        if isinstance(function, _Function):
            live = host_names.get((path, group[0].function), set())
            keep = _is_code_of(function, path, forward)
            found += _of_function(function, group, source=sources[path], keep=keep, live=live)
    return tuple(found)


def _is_code_of(function: _Function, path: str, code: CodeType | None) -> bool:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return code is not None and (code.co_filename, code.co_firstlineno) == (path, first)


def _of_function(
    function: _Function, found: Sequence[Finding], *, source: Source, keep: bool, live: set[str]
) -> list[Suggestion]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # its docstring
        body = body[1:]
    blocks = _merged([_block(function, finding.lineno, source=source) for finding in found])
    share = sum(map(_count, blocks)) / max(_count(body), 1)
    if (share >= _MOST and not keep) or any(_returns_inside(block) for block in blocks) or _is_installed(found[0]):
        blocks = [body]
    hint = _hint(function, found, source=source)
    made = []
    for block in blocks:
        first, last = block[0].lineno, block[-1].end_lineno or block[-1].lineno
        reads, assigns = _names(function, block)
        where = f"{found[0].path}:{first}: {_lines(first, last)} of {found[0].function}"
        mark = _mark(tuple(name for name in reads if name in live))
        if hint is not None:
            text = f"{where}: {hint}"
        elif block is body:
            text = _whole(found[0], where=where, mark=mark)
        else:
            ends = isinstance(block[-1], ast.Return)
            text = _step(function, where=where, mark=mark, reads=reads, assigns=assigns, ends=ends)
        made.append(Suggestion(found[0].path, found[0].function, first, last, reads, assigns, text))
    return made


def _returns_inside(block: list[ast.stmt]) -> bool:
    """True where a block returns before its last statement: as a function of its own it would not end its caller."""
    nodes = (node for statement in block for node in ast.walk(statement) if node is not block[-1])
    return any(isinstance(node, ast.Return) for node in nodes)


def _hint(function: _Function, found: Sequence[Finding], *, source: Source) -> str | None:
    """Why marking these lines, or the function, would not do; None where it would."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return "a generator cannot be marked, for its body runs later. Mark the function that runs through it."
    made: set[str] = set()
    for finding in found:
        statement = source.statement(finding.lineno)
        if finding.kind in _RESULTS and isinstance(statement, ast.Assign | ast.AnnAssign):
            made |= _stored(statement)
    lines = {finding.lineno for finding in found if finding.kind in _RESULTS}
    for node in nodes:
        for value in _returned(node):
            named = isinstance(value, ast.Name) and value.id in made
            if isinstance(value, ast.Subscript):  # rows by numbers of which nobody knows how many there are
                named = bool(made & {each.id for each in ast.walk(value.slice) if isinstance(each, ast.Name)})
            called = value.func if isinstance(value, ast.Call) else None
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            read = value.lineno in lines and (isinstance(value, ast.Subscript) or name in _READS)
            if named or read:
                return (
                    "what is returned depends on the data, and what a break returns must keep its shape, a number its value. "
                    "Mark the function that goes on with it, or return tensors of fixed shape."
                )
    return None


def _returned(node: ast.AST) -> list[ast.expr]:
    """What a return statement returns, one by one."""
    if not isinstance(node, ast.Return) or node.value is None:
        return []
    return list(node.value.elts) if isinstance(node.value, ast.Tuple | ast.List) else [node.value]


def _is_installed(finding: Finding) -> bool:
    return "site-packages" in finding.path or "dist-packages" in finding.path


def _can_be_set(finding: Finding) -> bool:
    """Whether a function can be replaced from outside, by its name in its module."""
    found: object = sys.modules.get(finding.module)
    for name in finding.function.split("."):
        found = getattr(found, name, None)
    return found is not None


def _stored(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _merged(blocks: list[list[ast.stmt]]) -> list[list[ast.stmt]]:
    """Blocks in order: one inside another is dropped, and what overlaps or touches in one list becomes one."""
    merged: list[list[ast.stmt]] = []
    for block in sorted(blocks, key=lambda b: (b[0].lineno, -(b[-1].end_lineno or 0))):
        previous = merged[-1] if merged else []
        if previous and (block[-1].end_lineno or 0) <= (previous[-1].end_lineno or 0):
            continue
        if previous and (
            block[0] in previous
            or (
                block[0].lineno <= (previous[-1].end_lineno or 0) + 1 and block[0].col_offset == previous[-1].col_offset
            )
        ):
            previous += [statement for statement in block if statement not in previous]
        else:
            merged.append(list(block))
    return merged


def _mark(live: tuple[str, ...]) -> str:
    """The decorator. What is not named as live data, a replay hands over as it was at capture."""
    names = "".join(f'"{name}", ' for name in live).rstrip()
    return f"eager_on_graph(live=({names if len(live) == 1 else names.rstrip(',')}))" if live else "eager_on_graph"


def _whole(finding: Finding, *, where: str, mark: str) -> str:
    if not _is_installed(finding):
        return f"{where}: mark the function:\n    @{mark}\n    def {finding.function.rsplit('.', 1)[-1]}(...):"
    target = f"{finding.module}.{finding.function}"
    if _can_be_set(finding):
        return f"{where}: mark the function from outside:\n    {target} = {mark}({target})"
    return f"{where}: mark a function that calls this one, which cannot be replaced from outside."


def _step(
    function: _Function, *, where: str, mark: str, reads: tuple[str, ...], assigns: tuple[str, ...], ends: bool
) -> str:
    name = f"{function.name.strip('_')}_step"
    given = "self." if reads[:1] == ("self",) else ""
    result = "return " if ends else f"{', '.join(assigns)} = " if assigns else ""
    lines = [
        f"{where}: move to a function of its own:",
        f"    @{mark}",
        f"    def {name}({', '.join(reads)}):",
        "        ...  # these lines",
        *([f"        return {', '.join(assigns)}"] if assigns else []),
        f"  called as {result}{given}{name}({', '.join(read for read in reads if read != 'self')})",
    ]
    return "\n".join(lines)


def _block(function: _Function, lineno: int, *, source: Source) -> list[ast.stmt]:
    """The statements from a line to the last use, in the same list, of what it makes."""
    statement = source.chain(lineno)[0]
    body = _list_of(function, statement)
    if statement not in body:  # the head of the function, such as a default
        return body
    first = last = body.index(statement)
    made: set[str] = set()
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        made = _stored(statement)
    for index in range(last + 1, len(body)):
        if made & set(_loaded_in_order(body[index])):
            last = index
    return body[first : last + 1]


def _list_of(function: _Function, statement: ast.AST) -> list[ast.stmt]:
    """The list that a statement of a function stands in."""
    stack: list[ast.stmt] = [function]
    while stack:
        for body in _bodies(stack.pop()):
            if statement in body:
                return body
            stack += body
    return function.body


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    names = ("body", "orelse", "finalbody")
    found = [getattr(statement, name) for name in names if isinstance(getattr(statement, name, None), list)]
    parts = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
    return [body for body in found if body] + [part.body for part in parts]


def _names(function: _Function, block: list[ast.stmt]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a block reads of the variables around it, and what it sets that is read afterwards."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    before = {argument.arg for argument in parameters if argument is not None}
    start, end = block[0].lineno, block[-1].end_lineno or block[-1].lineno
    inside = {id(node) for statement in block for node in ast.walk(statement)}
    in_loop = any(
        isinstance(node, ast.For | ast.While) and node.lineno < start and (node.end_lineno or 0) >= end
        for node in ast.walk(function)
    )
    after: set[str] = set()
    for node in ast.walk(function):
        if id(node) in inside or not isinstance(node, ast.Name):
            continue
        if isinstance(node.ctx, ast.Store) and (node.lineno < start or in_loop):
            before.add(node.id)
        elif isinstance(node.ctx, ast.Load) and (node.lineno > end or in_loop):
            after.add(node.id)
    stored = {
        node.id for s in block for node in ast.walk(s) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    set_first: set[str] = set()
    reads: dict[str, None] = {}
    for statement in block:
        for name in _loaded_in_order(statement):
            if name in before and name not in set_first and not hasattr(builtins, name):
                reads[name] = None
        if isinstance(statement, ast.Assign):
            set_first |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    ordered = sorted(reads, key=lambda name: name != "self")
    return tuple(ordered), tuple(sorted(stored & after))


def _loaded_in_order(statement: ast.stmt) -> list[str]:
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    augmented = {
        node.target.id
        for node in ast.walk(statement)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }
    nodes.sort(key=lambda node: (node.lineno, node.col_offset))
    return [node.id for node in nodes if isinstance(node.ctx, ast.Load) or node.id in augmented]


def _count(statements: Sequence[ast.stmt]) -> int:
    return sum(isinstance(node, ast.stmt) for statement in statements for node in ast.walk(statement))


def _lines(first: int, last: int) -> str:
    return f"line {first}" if first == last else f"lines {first}-{last}"
