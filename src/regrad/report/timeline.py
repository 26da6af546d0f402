"""A timeline as a picture, as JSON or as a trace for Perfetto: the file's ending says which.

The picture needs matplotlib (the extra ``plot``), which is loaded when it is drawn.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrad.core.errors import UsageError
from regrad.core.text import moment_text, short_operation, short_place
from regrad.core.timeline import Holder, Timeline
from regrad.core.trace import (
    ACTIVATIONS,
    BUFFERS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    TEMPORARIES,
    WEIGHTS,
)
from regrad.core.units import format_bytes
from regrad.report.chrome_trace import chrome_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".svg", ".png")
TRACES = (".trace.json", ".perfetto.json")
ENDINGS = {".svg": "a picture", ".png": "a picture", ".trace.json": "a trace for Perfetto", ".json": "the figures"}

COLOURS = {
    WEIGHTS: "#5b6b8c",
    GRADIENTS: "#8f9fc0",
    OPTIMIZER_STATE: "#b9c4da",
    BUFFERS: "#7d7461",
    INPUTS: "#a89f8c",
    ACTIVATIONS: "#e08a3c",
    TEMPORARIES: "#f3cf95",
}
INK, FAINT, ALARM = "#2b2f36", "#8a8f98", "#c23b3b"
COLUMNS = 1000
"""Of the many slots that fall into one column the highest is drawn, so that no peak is lost."""
NAMED_HOLDERS = 9
LETTERS, SMALL_LETTERS = 29, 36
"""What has room in a line of the panel."""


def check_timeline_file(path: Path) -> None:
    """Say before the work that its result could not be written.

    Raises :class:`UsageError` for an ending that is not known, a folder that is not there, or a picture without
    matplotlib.
    """
    if not path.name.lower().endswith((*PICTURES, ".json")):
        known = ", ".join(f"{ending} ({what})" for ending, what in ENDINGS.items())
        raise UsageError(f"--timeline {path}: the ending says what to write, and this one is not known. Use {known}.")
    if path.is_dir():
        raise UsageError(f"--timeline {path} is a folder. Give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--timeline {path}: there is no folder {path.absolute().parent}. Make it first.")
    if path.name.lower().endswith(PICTURES) and not can_draw():
        raise UsageError(
            f"--timeline {path}: a picture is drawn by matplotlib, which is not installed. "
            "Install it: pip install 'regrad[plot]'; or write a .json or a .trace.json, which do without."
        )


def can_draw() -> bool:
    """Whether matplotlib is there to draw pictures."""
    return find_spec("matplotlib") is not None


def write_timeline(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write ``timeline`` in the format that the ending of ``path`` names; ``title`` stands above a picture.

    Raises as :func:`check_timeline_file`. Cost: about a second for a picture.
    """
    check_timeline_file(path)
    name = path.name.lower()
    if name.endswith(TRACES):
        path.write_text(chrome_trace(timeline) + "\n", encoding="utf-8")
    elif name.endswith(PICTURES):
        _draw(timeline, path, title)
    else:
        path.write_text(timeline.to_json() + "\n", encoding="utf-8")


def _draw(timeline: Timeline, path: Path, title: str) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "regrad",
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.size": 9,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(11.5, 5.6))
        axes = figure.add_axes((0.065, 0.14, 0.585, 0.70))
        _Chart(timeline, axes).draw()
        _heading(timeline, figure, title)
        _legend(timeline, figure)
        _panel(timeline, figure)
        undated = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, facecolor="white", metadata=undated)


class _Chart:
    """The areas, the bands above them and the lines across them."""

    def __init__(self, timeline: Timeline, axes: Axes) -> None:
        self.timeline, self.axes = timeline, axes
        self.timed = timeline.seconds > 0
        self.edges = [slot.start_seconds for slot in timeline.slots] if self.timed else list(range(len(timeline.slots)))
        self.edges = [*self.edges, timeline.seconds if self.timed else len(timeline.slots)]
        self.end = self.edges[-1] or 1
        self.top = 1.09 * max(timeline.peak_bytes, timeline.eager_peak_bytes, timeline.budget_bytes or 0, 1)

    def draw(self) -> None:
        """All of it."""
        self._areas()
        self._eager()
        self._bands()
        self._budget()
        self._peak()
        self._axis()

    def _columns(self) -> list[int]:
        """Slots to draw, one of each column: the highest that begins in it."""
        total, best = self.timeline.total_bytes, dict[int, int]()
        for slot, level in enumerate(total):
            column = min(int(self.edges[slot] / self.end * COLUMNS), COLUMNS - 1)
            if column not in best or level > total[best[column]]:
                best[column] = slot
        return list(best.values())

    def _areas(self) -> None:
        columns = self._columns()
        if not columns:
            return
        x = [self.edges[0], *(self.edges[slot] for slot in columns[1:]), self.end]
        below = [0] * len(x)
        for category in CATEGORIES:
            row = self.timeline.category_bytes[category]
            if not any(row):
                continue
            above = [b + row[slot] for b, slot in zip(below, [*columns, columns[-1]], strict=True)]
            self.axes.fill_between(x, below, above, step="post", color=COLOURS[category], linewidth=0, zorder=2)
            below = above
        self.axes.step(x, below, where="post", color=INK, linewidth=0.7, zorder=3)

    def _eager(self) -> None:
        timeline = self.timeline
        if not timeline.eager_bytes or not any(slot.replayed for slot in timeline.slots):
            return
        best: dict[int, tuple[int, float]] = {}
        for slot, level in zip(timeline.eager_slots, timeline.eager_bytes, strict=True):
            column = int(self.edges[slot] / self.end * COLUMNS)
            best[column] = max(best.get(column, (0, 0.0)), (level, self.edges[slot]))
        x = [self.edges[0], *(at for _, at in list(best.values())[1:]), self.end]
        y = [level for level, _ in best.values()]
        self.axes.step(x, [*y, y[-1]], where="post", color=FAINT, linewidth=1.0, zorder=4)
        level, at = max(zip(timeline.eager_bytes, timeline.eager_slots, strict=True), key=lambda pair: pair[0])
        text = f"without the plan: {format_bytes(level)}"
        side = "left" if self.edges[at] < 0.2 * self.end else "right" if self.edges[at] > 0.8 * self.end else "center"
        self.axes.annotate(
            text, (self.edges[at], level), xytext=(0, 5), textcoords="offset points", ha=side, color=FAINT, zorder=7,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip

    def _bands(self) -> None:
        strip = self.axes.get_xaxis_transform()
        for number, band in enumerate(self.timeline.bands):
            start, stop = self.edges[band.start], self.edges[band.stop]
            if number:
                self.axes.axvline(start, color=FAINT, linewidth=0.8, zorder=5)
            self.axes.fill_between(
                [start, stop], 1.0, 1.06, transform=strip, color=("#eef0f4", "#e2e6ed")[number % 2], linewidth=0, clip_on=False,
            )  # fmt: skip
            if stop - start > 0.08 * self.end:
                self.axes.text((start + stop) / 2, 1.03, band.phase, transform=strip, ha="center", va="center")
            elif stop == self.end:
                self.axes.text(stop + 0.008 * self.end, 1.03, band.phase, transform=strip, ha="left", va="center")
        for start, stop in self._replays():
            self.axes.fill_between([start, stop], 1.0, 1.012, transform=strip, color=ALARM, linewidth=0, clip_on=False)

    def _replays(self) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for number, slot in enumerate(self.timeline.slots):
            if slot.replayed:
                start, stop = self.edges[number], self.edges[number + 1]
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, stop))
        return found

    def _budget(self) -> None:
        budget = self.timeline.budget_bytes
        if budget is not None:
            self.axes.axhline(budget, color=ALARM, linewidth=1.2, linestyle=(0, (5, 3)), zorder=6)
            self.axes.annotate(
                f"budget {format_bytes(budget)}", (self.end, budget), xytext=(-2, 5), textcoords="offset points",
                ha="right", color=ALARM, zorder=7,
            )  # fmt: skip

    def _peak(self) -> None:
        timeline = self.timeline
        if not timeline.slots:
            return
        x = self.edges[timeline.peak_slot]
        self.axes.plot([x, x], [0, timeline.peak_bytes], color=INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=6)
        self.axes.plot([x], [timeline.peak_bytes], marker="o", markersize=6, color=INK, zorder=8)

    def _axis(self) -> None:
        axes = self.axes
        axes.set_xlim(0, self.end)
        axes.set_ylim(0, self.top)
        said = "operations, in the order in which they run"
        if self.timed:
            said, scale = ("seconds", 1) if self.end >= 1 else ("milliseconds", 1000)
            said += ", summed over operations timed one by one"
            axes.xaxis.set_major_formatter(lambda at, _: f"{at * scale:.3g}")
        axes.set_xlabel(said)
        ticks = _ticks(int(self.top))
        axes.set_yticks(ticks, [format_bytes(tick) if tick else "0" for tick in ticks])
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6, zorder=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _ticks(top: int) -> list[int]:
    """Four to nine round amounts from 0 to ``top``: powers of two and halves of them, in binary units."""
    step = 1
    while top // step >= 8:
        step *= 2
    return list(range(0, top + 1, step))


def _heading(timeline: Timeline, figure: Figure, title: str) -> None:
    peak, eager = format_bytes(timeline.peak_bytes), format_bytes(timeline.eager_peak_bytes)
    said = f"peak {peak}"
    if any(slot.replayed for slot in timeline.slots):
        said = f"peak {peak} in place of {eager}"
    if timeline.seconds > timeline.added_seconds > 0:
        said += f", at {timeline.seconds / (timeline.seconds - timeline.added_seconds):.2f}x the time"
    figure.text(0.065, 0.95, title or "One training step", fontsize=13, fontweight="bold", va="center")
    figure.text(0.065, 0.912, said, color=FAINT, va="center")


def _legend(timeline: Timeline, figure: Figure) -> None:
    from matplotlib.patches import Patch

    least = 0.003 * max(timeline.peak_bytes, timeline.eager_peak_bytes)
    shown = [category for category in CATEGORIES if max(timeline.category_bytes[category], default=0) > least]
    handles: list[Any] = [Patch(color=COLOURS[category], label=category) for category in shown]
    if any(slot.replayed for slot in timeline.slots):
        handles.append(Patch(color=ALARM, label="running again"))
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.058, 0.0), ncols=len(handles), frameon=False,
        handlelength=1.0, handleheight=1.0, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip


def _panel(timeline: Timeline, figure: Figure) -> None:
    """Who holds the peak, beside the chart."""
    left, y = 0.72, 0.95
    figure.text(
        left, y, f"At the peak: {format_bytes(timeline.peak_bytes)}", fontsize=11, fontweight="bold", va="center"
    )
    for line in _wrap(moment_text(timeline.peak_moment), 46)[:2]:
        y -= 0.036
        figure.text(left, y, line, color=FAINT, va="center")
    y -= 0.062
    shown = timeline.holders[:NAMED_HOLDERS]
    for holder in shown:
        figure.patches.append(_square(figure, left, y, COLOURS[holder.category]))
        figure.text(left + 0.074, y, format_bytes(holder.bytes), ha="right", va="center", fontweight="bold")
        first, second = holder_lines(holder)
        figure.text(left + 0.082, y, first, va="center")
        figure.text(left + 0.082, y - 0.031, second, color=FAINT, fontsize=7.5, va="center")
        y -= 0.078
    rest = timeline.peak_bytes - sum(holder.bytes for holder in shown)
    if rest:
        figure.text(left + 0.074, y, format_bytes(rest), ha="right", va="center", fontweight="bold")
        figure.text(left + 0.082, y, f"in {len(timeline.holders) - len(shown)} other groups", va="center")


def _square(figure: Figure, x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    across = 0.011
    up = across * width / height
    return Rectangle((x, y - up / 2), across, up, transform=figure.transFigure, color=colour, linewidth=0)


def holder_lines(holder: Holder) -> tuple[str, str]:
    """Two short lines about a holder: how many of what, and where it was made."""
    what = short_operation(holder.operation) or "tensor"
    kind = "parameter " if what.startswith("parameter ") else "buffer " if what.startswith("buffer ") else ""
    name = what.removeprefix(kind) if kind else holder.module
    first = f"{holder.count} × {kind.strip() or what}" if holder.count > 1 else kind.strip() or what
    place = " · ".join(part for part in (short_place(holder.where), "again" if holder.replayed else "") if part)
    if len(name) + len(place) + 3 > SMALL_LETTERS:
        name = name if len(name) <= (room := max(12, SMALL_LETTERS - len(place) - 3)) else f"…{name[1 - room :]}"
        place = _cut(place, SMALL_LETTERS - len(name) - 3)
    return _cut(first, LETTERS), " · ".join(part for part in (name, place) if part) or holder.category


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _wrap(text: str, most: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) + 1 > most:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
