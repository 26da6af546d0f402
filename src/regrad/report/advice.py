"""Advice as rich tables for a terminal. The words are those of :mod:`regrad.core.advice_text`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.advice import Advice
from regrad.core.advice_text import (
    MOST_HOLDERS,
    details,
    facts,
    holder_text,
    no_use_text,
    ratio_text,
    title,
    trap_lines,
)
from regrad.core.units import format_bytes
from regrad.report.text import facts_table


def advice_report(advice: Advice) -> RenderableType:
    """Figures, who holds the peak, the verdict, suggestions by rank, what is of no use, traps, notes."""
    parts: list[RenderableType] = [facts_table(tuple(facts(advice)))]
    parts += [
        Text(f"  {format_bytes(one.bytes):>10}  {holder_text(one)}", style="dim")
        for one in advice.holders[:MOST_HOLDERS]
    ]
    parts += [Text(""), Text(advice.verdict, style="bold")]
    if advice.suggestions:
        parts.append(_suggestions(advice))
    if advice.no_use:
        parts.append(Text("of no use here", style="bold"))
        parts += [Text(f"  {no_use_text(one)}") for one in advice.no_use]
    if advice.traps:
        parts.append(Text("known traps that this step is in", style="bold"))
        parts += [Text(f"  {line}") for trap in advice.traps for line in trap_lines(trap)]
    parts += [Text.assemble(("note ", "yellow"), note) for note in advice.notes]
    return Group(*parts)


def _suggestions(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("change", overflow="fold")
    for name in ("peak", "", "step time"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for number, one in enumerate(advice.suggestions, 1):
        table.add_row(
            str(number),
            Text.assemble(title(one), *((f"\n  {line}", "dim") for line in details(one))),
            Text(format_bytes(one.predicted_peak_bytes)),
            Text("fits" if one.fits else "no", style="green" if one.fits else ""),
            Text(ratio_text(one)),
        )
    return table
