"""The solver for many different segments: slack on a grid, every number of bytes rounded upward.

With unit u every ``extra`` and ``need`` is rounded up to a multiple of u, so what fits on the grid fits in bytes. A
plan loses at most u per segment by that and u once for its own peak: the best plan of the grid for M bytes is at least
as fast as the best of all plans for ``M - loss``, ``loss = (n + 1) u``. With u = 1 nothing is lost.

The rows are not all kept: one in about √n is, and the rows between are made again when a plan is read back, over the
few cells that this plan can reach. (Recomputation, here too, is what makes it fit.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isqrt

import numpy as np
from numpy.typing import NDArray

from regrad.planners._items import LOWEST, Items

Floats = NDArray[np.float64]
Row = tuple[int, Floats]
MOST_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class _Cells:
    """The items in units: per segment (extra, need, seconds), and the cells between which each row changes."""

    segments: tuple[tuple[tuple[int, int, float], ...], ...]
    least: tuple[int, ...]
    enough: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The whole chain's row: ``seconds[k]`` at slack ``(first + k) * unit``, infinite nowhere and never rising."""

    unit: int
    loss: int
    first: int
    seconds: Floats
    _cells: _Cells
    _rows: dict[int, Row]
    _stride: int

    def rebuild(self, cell: int) -> tuple[int, ...]:
        """The item of every segment in the plan of ``seconds[cell]``. Cost: at most about 1/√n of the solve."""
        at, chosen = self.first + cell, list[int]()
        count = len(self._cells.segments)
        for start in range(0, count, self._stride):
            stop = min(start + self._stride, count)
            rows = self._between(start, stop, at)
            for i in range(start, stop):
                base, row = rows[i + 1]
                best = inf
                for which, (extra, need, seconds) in enumerate(self._cells.segments[i]):
                    left = at - extra
                    if need <= at and left >= self._cells.least[i + 1]:
                        total = seconds + float(row[min(left - base, len(row) - 1)])
                        if total < best:
                            best, choice, then = total, which, left
                chosen.append(choice)
                at = then
        return tuple(chosen)

    def _between(self, start: int, stop: int, at: int) -> dict[int, Row]:
        """Rows start+1 … stop over the cells that a plan which enters ``start`` at ``at`` can reach."""
        rows = {stop: self._rows[stop]}
        lowest = [at]
        for i in range(start, stop):
            lowest.append(lowest[-1] - max(extra for extra, *_ in self._cells.segments[i]))
        for i in range(stop - 1, start, -1):
            rows[i] = _row(self._cells, i, rows[i + 1], lowest[i - start], at)
        return rows


def grid(items: Items, most_slack: int | None, max_work: int) -> Grid:
    """The grid up to ``most_slack``; its row is empty if nothing fits there.

    The unit is one byte if that takes at most ``max_work`` cell updates; otherwise it is what ``max_work`` affords,
    and never more than 1/(100 (n + 1)) of the slack between the least plan and the fastest. Cost: ``max_work``
    updates at about 1 ns each, or 50 n · Σ options of them if that is more; memory 4 bytes · cells · √n.
    """
    count = len(items.segments)
    top = items.enough[0] if most_slack is None else min(most_slack, items.enough[0])
    reach = max(top - min(items.least[:-1]), 1)
    wanted = 100 * (count + 1)
    affordable = min(2 * max_work // sum(len(segment) for segment in items.segments), MOST_CELLS)
    unit = -(-reach // affordable) if affordable > wanted else max(1, reach // wanted)
    loss = 0 if unit == 1 else (count + 1) * unit
    scaled, stride = _scale(items, unit), isqrt(count) + 1
    # rounded upward, the fastest plan may need more than ``top``; only a limit that was asked for cuts the rows
    high = scaled.enough[0] if most_slack is None else most_slack // unit
    if scaled.least[0] > high:
        return Grid(unit, loss, 0, np.empty(0), scaled, {}, stride)
    row: Row = (LOWEST, np.zeros(1))
    rows = {count: row}
    for i in range(count - 1, -1, -1):
        row = _row(scaled, i, row, scaled.least[i], high)
        if i % stride == 0:
            rows[i] = row
    return Grid(unit, loss, row[0], row[1], scaled, rows, stride)


def _scale(items: Items, unit: int) -> _Cells:
    segments = tuple(
        tuple((-(-item.extra // unit), -(-item.need // unit), item.seconds) for item in segment)
        for segment in items.segments
    )
    least, enough = [LOWEST], [LOWEST]
    for segment in reversed(segments):
        quickest = min(seconds for *_, seconds in segment)
        least.append(min(max(least[-1] + extra, need) for extra, need, _ in segment))
        enough.append(min(max(enough[-1] + e, need) for e, need, seconds in segment if seconds <= quickest))
    return _Cells(segments, tuple(reversed(least)), tuple(reversed(enough)))


def _row(cells: _Cells, i: int, following: Row, low: int, high: int) -> Row:
    """Seconds of segments i … n-1 at the cells ``low`` … ``high``, without those beyond which it is level.

    At least one cell is made, and the last one stands for all beyond it.
    """
    low = max(low, cells.least[i])
    high = max(min(high, cells.enough[i]), low)
    base, after = following
    best = np.full(high - low + 1, inf)
    spare = np.empty_like(best)
    last = base + len(after) - 1
    for extra, need, seconds in cells.segments[i]:
        # the following row starts where it is feasible (or at what can be reached), and is level beyond its end
        start, stop = max(low, need, base + extra), min(high, last + extra)
        if start <= stop:
            view = spare[: stop - start + 1]
            np.add(after[start - extra - base : stop - extra - base + 1], seconds, out=view)
            part = best[start - low : stop - low + 1]
            np.minimum(part, view, out=part)
        start = max(start, stop + 1)
        if start <= high:
            part = best[start - low :]
            np.minimum(part, after[-1] + seconds, out=part)
    return low, best
