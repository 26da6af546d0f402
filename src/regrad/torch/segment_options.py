"""What segments of the chain may do under a policy, and what they may do beside being kept or run again as a whole.

Beside those two a segment has "pack" (all that it saves and that can be packed), "offload" (all that can be moved at all)
and up to six "ranges": the best sets of ranges and moves inside it for rising prices of a byte, one front for all segments
that do the same. As for the other options, bytes are those of a step in which every segment that has an option takes it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from regrad.core.chain import KEEP, RANGES, RECOMPUTE, Option, Problem
from regrad.core.plan import Choices, leaves
from regrad.core.simulate_moves import ELSEWHERE, PACKING, Movable
from regrad.core.simulate_tape import TapeRange
from regrad.planners.tape_search import TapeSearch, Way
from regrad.torch.chain import Cut, cut, read_levels
from regrad.torch.move_plan import moved_in
from regrad.torch.policy import Policy

if TYPE_CHECKING:
    from regrad.torch.profile import Profile

PACK, OFFLOAD = "pack", "offload"
MOST_RANGES, _RATES = 6, 12
Part = tuple[int, str]
"""A segment and one of its options."""


def restricted(source: Profile, policy: Policy) -> Problem:
    """The problem in which segments that a policy keeps can only be kept."""
    problem, calls = source.problem, {(call.module, call.count): call for call in source.base.trace.calls}
    segments = []
    for segment, piece in zip(problem.chain.segments, source.pieces, strict=True):
        reason = segment.reason or ("" if policy.recompute else "the policy recomputes nothing")
        if not reason and piece.module and policy.keep:
            call = calls[piece.module, piece.call]
            numbers = {operation.torch_call for operation in source.base.trace.operations[call.start : call.stop]}
            kept = sorted({source.base.calls[at] for at in numbers if at >= 0 and policy.keeps(source.base.calls[at])})
            reason = f"the policy keeps {', '.join(kept)} in it" if kept else ""
        options = (segment.option(KEEP),) if reason else segment.options
        segments.append(replace(segment, options=options, reason=reason))
    return replace(problem, shape=replace(problem.chain, segments=tuple(segments)))


@dataclass(frozen=True)
class Parts:
    """A problem whose segments have the finer options too, the search that they are of, and what each of them does."""

    problem: Problem
    search: TapeSearch
    ways: dict[Part, Way]

    def way(self, plan: Choices) -> Way | None:
        """The ranges and moves of a plan of one level; None if it takes none of the finer options, or has spans."""
        if any(choice.is_span for choice in plan):
            return None
        taken = [(leaf.start, leaf.option) for leaf in leaves(plan) if leaf.option != KEEP]
        if all(option == RECOMPUTE for _, option in taken):
            return None
        ways = [self.ways[part] for part in taken]
        return tuple(one for ranges, _ in ways for one in ranges), tuple(one for _, moves in ways for one in moves)


def parts_of(source: Profile, search: TapeSearch) -> Parts | None:
    """The finer options of a profile's segments; None where there are none. Cost: a few passes over the trace."""
    trace = source.arithmetic.trace
    cuts = cut(trace, [(piece.module, piece.call, piece.reason) for piece in source.pieces if piece.module])
    ways: dict[Part, Way] = {}
    for index, part in enumerate(cuts):
        ways.update({(index, name): way for name, way in _ways(search, part).items()})
    names = list(dict.fromkeys(name for _, name in ways if name != RECOMPUTE))
    if not names:
        return None
    options: list[list[Option]] = []
    for index, segment in enumerate(source.chain.segments):
        # beside finer options a segment runs again as one range, or not at all
        whole = segment.can(RECOMPUTE) and (index, RECOMPUTE) in ways
        options.append([one for one in segment.options if one.name == KEEP or (one.name == RECOMPUTE and whole)])
    for name in names:
        _read(source, search, cuts, name, ways, options)
    segments = tuple(
        replace(segment, options=tuple(found)) for segment, found in zip(source.chain.segments, options, strict=True)
    )
    return Parts(replace(source.problem, shape=replace(source.chain, segments=segments), states=()), search, ways)


def _read(
    source: Profile, search: TapeSearch, cuts: list[Cut], name: str, ways: dict[Part, Way], options: list[list[Option]]
) -> None:
    """Add the option ``name`` to every segment that has it, with its figures."""
    taken = {index: ways[index, name] for index in range(len(cuts)) if (index, name) in ways}
    priced = search.price(
        (one for ranges, _ in taken.values() for one in ranges), (one for _, moves in taken.values() for one in moves)
    )
    readings, _ = read_levels(source.arithmetic, search.levels(priced.ranges, priced.moves), cuts)
    for index, (ranges, moves) in taken.items():
        now, part = readings[index], cuts[index]
        seconds = now.seconds + moved_in(source.arithmetic, moves, part.start, part.stop).seconds
        options[index].append(
            Option(name, now.retained, now.transient, now.forward, added_seconds=seconds, recomputes=bool(ranges))
        )


def _ways(search: TapeSearch, part: Cut) -> dict[str, Way]:
    """The finer options of one piece by name; as RECOMPUTE the piece as one range, where it can be one."""
    starts = [first for first, _ in search.calls]
    start, stop = bisect_left(starts, part.start), bisect_left(starts, part.stop)
    inside = [offer.move for offer in search.offers if start <= offer.call < stop]
    found: dict[str, Way] = {}
    packing = tuple(one for one in inside if one.how in PACKING)
    if packing:
        found[PACK] = (), packing
    if any(one.how == ELSEWHERE for one in inside):
        found[OFFLOAD] = (), _one_each(inside)
    if search.recompute and part.piece.module:
        if not search.problem(part.start, part.stop):
            found[RECOMPUTE] = (TapeRange(part.start, part.stop),), ()
        front = _front(search, start, stop)
        found.update({f"{RANGES} {number}": way for number, way in enumerate(front, 1)})
    return found


def _one_each(moves: list[Movable]) -> tuple[Movable, ...]:
    """One move a storage, out of the way rather than packed."""
    return tuple({one.storage: one for one in sorted(moves, key=lambda one: one.how == ELSEWHERE)}.values())


def _front(search: TapeSearch, start: int, stop: int) -> list[Way]:
    """The best sets of ranges among calls ``start`` … ``stop - 1``, with moves beside them, by rising seconds."""
    whole = (search.calls[start][0], search.calls[stop - 1][1]) if start < stop else (0, 0)
    rates = sorted(
        {offer.seconds / offer.freed_bytes for offer in search.offers if start <= offer.call < stop}
        | {
            found.seconds / found.freed_bytes
            for first in range(start, stop)
            for last in range(first + 1, stop + 1)
            if (found := search.stretch(first, last)) is not None
        }
    )
    ways: dict[Way, None] = {}
    for step in range(min(_RATES, len(rates))):
        way = search.best_at(
            rates[(step + 1) * len(rates) // min(_RATES, len(rates)) - 1] * 1.0001 + 1e-18, start, stop
        )
        if way[0] and (len(way[0]), way[0][0].start, way[0][0].stop) != (1, *whole):
            ways[way] = None
    front = list(ways)
    spread = (len(front) - 1) / (MOST_RANGES - 1)
    return [front[round(number * spread)] for number in range(MOST_RANGES)] if len(front) > MOST_RANGES else front
