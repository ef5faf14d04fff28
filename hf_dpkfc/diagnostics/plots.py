"""Figures of diagnostics, by matplotlib's object API: no global state, no display.

Sizes are made for a phone's width: text stays legible when a figure is 360 pixels wide.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

# Okabe & Ito's colours, which colour-blind readers can tell apart; lines also differ in style.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

WIDTH = 4.5
HEIGHT = 3.1
ROW_HEIGHT = 0.19

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "hf_dpkfc",
    "svg.fonttype": "path",
}

Points = Sequence[tuple[float, float]]


def style() -> AbstractContextManager[None]:
    """Our style, for as long as a figure is made."""
    return matplotlib.rc_context(_STYLE)


def new_figure(width: float = WIDTH, height: float = HEIGHT, **grid: Any) -> tuple[Figure, Any]:
    """A figure and its axes, in our style."""
    with style():
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**grid)


def to_svg(figure: Figure) -> str:
    """The figure as SVG, the same bytes for the same figure."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def draw_lines(
    axes: Axes,
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
    colors: Sequence[int] | None = None,
    styles: Sequence[int] | None = None,
    legend: bool = True,
) -> None:
    """Draw named series of points; markers are left out where they would merge."""
    for i, (name, points) in enumerate(series.items()):
        color = colors[i] if colors else i
        dashes = styles[i] if styles else i
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLORS[color % len(COLORS)],
            linestyle=STYLES[dashes % len(STYLES)],
            marker=MARKERS[color % len(MARKERS)] if len(points) <= 12 else None,
            label=name,
        )
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    if log_x:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if log_y:
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    if legend and len(series) > 1:
        axes.legend()


def line_figure(series: Mapping[str, Points], **options: Any) -> Figure:
    """A figure of one :func:`draw_lines`."""
    figure, axes = new_figure()
    with style():
        draw_lines(axes, series, **options)
    return figure


def dumbbell_figure(
    rows: Sequence[tuple[str, float, float]],
    *,
    x_label: str,
    title: str,
    names: tuple[str, str] = ("without preconditioner", "with preconditioner"),
) -> Figure:
    """One row per layer, first layer on top: two values joined by a line, on a log scale."""
    figure, axes = new_figure(height=1.2 + ROW_HEIGHT * len(rows))
    with style():
        at = range(len(rows))
        before, after = [r[1] for r in rows], [r[2] for r in rows]
        axes.hlines(at, before, after, color="#999999", linewidth=1)
        axes.plot(before, at, "o", color=COLORS[0], markerfacecolor="white", label=names[0])
        axes.plot(after, at, "s", color=COLORS[1], label=names[1])
        axes.set_yticks(list(at), [r[0] for r in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xscale("log")
        if max(before + after) < 100 * min(before + after):
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=x_label)
        axes.grid(axis="y", visible=False)
        figure.suptitle(title, fontsize=9.5)
        figure.legend(loc="outside lower center", ncols=2)
    return figure
