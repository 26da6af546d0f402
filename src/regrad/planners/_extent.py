"""Between which amounts of memory each range of a chain changes, exact in bytes, and what solving it would cost.

The least memory of a range is a minimum over its first item of the largest of three: what the item's own moments need,
what the rest needs on top of what the item holds, and, for a span, what its contents need on top of the gradients that
are there by then. So it needs no grid, and no budget is called infeasible that has a plan. The two tables are those of
``_nested.py``; cost O(n³) simple numpy steps, less where ranges are equal one by one.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from regrad.planners._figures import NEVER, Figures, Ints, Leaf

# a row is gone through once for each end of a span, and about so often for the options and to close it
OPTION_PASSES = 8


class Extent:
    """For segments i … j-1, as a row of items (``rows[i, j]``) and as the contents of a span (``spans[i, j]``), the
    least bytes above the baseline at its entry, ``NEVER`` if there is no such span."""

    def __init__(self, figures: Figures) -> None:
        self.figures = figures
        count = len(figures.parts)
        self._later = np.array(figures.later)
        self.rows: Ints = np.full((count + 1, count + 1), NEVER, dtype=np.int64)
        self.spans: Ints = np.full((count + 1, count + 1), NEVER, dtype=np.int64)
        np.fill_diagonal(self.rows, -NEVER)
        number, members = figures.classes
        of_class: Ints = np.empty((2, len(members)), dtype=np.int64)
        made = 0
        for length in range(1, count + 1):
            here = number.diagonal(length)
            while made < len(members) and members[made][1] - members[made][0] == length:
                of_class[:, made] = self._least(*members[made])
                made += 1
            starts = np.arange(len(here))
            self.rows[starts, starts + length], self.spans[starts, starts + length] = of_class[:, here]

    @property
    def least_bytes(self) -> int:
        """The smallest budget that has a plan."""
        return max(self.figures.persistent + int(self.rows[0, len(self.figures.parts)]), self.figures.floor)

    def fits(self, start: int, stop: int, memory: int, inside: bool) -> bool:
        """Whether the range has a plan in ``memory`` bytes above its baseline."""
        return bool((self.spans if inside else self.rows)[start, stop] <= memory)

    def spread(self, top: int | None = None) -> tuple[int, int]:
        """The bytes over which all rows change, up to ``top`` each, and the same with each row as often as it is gone
        through.

        Over the unit, the first is how many cells solving takes and the second how many updates of cells.
        """
        plain = weighted = 0
        for least, enough in self._ends:
            until = enough if top is None else np.minimum(enough, top)
            changing = np.maximum(until - least, 0)
            plain += int(changing.sum())
            weighted += int((changing.astype(np.float64) * self._lengths).sum())
        return plain, weighted

    @cached_property
    def _lengths(self) -> Ints:
        starts, stops = np.array(self.figures.classes[1]).T
        lengths: Ints = stops - starts + OPTION_PASSES
        return lengths

    @cached_property
    def _ends(self) -> tuple[tuple[Ints, Ints], ...]:
        """By class, for rows of items and for spans: where they begin and where they are level."""
        starts, stops = np.array(self.figures.classes[1]).T
        found = []
        for least, enough in ((self.rows, self._enough(False)), (self.spans, self._enough(True))):
            begin = least[starts, stops]
            found.append((begin, np.where(begin < NEVER, enough[starts, stops], begin)))
        return tuple(found)

    def _enough(self, inside: bool) -> Ints:
        """For each range the bytes in which all its segments can take their fastest option."""
        parts, later = self.figures.parts, self._later
        enough: Ints = np.full_like(self.rows, -NEVER)
        outcome: Ints = np.full_like(self.rows, -NEVER)
        for i in range(len(parts) - 1, -1, -1):
            for table, leaves in ((enough, parts[i].alone), (outcome, parts[i].first if inside else parts[i].alone)):
                quickest = min((leaf.seconds for leaf in leaves), default=0.0)
                quick = [leaf for leaf in leaves if leaf.seconds <= quickest]
                needs = [
                    np.maximum(np.maximum(leaf.run, leaf.back + later[i + 1] - later), enough[i + 1] + leaf.held)
                    for leaf in quick
                ]
                if needs:
                    table[i, i + 1 :] = np.min(needs, axis=0)[i + 1 :]
        return outcome

    def _least(self, start: int, stop: int) -> tuple[int, int]:
        figures = self.figures
        part = figures.parts[start]
        last = min(stop, figures.reach[start])
        middles = slice(start + 1, min(last, stop - 1) + 1)
        run = part.boundary + np.maximum.accumulate([0, *(p.replay for p in figures.parts[start:last])])[1:]
        inner = self.spans[start, middles] + self._later[middles] - figures.later[stop]
        then = self.rows[middles, stop] + part.boundary
        split = int(np.maximum(np.maximum(inner, then), run[: len(then)]).min(initial=NEVER))
        if last < stop:
            return min(self._leaf(part.alone, start, stop), split), NEVER
        span = min(self._leaf(part.first, start, stop), split)
        return min(self._leaf(part.alone, start, stop), split, max(span, int(run[-1]))), span

    def _leaf(self, leaves: tuple[Leaf, ...], start: int, stop: int) -> int:
        gained = self.figures.later[start + 1] - self.figures.later[stop]
        after = int(self.rows[start + 1, stop])
        return min((max(leaf.run, leaf.back + gained, after + leaf.held) for leaf in leaves), default=NEVER)
