"""A chain's options, once for each way to bring back the state that a replay needs.

What an engine charges one segment alone goes into the figures of the option; what segments share, the journal's log,
is priced by the walk. Union accounting is the engine ``journal (union)``, the shared log ``journal`` and ``journal
(stays back)``: a problem may offer any of them (docs/concepts/cost-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from regrad.core.chain import Chain, Option, Segment
from regrad.core.errors import InvalidPlan
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT, STAYS_BACK, UNION, Moves, StateUse, StateVariable

SHARED_LOG_ENGINES = (SNAPSHOT, READ_SET, JOURNAL, STAYS_BACK)
UNION_ENGINES = (SNAPSHOT, READ_SET, UNION)
MOST_OPTIONS = 4096


def with_states(
    chain: Chain,
    variables: Iterable[StateVariable],
    engines: Sequence[str] = SHARED_LOG_ENGINES,
    *,
    usual: Mapping[str, str] | None = None,
    most_options: int = MOST_OPTIONS,
) -> Chain:
    """``chain`` with every recomputing option of a segment that touches state once for each combination of engines.

    Generators' states are no variables: what they cost belongs to the options that recompute. An engine is offered for
    a variable where it has a cost there (``StateVariable.cost``). Snapshots and what else a
    segment holds by itself count from the start of its forward. Variables that the same segments touch are better given
    as one: raises :class:`InvalidPlan` for more than 4,096 options of one segment, and for a state without an engine.

    ``usual`` names an engine for every variable: the combination of those keeps the option's own name and stands last, for
    planners that know one way to recompute. Nothing is raised for many options then: beyond ``most_options`` of one
    segment engines go that another one beats whatever the other segments do (:func:`undominated`), and if that is not
    enough all but the usual one, for the smallest variables first.
    """
    variables = tuple(variables)
    for variable in variables:
        outside = [k for k in variable.touching if not 0 <= k < len(chain)]
        if outside:
            raise InvalidPlan(f"state {variable.name!r} is touched by segment {outside[0]} of {len(chain)}")
    segments = []
    for i, segment in enumerate(chain.segments):
        touched = [variable for variable in variables if i in variable.touching]
        uses = [_uses(variable, i, engines) for variable in touched]
        if usual is not None:
            count = sum(option.recomputes for option in segment.options)
            uses = _fewer(touched, i, uses, usual, most_options // max(count, 1))
        segments.append(_expanded(segment, uses, usual))
    return replace(chain, segments=tuple(segments))


def undominated(variable: StateVariable, segment: int, uses: list[StateUse]) -> list[StateUse]:
    """The uses that no other one matches in all, whatever engines the other segments take.

    What an engine charges the segment alone is compared as it stands. Of the journal the most that it can charge is
    known: all entries from the segment on, its redo bytes and its moves from the present, as if no other segment shared
    them. A use that is above that in all goes too; the journal itself never does, for sharing may make it free. Where
    staying back is offered nothing is said of the journal: others may rule it out.
    """
    payload, headers = 0, 0
    for entry in variable.entries:
        if entry.writer >= segment:
            payload, headers = payload + entry.payload_bytes, headers + entry.header_bytes
    redo = variable.redo_bytes(segment)
    alone = variable.bandwidth.seconds(Moves(payload + redo, payload + redo))
    figures = {
        use.engine: (use.retained_bytes, use.transient_bytes, use.added_seconds) for use in uses if not use.needs_log
    }
    returns = all(use.engine != STAYS_BACK for use in uses)
    most = {
        use.engine: (payload + headers, redo, alone + use.added_seconds)
        for use in uses
        if use.engine == JOURNAL and returns
    }
    kept = []
    for use in uses:
        own = figures.get(use.engine)
        others = [f for engine, f in (figures | most).items() if engine != use.engine]
        beaten = own is not None and any(
            all(a <= b for a, b in zip(other, own, strict=True)) and other != own for other in others
        )
        if not beaten:
            kept.append(use)
    return kept


def _fewer(
    variables: list[StateVariable], segment: int, uses: list[list[StateUse]], usual: Mapping[str, str], most: int
) -> list[list[StateUse]]:
    """At most ``most`` combinations, the usual one among them."""
    if prod(map(len, uses)) <= most:
        return uses
    found = []
    for variable, offered in zip(variables, uses, strict=True):
        left = undominated(variable, segment, offered)
        found.append([use for use in offered if use in left or use.engine == usual[variable.name]])
    for at in sorted(range(len(variables)), key=lambda k: variables[k].nbytes):
        if prod(map(len, found)) <= most:
            break
        found[at] = [use for use in found[at] if use.engine == usual[variables[at].name]]
    return found


def _uses(variable: StateVariable, segment: int, engines: Sequence[str]) -> list[StateUse]:
    found = []
    for engine in engines:
        cost = variable.cost(segment, engine)
        if cost is not None:
            seconds = variable.bandwidth.seconds(cost.forward + cost.backward) + cost.seconds
            found.append(StateUse(variable.name, engine, cost.retained_bytes, cost.transient_bytes, seconds))
    if not found:
        raise InvalidPlan(f"none of the engines {', '.join(engines)} has a cost for state {variable.name!r}")
    return found


def _expanded(segment: Segment, uses: list[list[StateUse]], usual: Mapping[str, str] | None) -> Segment:
    if not uses:
        return segment
    options: list[Option] = []
    last: list[Option] = []
    for option in segment.options:
        if not option.recomputes:
            options.append(option)
            continue
        for combination in product(*uses):
            made = _charged(option, combination)
            if usual is not None and all(usual[use.state] == use.engine for use in combination):
                last.append(replace(made, name=option.name))
                continue
            options.append(made)
            if len(options) > MOST_OPTIONS:
                raise InvalidPlan(f"segment {segment.name!r} has more than {MOST_OPTIONS:,} options with its states")
    return replace(segment, options=(*options, *last))


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
