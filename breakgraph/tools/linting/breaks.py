"""Which lines of a function belong into a marked one: from one that no graph can hold to the last use of its result."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType

from breakgraph.tools.linting.blocks import (
    blocks_of,
    bound_names,
    can_be_moved,
    names_of,
    parameters_of,
    returns_inside,
    stored,
)
from breakgraph.tools.linting.places import is_user_file
from breakgraph.tools.linting.report import Finding, Kind, Severity, Suggestion
from breakgraph.tools.linting.source import Function, Source, source_of
from breakgraph.tools.linting.watch import HostNames

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
_GENERATOR = "a generator cannot be marked, for its body runs later. Mark the function that runs through it."
_RETURNED = (
    "what is returned depends on the data, and what a break returns must keep its shape, a number its value. "
    "Mark the function that goes on with it, or return tensors of fixed shape."
)
_LAMBDA = "a lambda. Write it as a function with a name, and mark that or what it calls."
_COMPREHENSION = re.compile(r"\.<(genexpr|listcomp|setcomp|dictcomp)>")


def suggestions(
    findings: Iterable[Finding], *, forward: CodeType | None, host_names: Mapping[tuple[str, str], HostNames]
) -> tuple[Suggestion, ...]:
    """What to run as a break, for each function with lines that fail.

    Args:
        findings: Of a run; notes are passed over.
        forward: The code of the forward itself: as one break nothing of it would be in a graph.
        host_names: Variables that hold host data of the step, by path and function.
    """
    found: list[Suggestion] = []
    groups: dict[tuple[str, Function], list[Finding]] = defaultdict(list)
    for finding in findings:
        if finding.severity is not Severity.FAILS or finding.kind not in _BREAKABLE or not is_user_file(finding.path):
            continue
        source = source_of(finding.path)
        function = None if source is None else source.function_at(finding.lineno)
        if finding.function.endswith("<lambda>"):
            found.append(_advice(finding, finding.lineno, finding.lineno, _LAMBDA))
        elif function is not None:
            groups[finding.path, function].append(finding)
    for (path, function), group in groups.items():
        source = source_of(path)
        if source is not None:
            names = _names_at(host_names, group, parameters=parameters_of(*source.functions_at(group[0].lineno)))
            keep = _is_code_of(function, path, forward)
            found += _of_function(function, group, source=source, keep=keep, names=names)
    return tuple(sorted(dict.fromkeys(found), key=lambda each: (each.path, each.first)))


def _names_at(
    host_names: Mapping[tuple[str, str], HostNames], group: Sequence[Finding], *, parameters: set[str]
) -> HostNames:
    """The variables with host data; what was taken out of an input has to be taken out of the next one anew."""
    names = HostNames()
    for place in {(finding.path, _COMPREHENSION.sub("", finding.function)) for finding in group}:
        names.add(host_names.get(place, HostNames()))
    return HostNames(names.given & parameters, names.derived | (names.given - parameters))


def _is_code_of(function: Function, path: str, code: CodeType | None) -> bool:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return code is not None and (code.co_filename, code.co_firstlineno) == (path, first)


def _of_function(
    function: Function, found: Sequence[Finding], *, source: Source, keep: bool, names: HostNames
) -> list[Suggestion]:
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # its docstring
        body = body[1:]
    blocks = blocks_of(function, [finding.lineno for finding in found], source=source, derived=names.derived)
    share = sum(map(_count, blocks)) / max(_count(body), 1)
    if (share >= _MOST and not keep) or any(returns_inside(block) for block in blocks) or _is_installed(found[0]):
        blocks = [body]
    hint = _hint(function, found, source=source)
    if hint is not None:
        return [_advice(found[0], block[0].lineno, block[-1].end_lineno or 0, hint) for block in blocks]
    if blocks == [body] and (not keep or returns_inside(body)):
        return [_whole(function, found[0], body, names=names)]
    known = bound_names(*source.functions_at(found[0].lineno))
    return [
        _step(function, found[0], block, names=names, known=known, number=number if len(blocks) > 1 else None)
        for number, block in enumerate(blocks, start=1)
    ]


def _hint(function: Function, found: Sequence[Finding], *, source: Source) -> str | None:
    """Why marking these lines, or the function, would not do; None where it would."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return _GENERATOR
    results = [finding for finding in found if finding.kind in _RESULTS and "host data" not in finding.what]
    statements = [source.statement(finding.lineno) for finding in results]
    made = stored(each for each in statements if isinstance(each, ast.Assign | ast.AnnAssign))
    lines = {finding.lineno for finding in results}
    returned = [value for node in nodes for value in _returned(node)]
    return _RETURNED if any(_depends(value, made=made, lines=lines) for value in returned) else None


def _depends(value: ast.expr, *, made: set[str], lines: set[int]) -> bool:
    """Whether a value that is returned has a shape or a value that depends on the data."""
    if isinstance(value, ast.Name):
        return value.id in made
    if isinstance(value, ast.Subscript):  # rows by numbers of which nobody knows how many there are
        rows = {each.id for each in ast.walk(value.slice) if isinstance(each, ast.Name)}
        return bool(made & rows) or value.lineno in lines
    called = value.func if isinstance(value, ast.Call) else None
    name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    return value.lineno in lines and name in _READS


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


def _mark(live: tuple[str, ...]) -> str:
    """The decorator. What is not named as live data, a replay hands over as it was at capture."""
    names = "".join(f'"{name}", ' for name in live).rstrip()
    return f"eager_on_graph(live=({names if len(live) == 1 else names.rstrip(',')}))" if live else "eager_on_graph"


def _advice(finding: Finding, first: int, last: int, text: str) -> Suggestion:
    where = _where(finding, first, last)
    return Suggestion(finding.path, finding.function, first, last, text=f"{where}: {text}")


def _whole(function: Function, finding: Finding, body: list[ast.stmt], *, names: HostNames) -> Suggestion:
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    reads, assigns = names_of(function, body, known=bound_names(function))
    live = tuple(name for name in reads if name in names.given)
    mark, where = _mark(live), _where(finding, first, last)
    target = f"{finding.module}.{finding.function}"
    if not _is_installed(finding):
        text = f"{where}: mark the function: @{mark} above def {function.name}"
    elif _can_be_set(finding):
        text = f"{where}: mark the function from outside:\n    {target} = {mark}({target})"
    else:
        text = f"{where}: mark a function that calls this one, which cannot be replaced from outside."
    return Suggestion(finding.path, finding.function, first, last, reads, assigns, live, text=text)


def _step(
    function: Function,
    finding: Finding,
    block: list[ast.stmt],
    *,
    names: HostNames,
    known: set[str],
    number: int | None,
) -> Suggestion:
    first, last = block[0].lineno, block[-1].end_lineno or block[-1].lineno
    reads, assigns = names_of(function, block, known=known)
    live = tuple(name for name in reads if name in names.given)
    derived = tuple(name for name in reads if name in names.derived and name not in live)
    lines = [
        f"{_where(finding, first, last)}: move into a function marked with @eager_on_graph.",
        f"    reads: {', '.join(reads) or 'nothing'}; sets for later: {', '.join(assigns) or 'nothing'}",
    ]
    if live:
        lines.append(f"    host data of the inputs, to be named in live=: {', '.join(live)}")
    if derived:
        lines.append(f"    computed from host data before: {', '.join(derived)}; compute it in the same function")
    example = None
    if not derived and can_be_moved(function, block, reads=reads, known=known):
        name = f"{function.name.strip('_')}_step{'' if number is None else f'_{number}'}"
        example = f"@{_mark(live)} def {name}({', '.join(reads)})"
        lines.append(f"    for example: {example}")
    return Suggestion(
        finding.path, finding.function, first, last, reads, assigns, live, text="\n".join(lines), example=example
    )


def _count(statements: Sequence[ast.stmt]) -> int:
    return sum(isinstance(node, ast.stmt) for statement in statements for node in ast.walk(statement))


def _where(finding: Finding, first: int, last: int) -> str:
    lines = f"line {first}" if first == last else f"lines {first}-{last}"
    return f"{finding.path}:{first}: {lines} of {finding.function}"
