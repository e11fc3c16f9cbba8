"""Forwards with one planted fault each: what `verify` has to find, in which step, and at which line.

The line of a fault ends with the comment `# FAULT`; tests read its number from this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph import eager_on_graph
from breakgraph.tools import Cause

ROWS, WIDTH = 8, 4


@attrs.frozen(kw_only=True)
class Planted:
    """One fault: arguments of `verify`, and what it must find.

    `step` is the name of the break to blame, or the count of breaks before the segment; `line` the function that holds the
    line with the comment, or nothing where no line can be known.
    """

    forward: Callable[..., Any]
    cause: Cause
    step: str | int
    line: str = ""
    evidence: str = ""
    change: Callable[[int], None] = lambda number: None
    live: Callable[[int], Mapping[str, Any]] | None = None
    valid_rows: Callable[[int], int | None] | None = None
    modules: tuple[nn.Module, ...] = ()


def fault_line(function: str) -> int:
    """The number of the line with the comment in a function of this file."""
    lines = Path(__file__).read_text().splitlines()
    inside = False
    for number, line in enumerate(lines, 1):
        if line.startswith(("def ", "class ")):
            inside = line.split()[1].partition("(")[0].rstrip(":") == function
        if inside and line.endswith("# FAULT"):
            return number
    raise LookupError(function)


@eager_on_graph
def half(x: torch.Tensor) -> torch.Tensor:
    """An ordinary break."""
    return x * 0.5


class Scaled(nn.Module):
    """A number that Python holds is baked into the segment."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = 2.0
        self.device = str(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = half(x + 1)
        return half(y * self.scale) - 1  # FAULT


def frozen_attribute(device: torch.device) -> Planted:
    """A number in an attribute changes between steps."""
    model = Scaled(device)

    def change(number: int) -> None:
        model.scale = 2.0 + number

    return Planted(
        forward=model, cause=Cause.FROZEN_VALUE, step=1, line="Scaled", evidence="Scaled.scale", change=change
    )


def frozen_live_number(device: torch.device) -> Planted:
    """A number of the live data is used in a segment."""

    def forward(x: torch.Tensor, scale: float) -> torch.Tensor:
        y = half(x + 1)
        return half(y) * scale  # FAULT

    return Planted(
        forward=forward,
        cause=Cause.FROZEN_VALUE,
        step=2,
        line="frozen_live_number",
        evidence="live data 'scale'",
        live=lambda number: {"scale": 1.5 + number},
    )


def input_not_copied(device: torch.device) -> Planted:
    """A tensor of the live data is read in a segment."""

    def forward(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = half(x * 3)
        return y + positions[:, None]  # FAULT

    kept = [torch.arange(ROWS, device=device) + number * 10.0 for number in range(5)]
    return Planted(
        forward=forward,
        cause=Cause.STALE_INPUT,
        step=1,
        line="input_not_copied",
        evidence="live data 'positions'",
        live=lambda number: {"positions": kept[number]},
    )


def tensor_of_a_closure(device: torch.device) -> Planted:
    """A tensor that the forward closes over is replaced."""
    box = [torch.ones(ROWS, WIDTH, device=device)]
    kept = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = half(x) * box[0]  # FAULT
        return half(y) + 1

    def change(number: int) -> None:
        kept.append(box[0])
        box[0] = torch.full((ROWS, WIDTH), number + 2.0, device=device)

    return Planted(forward=forward, cause=Cause.STALE_INPUT, step=1, line="tensor_of_a_closure", change=change)


def replaced_weight(device: torch.device) -> Planted:
    """A parameter is replaced after the capture."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Halved(), nn.Linear(WIDTH, WIDTH)).to(device)
    kept = []

    def change(number: int) -> None:
        kept.append(model[2].weight)
        model[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return Planted(
        forward=forward,
        cause=Cause.MOVED_BUFFER,
        step=1,
        evidence="Sequential.2.weight",
        change=change,
        modules=(model,),
    )


class Halved(nn.Module):
    """A break as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the break."""
        return half(x)


def forgotten_break(device: torch.device) -> Planted:
    """A loop over lengths stands in a segment."""

    def attend(q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = torch.zeros_like(q)
        start = 0
        for length in lengths:
            out[start : start + length] = q[start : start + length].mean(0)  # FAULT
            start += length
        return out

    def forward(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return half(attend(half(x), lengths) + 1) * 2

    return Planted(
        forward=forward,
        cause=Cause.MISSING_BREAK,
        step=1,
        line="forgotten_break",
        live=lambda number: {"lengths": [[3, 5], [2, 2, 4], [8], [1, 7], [4, 4]][number]},
    )


def branch_on_a_length(device: torch.device) -> Planted:
    """A branch on a length stands in a segment."""

    def forward(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        y = half(x)
        if len(lengths) > 1:
            y = y.sigmoid()
        return half(y.tanh())  # FAULT

    return Planted(
        forward=forward,
        cause=Cause.MISSING_BREAK,
        step=1,
        line="branch_on_a_length",
        live=lambda number: {"lengths": [8] if number else [3, 5]},
    )


def unwritten_rows(device: torch.device) -> Planted:
    """A break leaves the rows of padding unwritten, and a sum reads them."""

    @eager_on_graph(rows=("q", "out"))
    def attend(q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q * 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)  # FAULT
        attend(x + 1, out)
        return half(out + out.sum(0))

    return Planted(
        forward=forward,
        cause=Cause.UNWRITTEN_ROWS,
        step="attend",
        line="unwritten_rows",
        evidence="argument 'out'",
        valid_rows=lambda number: 5 if number else None,
    )


def memory_that_nobody_wrote(device: torch.device) -> Planted:
    """Half a table is read that was never written."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        table = torch.empty(ROWS, WIDTH, device=x.device)  # FAULT
        table[: ROWS // 2] = 1.0
        return half(x + 1) + table

    return Planted(forward=forward, cause=Cause.UNWRITTEN_ROWS, step=1, line="memory_that_nobody_wrote")


class Counted(nn.Module):
    """A buffer that each forward changes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count and use it."""
        y = half(x)
        self.count.add_(1)  # FAULT
        return half(y * self.count) + 1


def undeclared_state(device: torch.device) -> Planted:
    """The forward counts in a buffer."""
    return Planted(
        forward=Counted(device), cause=Cause.UNDECLARED_STATE, step=1, line="Counted", evidence="Counted.count"
    )


class Stepped(nn.Module):
    """A number that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count in Python and use it."""
        self.steps += 1
        return half(half(x) * self.steps)  # FAULT


def number_that_the_forward_changes(device: torch.device) -> Planted:
    """The forward counts in an attribute."""
    return Planted(forward=Stepped(), cause=Cause.FROZEN_VALUE, step=1, line="Stepped", evidence="Stepped.steps")


class Remembers(nn.Module):
    """A break that reads what Python of the segment left on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: torch.Tensor | None = None

    @eager_on_graph
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """Read what is no argument."""
        assert self.saved is not None
        return x + self.saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leave it on the object."""
        self.saved = half(x) * 3
        return self.mix(x + 1) * 2


def hidden_input(device: torch.device) -> Planted:
    """A break reads what Python of a segment left on the object."""
    return Planted(forward=Remembers(), cause=Cause.HIDDEN_INPUT, step="mix", evidence="return")


def frozen_argument(device: torch.device) -> Planted:
    """A break gets a number that is no live data."""

    @eager_on_graph
    def cut(x: torch.Tensor, count: int) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[:count] = x[:count]
        return out

    def forward(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return cut(x * 2, len(lengths)) + 1

    return Planted(
        forward=forward,
        cause=Cause.FROZEN_VALUE,
        step="cut",
        evidence="argument count",
        live=lambda number: {"lengths": list(range(number + 1))},
    )


class Leaves(nn.Module):
    """A break that leaves its result on the object, where the next segment finds that of the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(1)

    @eager_on_graph
    def compute(self, x: torch.Tensor) -> None:
        """Return nothing."""
        self.out = x.cumsum(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read it from the object."""
        self.compute(x + 1)
        return half(self.out * 2)  # FAULT


def result_left_on_the_object(device: torch.device) -> Planted:
    """A break leaves its result on the object."""
    return Planted(forward=Leaves(), cause=Cause.MOVED_BUFFER, step=1, line="Leaves", evidence="Leaves.out")


def random_on_the_host(device: torch.device) -> Planted:
    """A break draws from the operating system."""

    @eager_on_graph
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + int.from_bytes(os.urandom(3), "little") % 1009

    def forward(x: torch.Tensor) -> torch.Tensor:
        return half(noise(x * 2)) + 1

    return Planted(forward=forward, cause=Cause.NON_DETERMINISTIC, step="noise")


def undeclared_generator(device: torch.device) -> Planted:
    """A break draws from a generator that nobody declared."""
    generator = torch.Generator(device=device)

    @eager_on_graph
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return noise(half(x)) + 1

    return Planted(forward=forward, cause=Cause.NON_DETERMINISTIC, step="noise")


def fault_behind_padded_rows(device: torch.device) -> Planted:
    """The same number as in an attribute, behind a break that is given fewer rows and pads them."""

    @eager_on_graph(rows=("q", "return"))
    def attend(q: torch.Tensor) -> torch.Tensor:
        return q * 2

    scale = [2.0]

    def change(number: int) -> None:
        scale[0] = 2.0 + number

    def forward(x: torch.Tensor) -> torch.Tensor:
        return half(attend(x + 1) * scale[0]) + 1  # FAULT

    return Planted(
        forward=forward,
        cause=Cause.FROZEN_VALUE,
        step=1,
        line="fault_behind_padded_rows",
        change=change,
        valid_rows=lambda number: 5 if number else None,
    )


def fault_beside_the_breaks(device: torch.device) -> Planted:
    """A residual passes beside the breaks: the difference shows in the result alone, and was made in the first segment."""
    scale = [2.0]

    def change(number: int) -> None:
        scale[0] = 2.0 + number

    def forward(x: torch.Tensor) -> torch.Tensor:
        residual = x * scale[0]  # FAULT
        return residual + half(half(torch.ones_like(x)) + 1)

    return Planted(forward=forward, cause=Cause.FROZEN_VALUE, step=0, line="fault_beside_the_breaks", change=change)


def forgotten_live(device: torch.device) -> Planted:
    """A tensor of the step is an argument of a break and not declared live."""

    @eager_on_graph
    def lookup(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + table

    kept = [torch.full((ROWS, WIDTH), float(number), device=device) for number in range(5)]
    return Planted(
        forward=lambda x, table: lookup(half(x) * 2, table) - 1,
        cause=Cause.STALE_INPUT,
        step="lookup",
        evidence="argument table",
        live=lambda number: {"table": kept[number]},
    )


def forgotten_live_list(device: torch.device) -> Planted:
    """A list of another length at each step is an argument of a break and not declared live."""

    @eager_on_graph
    def total(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return x * len(lengths)

    return Planted(
        forward=lambda x, lengths: total(half(x), list(lengths)) - 1,
        cause=Cause.FROZEN_VALUE,
        step="total",
        evidence="argument lengths",
        live=lambda number: {"lengths": list(range(number + 1))},
    )


def state_that_a_break_writes(device: torch.device) -> Planted:
    """A break counts in a buffer that nobody declared."""
    model = CountsInABreak(device)
    return Planted(
        forward=model,
        cause=Cause.UNDECLARED_STATE,
        step="count_up",
        evidence="CountsInABreak.count",
        line="CountsInABreak",
    )


class CountsInABreak(nn.Module):
    """A break that changes a buffer of its module."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1, device=device))

    @eager_on_graph
    def count_up(self, x: torch.Tensor) -> torch.Tensor:
        """Change and use it."""
        self.count.add_(1)  # FAULT
        return x * self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One break between two segments."""
        return self.count_up(x + 1) * 2


def other_break(device: torch.device) -> Planted:
    """Python calls one break at the capture and another one later."""

    @eager_on_graph
    def third(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    return Planted(
        forward=lambda x, lengths: (half if len(lengths) > 1 else third)(x + 1) * 2,
        cause=Cause.MISSING_BREAK,
        step=0,
        evidence="another break",
        live=lambda number: {"lengths": [8] if number else [3, 5]},
    )


def moved_beside_a_frozen_value(device: torch.device) -> Planted:
    """A parameter that no segment reads is replaced as well: the number is to blame."""
    model = Scaled(device)
    model.unused = nn.Parameter(torch.zeros(1, device=device))
    kept = []

    def change(number: int) -> None:
        kept.append(model.unused)
        model.unused = nn.Parameter(torch.ones(1, device=device))
        model.scale = 2.0 + number

    return Planted(
        forward=model, cause=Cause.FROZEN_VALUE, step=1, line="Scaled", evidence="Scaled.scale", change=change
    )


def fault_behind_halves_of_one_buffer(device: torch.device) -> Planted:
    """Two breaks fill one buffer together, which is right; the number behind them is not."""

    @eager_on_graph
    def first(q: torch.Tensor, out: torch.Tensor) -> None:
        out[:4] = q[:4] * 2

    @eager_on_graph
    def second(q: torch.Tensor, out: torch.Tensor) -> None:
        out[4:] = q[4:] * 3

    scale = [2.0]

    def change(number: int) -> None:
        scale[0] = 2.0 + number

    def forward(x: torch.Tensor) -> torch.Tensor:
        q = x + 1
        out = torch.empty_like(q)
        first(q, out)
        second(q, out)
        return half(out * scale[0]) * 2  # FAULT

    return Planted(
        forward=forward, cause=Cause.FROZEN_VALUE, step=2, line="fault_behind_halves_of_one_buffer", change=change
    )


def unjoined_stream(device: torch.device) -> Planted:
    """A break works on a side stream where no hook sees it; the forward waits for it on the host, where it is not captured."""
    side = torch.cuda.Stream(device)

    @eager_on_graph
    def late(x: torch.Tensor, out: torch.Tensor) -> None:
        main = torch.cuda.current_stream()
        torch._C._cuda_setStream(side.stream_id, side.device_index, side.device_type)
        torch.cuda._sleep(20_000_000)
        out.copy_(x * 2)
        torch._C._cuda_setStream(main.stream_id, main.device_index, main.device_type)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = half(x + 1)
        out = torch.zeros_like(y)
        late(y, out)
        if not torch.cuda.is_current_stream_capturing():  # a capture cannot wait, and a replay runs no Python
            side.synchronize()
        return half(out + 1) * 2

    return Planted(forward=forward, cause=Cause.UNJOINED_STREAM, step="late")


GPU_FAULTS = {"unjoined_stream": unjoined_stream}

FAULTS = {
    function.__name__: function
    for function in (
        frozen_attribute,
        frozen_live_number,
        input_not_copied,
        tensor_of_a_closure,
        replaced_weight,
        forgotten_break,
        branch_on_a_length,
        unwritten_rows,
        memory_that_nobody_wrote,
        undeclared_state,
        number_that_the_forward_changes,
        hidden_input,
        frozen_argument,
        result_left_on_the_object,
        random_on_the_host,
        undeclared_generator,
        fault_behind_padded_rows,
        fault_beside_the_breaks,
        forgotten_live,
        forgotten_live_list,
        state_that_a_break_writes,
        other_break,
        moved_beside_a_frozen_value,
        fault_behind_halves_of_one_buffer,
    )
}
