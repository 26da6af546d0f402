"""An estimate as rich tables for a terminal. The words are those of :mod:`regrad.memory.text`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrad.core.units import format_bytes
from regrad.memory.estimate import Estimate
from regrad.memory.text import MOST_HOLDERS, categories, comparison_lines, facts, what
from regrad.report.text import facts_table


def estimate_report(estimate: Estimate) -> RenderableType:
    """Headline, categories, holders of the peak, blocks, optimizers, formula beside trace, notes."""
    parts: list[RenderableType] = [facts_table(tuple(facts(estimate))), _categories(estimate), _holders(estimate)]
    if estimate.blocks:
        parts.append(_blocks(estimate))
    parts.append(_optimizers(estimate))
    parts += [Text(line) for line in comparison_lines(estimate)]
    parts += [Text.assemble(("note ", "yellow"), note) for note in estimate.notes]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0, overflow="fold")
    return table


def _categories(estimate: Estimate) -> Table:
    table = _table("at the peak", "training", "inference")
    for name, training, inference in categories(estimate):
        table.add_row(Text(name), Text(format_bytes(training)), Text(format_bytes(inference)))
    return table


def _holders(estimate: Estimate) -> Table:
    table = _table("held at the peak of training", "of them", "bytes")
    for holder in estimate.training.holders[:MOST_HOLDERS]:
        table.add_row(Text(what(holder)), str(holder.count), Text(format_bytes(holder.bytes)))
    return table


def _blocks(estimate: Estimate) -> Table:
    table = _table("block", "of them", "weights", "gradients", "optimizer", "keeps")
    for block in estimate.blocks:
        sizes = (block.weights_bytes, block.gradients_bytes, block.optimizer_bytes, block.activation_bytes)
        table.add_row(Text(block.name), str(block.count), *(Text(format_bytes(size)) for size in sizes))
    table.caption = "of one block; keeps: from its forward to its backward"
    table.caption_justify = "left"
    return table


def _optimizers(estimate: Estimate) -> Table:
    judged = estimate.device is not None
    table = _table("optimizer", "its state", "parameter memory", "peak", *(["fits"] if judged else []))
    for choice in estimate.optimizers:
        sizes = (choice.optimizer_bytes + choice.master_bytes, choice.parameter_memory_bytes, choice.peak_bytes)
        verdict = [Text("yes" if choice.fits else "no")] if judged else []
        chosen = " (this one)" if choice.name == estimate.optimizer else ""
        table.add_row(Text(choice.title + chosen), *(Text(format_bytes(size)) for size in sizes), *verdict)
    return table
