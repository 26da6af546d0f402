"""An estimate in plain text, for ``print``."""

from __future__ import annotations

from regrad.core.text import short_operation
from regrad.core.timeline import Holder
from regrad.core.units import format_bytes
from regrad.memory.estimate import Estimate, Usage

MOST_HOLDERS = 6


def facts(estimate: Estimate) -> list[tuple[str, str]]:
    """Names and values of the headline figures."""
    training, inference = estimate.training, estimate.inference
    rows = [
        ("training peak", f"{format_bytes(training.peak_bytes)} ({training.peak_bytes:,} bytes; {_method(estimate)})"),
        ("  it falls in", moment(training)),
        ("inference peak", f"{format_bytes(inference.peak_bytes)} ({inference.peak_bytes:,} bytes)"),
        (
            "parameters",
            f"{estimate.parameters:,} in {estimate.dtype}; weights, gradients and {estimate.optimizer} state: "
            f"{format_bytes(estimate.parameter_memory_bytes)} ({estimate.parameter_memory_bytes:,} bytes)",
        ),
    ]
    if estimate.reserved_peak_bytes is not None:
        rows.append(("reserved", f"{format_bytes(estimate.reserved_peak_bytes)} by the device's allocator"))
    if estimate.device is not None:
        rows.append(("device", estimate.device.in_words()))
        rows.append(("fits", _fits(estimate)))
    return rows


def _method(estimate: Estimate) -> str:
    if estimate.band_ratio is None:
        return f"by {estimate.method}, not compared with a measurement"
    return f"by {estimate.method}, ±{estimate.band_ratio:.0%}"


def _fits(estimate: Estimate) -> str:
    assert estimate.usable_bytes is not None
    gap = estimate.usable_bytes - estimate.peak_bytes
    return f"yes, {format_bytes(gap)} left" if estimate.fits else f"no, {format_bytes(-gap)} too much"


def moment(usage: Usage) -> str:
    """When the peak is."""
    at = usage.peak_moment
    where = f" in {at.module}" if at.module else ""
    return f"{at.phase}: {at.operation}{where}"


def what(holder: Holder) -> str:
    """What a holder is and where it was made."""
    where = f" in {holder.module}" if holder.module else ""
    return f"{holder.category}: {short_operation(holder.operation)}{where}" if holder.operation else holder.category


def categories(estimate: Estimate) -> list[tuple[str, int, int]]:
    """Category, bytes at the training peak, bytes at the inference peak; those that are nought in both left out."""
    training, inference = estimate.training.by_category(), estimate.inference.by_category()
    return [(name, size, inference[name]) for name, size in training.items() if size or inference[name]]


def estimate_text(estimate: Estimate) -> str:
    """Everything, in lines."""
    lines = [f"{name + ':':<16} {value}" for name, value in facts(estimate)]
    lines += ["", "at the peak of training, and of inference:"]
    lines += [
        f"  {name:<12} {format_bytes(one):>10}  {format_bytes(other):>10}" for name, one, other in categories(estimate)
    ]
    lines += ["", "held at the peak of training:"]
    for holder in estimate.training.holders[:MOST_HOLDERS]:
        times = f" ({holder.count})" if holder.count > 1 else ""
        lines.append(f"  {format_bytes(holder.bytes):>10}  {what(holder)}{times}")
    if estimate.blocks:
        lines += ["", "by block (bytes of one):"]
    for block in estimate.blocks:
        times = f" ({block.count})" if block.count > 1 else ""
        lines.append(
            f"  {block.name}{times}: weights {format_bytes(block.weights_bytes)}, optimizer "
            f"{format_bytes(block.optimizer_bytes)}, keeps {format_bytes(block.activation_bytes)}"
        )
    lines += ["", "with another optimizer:"]
    for choice in estimate.optimizers:
        verdict = "" if choice.fits is None else ", fits" if choice.fits else ", does not fit"
        lines.append(
            f"  {choice.title}: {format_bytes(choice.parameter_memory_bytes)} of parameter memory, peak "
            f"{format_bytes(choice.peak_bytes)}{verdict}"
        )
    lines += comparison_lines(estimate)
    return "\n".join(lines + [f"note: {note}" for note in estimate.notes])


def comparison_lines(estimate: Estimate) -> list[str]:
    """Formula beside trace, and why they differ; nothing where only one applies."""
    found = estimate.comparison
    if found is None:
        return []
    figures = (found.textbook_bytes, found.formula_bytes, found.trace_bytes)
    book, own, traced = (f"{found.over_unit(figure):.1f}" for figure in figures)
    lines = ["", f"{found.block}, bytes over s·b·h: textbook {book}, formula for this layer {own}, trace {traced}"]
    for difference in found.differences:
        if difference.why:
            change = found.over_unit(difference.trace_bytes - difference.formula_bytes)
            lines.append(f"  {difference.kind}: {change:+.1f}; {difference.why}")
    return lines
