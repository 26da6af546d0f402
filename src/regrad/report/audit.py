"""An audit as rich tables for a terminal. The words and the folding are those of :mod:`regrad.core.audit_text`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.audit import DIVERGED, EXACT, Audit
from regrad.core.audit_text import facts, headline, rows
from regrad.report.text import facts_table

_STYLES = {EXACT: "bold green", DIVERGED: "bold red"}


def audit_report(audit: Audit) -> RenderableType:
    """Verdict, figures, what each segment touches, and notes, to be printed on a rich console."""
    parts: list[RenderableType] = [Text(headline(audit), style=_STYLES.get(audit.verdict, "bold yellow"))]
    parts.append(facts_table(facts(audit)))
    if audit.segments:
        parts.append(_segments_table(audit))
    parts += [Text.assemble(("note ", "yellow"), note) for note in audit.notes]
    return Group(*parts)


def _segments_table(audit: Audit) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("segment", overflow="fold")
    table.add_column("runs", no_wrap=True)
    table.add_column("state", overflow="fold")
    for name, runs, lines in rows(audit):
        table.add_row(Text(name), Text(runs), Text("\n".join(lines) or "none", style="" if lines else "dim"))
    table.caption = "runs: forwards + replays over all steps; state: of the first segment of the row"
    table.caption_justify = "left"
    return table
