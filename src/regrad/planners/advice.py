"""Whether journalling pays for a problem's states, and why not: values and sentences for a report.

The eager step is compared with one that replays all segments of a state from its journal, by walking both, and what
the journal holds with whole copies. Rule of thumb, which these figures check: a journal pays where activations exceed the
budget, writes are sparse and several old versions are live.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from regrad.core.chain import Option, Problem, Segment
from regrad.core.errors import IllegalSchedule
from regrad.core.plan import Choices, Solution, leaves, one_level
from regrad.core.state import LOG_ENGINES, UNION, SharedLogPrice, StateVariable
from regrad.core.units import format_bytes, format_seconds
from regrad.planners.base import Priced, kept, price

JOURNALS = (*LOG_ENGINES, UNION)


class Why(str, Enum):
    """What is found about one state."""

    PAYS = "pays"
    ROOMY_BUDGET = "roomy budget"
    EAGER_IS_SMALLER = "eager is smaller"
    DENSE_WRITES = "dense writes"
    ANOTHER_ENGINE = "another engine"
    NOT_OFFERED = "not offered"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: ``state``, ``why``, the two figures that were compared, in bytes, and a sentence that says it."""

    state: str
    why: Why
    ours_bytes: int
    other_bytes: int
    text: str


@dataclass(frozen=True, slots=True)
class Journalling:
    """``pays``: the plan journals a state that it need not journal. ``findings``: for every state at least one."""

    pays: bool
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return "\n".join(finding.text for finding in self.findings)


def journalling(
    problem: Problem, solution: Solution, budget_bytes: int, pricing: Callable[[Choices], Priced] | None = None
) -> Journalling:
    """What ``solution``, found for ``budget_bytes``, does with each state of ``problem``, and why. Cost: a walk a state.

    ``pricing`` gives the figures of a plan where better ones than those of the chain are known.
    """
    findings: list[Finding] = []
    pricing = pricing or (lambda choices: price(choices, problem))
    eager = pricing(one_level([kept(segment) for segment in problem.chain.segments]))
    for variable in problem.states:
        findings += _findings(problem, variable, solution.plan, eager, budget_bytes, pricing)
    return Journalling(any(finding.why is Why.PAYS for finding in findings), tuple(findings))


def _findings(
    problem: Problem,
    variable: StateVariable,
    plan: Choices | None,
    eager: Priced,
    budget: int,
    pricing: Callable[[Choices], Priced],
) -> list[Finding]:
    name = variable.name
    journalled, users = _all_by(problem, name, JOURNALS)
    if not users:
        text = f"{name}: no segment is offered a replay from a journal"
        return [Finding(name, Why.NOT_OFFERED, 0, 0, text)]
    journal = _legal_price(journalled, pricing)
    held, copies = _journal_bytes(problem, variable, users), len(users) * variable.nbytes
    found = []
    used = _engines(problem, name, plan)
    if any(engine in JOURNALS for engine in used):
        text = (
            f"{name}: {sum(e in JOURNALS for e in used)} segments are replayed from a journal; all {len(users)} would "
            f"hold {format_bytes(held)} in it, whole copies {format_bytes(copies)}"
        )
        found.append(Finding(name, Why.PAYS, held, copies, text))
    elif eager.peak_bytes <= budget:
        text = (
            f"{name}: the eager step needs {format_bytes(eager.peak_bytes)} of {format_bytes(budget)}; a replay would "
            "only cost time"
        )
        found.append(Finding(name, Why.ROOMY_BUDGET, eager.peak_bytes, budget, text))
    if journal and eager.peak_bytes <= journal.peak_bytes and eager.added_seconds <= journal.added_seconds:
        text = (
            f"{name}: keeping is no larger and no slower than replaying all {len(users)} segments: "
            f"{format_bytes(eager.peak_bytes)} against {format_bytes(journal.peak_bytes)} and "
            f"{format_seconds(journal.added_seconds - eager.added_seconds)} more"
        )
        found.append(Finding(name, Why.EAGER_IS_SMALLER, eager.peak_bytes, journal.peak_bytes, text))
    if held >= copies:
        text = (
            f"{name}: writes are dense: the journal of {len(users)} replays holds {format_bytes(held)}, whole copies "
            f"{format_bytes(copies)}"
        )
        found.append(Finding(name, Why.DENSE_WRITES, held, copies, text))
    if not found:
        text = (
            f"{name}: this plan is faster with {', '.join(sorted(used)) or 'none of its segments replayed'} than with a "
            "journal"
        )
        found.append(Finding(name, Why.ANOTHER_ENGINE, held, copies, text))
    return found


def _legal_price(plan: Choices, pricing: Callable[[Choices], Priced]) -> Priced | None:
    """None where a present reader stands between replays that can only stay back."""
    try:
        return pricing(plan)
    except IllegalSchedule:
        return None


def _engines(problem: Problem, state: str, plan: Choices | None) -> list[str]:
    """The engines that the plan's replays use for ``state``."""
    chosen = (problem.chain.segments[leaf.start].option(leaf.option) for leaf in leaves(plan or ()))
    return [use.engine for option in chosen for use in option.states if use.state == state]


def _all_by(problem: Problem, state: str, engines: Collection[str]) -> tuple[Choices, tuple[int, ...]]:
    """The plan that replays every segment that it can with ``state`` by one of ``engines``, and those segments.

    Other states go by the first engine that is no log, where there is one.
    """
    names, users = [], []
    for i, segment in enumerate(problem.chain.segments):
        option = _by(segment, state, engines)
        names.append(kept(segment) if option is None else option.name)
        if option is not None:
            users.append(i)
    return one_level(names), tuple(users)


def _by(segment: Segment, state: str, engines: Collection[str]) -> Option | None:
    fitting = [o for o in segment.options if any(u.state == state and u.engine in engines for u in o.states)]
    # replays of one state from its log must go together: the first engine offered, everywhere
    fitting.sort(key=lambda o: (min(_rank(u.engine) for u in o.states if u.state == state), len(o.logs)))
    return fitting[0] if fitting else None


def _rank(engine: str) -> int:
    return JOURNALS.index(engine) if engine in JOURNALS else len(JOURNALS)


def _journal_bytes(problem: Problem, variable: StateVariable, users: tuple[int, ...]) -> int:
    """What the journal holds at the end of the forward with all ``users`` replayed from it."""
    offered = {
        u.engine for s in problem.chain.segments for o in s.options for u in o.states if u.state == variable.name
    }
    if offered.isdisjoint(LOG_ENGINES):
        return sum(sum(variable.union(i)) for i in users)
    count = len(problem.chain)
    return SharedLogPrice(count, variable.entries, (0,) * count).peak_retained_bytes(users)
