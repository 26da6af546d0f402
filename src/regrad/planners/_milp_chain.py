"""One option for each segment of a chain as a mixed-integer program; the maths stands in ``milp.md``."""

from __future__ import annotations

from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from regrad.core.chain import RECOMPUTE, Chain, Option, Problem
from regrad.core.errors import PlannerMismatch
from regrad.core.plan import Choices, one_level
from regrad.core.simulate import simulate
from regrad.planners._milp_model import Formulation, Model, Units
from regrad.planners.base import least_seconds, recomputing

Taken = list[tuple[int, Option]]
"""The options of a segment, each with the column that says whether it is taken."""


def formulate_chain(problem: Problem) -> Formulation[Choices]:
    """The program for the chain of ``problem`` under its rule. Cost: O(n² c) terms for n segments of c options.

    Raises :class:`PlannerMismatch` for seconds that are not finite.
    """
    chain = problem.chain
    for segment in chain.segments:
        if not all(isfinite(option.added_seconds) for option in segment.options):
            raise PlannerMismatch(f"segment {segment.name!r} has an option whose seconds are not finite")
    units = _units(chain)
    model = Model()
    room = model.column(upper=inf)
    taken = [[(model.column(whole=True), option) for option in segment.options] for segment in chain.segments]
    for own in taken:
        model.row([(column, 1.0) for column, _ in own], lower=1.0, upper=1.0)
    model.row([(room, 1.0)], lower=units.weight(chain.gradient_bytes + chain.optimizer_bytes))
    (_static if problem.rule == "static" else _timeline)(model, chain, taken, units, room)

    def read(values: NDArray[np.float64]) -> Choices:
        return one_level([max(own, key=lambda it: float(values[it[0]]))[1].name for own in taken])

    def price(plan: Choices) -> tuple[int, float]:
        simulation = simulate(plan, chain, problem.rule, problem.states)
        return simulation.peak_bytes, simulation.added_seconds

    def blame(plan: Choices) -> list[int]:
        phase, last = simulate(plan, chain, problem.rule, problem.states).moment
        stop = 0 if phase == "optimizer" else last + 1 if last >= 0 else len(taken)
        chosen = zip(taken[:stop], plan, strict=False)
        return [column for own, choice in chosen for column, option in own if option.name == choice.option]

    seconds = {column: option.added_seconds for own in taken for column, option in own}
    all_again = recomputing(problem, (i for i, segment in enumerate(chain.segments) if segment.can(RECOMPUTE)))
    simple = recomputing(problem, ()), all_again
    return Formulation(model, seconds, room, units, least_seconds(problem), read, price, blame, simple)


def _units(chain: Chain) -> Units:
    figures = [chain.optimizer_bytes]
    for segment in chain.segments:
        figures.append(segment.gradient_bytes)
        for option in segment.options:
            figures += [option.retained_bytes, option.transient_bytes, option.forward_bytes]
    return Units.of(figures, chain.persistent_bytes)


def _timeline(model: Model, chain: Chain, taken: list[Taken], units: Units, room: int) -> None:
    retained: list[tuple[int, float]] = [(room, -1.0)]
    for own, later in zip(taken, chain.later_gradient_bytes, strict=True):
        model.row([*retained, *((c, units.weight(o.forward_bytes)) for c, o in own)], upper=0.0)
        retained += [(c, units.weight(o.retained_bytes)) for c, o in own]
        transient = [(c, units.weight(o.transient_bytes)) for c, o in own]
        model.row([*retained, *transient], upper=-units.weight(later))


def _static(model: Model, chain: Chain, taken: list[Taken], units: Units, room: int) -> None:
    retained = [(c, units.weight(o.retained_bytes)) for own in taken for c, o in own]
    gradients = units.weight(chain.gradient_bytes)
    model.row([*retained, (room, -1.0)], upper=-gradients)  # no transient is below nothing
    for own in taken:
        transient = [(c, units.weight(o.transient_bytes)) for c, o in own]
        model.row([*retained, *transient, (room, -1.0)], upper=-gradients)
