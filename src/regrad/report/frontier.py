"""A time-memory curve as a table, and as a picture in a file."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.errors import UsageError
from regrad.core.frontier_curve import OURS, Frontier, FrontierPoint
from regrad.core.units import format_bytes, format_seconds
from regrad.report.frontier_picture import Picture, svg, write_png
from regrad.report.text import facts_table
from regrad.report.timeline import can_draw

SVG, PNG = ".svg", ".png"


def frontier_report(frontier: Frontier) -> RenderableType:
    """For a rich console: figures, ours beside the best of the others at each budget, how far each method gets, notes."""
    facts = (
        ("eager peak", f"{format_bytes(frontier.eager_peak_bytes)} ± {frontier.band_ratio:.0%}, by {frontier.predicted_by}"),
        ("least feasible", format_bytes(frontier.least_bytes)),
        ("always there", format_bytes(frontier.persistent_bytes)),
        ("eager step", format_seconds(frontier.eager_seconds)),
    )  # fmt: skip
    parts: list[RenderableType] = [facts_table(facts), _by_budget(frontier), _by_method(frontier)]
    parts += [Text.assemble(("left out ", "yellow"), f"{one.method}: {one.reason}") for one in frontier.left_out]
    parts += [Text.assemble(("note ", "yellow"), note) for note in frontier.notes]
    return Group(*parts)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right" if name in ("budget", "peak", "step", "plans") else "left")
    table.caption_justify = "left"
    return table


def _by_budget(frontier: Frontier) -> Table:
    """Ours beside the best of all others."""
    table = _table("budget", "peak", "step", OURS, "step", "the best of the others")
    behind = {budget for budget, *_ in frontier.behind()}
    for budget in frontier.budgets_bytes:
        ours, other = frontier.best(budget, OURS), frontier.best(budget, others=True)
        cells = ["–"] * 3 if ours is None else [format_bytes(ours.peak_bytes), _ratio(ours), ours.setting]
        cells += ["–"] * 2 if other is None else [_ratio(other), f"{other.method} {other.setting}".strip()]
        table.add_row(format_bytes(budget), *cells, style="red" if budget in behind else "")
    table.caption = "step: predicted time over the eager step's; – where nothing fits"
    return table


def _by_method(frontier: Frontier) -> Table:
    """Every method: how far down it gets, and what that takes."""
    table = _table("method", "kind", "plans", "peak", "step", "lowest")
    for method in frontier.methods:
        points = frontier.of(method)
        lowest = min(points, key=lambda point: (point.peak_bytes, point.added_seconds))
        table.add_row(
            method,
            lowest.kind,
            str(len(points)),
            format_bytes(lowest.peak_bytes),
            _ratio(lowest),
            lowest.setting,
        )
    return table


def _ratio(point: FrontierPoint) -> str:
    return f"{point.step_ratio:.3f}x"


def check_picture_file(path: Path, ending: str) -> None:
    """Say before the work that a picture could not be written.

    Raises :class:`UsageError` for a name with another ending, a folder that is not there, or a PNG without matplotlib.
    """
    option = f"--{ending[1:]}"
    if path.suffix.lower() != ending:
        raise UsageError(f"{option} {path}: give a file whose name ends in {ending}.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder. Give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}. Make it first.")
    if ending == PNG and not can_draw():
        raise UsageError(
            f"{option} {path}: a PNG is drawn by matplotlib, which is not installed. "
            "Install it: pip install 'regrad[plot]'; or ask for --svg, which does without."
        )


def write_picture(frontier: Frontier, path: Path, title: str = "") -> None:
    """Draw the curve into ``path``, an ``.svg`` or a ``.png``; ``title`` stands above it. The same curve gives the same SVG.

    Raises as :func:`check_picture_file`.
    """
    ending = SVG if path.suffix.lower() != PNG else PNG
    check_picture_file(path, ending)
    shapes = Picture(frontier, title).shapes()
    if ending == PNG:
        write_png(shapes, path)
    else:
        path.write_text(svg(shapes), encoding="utf-8")
