"""Engines of large state as part of a plan: offered, chosen, told to the segments, exact, and priced to the byte."""

from __future__ import annotations

import copy
import pickle
import random
import warnings

import pytest
import torch
from queues import WIDTH, by, fixed, make_step, options, same, train
from torch import nn

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.plan import Plan
from regrad.core.state import JOURNAL, READ_SET, SNAPSHOT
from regrad.planners import Optimal, RecomputeAll
from regrad.planners.advice import Why
from regrad.torch import recompute
from regrad.torch.describe import Found, describe
from regrad.torch.execute import LOG, planned_calls
from regrad.torch.measure import measure_peak
from regrad.torch.profile import Profile
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept
from regrad.torch.state_text import findings

BLOCKS = 4
ROOMY = 1 << 40
OFFERED = [
    (mode, engine)
    for mode in ("rows", "slice", "dense")
    for engine in (SNAPSHOT, JOURNAL, READ_SET)
    if (mode, engine) != ("dense", READ_SET)
]


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return {mode: rt.profile(make_step(mode)) for mode in ("rows", "slice", "dense")}


@pytest.fixture(scope="module")
def eager() -> dict[str, list[torch.Tensor]]:
    return {mode: train(make_step(mode)) for mode in ("rows", "slice", "dense")}


def engines_offered(profile: Profile, index: int = 0) -> set[str]:
    return {use.engine for one in profile.stateful.chain.segments[index].options for use in one.states}


def test_every_engine_that_a_region_can_run_is_offered_and_none_that_it_cannot(profiles):
    assert engines_offered(profiles["rows"]) == engines_offered(profiles["slice"]) == {SNAPSHOT, JOURNAL, READ_SET}
    # all of the queue is read before it is written: a read set would be a copy
    assert engines_offered(profiles["dense"]) == {SNAPSHOT, JOURNAL}
    for profile in profiles.values():
        (variable,) = profile.stateful.states
        assert variable.nbytes == 4 << 20
        assert [entry.writer for entry in variable.entries] == list(range(BLOCKS))
        segments = profile.stateful.chain.segments
        assert all(segment.options[-1].name == RECOMPUTE for segment in segments[:BLOCKS])
        assert [option.name for option in segments[BLOCKS].options] == [KEEP]
    assert [e.payload_bytes for e in profiles["rows"].stateful.states[0].entries] == [16 * 4 * WIDTH] * BLOCKS
    assert [e.payload_bytes for e in profiles["dense"].stateful.states[0].entries] == [4 << 20] * BLOCKS


def test_the_usual_engine_is_the_log_where_writes_are_sparse(profiles):
    usual = {mode: profile.stateful.chain.segments[0].option(RECOMPUTE).engine for mode, profile in profiles.items()}
    assert usual == {"rows": JOURNAL, "slice": JOURNAL, "dense": SNAPSHOT}


@pytest.mark.memory
@pytest.mark.parametrize(("mode", "engine"), OFFERED)
def test_an_engine_alone_is_exact_and_its_peak_is_the_one_predicted(mode, engine, profiles, eager):
    plan = rt.plan_profile(profiles[mode], ROOMY, by(engine))
    assert [segment.engine for segment in plan.segments] == [engine] * BLOCKS + [None]
    assert [segment.option for segment in plan.segments] == [RECOMPUTE] * BLOCKS + [KEEP]
    assert not any("dry run" in note for note in plan.notes)
    step = make_step(mode)
    rt.apply(step.model, plan)
    before = recompute.replays()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionKept)
        assert same(train(step), eager[mode])
    assert recompute.replays() - before == 3 * BLOCKS
    measured = rt.measure(step, steps=1).peak_bytes
    assert abs(plan.predicted_peak_bytes - measured) <= 0.01 * measured
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert rt.timeline(profiles[mode], again).peak_bytes == plan.predicted_peak_bytes - 256


@pytest.mark.memory
def test_any_mix_of_engines_and_kept_segments_is_exact_and_priced(profiles, eager):
    draw = random.Random(7)
    for mode in ("rows", "dense"):
        for _ in range(4):
            choice = [draw.choice([one.name for one in s.options]) for s in profiles[mode].stateful.chain.segments]
            plan = rt.plan_profile(profiles[mode], ROOMY, fixed(choice))
            step = make_step(mode)
            rt.apply(step.model, plan)
            assert same(train(step), eager[mode]), choice
            measured = rt.measure(step, steps=1).peak_bytes
            assert abs(plan.predicted_peak_bytes - measured) <= 0.01 * measured, choice


def test_a_kept_writer_logs_only_for_a_segment_that_needs_the_log(profiles):
    profile = profiles["rows"]
    copied = rt.plan_profile(profile, ROOMY, fixed(options(profile, [SNAPSHOT, None, READ_SET, None])))
    assert planned_calls(copied) == {
        "blocks.0": (RECOMPUTE,),
        "blocks.2": (RECOMPUTE,),
    }
    logged = rt.plan_profile(profile, ROOMY, fixed(options(profile, [SNAPSHOT, JOURNAL, None, None])))
    assert planned_calls(logged)["blocks.3"] == (LOG,)
    assert "blocks.0" in planned_calls(logged)
    # what each segment states adds up to what is held: a copy, and an entry of the log for each of three writers
    held = [state.retained_bytes for s in logged.segments for state in s.state if state.name.endswith("rows")]
    entry = 16 * 4 * WIDTH + 16 * 8
    assert held == [4 << 20, entry, entry, entry]


def test_optimal_chooses_the_engine_and_says_why(profiles):
    profile = profiles["dense"]
    # one segment runs again, the others stay: its own copy and nothing else, or a log of all four
    least = rt.plan_profile(profile, "min", by(SNAPSHOT)).predicted_peak_bytes
    assert least < rt.plan_profile(profile, ROOMY, by(JOURNAL)).predicted_peak_bytes
    sparse = profiles["rows"]
    plan = rt.plan_profile(sparse, ROOMY, by(JOURNAL))
    for segment in plan.segments[:BLOCKS]:
        (state,) = [one for one in segment.state if one.chosen]
        assert (state.engine, state.written) == (JOURNAL, True)
        assert "overwritten from here on, once in a log for all" in state.reason
    assert "overwritten from here on" in str(plan)
    solution = Optimal()(sparse.stateful, sparse.stateful.chain.persistent_bytes)
    tight = Optimal()(sparse.stateful, solution.least_bytes)
    taken = [sparse.stateful.chain.segments[c.start].option(c.option) for c in tight.plan]
    assert any(one.recomputes for one in taken)
    assert all(use.engine != SNAPSHOT for one in taken for use in one.states)


def found(profile: Profile, engines: list[str | None]) -> Found:
    names = tuple(options(profile, engines))
    return Found(names, profile.levels(names))


def test_findings_tell_a_roomy_budget_a_dense_queue_and_a_sparse_one_apart(profiles):
    def why(mode, engines, budget):
        return {finding.why for finding in findings(profiles[mode], found(profiles[mode], engines), budget)}

    kept: list[str | None] = [None] * BLOCKS
    assert why("rows", kept, ROOMY) == {Why.ROOMY_BUDGET}
    assert why("rows", [JOURNAL] * BLOCKS, 1) == {Why.PAYS}
    assert Why.ANOTHER_ENGINE in why("rows", [READ_SET] * BLOCKS, 1)
    assert why("dense", kept, ROOMY) == {Why.ROOMY_BUDGET, Why.EAGER_IS_SMALLER, Why.DENSE_WRITES}
    (first, *_) = findings(profiles["rows"], found(profiles["rows"], kept), ROOMY)
    names = tuple(options(profiles["rows"], kept))
    assert first.ours_bytes == profiles["rows"].levels(names).peak_bytes + 256


def test_what_was_found_stands_in_the_plan(profiles):
    for mode in ("rows", "dense"):
        plan = rt.plan_profile(profiles[mode], ROOMY, Optimal())
        assert not plan.recomputed
        options_now = tuple(choice.option for choice in plan.choices)
        expected = findings(profiles[mode], Found(options_now, profiles[mode].levels(options_now)), ROOMY)
        assert [one.text for one in expected] == list(plan.notes)
        assert all(one.text in str(plan) for one in expected)


def test_copies_of_a_planned_model_run_under_its_engines(profiles, eager):
    plan = rt.plan_profile(profiles["rows"], ROOMY, by(SNAPSHOT))
    step = make_step("rows")
    rt.apply(step.model, plan)
    for model in (copy.deepcopy(step.model), pickle.loads(pickle.dumps(step.model))):
        other = rt.Step(model, step.batch, step.loss, torch.optim.SGD(model.parameters(), lr=0.01))
        assert same(train(other), eager["rows"])
    held = retained_bytes()
    loss = step.loss(step.model, step.batch)
    assert BLOCKS * (4 << 20) <= retained_bytes() - held < BLOCKS * (4 << 20) + 100_000
    loss.backward()
    assert retained_bytes() == held


def test_calls_of_one_module_each_have_their_engine():
    profile = rt.profile(make_step("rows", shared=True))
    plain = train(make_step("rows", shared=True))
    plan = rt.plan_profile(profile, ROOMY, fixed(options(profile, [SNAPSHOT, JOURNAL, None, READ_SET])))
    assert [segment.engine for segment in plan.segments[:BLOCKS]] == [SNAPSHOT, JOURNAL, JOURNAL, READ_SET]
    step = make_step("rows", shared=True)
    rt.apply(step.model, plan)
    assert same(train(step), plain)
    held = retained_bytes()
    loss = step.loss(step.model, step.batch)
    assert 4 << 20 <= retained_bytes() - held < (4 << 20) + 100_000  # of the three one copies the whole
    del loss


def test_a_partial_backward_and_a_second_one_leave_the_present(profiles):
    plan = rt.plan_profile(
        profiles["rows"], ROOMY, fixed(options(profiles["rows"], [JOURNAL, SNAPSHOT, READ_SET, JOURNAL]))
    )
    results = []
    for planned in (False, True):
        step = make_step("rows")
        if planned:
            rt.apply(step.model, plan)
        inner = []
        handle = step.model.blocks[2].register_forward_pre_hook(lambda module, args, inner=inner: inner.append(args[0]))
        loss = step.loss(step.model, step.batch)
        handle.remove()
        now = step.model.blocks[0].queue.rows.clone()
        (part,) = torch.autograd.grad(loss, inner[0], retain_graph=True)
        assert torch.equal(step.model.blocks[0].queue.rows, now)
        gradients = torch.autograd.grad(loss, list(step.model.parameters()))
        assert torch.equal(step.model.blocks[0].queue.rows, now)
        results.append([part, *gradients])
    assert same(*results)


class Looking(nn.Module):
    """Reads its queue where torch cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8192, WIDTH))
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.line(x)) * float(self.queue.numpy()[0, 0])
        self.queue[:4] = x.detach()[:4]
        return x


def test_no_read_set_is_offered_where_python_looks_at_tensors():
    model = nn.Sequential(Looking(), Looking(), nn.Linear(WIDTH, 1))
    profile = rt.profile(rt.Step(model, torch.randn(64, WIDTH), lambda m, b: m(b).square().mean(), None), segments="*")
    offered = [engines_offered(profile, index) for index in range(2)]
    assert offered == [{SNAPSHOT, JOURNAL}] * 2


def test_a_model_without_large_state_has_the_problem_that_it_had():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)), nn.Linear(8, 1))
    profile = rt.profile(rt.Step(model, torch.randn(4, 8), lambda m, b: m(b).square().mean(), None))
    assert profile.stateful is profile.problem
    assert not rt.plan_profile(profile, ROOMY, Optimal()).notes


def test_planners_that_know_one_way_to_recompute_still_do(profiles):
    plan = rt.plan_profile(profiles["rows"], ROOMY, RecomputeAll())
    assert [segment.engine for segment in plan.segments] == [JOURNAL] * BLOCKS + [None]


@pytest.mark.memory
def test_parameters_that_are_written_are_charged_however_small() -> None:
    """A teacher that follows its student in the forward: an engine copies no parameter at its entry, and logs the writes."""
    model = ZOO["queue_encoder"]
    step = model.make("small")
    step()
    step.clear_gradients()
    plan = rt.plan_profile(rt.profile(step, segments=model.segments), 1 << 50, RecomputeAll())
    logged = [one for segment in plan.segments for one in segment.state if "teacher" in one.name and one.written]
    assert logged
    rt.apply(step.model, plan)
    measured = measure_peak(step).peak_bytes
    assert measured <= plan.predicted_peak_bytes <= 1.005 * measured


class Averaged(nn.Module):
    """A layer and the running mean of its weights, 1 MiB that it alone reads and writes, beside rows that all write."""

    def __init__(self, rows: nn.Module, times: int) -> None:
        super().__init__()
        self.rows, self.times = rows, times
        self.layer, self.mean = nn.Linear(512, 512), nn.Linear(512, 512).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.weight.mul_(0.9).add_(0.1 * self.layer.weight)
            self.rows.weight[:4] += 0.1
        h = torch.tanh(self.layer(x) + self.mean(x) + self.rows.weight[0].clone())
        return h + h.detach().repeat(1, self.times).mean()


@pytest.mark.memory
def test_a_kept_segment_copies_no_state_that_nobody_goes_back_to():
    torch.manual_seed(0)
    rows = nn.Linear(512, 4096).requires_grad_(False)
    model = nn.Sequential(*(Averaged(rows, times) for times in (1, 1, 1, 128)))  # the last has the peak in its forward
    step = rt.Step(model, torch.randn(64, 512), loss=lambda model, x: model(x).square().mean())
    profile = rt.profile(step)
    segments = profile.chain.segments
    options = tuple(RECOMPUTE if segment.name == "0" else KEEP for segment in segments)
    assert options.count(RECOMPUTE) == 1
    found = Found(options, profile.levels(options))
    plan = describe(profile, found, budget_bytes=ROOMY, least_bytes=0, planner="by hand", notes=())
    eager = copy.deepcopy(step)
    rt.apply(model, plan)
    for one in (step, eager):
        for _ in range(3):  # the first tells the engine how much each segment writes
            one()
    assert same([*model.state_dict().values()], [*eager.model.state_dict().values()])
    measured = measure_peak(step).peak_bytes
    assert measured <= plan.predicted_peak_bytes <= measured + (64 << 10)
