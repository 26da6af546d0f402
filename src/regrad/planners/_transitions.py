"""What couples segments that replay from one shared log, put so that a program over suffixes reads it exactly.

For each state variable let a be its first segment that is replayed from the log, E_k the bytes of the entries of writer
k, T = Σ_{k>=a} E_k, tail(i) = Σ_{k>i} E_k. While segments i >= a are on their way the log holds

    forward of i    T - tail(i)
    backward of i   T, or T - tail(s) once replays stay back and the last of them, s > i, is done

and for i < a nothing. So against a baseline of M - T none of it depends on a: a program that goes from the last segment
to the first carries, for each variable, only whether a first replay is still to come, and adds T where it decides that
this segment is the one. Where replays stay back it carries s as well, since redo(s) bytes stay aside until the next one.
A variable matters only from its first possible replay to the last segment that writes it or can be replayed: outside of
this window its states are one. Exact, with as many joint states as the windows that overlap multiply to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from regrad.core.chain import Option, Problem
from regrad.core.state import Moves, StateUse, StateVariable

CLOSED, OPEN = -1, -2  # no replay to come; one to come, from the present; s >= 0: one to come, from where s left it
MOST_STATES = 4_096
MOST_STEPS = 1_000_000
Joint = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A way through one segment: its option, and the joint states, by number, after and before it.

    Bytes beyond the option's own: ``forward`` and ``backward`` at its moments, ``aside`` of those put aside in its
    backward, and ``log``, T where this is a first replay. ``seconds`` are the log's moves.
    """

    option: int
    later: int
    state: int
    forward: int = 0
    backward: int = 0
    aside: int = 0
    log: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Transitions:
    """``steps[i]`` of every segment, ``counts[i]`` joint states before it (one before the first, one after the last)."""

    steps: tuple[tuple[Step, ...], ...]
    counts: tuple[int, ...]
    variables: int


class _Log:
    """One variable as this program sees it."""

    def __init__(self, variable: StateVariable, problem: Problem) -> None:
        self.variable = variable
        uses = [
            [use for o in s.options for use in o.logs if use.state == variable.name] for s in problem.chain.segments
        ]
        users = [i for i, found in enumerate(uses) if found]
        count = len(uses)
        self.first = min(users, default=count)
        self.last = max([*users, *(e.writer for e in variable.entries)], default=-1) if users else -1
        # by i: bytes of all entries, and of their payloads, whose writer is i or later
        self._totals, self._payloads = [0] * (count + 1), [0] * (count + 1)
        for entry in variable.entries:
            self._totals[entry.writer] += entry.total_bytes
            self._payloads[entry.writer] += entry.payload_bytes
        for i in range(count - 1, -1, -1):
            self._totals[i] += self._totals[i + 1]
            self._payloads[i] += self._payloads[i + 1]
        self.redo = {i: variable.redo_bytes(i) for i in users}

    def ways(self, i: int, state: int, use: StateUse | None) -> Iterator[tuple[int, int, int, int, int, float]]:
        """Through segment ``i`` from ``state`` after it: the state before it, and the figures of a :class:`Step`."""
        if state == CLOSED:
            if use is None:
                yield CLOSED, 0, 0, 0, 0, 0.0
            if i != self.last:
                return
            state = OPEN
        aside, passed = (self.redo[state], self._totals[state + 1]) if state >= 0 else (0, 0)
        if use is None:
            if i > self.first and not (state >= 0 and i in self.variable.present_readers):
                yield state, -self._totals[i + 1], aside - passed, aside, 0, 0.0
            return
        if state >= 0 and not use.stays_back:
            return
        bandwidth, redo = self.variable.bandwidth, self.redo[i]
        undone = self._payloads[i] - (self._payloads[state + 1] if state >= 0 else 0)
        moves = Moves(redo - aside, undone) if use.stays_back else Moves(redo, undone + redo)
        figures = -self._totals[i + 1], redo - passed, redo
        if i > self.first:
            yield i if use.stays_back else OPEN, *figures, 0, bandwidth.seconds(moves)
        returning = Moves(self._payloads[i], redo if use.stays_back else 0)
        yield CLOSED, *figures, self._totals[i], bandwidth.seconds(moves + returning)


def transitions(problem: Problem) -> Transitions | None:
    """Every way through every segment; None beyond 4,096 joint states of one segment or a million steps in all."""
    logs = [log for log in (_Log(v, problem) for v in problem.states) if log.last >= 0]
    known: dict[Joint, int] = {(CLOSED,) * len(logs): 0}
    steps: list[tuple[Step, ...]] = []
    counts, total = [1], 0
    for i in range(len(problem.chain) - 1, -1, -1):
        here: dict[Joint, int] = {}
        made: list[Step] = []
        for joint, later in known.items():
            for which, option in enumerate(problem.chain.segments[i].options):
                for before, figures in _through(logs, i, joint, option):
                    made.append(Step(which, later, here.setdefault(before, len(here)), *figures))
            total += len(problem.chain.segments[i].options)
            if len(here) > MOST_STATES or total > MOST_STEPS or len(made) > MOST_STEPS:
                return None
        known = here
        steps.append(tuple(made))
        counts.append(len(here))
    return Transitions(tuple(reversed(steps)), tuple(reversed(counts)), len(logs))


def _through(
    logs: list[_Log], i: int, joint: Joint, option: Option
) -> Iterator[tuple[Joint, tuple[int, int, int, int, float]]]:
    uses = {use.state: use for use in option.logs}
    ways = [log.ways(i, state, uses.get(log.variable.name)) for log, state in zip(logs, joint, strict=True)]
    for combination in product(*ways):
        forward = sum(way[1] for way in combination)
        backward, aside = sum(way[2] for way in combination), sum(way[3] for way in combination)
        log, seconds = sum(way[4] for way in combination), sum(way[5] for way in combination)
        yield tuple(way[0] for way in combination), (forward, backward, aside, log, seconds)
