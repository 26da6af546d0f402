"""Pairs of changes, for a step that no single one makes fit: the cheapest that does, else the one that leaves least.

Tried are micro-batches, bf16 and chunks of the loss on each other; a plan with micro-batches, bf16, another optimizer or
shards; another optimizer or shards with anything; both together. Not tried: offload with another change of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from regrad.core.advice import MICRO_BATCH, OPTIMIZER, PLAN, SAME_BYTES, SHARDING, NoUse, Suggestion
from regrad.core.errors import InfeasibleBudget, RegradError
from regrad.core.plan import Plan
from regrad.memory.advice import Scale, Swap, Way, choose, sharded_optimizer
from regrad.torch.advise_batches import Micro, micro_way, mixed, mixed_words
from regrad.torch.advise_ways import Workshop, chunked_ways, offload_way, phase_seconds, plan_words
from regrad.torch.plan import plan_profile
from regrad.torch.profile import Profile, make_profile
from regrad.torch.record import Record
from regrad.torch.step import Step


@dataclass
class Bench:
    """Everything that was priced of one step. ``rates`` are bytes per second out of memory and back."""

    shop: Workshop
    scale: Scale
    way: Way
    devices: int
    micros: list[tuple[Micro, Way, Record]] = field(default_factory=list)
    mixed: tuple[Step, Way, Record] | None = None
    chunked: list[Way] = field(default_factory=list)
    optimizers: list[Swap] = field(default_factory=list)
    shards: list[Swap] = field(default_factory=list)
    rates: tuple[float, float] = (1.0, 1.0)

    @property
    def optimizer_moment_bytes(self) -> int:
        """The optimizer's step by itself, which no change to the forward lowers."""
        return replace(self.way.floor, working_bytes=0).peak()


def cheapest_pair(bench: Bench) -> Suggestion | None:
    """The first by rank of all pairs; None where there are none."""
    found = list(_with_swaps(bench))
    if bench.optimizer_moment_bytes <= bench.scale.budget_bytes:
        found += _of_two_ways(bench)
        found += _plans(bench)
    found += _plans_with_swaps(bench)
    return choose(found)


def _with_swaps(bench: Bench) -> Iterator[Suggestion]:
    """Another optimizer or shards, with anything but a plan."""
    swaps = bench.optimizers + bench.shards
    ways = [way for _, way, _ in bench.micros] + bench.chunked + ([bench.mixed[1]] if bench.mixed is not None else [])
    for swap in swaps:
        for way in ways:
            yield bench.scale.with_swap(way, swap)
        room = bench.scale.budget_bytes + swap.freed_bytes(bench.way.floor)
        yield bench.scale.with_swap(offload_way(bench.shop.profile, room, bench.rates), swap)
    for lighter in bench.optimizers:
        for stage in bench.shards:
            one = bench.scale.with_swap(bench.way, sharded_optimizer(lighter, stage, bench.devices))
            yield replace(one, kinds=(OPTIMIZER, SHARDING))


def _of_two_ways(bench: Bench) -> Iterator[Suggestion]:
    """Micro-batches, bf16 and chunks of the loss on each other."""
    for micro, way, record in bench.micros:
        for one in chunked_ways(record, way, micro.extra_bytes)[0]:
            yield bench.scale.alone(one)
        if bench.mixed is None:
            continue
        changed = mixed(micro.step)
        both = bench.shop.attempt(f"mixed micro {micro.size}", MICRO_BATCH, "", changed)
        if isinstance(both, NoUse):
            continue
        timed = bench.shop.timed[f"mixed micro {micro.size}"]
        words, narrow = micro_way(micro, both.trace, timed=timed), mixed_words(changed)
        suggestion = bench.scale.alone(
            replace(
                words,
                kinds=(*words.kinds, *narrow["kinds"]),
                what=f"{words.what}; {narrow['what']}",
                how=f"{words.how}; {narrow['how']}",
                result=narrow["result"],
            )
        )
        yield suggestion
        if suggestion.fits:
            break
    if bench.mixed is not None:
        _, way, record = bench.mixed
        for one in chunked_ways(record, way)[0]:
            yield bench.scale.alone(one)


def _plans(bench: Bench) -> Iterator[Suggestion]:
    """A plan on micro-batches, and on the step in bf16."""
    if bench.micros:
        yield _largest_planned(bench, [(micro, way) for micro, way, _ in bench.micros])
    if bench.mixed is not None:
        changed, way, _ = bench.mixed
        yield bench.scale.alone(_planned(bench, changed, way, 1, 0))


def _largest_planned(bench: Bench, micros: Sequence[tuple[Micro, Way]]) -> Suggestion:
    """The largest micro-batches for which a plan fits, by halving; the smallest where none does."""

    def priced(index: int) -> Suggestion:
        micro, way = micros[index]
        return bench.scale.alone(_planned(bench, micro.step, way, micro.parts, micro.extra_bytes))

    best, least, most = priced(len(micros) - 1), 0, len(micros) - 1
    while best.fits and least < most:
        middle = (least + most) // 2
        one = priced(middle)
        if one.fits:
            best, most = one, middle
        else:
            least = middle + 1
    return best


def _planned(bench: Bench, changed: Step, way: Way, parts: int, extra_bytes: int) -> Way:
    """``way`` with a plan of its step, at what the budget leaves, or at its least."""
    profile = make_profile(changed, device=bench.shop.profile.device)
    plan = _plan_or_least(profile, bench.scale.budget_bytes - extra_bytes)
    floor = way.floor
    added = parts * plan.added_seconds
    return replace(
        way,
        kinds=(*way.kinds, PLAN),
        what=f"{way.what}; {plan_words(plan)}",
        how=f"{way.how}; rt.apply(model, rt.plan(…, budget={plan.budget_bytes}))",
        floor=replace(floor, working_bytes=plan.predicted_peak_bytes + extra_bytes),
        body_seconds=parts * phase_seconds(profile.trace)[0] + added,
        by="trace and trace arithmetic",
    )


def _plan_or_least(profile: Profile, budget_bytes: int) -> Plan:
    try:
        return plan_profile(profile, max(budget_bytes, 0))
    except InfeasibleBudget as error:
        if not isinstance(error.plan, Plan):
            raise
        return error.plan


def _plans_with_swaps(bench: Bench) -> list[Suggestion]:
    """A plan with another optimizer or with shards: planned without any optimizer, in the room that its state leaves.

    Of each family the mildest that a plan makes fit; where the least that plans reach is too much, that least.
    """
    budget, floor = bench.scale.budget_bytes, bench.way.floor
    last = replace(floor, working_bytes=0)
    families = [[swap for swap in family if swap.peak(last) <= budget] for family in (bench.optimizers, bench.shards)]
    profile = _bare_profile(bench) if any(families) else None
    if profile is None:
        return []
    least = _plan_or_least(profile, 0)

    def priced(plan: Plan, swap: Swap) -> Suggestion:
        way = Way(
            kinds=(PLAN,),
            what=plan_words(plan),
            how="rt.apply(model, rt.plan(…))",
            floor=replace(floor, working_bytes=plan.predicted_peak_bytes + floor.optimizer_bytes),
            body_seconds=bench.way.body_seconds + plan.added_seconds,
            by="trace arithmetic",
            result=SAME_BYTES,
            not_fixed="weights and gradients",
        )
        return bench.scale.with_swap(way, swap)

    found = []
    for family in families:
        for swap in family:
            one = priced(least, swap)
            if one.fits:
                one = priced(_plan_or_least(profile, budget - swap.optimizer_bytes + swap.weights_saved), swap)
            found.append(one)
            if one.fits:
                break
    return found


def _bare_profile(bench: Bench) -> Profile | None:
    """The profile of the step without its optimizer; None where such a step cannot be recorded."""
    given = bench.shop.step
    try:
        bare = Step(given.model, given.batch, given.loss, gradients=given.gradients)
        return make_profile(bare, device=bench.shop.profile.device)
    except RegradError:
        return None
