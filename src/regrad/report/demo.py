"""The demo's result as tables. It takes the plain values of the result's ``to_dict``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.units import format_bytes, format_seconds
from regrad.report.text import facts_table

IDENTITIES = ("losses", "gradients", "weights", "optimizer", "generator")


def demo_report(result: Mapping[str, Any]) -> RenderableType:
    """What was trained, one row for each way to train it, and what became of the runs under a real limit."""
    budget = f"{format_bytes(result['budget_bytes'])} ({result['budget']}; {result['budget_bytes']:,} bytes)"
    facts = (
        (
            "model",
            f"{result['model']}, {result['parameters']:,} parameters, {format_bytes(result['text_bytes'])} of text",
        ),
        ("budget", budget),
        ("device", f"{result['device']}, {result['threads']} threads"),
        ("steps", f"{result['steps']} of each run"),
    )
    parts: list[RenderableType] = [facts_table(facts), _runs(result["rows"]), _limits(result["limits"])]
    if result["failures"]:
        parts += [Text(f"not as it should be: {line}", style="bold red") for line in result["failures"]]
    else:
        parts.append(Text(f"all as it should be, in {format_seconds(result['seconds'])}", style="green"))
    return Group(*parts)


def _runs(rows: list[Mapping[str, Any]]) -> Table:
    """One column for each way to train: three of them fit any terminal, seven figures side by side do not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(row["name"], justify="right")
    figures: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("predicted peak", lambda row: format_bytes(row["predicted_peak_bytes"])),
        ("measured peak", lambda row: format_bytes(row["measured_peak_bytes"])),
        ("one step", lambda row: format_seconds(row["step_seconds"])),
        ("over the eager step", lambda row: f"{row['step_ratio']:.2f}x"),
        ("extra block forwards", lambda row: str(row["extra_forwards"])),
        ("last loss", lambda row: f"{row['last_loss']:.6f}"),
    )
    for name, figure in figures:
        table.add_row(name, *(figure(row) for row in rows))
    for name in IDENTITIES:
        same = [bool(row[f"{name}_identical"]) for row in rows]
        cells = [Text("yes", style="green") if yes else Text("no", style="bold red") for yes in same]
        table.add_row(f"same {name}, to the bit", *cells)
    return table


def _limits(limits: Mapping[str, Any]) -> RenderableType:
    if not limits["children"]:
        return Text(f"no run under a real limit: {limits['unavailable']}", style="yellow")
    parts: list[RenderableType] = [Text(f"in processes of their own under {limits['kind']}, {limits['steps']} steps:")]
    for child in limits["children"]:
        same = {True: "same losses as eager", False: "other losses than eager", None: ""}[child["losses_identical"]]
        facts = [
            ("limit", f"{format_bytes(child['limit_bytes'])}, of it {format_bytes(child['allowance_bytes'])} to grow"),
            ("exit code", f"{child['exit_code']}, after {child['steps_completed']} steps"),
        ]
        if child["last_line"]:
            where = " ".join(word for word in (child["phase"], child["module"]) if word)
            facts.append(("died in", f"{where}: {child['last_line']}"))
        verdict = f"{child['name']}: {child['verdict']}" + (f", {same}" if same else "")
        parts += [Text(f"\n{verdict}", style="bold"), facts_table(tuple(facts))]
    return Group(*parts)
