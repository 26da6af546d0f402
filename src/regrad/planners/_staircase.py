"""The exact solver: for every suffix of the chain the staircase of (least slack, seconds), to the byte.

The staircase of a suffix is the set of its plans that no other plan matches in slack and seconds. It is made from the
next one by shifting it once per item, lifting it to what the item needs, and dropping what is beaten: three numpy
passes over a few thousand points. It can grow with every segment, so a limit stops it; then ``_grid`` takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrad.planners._items import LOWEST, Items

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Staircase:
    """The points of the whole chain, slack ascending and seconds descending, and the way back to their plans."""

    slack: Ints
    seconds: Floats
    _back: tuple[tuple[NDArray[np.int32], NDArray[np.int32]], ...]

    def rebuild(self, point: int) -> tuple[int, ...]:
        """The item of every segment in the plan of a point."""
        chosen = []
        for which, parent in self._back:
            chosen.append(int(which[point]))
            point = int(parent[point])
        return tuple(chosen)


def staircase(items: Items, most_slack: int | None, max_points: int) -> Staircase | None:
    """The staircase up to ``most_slack``; None if one of a suffix has more than ``max_points`` points.

    Cost: O(n · options · max_points) time and 8 bytes · n · max_points at worst.
    """
    slack, seconds = np.array([LOWEST], dtype=np.int64), np.zeros(1)
    back = []
    for segment in reversed(items.segments):
        parts = []
        for which, item in enumerate(segment):
            # every point below the item's own need is lifted to it, and the fastest of them is enough
            first = max(int(np.searchsorted(slack, item.need - item.extra, side="right")) - 1, 0)
            lifted = np.maximum(slack[first:] + item.extra, item.need)
            stop = len(lifted) if most_slack is None else int(np.searchsorted(lifted, most_slack, side="right"))
            parts.append((lifted[:stop], seconds[first : first + stop] + item.seconds, which, first))
        merged, times = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
        order = np.argsort(merged, kind="stable")
        kept = order[falling(merged[order], times[order])]
        if len(kept) > max_points:
            return None
        slack, seconds = merged[kept], times[kept]
        which_of = np.concatenate([np.full(len(p[0]), p[2], dtype=np.int32) for p in parts])
        parent_of = np.concatenate([np.arange(p[3], p[3] + len(p[0]), dtype=np.int32) for p in parts])
        back.append((which_of[kept], parent_of[kept]))
    return Staircase(slack, seconds, tuple(reversed(back)))


def falling(slack: Ints, seconds: Floats) -> NDArray[np.bool_]:
    """Which points are faster than every point before them and the last of their slack to be so; slack is sorted."""
    keep = np.ones(len(slack), dtype=np.bool_)
    if len(slack) > 1:
        keep[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1]
        survivors = np.flatnonzero(keep)
        same = slack[survivors[1:]] == slack[survivors[:-1]]
        keep[survivors[:-1][same]] = False
    return keep
