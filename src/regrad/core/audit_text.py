"""An audit in plain text, and the words that every other picture of it uses too."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from regrad.core.text import short_place, without_numbers
from regrad.core.units import format_bytes

if TYPE_CHECKING:
    from regrad.core.audit import Audit, SegmentState, SlotUse, TorchResult


def headline(audit: Audit) -> str:
    """The verdict in one line."""
    if audit.verdict == "EXACT":
        again = sum(segment.recomputed for segment in audit.segments)
        nothing = ": nothing was recomputed, so nothing was put to the test" if not audit.replays else ""
        return (
            f"EXACT: {audit.steps} steps under {audit.engine} left the bytes of the eager ones; {again} of "
            f"{len(audit.segments)} segments recomputed, {audit.replays} replays{nothing}"
        )
    if audit.verdict == "DIVERGED":
        return f"DIVERGED: {audit.first}"
    return f"UNSUPPORTED: {audit.reason}"


def torch_line(result: TorchResult) -> str:
    """What torch's own checkpoint does, in one line."""
    if result.verdict == "SAME":
        return f"the same bytes as eager, {result.replays} replays"
    if result.verdict == "DIVERGED":
        return f"another result, and no error: {result.first}. It assumes a function that does the same on both runs"
    if result.verdict == "RAISED":
        return f"raises {result.message}"
    return f"not run: {result.message}"


def facts(audit: Audit) -> tuple[tuple[str, str], ...]:
    """Name and value of the figures under the headline."""
    return (
        ("compared", f"{audit.moments} moments; at the last {audit.slots} slots, {format_bytes(audit.compared_bytes)}"),
        ("torch.utils.checkpoint", torch_line(audit.torch)),
        ("for", f"{audit.model} on {audit.device}; the step was run {audit.runs} times"),
    )


def rows(audit: Audit) -> list[tuple[str, str, list[str]]]:
    """(segments, runs, lines of state) with neighbours that touch alike folded into one."""
    found = []
    for _, members in groupby(audit.segments, key=_shown):
        run = list(members)
        name = run[0].name if len(run) == 1 else f"{run[0].name} … {run[-1].name} ({len(run)})"
        runs = f"{run[0].forwards} + {run[0].replays}" if run[0].recomputed else f"{run[0].forwards}, kept"
        lines = [use_line(use) for use in run[0].state] + [f"hooks on {hook}" for hook in run[0].hooks]
        found.append((name, runs, lines))
    return found


def use_line(use: SlotUse) -> str:
    """``buffer blocks.0.norm.running_mean, 256 B, written at model.py:12 (declared)``."""
    size = f", {format_bytes(use.storage_bytes)}" if use.storage_bytes else ""
    lines = []
    if use.read_line and use.read_line != use.write_line:
        lines.append(f"read at {short_place(use.read_line)}")
    if use.write_line:
        lines.append(f"{'drawn' if use.use == 'drawn' else 'written'} at {short_place(use.write_line)}")
    return f"{use.slot}{size}, {' and '.join(lines) or use.use} ({use.found})"


def _shown(segment: SegmentState) -> tuple[object, ...]:
    state = tuple(
        (without_numbers(use.slot), use.storage_bytes, use.use, use.read_line, use.write_line) for use in segment.state
    )
    return segment.recomputed, segment.forwards, segment.replays, state, tuple(map(without_numbers, segment.hooks))


def audit_text(audit: Audit) -> str:
    """The whole audit for a terminal without colours, a log or a test."""
    lines = [headline(audit), *(f"{name + ':':<24}{value}" for name, value in facts(audit)), ""]
    for name, runs, state in rows(audit):
        lines.append(f"{name}: runs {runs}" + ("" if state else "; no state"))
        lines += [f"    {line}" for line in state]
    lines += [f"note: {note}" for note in audit.notes]
    return "\n".join(lines).rstrip()
