"""``rt.frontier``: ours is never above what else can be run, and every point's price is that of the plan when it runs."""

from __future__ import annotations

import pytest
import torch
from models import GPT, ConvNet, Shared, digits_batch, gpt_batch

import regrad.torch as rt
from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.errors import PlanMismatch, UsageError
from regrad.core.frontier_curve import OURS
from regrad.core.plan import Choice, Choices, one_level
from regrad.planners import Binomial, FirstK, Planner, SqrtN, Uniform
from regrad.torch.describe import UNSEEN_BYTES
from regrad.torch.frontier import _resolve
from regrad.torch.frontier_pricing import Pricing, depth_of, recomputed, simplified
from regrad.torch.spans import NoSuchSpan

PLANNERS = {"Optimal", "Milp", "Optimal, nested", "Frontier", "KeepAll", "RecomputeAll", "FirstK", "EveryK", "Uniform",
            "SqrtN", "Binomial"}  # fmt: skip


def gpt_step() -> rt.Step:
    model = GPT()
    return rt.Step(model, gpt_batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def conv_step(norm: str) -> rt.Step:
    model = ConvNet(norm)
    return rt.Step(model, digits_batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(scope="module")
def gpt_profile() -> rt.Profile:
    torch.manual_seed(0)
    return rt.profile(gpt_step())


@pytest.fixture(scope="module")
def curve(gpt_profile: rt.Profile) -> rt.Frontier:
    torch.manual_seed(0)
    return rt.frontier(gpt_step(), profile=gpt_profile, budgets=["min", "40%", "50%", "60%", "80%", "100%"])


def test_every_planner_is_on_it_or_has_a_reason(curve: rt.Frontier) -> None:
    left_out = {one.method: one.reason for one in curve.left_out}
    assert set(curve.methods) == {OURS, *PLANNERS}
    assert set(left_out) == {"StateAgnostic", "KeepOrSnapshot", "torch selective, sac_ilp"}
    assert all(left_out.values())
    assert len(curve.of("FirstK")) == 6  # one for every number of blocks
    assert {point.budget_bytes for point in curve.of(OURS)} == set(curve.budgets_bytes)


def test_ours_is_never_above_the_others(curve: rt.Frontier) -> None:
    assert curve.behind() == ()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: conv_step("group"), lambda: conv_step("batch"), lambda: shared_step()],
                         ids=["group norm", "batch norm", "one block called three times"])  # fmt: skip
def test_nor_on_other_models(make) -> None:
    found = rt.frontier(make(), budgets=["min", "35%", "50%", "75%"])
    assert found.of(OURS)
    assert len(found.methods) > 8
    assert found.behind() == ()


def shared_step() -> rt.Step:
    return rt.Step(Shared(), torch.randn(8, 32, 64))


def test_ours_never_rises_with_the_budget(curve: rt.Frontier) -> None:
    ours = sorted(curve.of(OURS), key=lambda point: point.budget_bytes or 0)
    assert all(point.peak_bytes <= (point.budget_bytes or 0) for point in ours)
    seconds = [point.added_seconds for point in ours]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0  # the last budget is the eager peak


def test_a_point_is_the_price_of_the_plan(curve: rt.Frontier, gpt_profile: rt.Profile) -> None:
    for k, point in enumerate(sorted(curve.of("FirstK"), key=lambda one: one.recomputed), start=1):
        assert (point.setting, point.recomputed, point.depth) == (f"k = {k}", k, 1)
        options = ["keep" if not segment.can(RECOMPUTE) else "" for segment in gpt_profile.chain.segments]
        can = [i for i, option in enumerate(options) if not option]
        options = [RECOMPUTE if i in can[:k] else KEEP for i in range(len(options))]
        levels = gpt_profile.levels(tuple(options))
        assert (point.peak_bytes, point.added_seconds) == (levels.peak_bytes + UNSEEN_BYTES, levels.added_seconds)


def test_a_planner_on_the_curve_is_what_it_plans_alone(curve: rt.Frontier, gpt_profile: rt.Profile) -> None:
    budget = curve.budgets_bytes[3]
    plan = rt.plan_profile(gpt_profile, budget, FirstK())
    best = curve.best(budget, "FirstK")
    assert best is not None
    assert best.peak_bytes == plan.predicted_peak_bytes
    assert best.added_seconds == pytest.approx(plan.added_seconds, rel=1e-12)


def test_budgets_as_they_are_given(gpt_profile: rt.Profile) -> None:
    found = rt.frontier(gpt_step(), profile=gpt_profile, budgets=["50%", 1024, "min", "50%"])
    assert len(found.budgets_bytes) == 3
    assert found.budgets_bytes[:2] == (1024, found.least_bytes)
    refused = [one for one in found.left_out if one.method == OURS]
    assert [one.reason.startswith("nothing fits 1.00 KiB: the least is ") for one in refused] == [True]
    assert len(found.of(OURS)) == 2


def test_budgets_that_are_not_given(gpt_profile: rt.Profile) -> None:
    least = rt.plan_profile(gpt_profile, "min")
    found = _resolve(None, least)
    assert len(found) == 12
    assert (found[0], found[-1]) == (least.least_bytes, least.eager_peak_bytes)


@pytest.mark.parametrize("budgets", [[], "50%"])
def test_no_list_of_budgets(budgets) -> None:
    with pytest.raises(UsageError, match="give a list"):
        rt.frontier(gpt_step(), budgets=budgets)


def test_a_profile_of_another_step(gpt_profile: rt.Profile) -> None:
    with pytest.raises(PlanMismatch):
        rt.frontier(rt.Step(GPT(blocks=3), gpt_batch()), profile=gpt_profile)


def test_the_users_step_is_left_alone(gpt_profile: rt.Profile) -> None:
    step = gpt_step()
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    generator = torch.get_rng_state()
    rt.frontier(step, profile=gpt_profile, budgets=["50%"])
    assert all(map(torch.equal, before, step.model.parameters()))
    assert torch.equal(generator, torch.get_rng_state())
    assert not rt.is_applied(step.model)


# -- prices of spans ----------------------------------------------------------------------------------------------


def blocks_of(profile: rt.Profile) -> list[int]:
    return [i for i, segment in enumerate(profile.chain.segments) if segment.can(RECOMPUTE)]


def choices(profile: rt.Profile, spans: list[tuple[int, int]]) -> Choices:
    """Spans over blocks first … last - 1, all else kept."""
    can, count = blocks_of(profile), len(profile.chain)
    made = {}
    for first, last in spans:
        start, stop = can[first], can[last - 1] + 1
        made[start] = Choice(start, stop, RECOMPUTE, one_level([KEEP] * count)[start:stop])
    found, at = [], 0
    while at < count:
        found.append(made.get(at, Choice(at, at + 1, KEEP)))
        at = found[-1].stop
    return tuple(found)


@pytest.mark.parametrize("planner", [Uniform(3), SqrtN(), Binomial(2)], ids=str)
def test_a_plan_with_spans_is_priced_as_it_runs(gpt_profile: rt.Profile, planner: Planner) -> None:
    choices_ = planner(gpt_profile.problem, 1 << 62).plan
    assert choices_ is not None
    assert any(choice.is_span for choice in choices_)
    peak, seconds = Pricing(gpt_profile).price(choices_)
    plan = rt.plan_profile(gpt_profile, 1 << 40, planner)
    assert plan.ranges
    assert (plan.predicted_peak_bytes, plan.added_seconds) == (peak, seconds)


def test_a_span_of_one_is_its_segment(gpt_profile: rt.Profile) -> None:
    pricing, can = Pricing(gpt_profile), blocks_of(gpt_profile)
    plain = one_level([RECOMPUTE if i in can[:2] else KEEP for i in range(len(gpt_profile.chain))])
    spans = choices(gpt_profile, [(0, 1), (1, 2)])
    assert simplified(spans) == plain
    assert pricing.price(spans) == pricing.price(plain)
    assert (recomputed(spans), depth_of(plain), depth_of(spans)) == (2, 1, 1)


def test_nesting_lowers_the_peak_and_costs_time(gpt_profile: rt.Profile) -> None:
    pricing = Pricing(gpt_profile)
    whole = choices(gpt_profile, [(0, 6)])
    outer = next(choice for choice in whole if choice.is_span)
    inner = choices(gpt_profile, [(0, 3), (3, 6)])
    kept = [choice for choice in inner if outer.start <= choice.start < outer.stop]
    nested = tuple(Choice(c.start, c.stop, c.option, tuple(kept)) if c is outer else c for c in whole)
    assert depth_of(nested) == 2
    flat_peak, flat_seconds = pricing.price(whole)
    peak, seconds = pricing.price(nested)
    assert peak < flat_peak
    assert seconds > flat_seconds


def test_a_span_over_a_write_from_outside_is_refused() -> None:
    """The blocks work in place on what they are given: none of them can be run again, nor can two at once."""
    from regrad.core.trace import FORWARD

    free, profile = (rt.profile(conv_step("group")) for _ in range(2))
    can = blocks_of(profile)
    Pricing(free).price(choices(free, [(0, 2)]))
    trace = profile.arithmetic.trace
    first, second = (next(c for c in trace.calls if c.module == profile.pieces[can[i]].module) for i in (0, 1))
    assert trace.operations[second.start].phase == FORWARD
    trace.operations[second.start].writes = (first.inputs[0],)  # as if it wrote what the first one was given
    with pytest.raises(NoSuchSpan, match=r"layers.0 … layers.1 cannot be run again as one: "):
        Pricing(profile).price(choices(profile, [(0, 2)]))
