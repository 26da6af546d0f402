"""Advice in plain text, for ``print`` and for the notes of an error; the words are those of every other picture of it."""

from __future__ import annotations

from regrad.core.advice import Advice, NoUse, Suggestion, Trap
from regrad.core.text import moment_text, short_operation
from regrad.core.timeline import Holder
from regrad.core.units import format_bytes

MOST_HOLDERS = 4


def facts(advice: Advice) -> list[tuple[str, str]]:
    """Names and values of the headline figures."""
    gap = advice.peak_bytes - advice.budget_bytes
    judged = f"{format_bytes(gap)} too much" if gap > 0 else f"{format_bytes(-gap)} left"
    band = f"± {advice.band_ratio:.1%}, by {advice.predicted_by}"
    return [
        ("budget", f"{format_bytes(advice.budget_bytes)} ({advice.budget_bytes:,} bytes)"),
        ("peak as it is", f"{format_bytes(advice.peak_bytes)} ({advice.peak_bytes:,} bytes; {band}), {judged}"),
        ("  it falls in", moment_text(advice.peak_moment)),
        ("at the peak", ", ".join(f"{name} {format_bytes(size)}" for name, size in advice.at_peak.items() if size)),
        ("always there", format_bytes(advice.persistent_bytes)),
    ]


def holder_text(holder: Holder) -> str:
    """What a holder is, where it was made, and how many there are."""
    where = f" in {holder.module}" if holder.module else ""
    times = f" ({holder.count})" if holder.count > 1 else ""
    made = f": {short_operation(holder.operation)}" if holder.operation else ""
    return f"{holder.category}{made}{where}{times}"


def ratio_text(one: Suggestion) -> str:
    """``1.27x``, ``at most 2.10x`` or ``not known``."""
    if one.step_ratio is None:
        return "not known"
    return ("at most " if one.at_most else "") + f"{one.step_ratio:.2f}x"


def title(one: Suggestion) -> str:
    """What a suggestion is, pairs with a plus."""
    return f"{' + '.join(one.kinds)}: {one.what}"


def details(one: Suggestion) -> list[str]:
    """What stands below a suggestion."""
    moved = [f"moves {format_bytes(one.moved_bytes)} a step"] if one.moved_bytes else []
    return [*([f"how: {one.how}"] if one.how else []), *moved, f"result: {one.result}; does not fix: {one.not_fixed}"]


def no_use_text(one: NoUse) -> str:
    """A change that is of no use, with its figure."""
    peak = "" if one.predicted_peak_bytes is None else f" (peak {format_bytes(one.predicted_peak_bytes)})"
    return f"{one.kind}: {one.what}{peak}: {one.why}"


def trap_lines(trap: Trap) -> list[str]:
    """A trap by name, what it is, whom it concerns and what to do."""
    cost = f" ({format_bytes(trap.bytes)})" if trap.bytes else ""
    where = f" in {', '.join(trap.modules[:4])}{', …' if len(trap.modules) > 4 else ''}" if trap.modules else ""
    return [f"{trap.name}{cost}{where}", f"  {trap.what}", f"  {trap.cure}"]


def advice_text(advice: Advice) -> str:
    """Everything, in lines."""
    lines = [f"{name + ':':<16} {value}" for name, value in facts(advice)]
    lines += [f"  {format_bytes(one.bytes):>10}  {holder_text(one)}" for one in advice.holders[:MOST_HOLDERS]]
    lines += ["", advice.verdict]
    for number, one in enumerate(advice.suggestions, 1):
        verdict = "fits" if one.fits else "does not fit"
        lines += ["", f"{number}. {title(one)}"]
        peak = f"peak {format_bytes(one.predicted_peak_bytes)} by {one.predicted_by}"
        lines.append(f"   {peak}, {verdict}; step time {ratio_text(one)}")
        lines += [f"   {line}" for line in details(one)]
    if advice.no_use:
        lines += ["", "of no use here:", *(f"  {no_use_text(one)}" for one in advice.no_use)]
    if advice.traps:
        lines += ["", "known traps that this step is in:"]
        lines += [f"  {line}" for trap in advice.traps for line in trap_lines(trap)]
    if advice.notes:
        lines += ["", *(f"note: {note}" for note in advice.notes)]
    return "\n".join(lines)
