"""Moves: what is saved in fewer bytes or elsewhere, planned and run. Peaks, held bytes, and the eager step's bytes."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import train
from moved import base, forced, retained
from torch import nn

import regrad.torch as rt
from regrad.core.errors import InvalidPlace, InvalidPolicy
from regrad.core.plan import Plan
from regrad.planners import Optimal
from regrad.torch.describe import Found
from regrad.torch.measure import measure_peak
from regrad.torch.move_plan import planned_moves, saves_of
from regrad.torch.plan import confirm
from regrad.torch.policy import Policy
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape.calls import CallCounter
from regrad.torch.tape_plan import tape_ranges

NAMES = ["gpt", "llama_like", "vit", "batchnorm_conv", "unet", "moe", "queue_encoder"]


def check_run(step: rt.Step, found: Found, plan: Plan, policy: Policy) -> None:
    """The plan runs: the eager bytes, every save moved, and peak and held bytes as predicted."""
    eager, planned = copy.deepcopy(step), copy.deepcopy(step)
    rt.apply(planned.model, plan, place=policy.place)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionKept)
        states = []
        for one in (eager, planned):
            torch.manual_seed(3)
            states.append(train(one.model, one.batch, steps=2))
        assert states[0] == states[1]
        again = copy.deepcopy(step)
        rt.apply(again.model, plan, place=policy.place)
        assert abs(plan.predicted_peak_bytes / measure_peak(again).peak_bytes - 1) <= 0.01
        tape = again.model.forward.taped.tape  # type: ignore[union-attr]
        reports = tape.report_moves()
        stop = found.search.tape.arithmetic.forward_stop  # type: ignore[union-attr]
        predicted = found.levels.before[stop] - found.search.tape.arithmetic.base_bytes  # type: ignore[union-attr]
        # a fused attention may draw, so a state of the generator is charged for each in a range; without dropout it does not
        fused = sum(
            plan.calls[at] == "scaled_dot_product_attention" for one in plan.ranges for at in range(one.start, one.stop)
        )
        measured = retained(again)
        assert predicted * 0.99 - 1024 - 5056 * fused <= measured <= predicted * 1.01 + 1024
    assert len(reports) == len(plan.moves)
    for report in reports:
        assert report.kept == ()
        assert report.moved == 2 * len(report.move.saves)  # a warm-up and the measured step
        assert report.held_bytes == report.move.held_bytes or report.move.how == "narrow"


# -- places ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "vit", "batchnorm_conv", "moe", "pooled", "grouped"])
def test_the_places_of_saves_are_those_that_hooks_see(name: str) -> None:
    step, profile = base(name)
    step = copy.deepcopy(step)
    seen: list[tuple[int, int]] = []
    counter = CallCounter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((counter.current, tensor.untyped_storage().nbytes()))
        return tensor

    original = step.model.forward

    def numbered(*args: Any, **kwargs: Any) -> Any:
        with counter:
            return original(*args, **kwargs)

    step.model.forward = numbered  # type: ignore[method-assign]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.compute_loss()
    slots: Counter[int] = Counter()
    sizes = {}
    for call, size in seen:
        if call >= 0:
            sizes[call, slots[call]] = size
            slots[call] += 1
    storages = profile.base.trace.storages
    found = {place: storages[index].bytes for index, places in saves_of(profile.base.trace).items() for place in places}
    assert found == sizes


class Indexing(nn.Module):
    """Saves integers that the forward computed; ``how`` says by which call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.head, self.table = how, nn.Linear(32, 300), nn.Embedding(300, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x)
        if self.how == "topk":
            return logits.topk(64, dim=1).values.sum()
        if self.how == "embedding":
            return (self.table(logits.argmax(1)) + self.head.bias[:32]).square().mean()
        if self.how == "cross_entropy":
            return F.cross_entropy(logits, logits.detach().argmin(1))
        if self.how == "gather":
            return logits.gather(1, (logits.detach() > 0).long().cumsum(1)[:, :200]).square().mean()
        return logits[:, (logits.detach()[:, 0] > 0).long()].square().mean()


@pytest.mark.parametrize(
    ("how", "width"), [("topk", 2), ("embedding", 2), ("cross_entropy", 2), ("gather", 2), ("index", None)]
)
def test_integers_are_narrowed_by_what_operations_guarantee(how: str, width: int | None) -> None:
    step = rt.Step(Indexing(how), torch.randn(1024, 32))
    search = rt.profile(step).search
    assert search is not None
    narrow = {
        search.tape.trace.storages[one.storage].bytes // one.held_bytes: one.held_bytes
        for one in search.movables
        if one.how == "narrow"
    }
    assert list(narrow) == ([] if width is None else [8 // width])


# -- each kind alone, and all together ----------------------------------------------------------------------------------------


@pytest.mark.memory
@pytest.mark.parametrize("name", ["gpt", "queue_encoder", "pooled"])
def test_packing_alone(name: str) -> None:
    step, profile = base(name)
    policy = Policy(recompute=False)
    under = profile.under(policy)
    assert under.search is not None
    kinds = {one.how for one in under.search.movables}
    assert kinds == {"gpt": {"bits"}, "queue_encoder": {"signs"}, "pooled": {"bits", "signs", "narrow"}}[name]
    found, plan = forced(under, (), under.search.movables)
    assert len(plan.moves) == len(under.search.movables)
    assert confirm(under, found) == ()
    check_run(step, found, plan, policy)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt", "queue_encoder")])
def test_what_cannot_be_packed_is_not(name: str) -> None:
    """These save no mask, no index of any size, and no result of relu that nobody else saves."""
    _, profile = base(name)
    assert profile.search is not None
    assert profile.search.movables == ()


@pytest.mark.memory
@pytest.mark.parametrize("name", NAMES)
def test_moving_elsewhere_alone(name: str, tmp_path: Path) -> None:
    step, profile = base(name)
    policy = Policy(recompute=False, pack=False, offload=str(tmp_path))
    under = profile.under(policy)
    assert under.search is not None
    found, plan = forced(under, (), under.search.movables)
    assert len(plan.moves) > 0
    assert {one.how for one in plan.moves} == {"offload"}
    assert confirm(under, found) == ()
    check_run(step, found, plan, policy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.memory
@pytest.mark.parametrize("name", [*NAMES, "pooled"])
def test_all_together_with_ranges(name: str, tmp_path: Path) -> None:
    step, profile = base(name)
    policy = Policy(offload=str(tmp_path))
    under = profile.under(policy)
    assert under.search is not None
    movables = under.search.movables
    ways = [way for way in under.search._sweep() if way[0] and under.search.price(way[0], movables).moves]
    ranges = ways[len(ways) // 2][0] if ways else ()
    found, plan = forced(under, ranges, movables)
    assert len(plan.moves) > 0
    assert (len(plan.ranges) > 0) == bool(ways)
    check_run(step, found, plan, policy)


# -- plans ----------------------------------------------------------------------------------------------------------------


@pytest.mark.memory
@pytest.mark.parametrize("name", NAMES)
def test_a_policy_that_only_moves_is_planned_and_run(name: str, tmp_path: Path) -> None:
    step, profile = base(name)
    policy = Policy(recompute=False, offload=str(tmp_path))
    seconds = []
    for budget in ("min", "60%", "80%"):
        plan = rt.plan_profile(profile, budget, policy=policy)
        assert plan.moves
        assert not plan.ranges
        assert not plan.recomputed
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        seconds.append(plan.added_seconds)
    assert seconds == sorted(seconds, reverse=True)
    planned, eager = copy.deepcopy(step), copy.deepcopy(step)
    rt.apply(planned.model, plan, place=policy.place)
    states = []
    for one in (eager, planned):
        torch.manual_seed(3)
        states.append(train(one.model, one.batch, steps=2))
    assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.memory
def test_packing_makes_plans_faster() -> None:
    step, profile = base("gpt")
    with_packing, without = (rt.plan_profile(profile, "50%", policy=Policy(pack=pack)) for pack in (True, False))
    assert with_packing.moves or with_packing.masks  # by which of them depends on what kernels take here
    assert not without.moves
    assert not without.masks
    assert with_packing.added_seconds < without.added_seconds
    planned = copy.deepcopy(step)
    rt.apply(planned.model, with_packing)
    measured = measure_peak(planned).peak_bytes
    assert abs(with_packing.predicted_peak_bytes / measured - 1) <= 0.01
    timeline = rt.timeline(profile, with_packing)
    assert abs(timeline.peak_bytes - with_packing.predicted_peak_bytes) <= 0.01 * measured
    assert Plan.from_json(with_packing.to_json()) == with_packing


@pytest.mark.memory
def test_segments_have_finer_options() -> None:
    step, profile = base("gpt")
    parts = profile.parts[0]
    segment = parts.problem.chain.segments[1]
    names = [option.name for option in segment.options]
    assert names[:3] == ["keep", "recompute", "pack"]
    assert 1 <= sum(name.startswith("ranges") for name in names) <= 6
    pack, keep = segment.option("pack"), segment.option("keep")
    assert pack.retained_bytes < keep.retained_bytes
    assert pack.added_seconds > 0
    chain_plan = rt.plan_profile(profile, "50%", Optimal())
    assert chain_plan.planner == "Optimal"
    assert chain_plan.ranges
    assert chain_plan.moves
    assert sum(one.moved_bytes for one in chain_plan.segments) == sum(one.bytes for one in chain_plan.moves)
    planned = copy.deepcopy(step)
    rt.apply(planned.model, chain_plan)
    assert abs(chain_plan.predicted_peak_bytes / measure_peak(planned).peak_bytes - 1) <= 0.01


def test_a_plan_states_its_moves_as_the_step_has_them() -> None:
    _, profile = base("pooled")
    search = profile.search
    assert search is not None
    _, plan = forced(profile, (), search.movables)
    trace = profile.base.trace
    again = planned_moves(trace, plan.moves)
    assert {one.storage for one in again} == {one.storage for one in search.movables}
    assert sum(one.out_seconds for one in again) == pytest.approx(plan.added_seconds)
    widths = {one.bytes // one.held_bytes for one in plan.moves if one.how == "narrow"}
    assert widths == {8}  # places among 16 x 16 fit a byte each; so do those of a row of 64, saved by two calls
    assert any(len(one.saves) == 2 for one in plan.moves)


# -- tensors that are repeated ------------------------------------------------------------------------------------------------


@pytest.mark.memory
def test_repeats_are_made_again_where_there_is_room_for_all_else() -> None:
    step, profile = base("grouped")
    policy = Policy(pack=False, keep=("softmax", "linear"))
    search = profile.under(policy).search
    assert search is not None
    plan = rt.plan_profile(profile, int(0.97 * search.price(()).peak_bytes), policy=policy)
    ranges = tape_ranges(profile.base.trace, plan.ranges)
    operations = profile.base.trace.operations
    again = [operations[k].name for one in ranges for k in search.tape.slice_of(one)[0]]
    assert again.count("aten.clone.default") == len(ranges) > 0
    assert set(again) <= {"aten.clone.default", "aten._unsafe_view.default", "aten.expand.default", "aten.view.default"}
    planned, kept = copy.deepcopy(step), copy.deepcopy(step)
    rt.apply(planned.model, plan)
    repeated, once = 4 * 64 * 512 * 4, 4 * 64 * 128 * 4  # all heads of one block; its keys and values before that
    assert retained(kept) - retained(planned) == len(ranges) * (repeated - once)


# -- policies -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_that_are_kept_run_once_and_are_not_moved(tmp_path: Path) -> None:
    _, profile = base("gpt")
    policy = Policy(offload=str(tmp_path), keep=("linear", "softmax"))
    plan = rt.plan_profile(profile, "min", policy=policy)
    again = {plan.calls[at] for one in plan.ranges for at in range(one.start, one.stop)}
    assert again
    moved = {plan.calls[call] for one in plan.moves for call, _ in one.saves}
    assert moved
    assert not {"linear", "Tensor.softmax"} & (again | moved)
    under = profile.under(policy)
    assert all(not segment.can("recompute") for segment in under.chain.segments)
    assert "the policy keeps" in under.chain.segments[1].reason


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(keep=("liner",)), r"no torch call of this step is called so. Did you mean linear\?"),
        (Policy(keep=("scaled_dot_product_attention",)), "Its calls are .*softmax"),
        (Policy(offload="host"), "the step runs on cpu"),
    ],
)
def test_a_policy_that_names_what_is_not_there(policy: Policy, message: str) -> None:
    _, profile = base("gpt")
    with pytest.raises(InvalidPolicy, match=message):
        rt.plan_profile(profile, "50%", policy=policy)


def test_a_place_that_takes_nothing(tmp_path: Path) -> None:
    _, profile = base("gpt")
    with pytest.raises(InvalidPlace, match="nowhere"):
        rt.plan_profile(profile, "50%", policy=Policy(offload=str(tmp_path / "nowhere")))
    with pytest.raises(InvalidPolicy, match="is one text"):
        Policy(keep="linear")  # type: ignore[arg-type]


def test_a_policy_that_allows_nothing_has_the_eager_step() -> None:
    _, profile = base("gpt")
    plan = rt.plan_profile(profile, "min", policy=Policy(recompute=False, pack=False))
    assert plan.least_bytes == pytest.approx(plan.eager_peak_bytes, rel=1e-4)
    assert not plan.moves
    assert not plan.recomputed
