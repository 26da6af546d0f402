"""What fits a budget, as rich tables for a terminal. The words and figures are those of :mod:`regrad.core.fit`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.fit import Fit, facts, header, rows
from regrad.report.text import facts_table


def fit_report(fit: Fit) -> RenderableType:
    """Figures, the table of sizes and the notes."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for position, name in enumerate(header(fit)):
        table.add_column(name, justify="right" if position else "left", no_wrap=True)
    for cells in rows(fit):
        style = {"largest, planned": "bold", "best throughput": "bold", "tried": "dim"}.get(cells[0], "")
        table.add_row(*cells, style=style)
    table.caption = f"step: predicted time over the eager step's; a plan's own best for each {header(fit)[1]}"
    table.caption_justify = "left"
    return Group(facts_table(facts(fit)), table, *(Text.assemble(("note ", "yellow"), note) for note in fit.notes))
