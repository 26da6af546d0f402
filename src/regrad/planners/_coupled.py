"""The solver of one level where segments share logs: a staircase of (least slack, seconds) for every joint state.

As ``_staircase.py``, with the states of ``_transitions.py`` beside the slack. Slack is counted as in ``_items.py``. To
the byte while the staircases stay small; otherwise slack is rounded upward to multiples of a unit, at most 1/(100 (n +
1 + logs)) of what the fastest plan needs, which loses at most that for every number that is added up: (n + 1 + logs)
units, 1 % in all. The least budget is exact always.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import Chain
from regrad.planners._items import LOWEST, checked_need
from regrad.planners._staircase import Floats, Ints, falling
from regrad.planners._transitions import Transitions

Indices = NDArray[np.int32]
_Back = tuple[tuple[tuple[Indices, Indices], ...], ...]  # by segment and joint state: ways, and points they came from


@dataclass(frozen=True, slots=True)
class _Way:
    """A step with its figures in slack: see ``_items.Item``; ``lift`` is what the log of a first replay takes."""

    option: int
    later: int
    state: int
    extra: int
    need: int
    lift: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Coupled:
    """The points of the whole chain, as of ``_staircase.Staircase``; ``least`` is the exact least slack."""

    slack: Ints
    seconds: Floats
    unit: int
    loss: int
    least: int
    _ways: tuple[tuple[_Way, ...], ...]
    _least: tuple[tuple[int, ...], ...]
    _back: _Back

    def rebuild(self, point: int) -> tuple[int, ...]:
        """The option of every segment in the plan of a point."""
        chosen, state = [], 0
        for ways, back in zip(self._ways, self._back, strict=True):
            which, parent = back[state]
            way = ways[int(which[point])]
            point, state = int(parent[point]), way.later
            chosen.append(way.option)
        return tuple(chosen)

    def frugal(self) -> tuple[int, ...]:
        """A plan for the least slack: from the first segment on the fastest step that leaves a way."""
        slack, state, chosen = self.least, 0, []
        for i, ways in enumerate(self._ways):
            fits = [w for w in ways if w.state == state and _least_of(w, self._least[i + 1]) <= slack]
            way = min(fits, key=lambda w: (w.seconds, w.extra + w.lift, w.need))
            slack, state = slack - way.lift - way.extra, way.later
            chosen.append(way.option)
        return tuple(chosen)


def coupled(chain: Chain, moves: Transitions, most_slack: int | None, max_points: int) -> Coupled:
    """The staircase up to ``most_slack``, exact if no joint state has more than ``max_points`` points.

    Cost: O(steps · points) time, with about 100 n points at most on the grid, and 8 bytes for each point kept.
    """
    ways = _ways_of(chain, moves)
    least, fastest = _extremes(ways, moves.counts)
    solved = _solve(ways, moves.counts, least, most_slack, max_points, 1)
    unit, terms = 1, len(ways) + 1 + moves.variables
    if solved is None:
        top = fastest if most_slack is None else min(fastest, most_slack)
        unit = max(top // (100 * terms), 1)
        rounded = tuple(tuple(_rounded(way, unit) for way in here) for here in ways)
        solved = _solve(rounded, moves.counts, least, most_slack, None, unit)
    assert solved is not None  # only a limit on points ends without an answer
    slack, seconds, back = solved
    return Coupled(slack, seconds, unit, 0 if unit == 1 else terms * unit, least[0][0], ways, least, back)


def _ways_of(chain: Chain, moves: Transitions) -> tuple[tuple[_Way, ...], ...]:
    held, found = 0, []
    for segment, later, steps in zip(chain.segments, chain.later_gradient_bytes, moves.steps, strict=True):
        minimum = min(option.retained_bytes for option in segment.options)
        here = []
        for s in steps:
            o = segment.options[s.option]
            need = checked_need(segment.name, o, held, later, s.forward, s.backward)
            extra, seconds = o.retained_bytes - minimum, o.added_seconds + s.seconds
            here.append(_Way(s.option, s.later, s.state, extra, need, s.log, seconds))
        found.append(tuple(_undominated(here)))
        held += minimum
    return tuple(found)


def _undominated(ways: list[_Way]) -> list[_Way]:
    """Of the ways between two joint states those that no other one matches in all; of equal ones the first stays."""
    best: dict[tuple[int, int], list[_Way]] = {}
    for way in sorted(ways, key=lambda w: (w.extra, w.need, w.lift, w.seconds)):
        kept = best.setdefault((way.later, way.state), [])
        if not any(o.need <= way.need and o.lift <= way.lift and o.seconds <= way.seconds for o in kept):
            kept.append(way)
    return [way for kept in best.values() for way in kept]


def _rounded(way: _Way, unit: int) -> _Way:
    extra, need, lift = (-(-size // unit) * unit for size in (way.extra, way.need, way.lift))
    return _Way(way.option, way.later, way.state, extra, need, lift, way.seconds)


def _least_of(way: _Way, after: tuple[int, ...]) -> int:
    return max(after[way.later] + way.extra, way.need) + way.lift


def _extremes(ways: tuple[tuple[_Way, ...], ...], counts: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The least slack of every suffix and joint state, and the least slack of the fastest plan of all."""
    least: list[tuple[int, ...]] = [(LOWEST,)]
    fastest: list[tuple[float, int]] = [(0.0, LOWEST)]
    for here, count in zip(reversed(ways), reversed(counts[:-1]), strict=True):
        low, quick = [-LOWEST] * count, [(inf, 0)] * count
        for way in here:
            low[way.state] = min(low[way.state], _least_of(way, least[-1]))
            seconds, slack = fastest[way.later]
            new = seconds + way.seconds, max(slack + way.extra, way.need) + way.lift
            quick[way.state] = min(quick[way.state], new)
        least.append(tuple(low))
        fastest = quick
    return tuple(reversed(least)), fastest[0][1]


def _solve(
    ways: tuple[tuple[_Way, ...], ...],
    counts: tuple[int, ...],
    least: tuple[tuple[int, ...], ...],
    most_slack: int | None,
    max_points: int | None,
    unit: int,
) -> tuple[Ints, Floats, _Back] | None:
    following: list[tuple[Ints, Floats]] = [(np.array([LOWEST // unit * unit]), np.zeros(1))]
    back: list[tuple[tuple[Indices, Indices], ...]] = []
    for i in range(len(ways) - 1, -1, -1):
        offers: list[list[tuple[Ints, Floats, int, int]]] = [[] for _ in range(counts[i])]
        for which, way in enumerate(ways[i]):
            offers[way.state].append((*_lifted(way, following[way.later], most_slack), which))
        made = [_merged(offer) for offer in offers]
        if max_points is not None and any(len(one[0]) > max_points for one in made):
            return None
        following = [(slack, seconds) for slack, seconds, *_ in made]
        back.append(tuple((which, parent) for *_, which, parent in made))
    return *following[0], tuple(reversed(back))


def _lifted(way: _Way, row: tuple[Ints, Floats], most_slack: int | None) -> tuple[Ints, Floats, int]:
    """The points of ``row`` with ``way`` before them, and the first of them that is left: one is enough below need."""
    slack, seconds = row
    first = max(int(np.searchsorted(slack, way.need - way.extra, side="right")) - 1, 0)
    lifted = np.maximum(slack[first:] + way.extra, way.need) + way.lift
    stop = len(lifted) if most_slack is None else int(np.searchsorted(lifted, most_slack, side="right"))
    return lifted[:stop], seconds[first : first + stop] + way.seconds, first


def _merged(offers: list[tuple[Ints, Floats, int, int]]) -> tuple[Ints, Floats, Indices, Indices]:
    """The points of all offers (slack, seconds, first parent, way) that none of them beats."""
    if not offers:
        nothing: Indices = np.empty(0, dtype=np.int32)
        return np.empty(0, dtype=np.int64), np.empty(0), nothing, nothing
    slack, seconds = np.concatenate([o[0] for o in offers]), np.concatenate([o[1] for o in offers])
    which = np.concatenate([np.full(len(o[0]), o[3], dtype=np.int32) for o in offers])
    parent = np.concatenate([np.arange(o[2], o[2] + len(o[0]), dtype=np.int32) for o in offers])
    order = np.argsort(slack, kind="stable")
    kept = order[falling(slack[order], seconds[order])]
    return slack[kept], seconds[kept], which[kept], parent[kept]
