"""A time-memory curve as shapes, and the shapes as SVG text or, by matplotlib, as a PNG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from regrad.core.frontier_curve import BASELINE, OURS, Frontier, FrontierPoint, outline
from regrad.core.units import format_bytes

WIDTH, HEIGHT = 1100, 560
LEFT, RIGHT, TOP, BOTTOM = 70, 790, 70, 490
INK, FAINT, ALARM = "#2b2f36", "#8a8f98", "#c23b3b"
COLOURS = ("#5b6b8c", "#3f8f7a", "#8f5ba8", "#b08a2e", "#4c9fc4", "#7d7461", "#a8556e", "#6a9a3a", "#8f9fc0", "#c47f4c")
ROOM = 1.8
"""How far above what ours adds at the most others are drawn; a curve that leaves the picture is cut off."""


@dataclass(frozen=True, slots=True)
class Line:
    """A broken line through pixels, y downwards."""

    pixels: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str


@dataclass(frozen=True, slots=True)
class Words:
    """Text; ``anchor`` is "start", "middle" or "end" of it, ``y`` its base line."""

    x: float
    y: float
    text: str
    colour: str = INK
    size: float = 12
    anchor: str = "start"
    bold: bool = False


Shape = Line | Dot | Words


class Picture:
    """Bytes to the right, step time upwards; each method a staircase, since a plan serves every larger budget too."""

    def __init__(self, frontier: Frontier, title: str) -> None:
        self.frontier, self.title = frontier, title
        self.low = min((point.peak_bytes for point in frontier.points), default=0)
        self.high = max(frontier.eager_peak_bytes, self.low + 1)
        margin = (self.high - self.low) // 20
        self.low, self.high = max(self.low - margin, 0), self.high + margin
        ours = max((point.step_ratio for point in frontier.of(OURS)), default=0.0)
        every = max((point.step_ratio for point in frontier.points), default=1.0)
        self.most = max(1.01, min(every, 1 + ROOM * (ours - 1)) if ours > 1 else every)
        others = [method for method in frontier.methods if method != OURS]
        self.colour = {method: COLOURS[k % len(COLOURS)] for k, method in enumerate(others)} | {OURS: ALARM}

    def shapes(self) -> list[Shape]:
        """All of it, in the order in which it is painted."""
        shapes = [*self._axes(), *self._marks()]
        for method in (*(m for m in self.frontier.methods if m != OURS), OURS):
            shapes += self._curve(method)
        return [*shapes, *self._legend()]

    def _x(self, peak_bytes: float) -> float:
        return LEFT + (RIGHT - LEFT) * (peak_bytes - self.low) / (self.high - self.low)

    def _y(self, step_ratio: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (step_ratio - 1) / (self.most - 1) * 0.96

    def _axes(self) -> list[Shape]:
        shapes: list[Shape] = [
            Words(LEFT, 30, self.title or "One training step", size=17, bold=True),
            Words(LEFT, 50, "predicted step time over the eager step's, by peak memory", FAINT),
            Line(((LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)), FAINT),
            Words((LEFT + RIGHT) / 2, BOTTOM + 42, "peak of the step", anchor="middle"),
        ]
        step = next(size for size in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 1e9) if (self.most - 1) / size <= 8)
        for k in range(9):
            if 1 + k * step <= self.most:
                y = self._y(1 + k * step)
                shapes.append(Line(((LEFT, y), (RIGHT, y)), "#e2e6ed"))
                shapes.append(Words(LEFT - 8, y + 4, f"{1 + k * step:.2f}×", anchor="end"))
        for k in range(6):
            at = self.low + (self.high - self.low) * k / 5
            shapes.append(Words(self._x(at), BOTTOM + 20, format_bytes(int(at)), anchor="middle"))
        return shapes

    def _marks(self) -> list[Shape]:
        frontier = self.frontier
        shapes: list[Shape] = []
        for at, text, anchor in (
            (frontier.least_bytes, "least feasible", "start"),
            (frontier.eager_peak_bytes, "eager peak", "end"),
        ):
            x = self._x(at)
            shapes.append(Line(((x, TOP), (x, BOTTOM)), FAINT, dashed=True))
            shapes.append(Words(x + (4 if anchor == "start" else -4), TOP + 10, text, FAINT, 11, anchor))
        return shapes

    def _curve(self, method: str) -> list[Shape]:
        points = outline(self.frontier.of(method))
        ours, colour = method == OURS, self.colour[method]
        drawn = [point for point in points if point.step_ratio <= self.most]
        shapes: list[Shape] = []
        pixels: list[tuple[float, float]] = []
        for point in drawn:
            x, y = self._x(point.peak_bytes), self._y(point.step_ratio)
            pixels += [(x, pixels[-1][1])] if pixels else []
            pixels.append((x, y))
            radius = 4.5 if ours else 3.5 if point.kind == BASELINE else 2.5
            shapes.append(Dot(x, y, radius, colour))
        if pixels:
            pixels.append((RIGHT, pixels[-1][1]))
            shapes.insert(0, Line(tuple(pixels), colour, 2.6 if ours else 1.2))
        return shapes

    def _legend(self) -> list[Shape]:
        shapes: list[Shape] = []
        x, y = RIGHT + 40, TOP
        for method in self.frontier.methods:
            points = self.frontier.of(method)
            shapes.append(Line(((x, y), (x + 26, y)), self.colour[method], 2.6 if method == OURS else 1.2))
            hidden = [point for point in outline(points) if point.step_ratio > self.most]
            text = f"{method} ({_beyond(hidden)})" if hidden else method
            shapes.append(Words(x + 34, y + 4, text, bold=method == OURS))
            y += 22
        for one in self.frontier.left_out[:8]:
            shapes.append(Words(x, y + 14, f"not on it: {one.method}", FAINT, 11))
            y += 16
        return shapes


def _beyond(hidden: list[FrontierPoint]) -> str:
    highest = max(point.step_ratio for point in hidden)
    return f"{len(hidden)} higher, up to {highest:.1f}×"


def svg(shapes: list[Shape]) -> str:
    """The shapes as SVG. The same shapes give the same text."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        "font-family=\"'DejaVu Sans', sans-serif\">",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Line):
            through = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.pixels)
            dash = ' stroke-dasharray="5 3"' if shape.dashed else ""
            lines.append(
                f'<polyline points="{through}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width}"{dash}/>'
            )
        elif isinstance(shape, Dot):
            lines.append(f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius}" fill="{shape.colour}"/>')
        else:
            bold = ' font-weight="bold"' if shape.bold else ""
            lines.append(
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" text-anchor="{shape.anchor}" '
                f'fill="{shape.colour}"{bold}>{escape(shape.text)}</text>'
            )
    return "\n".join([*lines, "</svg>", ""])


def write_png(shapes: list[Shape], path: Path) -> None:
    """Draw the shapes with matplotlib, two pixels for one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(HEIGHT, 0)
    axes.axis("off")
    for order, shape in enumerate(shapes):
        if isinstance(shape, Line):
            x, y = zip(*shape.pixels, strict=True)
            style = (0, (5, 3)) if shape.dashed else "solid"
            axes.plot(x, y, color=shape.colour, linewidth=0.72 * shape.width, linestyle=style, zorder=order)
        elif isinstance(shape, Dot):
            axes.plot([shape.x], [shape.y], "o", color=shape.colour, markersize=1.44 * shape.radius, zorder=order,
                      markeredgewidth=0)  # fmt: skip
        else:
            side = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            weight = "bold" if shape.bold else "normal"
            axes.text(shape.x, shape.y, shape.text, color=shape.colour, fontsize=0.72 * shape.size, ha=side,
                      va="baseline", fontweight=weight, zorder=order, parse_math=False)  # fmt: skip
    figure.savefig(path, dpi=200, facecolor="white")
