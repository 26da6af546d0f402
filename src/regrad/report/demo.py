"""The demo's result as tables. It takes the plain values of the result's ``to_dict``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.units import format_bytes, format_seconds
from regrad.report.text import facts_table

IDENTITIES = ("losses", "gradients", "weights", "optimizer", "generator")
STATE_IDENTITIES = ("losses", "gradients", "weights", "optimizer", "buffers", "attributes", "generator")

Figures = tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...]


def demo_report(result: Mapping[str, Any]) -> RenderableType:
    """What was trained, one column for each way to train it, what became of the runs under a real limit, and the same
    for the model with state."""
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
    parts.append(demo_state_report(result["stateful"]))
    if result["failures"]:
        parts += [Text(f"not as it should be: {line}", style="bold red") for line in result["failures"]]
    else:
        parts.append(Text(f"all as it should be, in {format_seconds(result['seconds'])}", style="green"))
    return Group(*parts)


def _runs(rows: list[Mapping[str, Any]]) -> Table:
    """One column for each way to train: three of them fit any terminal, seven figures side by side do not."""
    figures: Figures = (
        ("predicted peak", lambda row: format_bytes(row["predicted_peak_bytes"])),
        ("measured peak", lambda row: format_bytes(row["measured_peak_bytes"])),
        ("one step", lambda row: format_seconds(row["step_seconds"])),
        ("over the eager step", lambda row: f"{row['step_ratio']:.2f}x"),
        ("extra block forwards", lambda row: str(row["extra_forwards"])),
        ("last loss", lambda row: f"{row['last_loss']:.6f}"),
    )
    return _columns(rows, figures, IDENTITIES)


def _columns(rows: list[Mapping[str, Any]], figures: Figures, identities: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("")
    for row in rows:
        table.add_column(row["name"], justify="right")
    for name, figure in figures:
        table.add_row(name, *(figure(row) for row in rows))
    for name in identities:
        same = [bool(row[f"{name}_identical"]) for row in rows]
        cells = [Text("yes", style="green") if yes else Text("no", style="bold red") for yes in same]
        table.add_row(f"same {name}, to the bit", *cells)
    return table


def demo_state_report(result: Mapping[str, Any]) -> RenderableType:
    """The model with state: one column for each way to train it, and what torch's checkpoint made of the state."""
    facts = (
        ("model with state", f"{result['model']}, {result['parameters']:,} parameters"),
        ("budget", f"{format_bytes(result['budget_bytes'])} ({result['budget']})"),
        ("steps", f"{result['steps']} of each run, all from one start"),
    )
    figures: Figures = (
        ("predicted peak", lambda row: _or_none(row["predicted_peak_bytes"], format_bytes)),
        ("measured peak", lambda row: format_bytes(row["measured_peak_bytes"])),
        ("extra block forwards", lambda row: str(row["extra_forwards"])),
        ("replays by regrad", lambda row: str(row["replays"])),
        ("last loss", lambda row: f"{row['losses'][-1]:.6f}"),
    )
    parts: list[RenderableType] = [Text(""), facts_table(facts), _columns(result["rows"], figures, STATE_IDENTITIES)]
    for row in result["rows"]:
        if not row["bit_identical"]:
            parts.append(Text("\n".join(_what_differs(row)), style="yellow"))
    if not result["torch_bit_identical"]:
        parts.append(Text(result["torch_assumption"]))
    return Group(*parts)


def _or_none(value: Any, show: Callable[[Any], str]) -> str:
    return "none" if value is None else show(value)


def _what_differs(row: Mapping[str, Any]) -> list[str]:
    """Lines on how one run differs from the eager one."""
    lines = [f"under {row['name']}:"]
    if row["first_other_gradients_step"] is not None:
        lines.append(
            f"  other gradients from step {row['first_other_gradients_step']} on, "
            f"there by {row['gradient_error_ratio']:.2%} of their norm"
        )
    if row["first_other_loss_step"] is not None:
        lines.append(f"  other losses from step {row['first_other_loss_step']} on")
    lines.append(f"  other values in {len(row['other_values'])} of {row['values']} buffers and attributes")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for value in row["other_values"]:
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", value["name"]), []).append(value)
    for name, values in groups.items():
        twice = [value for value in values if value["counted_twice"]]
        if twice:
            first = twice[0]
            lines.append(f"  twice: {name} ({len(twice)})")
            lines.append(f"         {first['found_sum']:,}, in the eager run {first['eager_sum']:,}")
    return lines


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
