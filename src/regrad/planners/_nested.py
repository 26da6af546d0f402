"""The program over spans: for every range of the chain the least seconds as a row over memory.

Two rows for each range i … j of segments, over the bytes a above the baseline at its entry:

    row(i, j)(a)    as a row of items  min of  option       c + row(i+1, j)(a - r)
                                               span to m    span(i, m)(a - G(m, j)) + row(m, j)(a - b_i)
    span(i, j)(a)   as a span          F(i, j) + the same, its first option counted as in ``_figures.Part.first``, m < j

with G(m, j) the gradients that segments m … j-1 have made by then and F(i, j) one run of the span's forwards; a
candidate is at hand only from the memory on that its own moments need. Both terms of a span are read at the same
memory, so a row costs one addition and one minimum over memory for each m: O(n³ · cells) in all, less where ranges are
equal one by one, for these share their rows. The recursion over ranges is that of Beaumont et al. 2019 ("Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory"), with spans as items in
the place of their checkpoints, options at every leaf, and the timeline's own moments.

Memory is in cells of ``unit`` bytes, every number of bytes rounded upward. A moment of a plan is a sum of at most n
rounded numbers (what is held before it has a segment of its own each, and so have the gradients that are counted
between two depths), so the best plan of the cells for M bytes is at least as fast as the best of all plans for
``M - loss``, ``loss = (n + 1) unit``. Where the unit divides every figure nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import Chain
from regrad.core.plan import Choices
from regrad.planners._figures import NEVER, Figures, Leaf, descend, up

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds at the cells ``base`` … ``end``: infinite below, and above as at the end."""

    base: int
    end: int
    seconds: Floats
    last: float

    def at(self, cell: int) -> float:
        """The seconds with ``cell`` cells of memory."""
        return inf if cell < self.base else float(self.seconds[min(cell, self.end) - self.base])


NOTHING = Row(-NEVER, -NEVER, np.zeros(1), 0.0)
IMPOSSIBLE = Row(NEVER, NEVER, np.full(1, inf), inf)


class Nested:
    """The rows of a chain in cells of ``unit`` bytes; made by solving all of it.

    unit, loss      as above
    first, seconds  the row of the whole chain, as far as ``most_bytes`` if that is given; empty if nothing fits
    """

    def __init__(self, chain: Chain, figures: Figures, unit: int, most_bytes: int | None) -> None:
        self.chain, self.figures, self.unit = chain, figures, unit
        count = len(figures.parts)
        self.loss = figures.loss_bytes(unit)
        # ``_spans`` by start and ``_rows`` by stop, so that the two terms of a span lie side by side for every m
        self._spans = [[IMPOSSIBLE] * (count + 1) for _ in range(count)]
        self._rows = [[IMPOSSIBLE] * stop + [NOTHING] for stop in range(count + 1)]
        # base and end of the same rows, as arrays: [0] of ``_spans``, [1] of ``_rows``
        self._extents = np.full((2, 2, count + 1, count + 1), NEVER, dtype=np.int64)
        self._later = np.array(figures.later)
        self._needs = [self._need(start) for start in range(count)]
        self._top = _enough(figures, unit)
        if most_bytes is not None:
            self._top = min(self._top, most_bytes // unit)
        if self._top >= 0:
            self._solve()
        whole = self._rows[count][0]
        self.first, self.seconds = whole.base, whole.seconds[: 0 if whole is IMPOSSIBLE else None]

    def price(self, start: int, stop: int, cells: int, inside: bool) -> float:
        """The least seconds of segments ``start`` … ``stop - 1`` in ``cells``; see :data:`_figures.Price`."""
        if not inside:
            return self._rows[stop][start].at(cells)
        return self._spans[start][stop].at(cells)

    def choices(self, cell: int) -> Choices:
        """The plan of ``seconds[cell]``. Cost: O(n²) looks at rows."""
        return descend(self.chain, self.figures, self.unit, self.first + cell, self.price)

    def _need(self, start: int) -> NDArray[np.int64]:
        """For each end of a span that begins at ``start`` the cells in which its forwards run with nothing kept."""
        parts = self.figures.parts[start : self.figures.reach[start]]
        replay = np.maximum.accumulate([part.replay for part in parts])
        return -(-(self.figures.parts[start].boundary + replay) // self.unit)

    def _solve(self) -> None:
        count = len(self.figures.parts)
        number, _ = self.figures.classes
        made: list[tuple[Row, Row]] = []
        best = np.empty(self._top + 1)
        for length in range(1, count + 1):
            for start, which in enumerate(number.diagonal(length).tolist()):
                if which == len(made):
                    made.append(self._make(start, start + length, best))
                stop = start + length
                row, span = self._rows[stop][start], self._spans[start][stop] = made[which]
                self._extents[0, :, start, stop] = span.base, span.end
                self._extents[1, :, stop, start] = row.base, row.end

    def _make(self, start: int, stop: int, best: Floats) -> tuple[Row, Row]:
        """The range's row and its span's, from those of shorter ranges."""
        part, reach = self.figures.parts[start], self.figures.reach[start]
        high = self._high(part.alone, start, stop)
        high_inside = self._high(part.first, start, stop) if reach >= stop else high
        best[: max(high, high_inside) + 1] = inf
        self._offer_spans(start, stop, best, max(high, high_inside))
        span = IMPOSSIBLE
        if reach >= stop:
            forwards = self.figures.span_seconds(start, stop)
            span = self._close(part.first, start, stop, best[: high_inside + 1].copy(), forwards)
            replay = max(p.replay for p in self.figures.parts[start:stop])
            _offer(best[: high + 1], max(span.base, up(part.boundary + replay, self.unit)), span, 0, 0.0)
        return self._close(part.alone, start, stop, best[: high + 1].copy()), span

    def _high(self, leaves: tuple[Leaf, ...], start: int, stop: int) -> int:
        """The cell from which on every segment can take its fastest option, or the top if that comes first."""
        quickest = min(leaf.seconds for leaf in leaves)
        after = self._rows[stop][start + 1].end
        quick = (leaf for leaf in leaves if leaf.seconds <= quickest)
        cells = min(max(self._low(leaf, start, stop), after + up(leaf.held, self.unit)) for leaf in quick)
        return min(cells, self._top)

    def _low(self, leaf: Leaf, start: int, stop: int) -> int:
        later = self.figures.later
        return up(max(leaf.run, leaf.back + later[start + 1] - later[stop]), self.unit)

    def _close(self, leaves: tuple[Leaf, ...], start: int, stop: int, best: Floats, seconds: float = 0.0) -> Row:
        """``best``, which has the spans, with the options too and ``seconds`` on top, as a row."""
        after = self._rows[stop][start + 1]
        for leaf in leaves:
            held = up(leaf.held, self.unit)
            low = max(self._low(leaf, start, stop), after.base + held)
            _offer(best, low, after, held, leaf.seconds)
        np.minimum.accumulate(best, out=best)  # more memory is never worse; candidates were entered where they begin
        base = int(np.isfinite(best).argmax())
        if best[base] == inf:
            return IMPOSSIBLE
        found = best[base:] + seconds
        return Row(base, len(best) - 1, found, float(found[-1]))

    def _offer_spans(self, start: int, stop: int, best: Floats, high: int) -> None:
        """Every span that begins the range and ends before it does, with the row that follows."""
        last = min(stop - 1, self.figures.reach[start])
        inner, then = self._extents[0, :, start, start + 1 : last + 1], self._extents[1, :, stop, start + 1 : last + 1]
        gained = -((self.figures.later[stop] - self._later[start + 1 : last + 1]) // self.unit)
        boundary = up(self.figures.parts[start].boundary, self.unit)
        low, low_then = inner[0] + gained, then[0] + boundary
        end, end_then = inner[1] + gained, then[1] + boundary
        at = np.maximum(np.maximum(low, low_then), self._needs[start][: last - start])
        near, far = np.minimum(np.minimum(end, end_then), high), np.minimum(np.maximum(end, end_then), high)
        useful = np.flatnonzero(at <= high)
        # the loop is most of what solving takes: plain numbers, and two numpy steps for each stretch of cells
        columns = (start + 1 + useful, at[useful], near[useful] + 1, far[useful] + 1, low[useful], low_then[useful])
        spans, rows, minimum = self._spans[start], self._rows[stop], np.minimum
        for middle, cell, until_near, until_far, zero, zero_then in zip(*(c.tolist() for c in columns), strict=True):
            span, row = spans[middle], rows[middle]
            if cell < until_near:  # both change from cell to cell
                part, inside = best[cell:until_near], span.seconds[cell - zero : until_near - zero]
                minimum(part, inside + row.seconds[cell - zero_then : until_near - zero_then], out=part)
                cell = until_near
            elif cell >= until_far:  # neither does, and ``_close`` carries the value on
                best[cell] = min(best[cell], span.last + row.last)
                continue
            if cell < until_far:  # one of them still does
                part = best[cell:until_far]
                if len(span.seconds) + zero > until_near:
                    minimum(part, span.seconds[cell - zero : until_far - zero] + row.last, out=part)
                else:
                    minimum(part, row.seconds[cell - zero_then : until_far - zero_then] + span.last, out=part)


def _offer(best: Floats, at: int, row: Row, shift: int, seconds: float) -> None:
    """``seconds`` and those of ``row`` in ``shift`` cells less, from the cell ``at`` on, where they are better."""
    if at >= len(best):
        return
    low = row.base + shift
    stop = min(row.end + shift + 1, len(best))
    if at < stop:
        part = best[at:stop]
        np.minimum(part, row.seconds[at - low : stop - low] + seconds, out=part)
    else:
        best[at] = min(best[at], row.last + seconds)


def _enough(figures: Figures, unit: int) -> int:
    """The cells in which every segment can take its fastest option."""
    cells = -NEVER
    for i in range(len(figures.parts) - 1, -1, -1):
        quickest = min(leaf.seconds for leaf in figures.parts[i].alone)
        cells = min(
            max(up(leaf.run, unit), up(leaf.back + figures.later[i + 1], unit), cells + up(leaf.held, unit))
            for leaf in figures.parts[i].alone
            if leaf.seconds <= quickest
        )
    return cells
