"""Plans as rich tables for a terminal. The words and the folding are those of :mod:`regrad.core.text`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.chain import KEEP
from regrad.core.plan import Plan
from regrad.core.text import facts, fold_segments, plan_text
from regrad.core.units import format_bytes, format_seconds

__all__ = ["facts_table", "plan_report", "plan_text"]


def facts_table(pairs: tuple[tuple[str, str], ...]) -> Table:
    """Names and values without a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def plan_report(plan: Plan) -> RenderableType:
    """Figures, segments and notes of ``plan``, to be printed on a rich console."""
    parts: list[RenderableType] = [facts_table(facts(plan)), _segments_table(plan)]
    parts += [Text.assemble(("note ", "yellow"), note) for note in plan.notes]
    return Group(*parts)


def _segments_table(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("segment", overflow="fold")
    table.add_column("option")
    for name in ("retained", "transient", "added"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in fold_segments(plan.segments):
        kept = row.option == KEEP
        name = row.name if row.count == 1 else f"{row.name} ({row.count})"
        table.add_row(
            Text.assemble(name, (f"\n  {row.reason}", "dim") if row.reason else ""),
            Text(row.option, style="" if kept else "cyan"),
            Text(format_bytes(row.retained_bytes)),
            Text(format_bytes(row.transient_bytes)),
            Text("" if kept and not row.added_seconds else format_seconds(row.added_seconds)),
        )
    table.caption = "retained and transient: of each segment; added: of all in the row"
    table.caption_justify = "left"
    return table
