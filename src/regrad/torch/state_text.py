"""What a plan says of state: by which engine each segment brings it back, what that holds and moves, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from regrad.core.chain import KEEP
from regrad.core.plan import Choices, Solution, StatePlan, Status, leaves, one_level
from regrad.core.simulate_trace import StateCopy
from regrad.core.state import JOURNAL, READ_SET
from regrad.core.text import without_numbers
from regrad.core.trace import Call
from regrad.core.units import format_bytes
from regrad.planners.advice import Finding, journalling
from regrad.planners.base import Priced
from regrad.torch.state_pieces import total

if TYPE_CHECKING:
    from regrad.torch.describe import Found
    from regrad.torch.profile import Profile

LOG, OWN = "log", "own"


def state_plans(source: Profile, index: int, options: tuple[str, ...]) -> tuple[StatePlan, ...]:
    """What the engine keeps of each state that a recomputed segment finds, or that a kept one overwrites for others.

    Of a log each segment states what it puts in itself, so that the bytes of all segments add up to the log.
    """
    piece = source.pieces[index]
    call = source.states.call(piece.module, piece.call) if piece.module else None
    if call is None:
        return ()
    logs = {copy.key[1]: copy for copy in source.logs_of(index, options)}
    if options[index] == KEEP:
        return tuple(StatePlan(one.name, one.engine, one.bytes, one.bytes, True) for one in logs.values())
    chosen = source.engines(index, options[index])
    groups: dict[tuple[str, int], list[StateCopy]] = {}
    for copy in source.range_by(index, options[index]).state:
        kind = copy.key[0] if copy.key[0] != LOG else OWN
        groups.setdefault((kind, copy.key[1]), []).append(copy)
    return tuple(_one(source, call, copies, logs, chosen) for copies in groups.values())


def _one(
    source: Profile, call: Call, copies: list[StateCopy], logs: Mapping[int, StateCopy], chosen: Mapping[str, str]
) -> StatePlan:
    first = copies[-1]
    mine = [copy for copy in copies if copy.key[0] != LOG or copy.key[2] == call.start]
    held = sum(copy.bytes for copy in mine)
    if first.key[0] == OWN and first.key[1] in logs:
        held += logs[first.key[1]].bytes  # what it overwrites is needed by earlier segments, too
    back = sum(copy.bytes + 2 * copy.present_bytes for copy in copies)
    taken = held if first.key[0] in (LOG, OWN) else 0
    told = first.name in chosen
    reason = _why(source, call, first.key[1], first.engine) if told else ""
    return StatePlan(first.name, first.engine, held, taken + back, first.written, told, reason)


def _why(source: Profile, call: Call, index: int, engine: str) -> str:
    """The figures that speak for an engine: what is overwritten from the call on, what it reads, and the whole."""
    state = source.states.large[index]
    whole = format_bytes(state.nbytes)
    later = format_bytes(sum(total(pieces) for writer, pieces in state.writers.items() if writer >= call.start))
    if engine == JOURNAL:
        return f"{later} of {whole} overwritten from here on, once in a log for all"
    if engine == READ_SET:
        return f"{format_bytes(total(source.states.reads(call, state) or ()))} of {whole} read here"
    return f"a copy of {whole}; {later} overwritten from here on"


def engines_of(state: Iterable[StatePlan]) -> str | None:
    """The engines of the tensors that the step writes, in one word; None where it writes none."""
    engines = {one.engine for one in state if one.written and not one.name.endswith("generator")}
    return " + ".join(sorted(engines)) or None


def journal_notes(source: Profile, found: Found, budget_bytes: int) -> tuple[str, ...]:
    """Whether journalling pays in this plan, and why not: a sentence a finding, once for states alike."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings(source, found, budget_bytes):
        alike.setdefault((without_numbers(finding.state), finding.why), []).append(finding)
    notes = []
    for same in alike.values():
        more = f" (and {len(same) - 1} states like it)" if len(same) > 1 else ""
        notes.append(f"{same[0].text}{more}")
    return tuple(notes)


def findings(source: Profile, found: Found, budget_bytes: int) -> tuple[Finding, ...]:
    """:func:`regrad.planners.journalling` for a plan, with the figures of the trace; empty where no state has a choice."""
    problem = source.stateful
    if not problem.states:
        return ()
    plan = one_level(found.options)
    solution = Solution(Status.FEASIBLE, plan, 0.0, found.peak_bytes, found.levels.added_seconds)
    unseen = found.peak_bytes - found.levels.peak_bytes

    def price(choices: Choices) -> Priced:
        levels = source.levels(tuple(leaf.option for leaf in leaves(choices)))
        return Priced(choices, levels.peak_bytes + unseen, levels.added_seconds)

    return journalling(problem, solution, budget_bytes, price).findings
