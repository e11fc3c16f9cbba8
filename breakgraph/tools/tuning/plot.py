"""A picture of what more graphs are worth: the best ladder of each number of graphs, the chosen one, and the usual ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from breakgraph.errors import ConfigError
from breakgraph.tools.tuning.costs import CostUnit, LadderFigures
from breakgraph.tools.tuning.tune import Tuning

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "save_plot"]

_LEAST_WIDTH = 64
_BLUE, _RED, _GREY = "#1f5fa8", "#c8342c", "#5b6068"
_CHOSEN = {"marker": "o", "markersize": 12, "zorder": 3}  # larger and behind, so that a rival in its place is seen
_MARKERS = ("s", "^", "D", "v")


def check_plot(path: str | Path) -> Path:
    """Refuses, before anything is computed, a picture that could not be drawn.

    Args:
        path: A file whose name ends in .png.

    Returns:
        The path, with `~` resolved.

    Raises:
        ConfigError: The name ends in something else, or matplotlib is not installed.
    """
    given = Path(path).expanduser()
    if given.suffix.lower() != ".png":
        raise ConfigError(
            f"the picture cannot be written to {str(path)!r}; expected a name that ends in .png.",
            why="It is written as PNG, whatever its name says.",
            fix="Name it like waste.png.",
        )
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "the picture needs matplotlib, which is not installed.",
            why="It comes with an extra of its own.",
            fix='pip install -e ".[plot]", or leave --plot out.',
        ) from None
    return given


def save_plot(tuning: Tuning, *, path: str | Path) -> None:
    """Draws padding waste, or with times the mean step, against the number of graphs, as PNG.

    The line is the best ladder of at most that many graphs, whatever its memory; the points are the tuned ladder and its
    rivals. Costs the time of `Tuning.by_count`, and a second for the drawing.

    Args:
        tuning: What is drawn.
        path: A file whose name ends in .png; one that is there is overwritten.

    Raises:
        ConfigError: matplotlib is not installed, the name ends in something else, or it cannot be written.
    """
    given = check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: no display, no state that the process shares.
    figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), tuning)
    try:
        figure.savefig(given, format="png")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the picture cannot be written to {str(path)!r}: {error}.",
            why="It was asked for.",
            fix="Name a file in a folder that exists and that this user may write to.",
        ) from None


def _draw(axes: Axes, tuning: Tuning) -> None:
    timed = tuning.unit is CostUnit.MICROSECONDS
    best = tuning.by_count(max(_LEAST_WIDTH, tuning.tuned.graphs))

    def height(one: LadderFigures) -> float:
        return one.mean_cost if timed else 100 * one.waste

    style: dict[str, Any] = {"linestyle": "none", "markersize": 7, "zorder": 4, "clip_on": False}
    counts = range(1, len(best) + 1)
    axes.plot(counts, [height(one) for one in best], color=_BLUE, label="best ladder of so many graphs", zorder=2)
    for marker, rival in zip(_MARKERS, tuning.rivals, strict=True):
        label = f"{rival.name}: {rival.graphs} graphs, {_said(rival, timed=timed)}"
        axes.plot([max(rival.graphs, 1)], [height(rival)], marker=marker, color=_GREY, label=label, **style)
    tuned = tuning.tuned
    label = f"tuned: {tuned.graphs} graphs, {_said(tuned, timed=timed)}"
    axes.plot([max(tuned.graphs, 1)], [height(tuned)], color=_RED, label=label, **{**style, **_CHOSEN})
    most = max(len(best), *(rival.graphs for rival in tuning.rivals))
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, most * 1.15)
    ticks = [1 << power for power in range(most.bit_length())]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("number of graphs")
    axes.set_ylabel("mean time of a step (us)" if timed else "padding waste (% of computed rows)")
    shown = [height(one) for one in (tuned, *tuning.rivals)]
    if timed:
        # One graph for all sizes costs so much that the rest would be a flat line: what is far above the points leaves.
        low, high = min(shown), max(shown)
        highest = max(high + 0.1 * (high - low) + 1, min(height(best[0]) * 1.05, 2 * high - low + 1))
        axes.set_ylim(max(low - 0.5 * (high - low) - 1, 0), highest)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(0, max(*shown, height(best[0])) * 1.05 or 1)
    steps, sizes = sum(tuning.costs.counts.values()), len(tuning.costs.counts)
    axes.set_title(f"{steps:,} steps of {sizes:,} sizes up to {tuning.costs.largest:,} rows", fontsize=11)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def _said(figures: LadderFigures, *, timed: bool) -> str:
    return f"{figures.mean_cost:,.0f} us" if timed else f"{figures.waste:.1%}"
