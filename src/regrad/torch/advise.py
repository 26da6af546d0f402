"""``rt.advise``: from a step and a budget to what would make it fit, each change with its price."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regrad.core import advice as words
from regrad.core import trace as tr
from regrad.core.advice import Advice, NoUse, Suggestion
from regrad.core.errors import InfeasibleBudget, InvalidSubject, UsageError
from regrad.core.plan import Plan
from regrad.core.simulate_trace import TraceArithmetic, live_levels
from regrad.core.text import moment_text
from regrad.core.timeline import make_timeline
from regrad.core.units import Budget, format_bytes
from regrad.memory.advice import LEAST_GAIN_RATIO, Scale, choose, is_of_use, ranked, shards
from regrad.memory.devices import Device, as_device
from regrad.torch.advise_batches import micro_steps, micro_way, mixed, mixed_words
from regrad.torch.advise_optimizers import optimizer_swaps
from regrad.torch.advise_pairs import Bench, cheapest_pair
from regrad.torch.advise_ways import Workshop, chunked_ways, offload_way, phase_seconds, plan_words, rates, way_of
from regrad.torch.describe import BAND_RATIO, UNSEEN_BYTES
from regrad.torch.estimate import state_sizes
from regrad.torch.oom_facts import is_out_of_memory
from regrad.torch.plan import plan_profile
from regrad.torch.profile import Profile, Progress, make_profile, profile_of
from regrad.torch.step import Step
from regrad.torch.traps import find_traps
from regrad.torch.traps_retained import containers_kept

MOST_HOLDERS = 12
NO_ROOM = "this process has no memory left to price it in; ask rt.advise in a fresh one"


def advise(
    model: nn.Module | Step,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int | Budget | None = None,
    devices: int | None = None,
    device: str | Device | None = None,
    device_memory: str | int | None = None,
    offload_folder: str | Path | None = None,
    profile: Profile | None = None,
    progress: Progress | None = None,
) -> Advice:
    """What to change so that one training step of ``model`` on ``batch`` fits ``budget``.

    model, batch, loss, optimizer   as for :func:`regrad.torch.plan`; a Step's ``make_batch`` makes the micro-batches,
                    else the batch is cut along the first dimension that all of its tensors share
    budget          "8 GiB", bytes, or "60%"; left out, it is what ``device`` leaves
    devices         how many there are to shard over
    device          one that need not be here ("h100-80gb"), ``device_memory`` its memory; as for ``rt.estimate``
    offload_folder  where a file would be; 32 MiB are written there and removed, to learn how fast that is. Left out: the
                    system's folder for temporary files
    profile         what :func:`regrad.torch.profile` made of this step

    Every change is priced on this step: recorded with the change where it can be run on a copy without bytes, computed
    on the record where not. What does not lower the peak is listed with its figure and is not ranked; where no single
    change fits, the cheapest pair is looked for. Nothing of the user's is changed. Cost: a profile, a plan and about ten
    fake steps; where no single change fits, a profile and a plan for some pairs on top.

    Raises :class:`UsageError` for a budget that is not even what the weights and buffers take (unless ``devices`` share
    them), for none at all, a count of devices below one, an unknown device and a folder that is not there,
    :class:`InvalidSubject` for a step without a batch, :class:`CannotTrace` as :func:`regrad.torch.plan`, and whatever
    the model raises.
    """
    target = as_device(device, device_memory)
    wanted = _wanted(budget, target)
    count, folder = _count(devices), _folder(offload_folder)
    step = model if isinstance(model, Step) else Step(model, batch, loss, optimizer)
    if step.batch is None and step.loss is None:
        raise InvalidSubject(
            f"there is no batch to run {type(step.model).__name__} on, and advice is priced on a step: give "
            "advise(model, batch, …), or loss=… that brings its own."
        )
    with containers_kept(step):
        if profile is None:
            profile = make_profile(step, progress=progress, device=target)
        else:
            profile = profile_of(step, profile, None, progress)
        return _Advisor(profile, wanted, count, folder, progress).advice()


def _count(devices: Any) -> int:
    if devices is None:
        return 1
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise UsageError(f"devices={devices!r}: give how many there are, 1 or more.")
    return devices


def _folder(given: str | Path | None) -> Path | None:
    if given is None:
        return None
    if not Path(given).is_dir():
        raise UsageError(
            f"offload to {given} cannot be priced: there is no folder of that name. Make it, or name another."
        )
    return Path(given)


def _wanted(budget: str | int | Budget | None, target: Device | None) -> Budget:
    if budget is None:
        if target is None:
            raise UsageError('there is no budget: give budget="8 GiB", or a device ("h100-80gb") to advise for.')
        return Budget.parse(target.usable_bytes)
    found = Budget.parse(budget)
    if found.kind == "min":
        raise UsageError('advice is for an amount: "min" has no price to weigh. Give "8 GiB", bytes or "60%".')
    return found


class _Advisor:
    """Prices one kind of change after the other, and sorts what it finds into suggestions and what is of no use."""

    def __init__(
        self, profile: Profile, wanted: Budget, devices: int, folder: Path | None, progress: Progress | None
    ) -> None:
        self.profile, self.folder = profile, folder
        self.say = progress or (lambda stage, done: None)
        trace = profile.trace
        self.peak_bytes = live_levels(trace).peak_bytes + UNSEEN_BYTES
        budget_bytes = wanted.resolve(
            persistent_bytes=profile.chain.persistent_bytes, eager_peak_bytes=self.peak_bytes, least_bytes=0
        )
        body, optimizer = phase_seconds(trace)
        self.scale = Scale(budget_bytes, body + optimizer, optimizer)
        self.way = way_of(trace)
        self.bench = Bench(Workshop(profile.rehearsal.original, profile), self.scale, self.way, devices)
        self.found: list[Suggestion] = []
        self.no_use: list[NoUse] = []
        self.timeline = make_timeline(TraceArithmetic(trace), names=profile.eager.names)

    @property
    def fits(self) -> bool:
        """Whether the step fits as it is."""
        return self.peak_bytes <= self.scale.budget_bytes

    def advice(self) -> Advice:
        """The whole of it."""
        if not self.fits:
            self._check_budget()
            for kind, price in (
                (words.PLAN, self._plan), (words.MICRO_BATCH, self._micro), (words.MIXED, self._mixed),
                (words.OPTIMIZER, self._optimizer), (words.CHUNKED, self._chunked), (words.OFFLOAD, self._offload),
                (words.SHARDING, self._sharding),
            ):  # fmt: skip
                self.say(f"pricing: {kind}", 0.0)
                try:
                    price()
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._sort(kind, None, NO_ROOM, "not priced")
        self.say("looking for traps", 0.0)
        traps = find_traps(self.profile)
        least = None
        if not self.fits and not any(one.fits for one in self.found):
            self.say("trying pairs", 0.0)
            least = cheapest_pair(self.bench)
            if least is not None and is_of_use(
                least, min([self.peak_bytes, *(o.predicted_peak_bytes for o in self.found)])
            ):
                self.found.append(least)
        suggestions = ranked(self.found)
        at = self.timeline.peak_slot
        return Advice(
            budget_bytes=self.scale.budget_bytes,
            peak_bytes=self.peak_bytes,
            predicted_by="trace" if self.profile.trace.source == "real" else "fake trace",
            band_ratio=BAND_RATIO[self.profile.trace.source],
            eager_seconds=self.scale.eager_seconds,
            fits=self.fits,
            peak_moment=self.timeline.peak_moment,
            at_peak={name: row[at] if row else 0 for name, row in self.timeline.category_bytes.items()},
            holders=self.timeline.holders[:MOST_HOLDERS],
            persistent_bytes=self.profile.chain.persistent_bytes,
            device=self.profile.trace.device,
            suggestions=suggestions,
            no_use=tuple(self.no_use),
            traps=traps,
            verdict=self._verdict(suggestions),
            notes=self.profile.notes,
        )

    def _check_budget(self) -> None:
        """Refuse a budget that nothing here can reach."""
        trace, budget = self.profile.trace, self.scale.budget_bytes
        weights = state_sizes(trace)[0]
        buffers = sum(s.bytes for s in trace.storages if s.birth < 0 and s.category == tr.BUFFERS)
        if self.bench.devices == 1 and budget < weights + buffers:
            raise UsageError(
                f"the budget of {format_bytes(budget)} ({budget:,} bytes) is below what is there before any step: weights "
                f"{format_bytes(weights)}, buffers {format_bytes(buffers)}; with optimizer state and inputs "
                f"{format_bytes(self.profile.chain.persistent_bytes)}. No change to the step makes that fit: give a "
                "budget above it, devices=N to shard over, or a smaller model."
            )

    # -- one kind after the other -------------------------------------------------------------------------------

    def _sort(self, kind: str, one: Suggestion | None, why: str, what: str = "") -> None:
        """Among the suggestions if it is of use, else among what is not, with ``why``."""
        if one is None:
            self.no_use.append(NoUse(kind, what, None, why))
        elif is_of_use(one, self.peak_bytes):
            self.found.append(one)
        else:
            self.no_use.append(NoUse(kind, one.what, one.predicted_peak_bytes, why))

    def _plan(self) -> None:
        feasible = True
        try:
            plan = plan_profile(self.profile, self.scale.budget_bytes)
        except InfeasibleBudget as error:
            if not isinstance(error.plan, Plan):
                raise
            plan, feasible = error.plan, False
        self._sort(words.PLAN, plan_suggestion(plan, feasible), self._why_no_plan(plan))

    def _why_no_plan(self, plan: Plan) -> str:
        moment = plan.peak_moment
        if moment.phase == tr.OPTIMIZER:
            state = state_sizes(self.profile.trace)[2]
            name = type(self.profile.rehearsal.original.optimizer).__name__
            return (
                f"recomputation will not help: the optimizer's step is the peak, {format_bytes(state)} of its "
                f"{format_bytes(plan.predicted_peak_bytes)} are {name}'s state"
            )
        return f"recomputation will not help: its least is held by the {moment_text(moment)}"

    def _micro(self) -> None:
        steps = micro_steps(self.profile.rehearsal.original)
        if isinstance(steps, str):
            self._sort(words.MICRO_BATCH, None, steps, "smaller batches, gradients summed")
            return
        tried = []
        for micro in steps:
            record = self.bench.shop.attempt(
                f"micro {micro.size}", words.MICRO_BATCH, f"micro-batches of {micro.size}", micro.step
            )
            if isinstance(record, NoUse):
                self.no_use.append(record)
                break
            shop, key = self.bench.shop, f"micro {micro.size}"
            way = micro_way(micro, record.trace, None if shop.timed[key] else shop.body_by_roofline(key))
            self.bench.micros.append((micro, way, record))
            tried.append(self.scale.alone(way))
            if tried[-1].fits:
                break
        best = choose(tried)
        if best is not None:
            inputs = self.timeline.category_bytes[tr.ACTIVATIONS][self.timeline.peak_slot]
            why = f"little of the peak is in proportion to the batch: {format_bytes(inputs)} are activations"
            self._sort(words.MICRO_BATCH, best, why)

    def _mixed(self) -> None:
        changed = mixed(self.profile.rehearsal.original)
        record = self.bench.shop.attempt("mixed", words.MIXED, "forward under autocast to bf16", changed)
        if isinstance(record, NoUse):
            self.no_use.append(record)
            return
        way = way_of(record.trace, timed=self.bench.shop.timed["mixed"], **mixed_words(changed))
        self.bench.mixed = changed, way, record
        one = self.scale.alone(way)
        why = "the copies of the weights in bf16 take what narrower activations save, or there is little to narrow"
        self._sort(words.MIXED, one, why)

    def _optimizer(self) -> None:
        if self.profile.rehearsal.original.optimizer is None:
            self._sort(words.OPTIMIZER, None, "the step has no optimizer", "a lighter optimizer")
            return
        self.bench.optimizers = optimizer_swaps(self.profile, self.way.floor)
        tried = [self.scale.with_swap(self.way, swap) for swap in self.bench.optimizers]
        name, state = type(self.profile.rehearsal.original.optimizer).__name__, self.way.floor.optimizer_bytes
        why = f"{name} holds {format_bytes(state)}" if state else f"{name} holds no state"
        for one in tried:
            if one.result == words.SAME_BUT_ROUNDING:
                self._sort(
                    words.OPTIMIZER, one, f"its step makes {format_bytes(self.way.floor.step_bytes)} for a moment"
                )
        lighter = [one for one in tried if one.result != words.SAME_BUT_ROUNDING]
        fitting = [one for one in lighter if one.fits]
        # The mildest that fits, in the order of the table; where none does the one that leaves least.
        best = fitting[0] if fitting else min(lighter, key=lambda one: one.predicted_peak_bytes, default=None)
        self._sort(words.OPTIMIZER, best, why, "a lighter optimizer")

    def _chunked(self) -> None:
        self.bench.chunked, why = chunked_ways(self.profile.eager, self.way)
        tried = [self.scale.alone(way) for way in self.bench.chunked]
        fitting = [one for one in tried if one.fits]
        least = min((one.predicted_peak_bytes for one in tried), default=0)
        best = fitting[0] if fitting else next(
            (one for one in tried if one.predicted_peak_bytes <= least * (1 + LEAST_GAIN_RATIO)), None
        )  # fmt: skip
        at = moment_text(self.timeline.peak_moment)
        self._sort(words.CHUNKED, best, why or f"the loss is not the peak: that is the {at}", "head and loss in chunks")

    def _offload(self) -> None:
        self.bench.rates = rates(self.profile, self.folder)
        one = self.scale.alone(offload_way(self.profile, self.scale.budget_bytes, self.bench.rates))
        kept = self.timeline.category_bytes[tr.ACTIVATIONS][self.timeline.peak_slot]
        self._sort(words.OFFLOAD, one, f"{format_bytes(kept)} of the peak are activations, and not all can be away")

    def _sharding(self) -> None:
        self.bench.shards = shards(self.way.floor, self.bench.devices)
        if self.bench.devices == 1:
            return
        tried = [self.scale.with_swap(self.way, swap) for swap in self.bench.shards]
        fitting = [one for one in tried if one.fits]
        best = fitting[0] if fitting else tried[-1]
        self._sort(words.SHARDING, best, "activations are the peak, and every device holds those of its own batch")

    def _verdict(self, suggestions: tuple[Suggestion, ...]) -> str:
        if self.fits:
            return "the step fits as it is: nothing has to be changed"
        fitting = [one for one in suggestions if one.fits]
        at = f"the peak is the {moment_text(self.timeline.peak_moment)}"
        if self.timeline.peak_moment.phase == tr.OPTIMIZER:
            at = next((one.why for one in self.no_use if one.kind == words.PLAN), at)
        if fitting:
            single = len(fitting[0].kinds) == 1
            count = f"{len(fitting)} single changes make it fit" if single and len(fitting) > 1 else ""
            one = "one change makes it fit" if single else "no single change makes it fit; a pair does"
            return f"{at}; {count or one}: {' + '.join(fitting[0].kinds)} first"
        if not suggestions:
            return f"{at}; nothing here lowers it"
        least = min(suggestions, key=lambda one: one.predicted_peak_bytes)
        gap = least.predicted_peak_bytes - self.scale.budget_bytes
        return (
            f"{at}; nothing here makes it fit: the least is {format_bytes(least.predicted_peak_bytes)} by "
            f"{' + '.join(least.kinds)}, {format_bytes(gap)} too much"
        )


def plan_suggestion(plan: Plan, feasible: bool) -> Suggestion:
    """A plan of :func:`regrad.torch.plan` as a suggestion, with its own figures."""
    what = plan_words(plan)
    budget = plan.budget_bytes if feasible else "min"
    return Suggestion(
        kinds=(words.PLAN,),
        what=what if feasible else f"{what}, the least that recomputation reaches",
        how=f"rt.apply(model, rt.plan(model, batch, loss=loss, optimizer=optimizer, budget={budget!r}))",
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_by="trace arithmetic",
        step_ratio=plan.step_ratio,
        fits=feasible,
        result=words.SAME_BYTES,
        not_fixed="weights, gradients, optimizer state and the optimizer's own step",
    )
