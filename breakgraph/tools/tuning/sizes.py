"""Reads what `tune` needs from files: how often each size was seen, and what was measured of some sizes.

A number that is wrong or missing gives a ladder for steps that nobody has, and the ladder does not show it. So every line
is held to its form, and what is refused is refused with the name of the file and the number of the line.
"""

from __future__ import annotations

import csv
import enum
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from breakgraph.errors import ConfigError

__all__ = ["MOST_COUNT", "MOST_ROWS", "StepPhase", "read_measured", "read_sizes"]

MOST_ROWS = 1 << 20
"""Largest size that is taken: no step has a million rows, but a time stamp in the wrong column has."""
MOST_COUNT = 10**15
"""Largest count that is taken: at a step a microsecond, thirty years."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_WHY = "The ladder is the best one for exactly these numbers; a wrong one would make it that of other steps."


class StepPhase(enum.StrEnum):
    """Which steps of an engine: the two have runners and ladders of their own."""

    PREFILL = "prefill"
    DECODE = "decode"


@attrs.frozen
class _Line:
    """One line of a file.

    Attributes:
        where: File and line, for messages.
        values: By column or key.
    """

    where: str
    values: Mapping[str, Any]

    def error(self, what: str, *, fix: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what}", why=_WHY, fix=fix)

    def integer(self, name: str, *, least: int, most: int) -> int:
        value = self.values[name]
        text = value.strip() if isinstance(value, str) else value
        number = int(text) if isinstance(text, str) and _INTEGER.fullmatch(text) else text
        if isinstance(number, bool) or not isinstance(number, int):
            raise self.error(
                f"{name} is {_shown(value)}; expected an integer.",
                fix=f"Write {name} in decimal digits, without point or quotes.",
            )
        if not least <= number <= most:
            raise self.error(
                f"{name} is {_shown(number)}; expected {least:,} to {most:,}.",
                fix=f"Correct {name}, or remove the line.",
            )
        return number


def read_sizes(path: str | Path, *, phase: StepPhase | str | None = None) -> dict[int, int]:
    """Reads how often each size was seen.

    A `.csv` file has a header with the columns `size` and `count`, in any order. A `.jsonl` file has one object a line, with
    `size` and perhaps `count`; without it the line is one step, so that a trace of steps can be read as it is. Both may have
    `phase`, as what a server records has. Other columns and keys are ignored, blank lines too. A size that comes again is
    added up; a size that was seen 0 times is left out.

    Args:
        path: The file, in UTF-8.
        phase: Take the lines of this phase only. It may be left out where all lines are of one.

    Returns:
        Size to count, ascending.

    Raises:
        ConfigError: The file cannot be read, has another extension, a line that is not as said or no count above 0, lines of two
            phases with `phase` left out, or lines without one where it was given.
    """
    wanted = None if phase is None else _phase(phase)
    given = Path(path).expanduser()
    lines = _opened(given)
    counts: Counter[int] = Counter()
    seen: dict[str, str] = {}
    for line in lines:
        found = _phase_of(line, wanted=wanted)
        seen.setdefault(found, line.where)
        if len(seen) > 1 and wanted is None:
            (first, there), (second, here) = seen.items()
            raise ConfigError(
                f"{given} has {first or 'no phase'} in {there.rpartition(', ')[2]} and {second or 'no phase'} in"
                f" {here.rpartition(', ')[2]}; expected one phase.",
                why="Prefills are counted in tokens and decodes in requests, and each has a ladder of its own.",
                fix="Choose one with --phase prefill or --phase decode (phase= in Python).",
            )
        size = line.integer("size", least=1, most=MOST_ROWS)
        count = 1 if "count" not in line.values else line.integer("count", least=0, most=MOST_COUNT)
        if count and (wanted is None or found == wanted):
            counts[size] += count
    if not counts:
        others = f" of phase {wanted.value}" if wanted is not None and seen else ""
        raise ConfigError(
            f"{given} counts no step{others}.",
            why="The best ladder for no step has no bucket, and the first step would run eagerly.",
            fix="Record sizes while requests run: breakgraph serve --record-sizes sizes.jsonl.",
        )
    return dict(sorted(counts.items()))


def read_measured(path: str | Path, *, column: str) -> dict[int, float]:
    """Reads what was measured of some sizes: a `.csv` with the column `size` and one other.

    Args:
        path: The file, in UTF-8. Other columns are ignored, blank lines too.
        column: Name of the other one: "microseconds" of a step, or "bytes" of a graph.

    Returns:
        Size to number, ascending.

    Raises:
        ConfigError: The file cannot be read or has no line, a number is negative or none, or a size comes twice.
    """
    given = Path(path).expanduser()
    if given.suffix.lower() != ".csv":
        raise _extension(given, "a .csv file")
    measured: dict[int, float] = {}
    for line in _csv_lines(given, needed=("size", column)):
        size = line.integer("size", least=1, most=MOST_ROWS)
        if size in measured:
            raise line.error(f"size {size} came before.", fix="Leave one line for each size, for example its median.")
        text = line.values[column]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= MOST_COUNT or "_" in text:
            raise line.error(
                f"{column} is {_shown(text)}; expected a number from 0 to {MOST_COUNT:.0e}.",
                fix="Correct it, or remove the line: what lies between two sizes is interpolated.",
            )
        measured[size] = value
    if not measured:
        raise ConfigError(f"{given} has no line below its header.", why=_WHY, fix=f"Write lines of size,{column}.")
    return dict(sorted(measured.items()))


def _phase(phase: StepPhase | str) -> StepPhase:
    try:
        return StepPhase(phase)
    except ValueError:
        raise ConfigError(
            f"phase is {phase!r}; expected 'prefill', 'decode' or None.",
            why="Each has a runner and a ladder of its own.",
            fix="Give phase='prefill' or phase='decode', or leave it out.",
        ) from None


def _phase_of(line: _Line, *, wanted: StepPhase | None) -> str:
    found = line.values.get("phase")
    text = found.strip() if isinstance(found, str) else found
    if text in (None, ""):
        if wanted is not None:
            raise line.error(
                f"it has no phase, but {wanted.value} steps were asked for.",
                fix="Leave the phase out, or write it in every line.",
            )
        return ""
    if text not in list(StepPhase):
        raise line.error(
            f"phase is {_shown(found)}; expected prefill or decode.", fix="Correct it, or remove the line."
        )
    return str(text)


def _opened(path: Path) -> Iterator[_Line]:
    kind = path.suffix.lower()
    if kind == ".csv":
        return _csv_lines(path, needed=("size", "count"))
    if kind == ".jsonl":
        return _jsonl_lines(path)
    raise _extension(path, "a .csv or .jsonl file")


def _extension(path: Path, expected: str) -> ConfigError:
    packed = path.suffix.lower() in (".gz", ".zst", ".bz2", ".xz", ".zip")
    return ConfigError(
        f"{str(path)!r} ends in {path.suffix!r}; expected {expected}.",
        why="The extension says how the file is read; guessing could read it wrongly.",
        fix="Unpack it first." if packed else "Rename it where it is one, or convert it.",
    )


def _text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends; a byte-order mark is no part of the first."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text in UTF-8: {error.reason} at byte {error.start} of a part of it.",
            why="Sizes and counts are read from lines of text.",
            fix="Give a .csv or .jsonl file, unpacked, saved as UTF-8.",
        ) from None
    except (OSError, ValueError) as error:  # of a null byte in its name
        raise ConfigError(
            f"{path} cannot be read: {error}.",
            why="It has the numbers that the ladder is made for.",
            fix="Name a file that exists and that this user may read.",
        ) from None


def _csv_lines(path: Path, *, needed: tuple[str, str]) -> Iterator[_Line]:
    reader = csv.reader(_text_lines(path), strict=True)
    header: list[str] | None = None
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ConfigError(
                f"{path}, line {reader.line_num}: {error}.", why=_WHY, fix="Write plain numbers between commas."
            ) from None
        if row is None:
            break
        line = _Line(f"{path}, line {reader.line_num}", {})
        if not any(cell.strip() for cell in row):
            continue
        if header is None:
            header = [cell.strip().lower() for cell in row]
            _check_header(line, header, needed=needed)
        elif len(row) != len(header):
            raise line.error(
                f"it has {len(row)} cells; expected {len(header)}, as the header has.", fix="Correct or remove it."
            )
        else:
            yield attrs.evolve(line, values=dict(zip(header, row, strict=True)))
    if header is None:
        _check_header(_Line(f"{path}, line 1", {}), [], needed=needed)


def _check_header(line: _Line, header: list[str], *, needed: tuple[str, str]) -> None:
    for name in needed:
        if header.count(name) != 1:
            fault = f"{header.count(name)} columns {name}" if name in header else f"no column {name}"
            raise line.error(
                f"the header {_shown(','.join(header))} has {fault}; expected one.",
                fix=f"Begin the file with {','.join(needed)}.",
            )
    if header.count("phase") > 1:
        raise line.error("the header has two columns phase; expected at most one.", fix="Remove one of them.")


def _jsonl_lines(path: Path) -> Iterator[_Line]:
    for number, text in enumerate(_text_lines(path), start=1):
        if not text.strip():
            continue
        line = _Line(f"{path}, line {number}", {})
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise line.error(
                f"it is no JSON: {error}.", fix='Write one object a line: {"size": 17, "count": 3}.'
            ) from None
        if not isinstance(found, dict) or "size" not in found:
            raise line.error(
                f"it is {_shown(text.strip())}; expected an object with a size.",
                fix='Write one object a line: {"size": 17, "count": 3}.',
            )
        for name in ("size", "count"):
            if isinstance(found.get(name), str):
                raise line.error(f"{name} is {_shown(found[name])}; expected an integer.", fix="Remove the quotes.")
        yield attrs.evolve(line, values=found)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
