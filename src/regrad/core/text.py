"""A plan in plain text, and the folding of its segments that every other picture of a plan uses too."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from regrad.core.chain import KEEP
from regrad.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from regrad.core.plan import PeakMoment, Plan, SegmentPlan


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring segments that would be shown alike. Bytes are those of one segment, seconds the sum of all."""

    name: str
    count: int
    option: str
    retained_bytes: int
    transient_bytes: int
    added_seconds: float
    reason: str


def fold_segments(segments: tuple[SegmentPlan, ...]) -> tuple[Row, ...]:
    """Fold runs of neighbours whose option, reason and bytes read the same; of their bytes the largest is kept."""
    rows = []
    for _, members in groupby(segments, key=_shown):
        run = list(members)
        option = run[0].option if run[0].engine is None else f"{run[0].option} ({run[0].engine})"
        rows.append(
            Row(
                name=run[0].name if len(run) == 1 else _range(run[0].name, run[-1].name),
                count=len(run),
                option=option,
                retained_bytes=max(segment.retained_bytes for segment in run),
                transient_bytes=max(segment.transient_bytes for segment in run),
                added_seconds=sum(segment.added_seconds for segment in run),
                reason=run[0].reason,
            )
        )
    return tuple(rows)


def _range(first: str, last: str) -> str:
    """``h.0 … 11`` for ``h.0`` and ``h.11``."""
    stem, _, tail = last.rpartition(".")
    return f"{first} … {tail if stem == first.rpartition('.')[0] else last}"


def _shown(segment: SegmentPlan) -> tuple[object, ...]:
    sizes = format_bytes(segment.retained_bytes), format_bytes(segment.transient_bytes)
    return segment.option, segment.engine, segment.reason, *sizes


def without_numbers(module: str) -> str:
    """``blocks.*.mlp`` for ``blocks.11.mlp``: one name for the same module of every block."""
    return re.sub(r"(?<![^.\s])\d+(?![^.])", "*", module)


def short_operation(name: str) -> str:
    """``addmm`` for ``aten.addmm.default``, ``mul.Tensor`` for ``aten.mul.Tensor``."""
    return name.replace("aten.", "").removesuffix(".default")


def short_place(where: str) -> str:
    """``model.py:12`` for ``/home/…/model.py:12``."""
    return where.replace("\\", "/").rpartition("/")[2]


def moment_text(moment: PeakMoment) -> str:
    """``backward of lm_head, aten._log_softmax_backward_data``."""
    where = f" of {moment.module}" if moment.module else ""
    what = f", {moment.operation}" if moment.operation else ""
    return f"{moment.phase}{where}{what}"


def facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Name and value of the figures that stand above the table of segments."""
    band = f"± {plan.band_ratio:.1%}, by {plan.predicted_by}"
    recomputed = len(plan.recomputed)
    time = f"{format_seconds(plan.eager_seconds + plan.added_seconds)} a step, {plan.step_ratio:.2f}x the eager step"
    return (
        ("budget", f"{format_bytes(plan.budget_bytes)} ({plan.budget_bytes:,} bytes)"),
        ("predicted peak", f"{format_bytes(plan.predicted_peak_bytes)} ({plan.predicted_peak_bytes:,} bytes; {band})"),
        ("  it falls in", moment_text(plan.peak_moment)),
        ("eager peak", f"{format_bytes(plan.eager_peak_bytes)}, in {moment_text(plan.eager_peak_moment)}"),
        ("least feasible", format_bytes(plan.least_bytes)),
        ("always there", f"{format_bytes(plan.persistent_bytes)} (weights, buffers, inputs, optimizer state)"),
        ("time", time if plan.eager_seconds > 0 else "not measured"),
        ("chosen by", f"{plan.planner}: {recomputed} of {len(plan.segments)} segments recomputed{_in_ranges(plan)}"),
        *((("moved", moves_text(plan)),) if plan.moves else ()),
        ("for", f"device {plan.device}, gradients {plan.gradients}, model {plan.fingerprint[:12]}"),
    )


def state_lines(plan: Plan) -> list[str]:
    """What is kept of the state that the step writes, a line for each kind; empty where it writes none."""
    kinds: dict[tuple[str, str], list[int]] = {}
    reasons: dict[tuple[str, str], str] = {}
    for segment in plan.segments:
        for state in segment.state:
            if state.written:
                key = (without_numbers(state.name), state.engine)
                found = kinds.setdefault(key, [0, 0, 0])
                reasons.setdefault(key, f" ({state.reason})" if state.reason else "")
                found[0] += 1
                found[1] = max(found[1], state.retained_bytes)
                found[2] += state.moved_bytes
    if not kinds:
        return []
    rows = [
        f"  {name}: {engine}, {count} x {format_bytes(size)} at most, {format_bytes(moved)} moved a step"
        f"{reasons[name, engine]}"
        for (name, engine), (count, size, moved) in kinds.items()
    ]
    return ["", "state that the step writes and the replays need as it was:", *rows]


def _in_ranges(plan: Plan) -> str:
    masks = ", dropout masks kept as bits" if plan.masks else ""
    return f", in {len(plan.ranges)} ranges of torch calls{masks}" if plan.ranges else ""


def moves_text(plan: Plan) -> str:
    """``61 saved tensors: 49 bits, 12 offload; 120 MiB held in 3.20 MiB, adds 4.1 ms``; "" without moves."""
    if not plan.moves:
        return ""
    count = Counter(one.how for one in plan.moves)
    kinds = ", ".join(f"{number} {how}" for how, number in sorted(count.items()))
    size, held = sum(one.bytes for one in plan.moves), sum(one.held_bytes for one in plan.moves)
    seconds = format_seconds(sum(one.added_seconds for one in plan.moves))
    what = f"{len(plan.moves)} saved tensors" if len(plan.moves) > 1 else "1 saved tensor"
    return f"{what}: {kinds}; {format_bytes(size)} held in {format_bytes(held)}, adds {seconds}"


def move_lines(plan: Plan) -> list[str]:
    """The saved tensors that are held otherwise, a line for each kind, and their sum."""
    kinds: dict[tuple[str, str, int, int], list[float]] = {}
    for one in plan.moves:
        key = (without_numbers(one.name), one.how, one.bytes, one.held_bytes)
        kinds.setdefault(key, []).append(one.added_seconds)
    if not kinds:
        return []
    lines = [
        "",
        "saved tensors in fewer bytes or elsewhere (how many, of which call, how, bytes of each, what it adds):",
    ]
    for (name, how, size, held), seconds in kinds.items():
        what = f"{format_bytes(size)} in {format_bytes(held)}"
        lines.append(f"  {len(seconds)} x {name}, {how}: {what}, {format_seconds(sum(seconds))}")
    return [*lines, f"  in all {moves_text(plan)}"]


def range_lines(plan: Plan) -> list[str]:
    """The ranges of torch calls that are recomputed, a line for each kind."""
    kinds: dict[tuple[str, str, str, int, int], list[float]] = {}
    for one in plan.ranges:
        key = (without_numbers(one.name), one.first, one.last, one.stop - one.start, one.depth)
        kinds.setdefault(key, []).append(one.added_seconds)
    if not kinds:
        return []
    lines = ["", "ranges of torch calls that are run again (how many, from which call to which, what it adds):"]
    for (name, first, last, calls, depth), seconds in kinds.items():
        what = first if calls == 1 else f"{first} … {last} ({calls} calls)"
        lines.append(f"  {'  ' * depth}{len(seconds)} x {name}: {what}, {format_seconds(sum(seconds))}")
    return lines


def plan_text(plan: Plan) -> str:
    """The whole plan for a terminal without colours, a log or a test."""
    lines = [f"{name + ':':<16} {value}" for name, value in facts(plan)]
    rows = [("segment", "option", "retained", "transient", "added", "")]
    for row in fold_segments(plan.segments):
        name = row.name if row.count == 1 else f"{row.name} ({row.count})"
        added = "" if row.option == KEEP and not row.added_seconds else format_seconds(row.added_seconds)
        rows.append(
            (name, row.option, format_bytes(row.retained_bytes), format_bytes(row.transient_bytes), added, row.reason)
        )
    widths = [max(len(cells[column]) for cells in rows) for column in range(6)]
    lines.append("")
    for name, option, *sizes, reason in rows:
        numbers = "  ".join(size.rjust(width) for size, width in zip(sizes, widths[2:5], strict=True))
        lines.append(f"{name.ljust(widths[0])}  {option.ljust(widths[1])}  {numbers}  {reason}".rstrip())
    lines += range_lines(plan)
    lines += move_lines(plan)
    lines += state_lines(plan)
    if plan.notes:
        lines.append("")
        lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(lines)
