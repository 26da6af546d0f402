"""``rt.plan``: profile, solve, confirm by a dry run, explain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regrad.core import trace as tr
from regrad.core.chain import KEEP, Chain
from regrad.core.errors import InfeasibleBudget, PlanMismatch, PlannerMismatch
from regrad.core.plan import Plan, SegmentPlan, Solution, StatePlan, leaves, one_level
from regrad.core.simulate_trace import live_levels
from regrad.core.timeline import peak_moment
from regrad.core.units import Budget, format_bytes
from regrad.planners.portfolio import Portfolio
from regrad.torch.fingerprint import step_fingerprint
from regrad.torch.improve import Options, faster, lower
from regrad.torch.profile import Profile, Progress, make_profile
from regrad.torch.step import Step
from regrad.torch.store import untouched

BAND_RATIO = {"fake": 0.01, "real": 0.01}
"""How far predicted and measured peaks lie apart, by the method of the prediction; measured in benchmarks/."""
UNSEEN_BYTES = 256
"""On top of every prediction: Python numbers in the formulas of a backward, which no record shows. 48 were seen."""
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
    profile        what :func:`profile` made of this step: one profile serves every budget. One of another model, other
                   shapes or another optimizer is refused with :class:`PlanMismatch`
    progress       called as ``progress(stage, share_done)``

    Nothing of the user's is changed: the work is done on copies without bytes. Takes seconds; the memory of single
    operations. The plan is for the steady state: optimizer state is there, gradients are fresh unless the parameters
    hold a ``.grad`` now.

    Raises :class:`regrad.core.errors.InfeasibleBudget` with the least feasible budget and its plan,
    :class:`InvalidSubject` for an empty model, a batch on another device or a loss that is no scalar,
    :class:`InvalidQuantity` for a budget that cannot be read, and whatever the model itself raises.
    """
    wanted = Budget.parse(budget)
    _check_planner(planner)
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    if profile is None:
        profile = make_profile(step, segments=segments, progress=progress)
    elif profile.step_fingerprint != (found := step_fingerprint(step)):
        detail = "the profile is of another model, of other shapes of the batch, or of another optimizer"
        raise PlanMismatch(profile.step_fingerprint, found, detail)
    return plan_profile(profile, wanted, planner, progress)


def profile(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    segments: str | None = None,
    progress: Progress | None = None,
) -> Profile:
    """The profile of a step, which serves every budget: ``plan_profile(profile, "8 GiB")``. Arguments: :func:`plan`."""
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    return make_profile(step, segments=segments, progress=progress)


def plan_profile(
    source: Profile, budget: str | int | Budget, planner: Any = None, progress: Progress | None = None
) -> Plan:
    """A plan for a step that is profiled already. Takes one solve and a dry run or two; raises as :func:`plan`."""
    began = time.monotonic()
    say = progress or (lambda stage, done: None)
    search = _Search(source, planner or Portfolio())
    say("solving", 0.0)
    least, least_bytes = search.least()
    budget_bytes = Budget.parse(budget).resolve(
        persistent_bytes=source.chain.persistent_bytes,
        eager_peak_bytes=live_levels(source.trace).peak_bytes + UNSEEN_BYTES,
        least_bytes=least_bytes,
    )
    options = search.fastest(budget_bytes, least)
    say("confirming the plan", 0.0)
    feasible = search.peak(options) <= budget_bytes
    options, budget_given = (options, budget_bytes) if feasible else (least, least_bytes)
    with untouched(source.rehearsal.original):
        notes = confirm(source, options, search.peak(options))
    made = search.describe(budget_given, options, least_bytes, notes, time.monotonic() - began)
    if not feasible:
        moment = made.peak_moment
        holder = f"the {moment.phase} at {moment.operation} in {moment.module or 'the step'}"
        raise InfeasibleBudget(budget_bytes, least_bytes, made, holder)
    return made


def confirm(source: Profile, options: Options, predicted_bytes: int) -> tuple[str, ...]:
    """Run the plan on copies without bytes and compare the peak; a gap beyond the band is a note for the user."""
    recorded = live_levels(source.dry_run(options)).peak_bytes
    band = max(BAND_RATIO[source.rehearsal.source] * predicted_bytes, SMALL_BYTES)
    if abs(recorded - predicted_bytes) <= band:
        return ()
    return (
        f"a dry run of this plan peaks at {format_bytes(recorded)}, the prediction is {format_bytes(predicted_bytes)}: "
        "please report the model",
    )


def _check_planner(planner: Any) -> None:
    if planner is not None and (isinstance(planner, type) or not callable(planner)):
        raise PlannerMismatch(f"planner={planner!r} is no planner; give a value of regrad.planners, such as Optimal()")


class _Search:
    """Planners propose on the chain; trace arithmetic decides, and improves what they proposed."""

    def __init__(self, source: Profile, planner: Any) -> None:
        self.source = source
        self.planner = planner
        self.solve_seconds = 0.0

    def peak(self, options: Options) -> int:
        """Peak of a step, in bytes, by trace arithmetic."""
        return self.source.levels(options).peak_bytes + UNSEEN_BYTES

    def seconds(self, options: Options) -> float:
        """Seconds that a step takes longer than without recomputation, by trace arithmetic."""
        return self.source.levels(options).added_seconds

    def _propose(self, budget_bytes: int) -> list[Options]:
        began = time.monotonic()
        problem = self.source.problem
        if isinstance(self.planner, Portfolio):
            solutions: list[Solution] = list(self.planner.candidates(problem, budget_bytes))
        else:
            solutions = [self.planner(problem, budget_bytes)]
        self.solve_seconds += time.monotonic() - began
        return [tuple(leaf.option for leaf in leaves(s.plan)) for s in solutions if s.plan is not None]

    def least(self) -> tuple[Options, int]:
        """The options of the least peak that is known, and that peak."""
        chain = self.source.chain
        proposals = [tuple(s.options[-1].name for s in chain.segments), tuple(KEEP for _ in chain.segments)]
        solution = self.planner(self.source.problem, chain.persistent_bytes)
        if solution.least_bytes:
            proposals += self._propose(solution.least_bytes)
        best = min(proposals, key=self.peak)
        if isinstance(self.planner, Portfolio):
            best = lower(best, self.source, self.peak)
        return best, self.peak(best)

    def fastest(self, budget_bytes: int, least: Options) -> Options:
        """The fastest options whose peak is within the budget; those of the least peak if none is."""
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
            return least
        best = min(within, key=lambda options: (self.seconds(options), self.peak(options)))
        if isinstance(self.planner, Portfolio):
            best = faster(best, self.source, self.peak, self.seconds, budget_bytes)
        return best

    def describe(
        self, budget_bytes: int, options: Options, least_bytes: int, notes: tuple[str, ...], seconds: float
    ) -> Plan:
        """The plan that a user gets."""
        source, chain = self.source, self.source.chain
        trace, levels = source.arithmetic.trace, source.levels(options)
        segments = tuple(_segment_plan(chain, source, index, options) for index in range(len(options)))
        recorded = live_levels(source.trace)
        return Plan(
            fingerprint=source.fingerprint,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=self.peak(options),
            predicted_by="trace" if trace.source == "real" else "fake trace",
            band_ratio=BAND_RATIO[trace.source],
            peak_moment=peak_moment(trace, levels),
            eager_peak_bytes=recorded.peak_bytes + UNSEEN_BYTES,
            eager_peak_moment=peak_moment(source.trace, recorded),
            persistent_bytes=chain.persistent_bytes,
            least_bytes=least_bytes,
            added_seconds=levels.added_seconds,
            eager_seconds=chain.eager_seconds,
            planner=type(self.planner).__name__,
            device=trace.device,
            gradients=trace.gradients,
            segments=segments,
            choices=one_level(options),
            notes=(*source.notes, *_notes(source), *notes),
            cache_off=source.cache_off,
            training=source.training,
            planning_seconds=source.seconds + seconds,
            solve_seconds=self.solve_seconds,
        )


def _segment_plan(chain: Chain, source: Profile, index: int, options: Options) -> SegmentPlan:
    segment, piece, option = chain.segments[index], source.pieces[index], options[index]
    chosen, state = segment.option(option), _state(source, index, options)
    if segment.reason:
        reason = segment.reason
    elif option == KEEP:
        reason = "there is room for it"
    else:
        saved = segment.option(KEEP).retained_bytes - chosen.retained_bytes
        reason = f"frees {format_bytes(saved)} until its backward"
    return SegmentPlan(
        name=segment.name, option=option, retained_bytes=chosen.retained_bytes, transient_bytes=chosen.transient_bytes,
        added_seconds=chosen.added_seconds, reason=reason, engine=_engine(state), module=piece.module, call=piece.call,
        state=state,
    )  # fmt: skip


def _state(source: Profile, index: int, options: Options) -> tuple[StatePlan, ...]:
    """What the engine keeps of the state that a recomputed segment finds, or that a kept one overwrites for others."""
    piece = source.pieces[index]
    if not piece.module:
        return ()
    if options[index] == KEEP:
        copies = source.logs_of(index, options)
    else:
        copies = source.ranges_of[piece.module, piece.call].state
    return tuple(
        StatePlan(copy.name, copy.engine, copy.bytes, copy.bytes + 2 * copy.present_bytes, copy.written)
        for copy in copies
    )


def _engine(state: tuple[StatePlan, ...]) -> str | None:
    """The engines of the tensors that the step writes, in one word; None where it writes none."""
    engines = {one.engine for one in state if one.written and not one.name.endswith("generator")}
    return " + ".join(sorted(engines)) or None


def _notes(source: Profile) -> tuple[str, ...]:
    notes = []
    if peak_moment(source.trace, live_levels(source.trace)).phase == tr.OPTIMIZER:
        notes.append("the optimizer's step is the peak of the eager step: no plan goes below it")
    left_out = [
        segment
        for segment, piece in zip(source.chain.segments, source.pieces, strict=True)
        if piece.module and piece.reason
    ]
    if left_out:
        notes.append(f"{len(left_out)} segments can only be kept, {left_out[0].name} for one: {left_out[0].reason}")
    if not any(piece.module for piece in source.pieces):
        notes.append('no repeated blocks were found in ModuleList or Sequential; name them with segments="…"')
    return tuple(notes)
