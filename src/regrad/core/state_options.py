"""A chain's options, once for each way to bring back the state that a replay needs.

What an engine charges one segment alone goes into the figures of the option; what segments share, the journal's log,
is priced by the walk. Union accounting is the engine ``journal (union)``, the shared log ``journal`` and ``journal
(stays back)``: a problem may offer any of them (docs/concepts/cost-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product

from regrad.core.chain import Chain, Option, Segment
from regrad.core.errors import InvalidPlan
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT, STAYS_BACK, UNION, StateUse, StateVariable

SHARED_LOG_ENGINES = (SNAPSHOT, READ_SET, JOURNAL, STAYS_BACK)
UNION_ENGINES = (SNAPSHOT, READ_SET, UNION)
MOST_OPTIONS = 4096


def with_states(chain: Chain, variables: Iterable[StateVariable], engines: Sequence[str] = SHARED_LOG_ENGINES) -> Chain:
    """``chain`` with every recomputing option of a segment that touches state once for each combination of engines.

    Generators' states are no variables: what they cost belongs to the options that recompute. An engine is offered for
    a variable where it has a cost there (``StateVariable.cost``). Snapshots and what else a
    segment holds by itself count from the start of its forward. Variables that the same segments touch are better given
    as one: raises :class:`InvalidPlan` for more than 4,096 options of one segment, and for a state without an engine.
    """
    variables = tuple(variables)
    for variable in variables:
        outside = [k for k in variable.touching if not 0 <= k < len(chain)]
        if outside:
            raise InvalidPlan(f"state {variable.name!r} is touched by segment {outside[0]} of {len(chain)}")
    segments = []
    for i, segment in enumerate(chain.segments):
        touched = [variable for variable in variables if i in variable.touching]
        segments.append(_expanded(segment, [_uses(variable, i, engines) for variable in touched]))
    return replace(chain, segments=tuple(segments))


def _uses(variable: StateVariable, segment: int, engines: Sequence[str]) -> list[StateUse]:
    found = []
    for engine in engines:
        cost = variable.cost(segment, engine)
        if cost is not None:
            seconds = variable.bandwidth.seconds(cost.forward + cost.backward)
            found.append(StateUse(variable.name, engine, cost.retained_bytes, cost.transient_bytes, seconds))
    if not found:
        raise InvalidPlan(f"none of the engines {', '.join(engines)} has a cost for state {variable.name!r}")
    return found


def _expanded(segment: Segment, uses: list[list[StateUse]]) -> Segment:
    if not uses:
        return segment
    options: list[Option] = []
    for option in segment.options:
        if not option.recomputes:
            options.append(option)
            continue
        for combination in product(*uses):
            options.append(_charged(option, combination))
            if len(options) > MOST_OPTIONS:
                raise InvalidPlan(f"segment {segment.name!r} has more than {MOST_OPTIONS:,} options with its states")
    return replace(segment, options=tuple(options))


def _charged(option: Option, uses: tuple[StateUse, ...]) -> Option:
    retained = sum(use.retained_bytes for use in uses)
    return replace(
        option,
        name=", ".join([option.name, *(f"{use.state} by {use.engine}" for use in uses)]),
        retained_bytes=option.retained_bytes + retained,
        transient_bytes=option.transient_bytes + sum(use.transient_bytes for use in uses),
        forward_bytes=option.forward_bytes + retained,
        added_seconds=option.added_seconds + sum(use.added_seconds for use in uses),
        engine=" + ".join(dict.fromkeys(use.engine for use in uses)),
        states=uses,
    )


def without_states(chain: Chain) -> Chain:
    """``chain`` as if keeping state cost nothing: the same options by the same names, less what their uses charge."""
    return replace(chain, segments=tuple(_stateless(segment) for segment in chain.segments))


def _stateless(segment: Segment) -> Segment:
    return replace(segment, options=tuple(_uncharged(option) for option in segment.options))


def _uncharged(option: Option) -> Option:
    retained = sum(use.retained_bytes for use in option.states)
    return replace(
        option,
        retained_bytes=option.retained_bytes - retained,
        transient_bytes=option.transient_bytes - sum(use.transient_bytes for use in option.states),
        forward_bytes=max(option.forward_bytes - retained, 0),
        added_seconds=option.added_seconds - sum(use.added_seconds for use in option.states),
        states=(),
    )


def only(chain: Chain, engines: Collection[str]) -> Chain | None:
    """``chain`` with the options whose states, if any, are brought back by ``engines`` alone; None if one has none."""
    return _filtered(chain, lambda option: all(use.engine in engines for use in option.states))


def only_without(chain: Chain, engines: Collection[str]) -> Chain | None:
    """``chain`` without the options that bring a state back by one of ``engines``; None if a segment has no other."""
    return _filtered(chain, lambda option: all(use.engine not in engines for use in option.states))


def _filtered(chain: Chain, keeps: Callable[[Option], bool]) -> Chain | None:
    segments = [(segment, tuple(filter(keeps, segment.options))) for segment in chain.segments]
    if not all(options for _, options in segments):
        return None
    return replace(chain, segments=tuple(replace(segment, options=options) for segment, options in segments))
