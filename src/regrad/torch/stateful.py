"""A profile's problem with every way to bring large state back, so that a planner chooses the engine of each segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from regrad.core.chain import RECOMPUTE, Chain, Problem, Segment
from regrad.core.simulate_trace import Range, TraceArithmetic
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT, LogEntry, StateCost, StateVariable
from regrad.core.state_options import with_states
from regrad.core.trace import Call
from regrad.torch.chain import Piece, build_chain
from regrad.torch.state_pieces import total

if TYPE_CHECKING:
    from regrad.torch.state import LargeState, States

ENGINES = (SNAPSHOT, READ_SET, JOURNAL)
"""What regions run. None of them stays rolled back (docs/decisions/0010-staying-rolled-back.md)."""
MOST_OPTIONS = 64
"""Of one segment: local search on the trace tries each."""


def stateful(
    problem: Problem,
    arithmetic: TraceArithmetic,
    pieces: tuple[Piece, ...],
    ranges: Mapping[tuple[str, int], Range],
    states: States,
) -> Problem:
    """``problem`` with an option for each combination of engines; the problem itself where no segment has a choice.

    Option ``recompute`` stays, with the usual engine of each state. Cost: one more reading of the trace's levels.
    """
    calls = {i: states.call(piece.module, piece.call) for i, piece in enumerate(pieces) if piece.module}
    at = {call.start: i for i, call in calls.items() if call is not None}
    again = {i: call for i, call in calls.items() if call is not None and problem.chain.segments[i].can(RECOMPUTE)}
    named = [state for state in states.large.values() if state.attribute and state.writers]
    variables = [variable for state in named if (variable := _variable(state, states, at, again)) is not None]
    if not variables:
        return problem
    bare = {
        key: replace(one, state=states.copies(call, bare=True))
        for key, one in ranges.items()
        if (call := states.call(*key)) is not None
    }
    judged = [(piece.module, piece.call, piece.reason) for piece in pieces if piece.module]
    chain, _ = build_chain(arithmetic, judged, bare)
    usual = {state.name: states.usual(state) for state in named}
    expanded = with_states(_swapped(problem.chain, chain), variables, ENGINES, usual=usual, most_options=MOST_OPTIONS)
    return replace(problem, shape=expanded, states=tuple(variables))


def _swapped(chain: Chain, bare: Chain) -> Chain:
    """``chain`` with the option ``recompute`` of ``bare`` where it has one."""
    return replace(chain, segments=tuple(map(_segment, chain.segments, bare.segments)))


def _segment(segment: Segment, bare: Segment) -> Segment:
    options = tuple(bare.option(RECOMPUTE) if one.name == RECOMPUTE else one for one in segment.options)
    return replace(segment, options=options)


def _variable(
    state: LargeState, states: States, at: Mapping[int, int], again: Mapping[int, Call]
) -> StateVariable | None:
    """``state`` as planners see it: what segments leave in its log, and what engines charge; None if none needs it."""
    users = [i for i, call in again.items() if any(one is state for one in states.touched(call))]
    if not users:
        return None
    entries, place = [], 0
    for writer in sorted(state.writers):
        for piece in state.writers[writer]:
            # where it lies is not known; what is not all of it counts as apart from the others while there is room
            start = 0 if piece.full or place + piece.payload_bytes > state.nbytes else place
            entries.append(LogEntry(at[writer], state.name, start, piece.payload_bytes, piece.header_bytes))
            place = start + piece.payload_bytes if not piece.full else place
    costs = [cost for i in users for cost in _costs(i, again[i], state, states)]
    return StateVariable(
        state.name, state.nbytes, tuple(entries), touched_by=tuple(users), costs=tuple(costs),
        bandwidth=states.costs.bandwidth(sum(entry.payload_bytes for entry in entries) // len(entries)),
    )  # fmt: skip


def _costs(segment: int, call: Call, state: LargeState, states: States) -> list[StateCost]:
    """What engines charge ``segment`` alone, in seconds as on the trace; a read set of as much as the whole is none.

    The log's moves are those of the variable's bandwidth.
    """
    together = sum(bool(other.attribute) for other in states.touched(call))
    watch = states.watch_seconds(call) / max(1, together)
    found = [StateCost(segment, JOURNAL, 0, 0, seconds=watch)]
    reads = states.reads(call, state)
    engines = (SNAPSHOT, READ_SET) if reads is not None and total(reads) < state.nbytes else (SNAPSHOT,)
    for engine in engines:
        copy = states.own(call, state, engine)
        seconds = copy.take_seconds + copy.replay_seconds + (watch if engine == READ_SET else 0.0)
        found.append(StateCost(segment, engine, copy.bytes, copy.present_bytes, seconds=seconds))
    return found
