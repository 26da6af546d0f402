"""``rt.plan``: profile, solve, confirm by a dry run, explain."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from regrad.core.chain import KEEP, Problem
from regrad.core.errors import InfeasibleBudget, InvalidPlan, PlannerMismatch
from regrad.core.plan import Plan, Solution, leaves
from regrad.core.simulate_trace import live_levels
from regrad.core.trace import OPTIMIZER
from regrad.core.units import Budget, format_bytes
from regrad.memory.devices import Device, as_device
from regrad.planners.keep_or_snapshot import KeepOrSnapshot
from regrad.planners.optimal import Optimal
from regrad.planners.portfolio import Portfolio
from regrad.planners.state_agnostic import StateAgnostic
from regrad.planners.tape_search import Priced, TapeSearch
from regrad.torch.describe import BAND_RATIO, UNSEEN_BYTES, Found, describe
from regrad.torch.execute import Taped
from regrad.torch.improve import Options, faster, lower
from regrad.torch.move_plan import move_plans
from regrad.torch.policy import DEFAULT, Policy
from regrad.torch.profile import Profile, Progress, make_profile, profile_of
from regrad.torch.segment_options import Parts
from regrad.torch.spans import NoSuchSpan, ranges_of
from regrad.torch.step import Step
from regrad.torch.store import untouched
from regrad.torch.tape.moves import Move
from regrad.torch.tape.ranges import Range
from regrad.torch.tape_plan import range_plans

SMALL_BYTES = 1 << 16
"""A gap between two predictions below this is no news, however small the model."""
TIGHTENINGS = 6
"""How often a plan that the dry run finds over budget is solved again under a smaller one."""


def plan(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | Budget,
    segments: str | None = None,
    planner: Any = None,
    policy: Policy = DEFAULT,
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> Plan:
    """A plan under which one training step of ``model`` on ``batch`` peaks at or under ``budget``.

    model, batch   a module and what it is called with, or one :class:`regrad.torch.Step` that bundles everything
    loss           ``loss(model, batch) -> scalar tensor``; see :class:`regrad.torch.Step` for the default
    optimizer      counts with its state, as from the second step on
    budget         "8 GiB", "8GB", bytes, "60%" (persistent bytes plus 60 % of what the eager step needs above them) or
                   "min" (the least that has a plan)
    segments       glob over module names (``transformer.h.*``) that replaces the search for repeated blocks
    planner        a planner of :mod:`regrad.planners`; the default tries all and takes the fastest plan that fits
    policy         what the plan may do beside keeping: recompute, pack, offload; and what it must leave alone
    profile        what :func:`profile` made of this step: one profile serves every budget. One of another model, other
                   shapes or another optimizer is refused with :class:`PlanMismatch`
    progress       called as ``progress(stage, share_done)``

    Nothing of the user's is changed: the work is done on copies without bytes. Takes seconds; the memory of single
    operations. The plan is for the steady state: optimizer state is there, gradients are fresh unless the parameters
    hold a ``.grad`` now.

    Raises :class:`regrad.core.errors.InfeasibleBudget` with the least feasible budget and its plan,
    :class:`InvalidSubject` for an empty model, a batch on another device or a loss that is no scalar,
    :class:`InvalidQuantity` for a budget that cannot be read, :class:`InvalidPolicy` and :class:`InvalidPlace` for a policy
    that names what is not there, and whatever the model itself raises.
    """
    wanted = Budget.parse(budget)
    check_planner(planner)
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    profile = profile_of(step, profile, segments, progress)
    return plan_profile(profile, wanted, planner, progress, policy=policy)


def profile(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    segments: str | None = None,
    device: str | Device | None = None,
    progress: Progress | None = None,
) -> Profile:
    """The profile of a step, which serves every budget: ``plan_profile(profile, "8 GiB")``. Arguments: :func:`plan`.

    ``device`` is one that need not be here ("h100-80gb"; see :mod:`regrad.memory.devices`): the step is recorded with the
    operations that it would run there, and bytes and seconds are translated.
    """
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    return make_profile(step, segments=segments, progress=progress, device=as_device(device))


def plan_profile(
    source: Profile,
    budget: str | int | Budget,
    planner: Any = None,
    progress: Progress | None = None,
    *,
    policy: Policy = DEFAULT,
) -> Plan:
    """A plan for a step that is profiled already. Takes one solve and a dry run or two; raises as :func:`plan`."""
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    source = source.under(policy)
    search = _Search(source, planner or Portfolio())
    say("solving", 0.0)
    least = search.least()
    budget_bytes = Budget.parse(budget).resolve(
        persistent_bytes=source.chain.persistent_bytes,
        eager_peak_bytes=live_levels(source.trace).peak_bytes + UNSEEN_BYTES,
        least_bytes=least.peak_bytes,
    )
    found = search.fastest(budget_bytes, least)
    say("confirming the plan", 0.0)
    feasible = found.peak_bytes <= budget_bytes
    found, budget_given = (found, budget_bytes) if feasible else (least, least.peak_bytes)
    with untouched(source.rehearsal.original):
        notes = confirm(source, found)
    made = describe(
        source,
        found,
        budget_bytes=budget_given,
        least_bytes=least.peak_bytes,
        planner=type(search.planner).__name__,
        notes=notes,
    )
    seconds = source.seconds + time.monotonic() - began
    made = replace(made, planning_seconds=seconds, solve_seconds=search.solve_seconds)
    if not feasible:
        moment = made.peak_moment
        holder = f"the {moment.phase} at {moment.operation} in {moment.module or 'the step'}"
        raise InfeasibleBudget(budget_bytes, least.peak_bytes, made, holder)
    return made


def confirm(source: Profile, found: Found) -> tuple[str, ...]:
    """Run the plan on copies without bytes and compare the peak; a gap beyond the band is a note for the user."""
    taped = None
    if found.taped and found.search is not None:
        calls = source.base.calls
        ranges = [Range(one.start, one.stop, one.name) for one in range_plans(found.search, found.ranges, calls)]
        planned = move_plans(source.arithmetic, found.moves, calls)
        moves = [Move(one.saves, one.how, one.name, one.bytes, one.held_bytes) for one in planned]
        taped = Taped(ranges, calls, guard="off", masks=found.masks, moves=moves, place=source.policy.place)
    recorded = live_levels(source.dry_run(found.options, taped)).peak_bytes
    # copies of state are made of bytes, which the dry run does not have
    expected = found.peak_bytes if found.taped else source.stateless(found.options).peak_bytes + UNSEEN_BYTES
    band = max(BAND_RATIO[source.rehearsal.source] * found.peak_bytes, SMALL_BYTES)
    # tensors without bytes are packed in one go, real ones piece by piece with room for the pieces
    band += max((max(one.out_bytes, one.in_bytes) for one in found.moves), default=0)
    if -band <= recorded - expected <= band + _apart(source, found):
        return ()
    return (
        f"a dry run of this plan peaks at {format_bytes(recorded)}, the prediction is {format_bytes(expected)}: "
        "please report the model",
    )


def _apart(source: Profile, found: Found) -> int:
    """What a dry run may hold more: a storage of which one node saved several views comes back for each of them there."""
    storages, most = source.arithmetic.trace.storages, 0
    for one in found.moves:
        nodes = [save.node for save in storages[one.storage].saved_by]
        most = max(most, (max(map(nodes.count, nodes)) - 1) * storages[one.storage].bytes)
    return most


def check_planner(planner: Any) -> None:
    if planner is not None and (isinstance(planner, type) or not callable(planner)):
        raise PlannerMismatch(f"planner={planner!r} is no planner; give a value of regrad.planners, such as Optimal()")


def _problem_for(planner: Any, source: Profile) -> Problem:
    """With every engine for every state, if the planner takes logs that segments share; else with the usual ones."""
    if getattr(planner, "nested", False) or source.stateful is source.problem:
        return source.problem
    try:
        planner(source.stateful, source.chain.persistent_bytes)
    except PlannerMismatch:
        return source.problem
    return source.stateful


class _Search:
    """Planners propose on the chain; trace arithmetic decides, and improves what they proposed."""

    def __init__(self, source: Profile, planner: Any) -> None:
        self.source = source
        self.planner = planner
        self.solve_seconds = 0.0
        self.problem = _problem_for(planner, source)

    def found(self, options: Options) -> Found:
        """These options with their figures."""
        return Found(options, self.source.levels(options))

    def taped(self, one: Priced, search: TapeSearch) -> Found:
        """These ranges with their figures."""
        kept = tuple(KEEP for _ in self.source.pieces)
        return Found(kept, search.levels(one.ranges, one.moves), one.ranges, search, one.moves)

    @property
    def searches(self) -> list[TapeSearch]:
        """The searches for ranges, where the planner is the one that tries everything."""
        both = (self.source.search, self.source.masked_search) if isinstance(self.planner, Portfolio) else ()
        return [search for search in both if search is not None]

    def peak(self, options: Options) -> int:
        """Peak of a step, in bytes, by trace arithmetic."""
        return self.source.levels(options).peak_bytes + UNSEEN_BYTES

    def seconds(self, options: Options) -> float:
        """Seconds that a step takes longer than without recomputation, by trace arithmetic."""
        return self.source.levels(options).added_seconds

    def _propose(self, budget_bytes: int) -> list[Options]:
        began = time.monotonic()
        problem = self.problem
        if isinstance(self.planner, Portfolio):
            solutions: list[Solution] = list(self.planner.candidates(problem, budget_bytes))
        else:
            solutions = [self.planner(problem, budget_bytes)]
        self.solve_seconds += time.monotonic() - began
        flat = [s.plan for s in solutions if s.plan is not None and not any(choice.is_span for choice in s.plan)]
        return [tuple(leaf.option for leaf in leaves(plan)) for plan in flat]

    def least(self) -> Found:
        """What has the least peak that is known."""
        chain = self.source.chain
        proposals = [tuple(s.options[-1].name for s in chain.segments), tuple(KEEP for _ in chain.segments)]
        solution = self.planner(self.problem, chain.persistent_bytes)
        if solution.least_bytes:
            proposals += self._propose(solution.least_bytes)
        best = min(proposals, key=self.peak)
        if self._at_floor(best):
            return self.found(best)
        if isinstance(self.planner, Portfolio):
            best = lower(best, self.source, self.peak)
        found = [self.found(best)]
        if solution.least_bytes and (spans := self._spans(solution.least_bytes)) is not None:
            found.append(spans)
        for parts in self.source.parts:
            finer = self._parts(parts, Optimal()(parts.problem, 0).least_bytes)
            found += [] if finer is None else [finer]
        found += [self.taped(search.least(), search) for search in self.searches]
        return min(found, key=lambda one: one.peak_bytes)

    def _at_floor(self, options: Options) -> bool:
        """Whether the peak falls in the optimizer's step, which is the same under every plan."""
        levels = self.source.levels(options)
        return self.source.arithmetic.trace.operations[levels.operations[levels.peak_slot]].phase == OPTIMIZER

    def fastest(self, budget_bytes: int, least: Found) -> Found:
        """The fastest whose peak is within the budget; the one of the least peak if none is."""
        if least.peak_bytes > budget_bytes and self._at_floor(least.options):
            return least
        found = [least] if isinstance(self.planner, Portfolio) else []
        found += self._within(self._spans, budget_bytes)
        for parts in self.source.parts:
            finer = self._within(partial(self._parts, parts), budget_bytes)
            for one in finer if self.searches else ():
                parts.search.consider(one.ranges, one.moves)
            found += finer
        options = self._fastest_options(budget_bytes, least.options)
        if options is not None:
            found.append(self.found(options))
        if options is None or self.seconds(options) > 0:
            for search in self.searches:
                taped = search.fastest(budget_bytes - UNSEEN_BYTES)
                if taped is not None:
                    found.append(self.taped(taped, search))
        within = [one for one in found if one.peak_bytes <= budget_bytes]
        return min(within, key=lambda one: one.rank) if within else least

    def _within(self, propose: Callable[[int], Found | None], budget_bytes: int) -> list[Found]:
        """What ``propose`` gives that fits the budget on the trace; empty if nothing does."""
        target = budget_bytes
        for _ in range(TIGHTENINGS):
            found = propose(target)
            if found is None:
                return []
            if found.peak_bytes <= budget_bytes:
                return [found]
            target -= max(1, found.peak_bytes - budget_bytes)
        return []

    def _parts(self, parts: Parts, target_bytes: int) -> Found | None:
        """The plan of one level with the finer options of segments, if it takes any: it runs as ranges and moves."""
        planner = Optimal() if isinstance(self.planner, Portfolio) else self.planner
        if not getattr(planner, "options", False) or getattr(planner, "nested", False):
            return None
        if isinstance(planner, (KeepOrSnapshot, StateAgnostic)):  # controls: of whole segments
            return None
        try:
            solution = planner(parts.problem, target_bytes)
        except PlannerMismatch:  # more options than it can take
            return None
        way = None if solution.plan is None else parts.way(solution.plan)
        return None if way is None else self.taped(parts.search.price(*way), parts.search)

    def _spans(self, target_bytes: int) -> Found | None:
        """The planner's plan for a budget, if it has spans: they run as ranges of torch calls."""
        source = self.source
        if isinstance(self.planner, Portfolio) or not getattr(self.planner, "nested", False) or source.search is None:
            return None
        solution = self.planner(source.problem, target_bytes)
        if solution.plan is None or not any(choice.is_span for choice in solution.plan):
            return None
        try:
            ranges = ranges_of(source, solution.plan)
        except NoSuchSpan as error:
            raise InvalidPlan(f"{solution.planner} proposes a span that cannot run as one: {error}") from None
        return Found(tuple(KEEP for _ in source.pieces), source.search.levels(ranges), ranges, source.search)

    def _fastest_options(self, budget_bytes: int, least: Options) -> Options | None:
        """The fastest options of segments whose peak is within the budget."""
        target = budget_bytes
        found: list[Options] = [least] if isinstance(self.planner, Portfolio) else []
        for _ in range(TIGHTENINGS):
            proposals = self._propose(target)
            fitting = [options for options in proposals if self.peak(options) <= budget_bytes]
            found += fitting
            if fitting or not proposals:
                break
            # The chain is an approximation of the trace: what it lets through by so much, it is asked for less.
            target -= max(1, min(self.peak(options) for options in proposals) - budget_bytes)
        within = [options for options in found if self.peak(options) <= budget_bytes]
        if not within:
            return None
        best = min(within, key=lambda options: (self.seconds(options), self.peak(options)))
        if isinstance(self.planner, Portfolio):
            best = faster(best, self.source, self.peak, self.seconds, budget_bytes)
        return best
