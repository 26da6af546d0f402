"""What autograd keeps, as rich tables for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.saved import Saved, headline, tensor_text
from regrad.core.text import short_operation, short_place
from regrad.core.units import format_bytes

MOST_ROWS = 40


def saved_report(saved: Saved) -> RenderableType:
    """What is kept, folded over blocks, largest first; then totals by module; then notes."""
    parts: list[RenderableType] = [Text(headline(saved)), _storages(saved), _modules(saved)]
    parts += [Text.assemble(("note ", "yellow"), note) for note in saved.notes]
    return Group(*parts)


def _storages(saved: Saved) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("what and why", overflow="fold")
    table.add_column("made in", overflow="fold")
    rows = saved.rows()
    for row in rows[:MOST_ROWS]:
        times = f"{row.count} × " if row.count > 1 else ""
        what = f"{times}{tensor_text(row.shape, row.dtype)}"
        place = f"\n{short_place(row.where)}" if row.where else ""
        table.add_row(
            Text(format_bytes(row.bytes)),
            Text.assemble(what, (f" by {short_operation(row.operation)}\n{row.reason}", "dim")),
            Text.assemble(row.module or "the model", (place, "dim")),
        )
    rest = rows[MOST_ROWS:]
    if rest:
        left = f"in {len(rest)} more rows; --json has them all"
        table.add_row(Text(format_bytes(sum(row.bytes for row in rest))), Text(left, style="dim"), "")
    return table


def _modules(saved: Saved) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("module", overflow="fold")
    for name in ("modules", "made by itself", "with what is in it"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, count, own, total in saved.module_rows():
        table.add_row(Text(name or "the model"), str(count), Text(format_bytes(own)), Text(format_bytes(total)))
    return table
