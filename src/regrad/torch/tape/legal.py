"""Which ranges of operations can be run again: the in-place rule for any interval of a trace."""

from __future__ import annotations

from collections.abc import Collection

from regrad.core import trace as tr
from regrad.core.trace import Trace


def problem_of_range(
    trace: Trace, start_op: int, stop_op: int, names: dict[int, str] | None = None, kept: Collection[int] = ()
) -> str:
    """Why the forward operations ``start_op`` … ``stop_op - 1`` cannot be computed again; "" if they can.

    What the interval reads from before it must be at its replay what it was: no operation of the forward may write it
    after the first such read. An operation that itself writes what was there before the interval is not run again (what
    it saves is kept), so its own reads do not count. What the interval makes may be written by anyone: the replay makes
    its own. ``names`` are those of persistent storages, ``kept`` operations of the interval that are not run again: what
    they make counts as being there before it. Cost: linear in the forward's operations from ``start_op`` on.
    """
    read: dict[int, int] = {}
    end = trace.phase_starts[tr.BACKWARD]
    if not 0 <= start_op < stop_op <= end:
        return f"[{start_op}, {stop_op}) is no interval of the forward's {end} operations"
    for position in range(start_op, end):
        operation = trace.operations[position]
        outside = [index for index in operation.writes if _is_outside(trace, index, start_op, kept)]
        for index in outside:
            if index in read:
                what = _name(trace, index, names or {})
                reader = trace.operations[read[index]]
                when = "in the range" if position < stop_op else "later in the forward"
                return f"{what} is read by {reader.name} and then written {when} by {operation.name}"
        if position < stop_op and not outside and position not in kept:
            for index in operation.reads:
                if _is_outside(trace, index, start_op, kept):
                    read.setdefault(index, position)
    return ""


def _is_outside(trace: Trace, index: int, start_op: int, kept: Collection[int]) -> bool:
    birth = trace.storages[index].birth
    return birth < start_op or birth in kept


def _name(trace: Trace, index: int, names: dict[int, str]) -> str:
    if index in names:
        return names[index]
    return "a tensor computed before it" if trace.storages[index].birth >= 0 else "state"
