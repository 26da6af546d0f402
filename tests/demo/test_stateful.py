"""The model with state: the planned run has eager's bytes and recomputes; an engine that does less is found out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.checkpoint import checkpoint

import regrad.torch as rt
from regrad.core.plan import Plan
from regrad.demo import stateful
from regrad.demo.experts import ExpertsConfig, MixtureOfExperts, Router
from regrad.demo.gpt import GPTConfig
from regrad.demo.state_result import COMPARED, EAGER, PLANNED, TORCH, StateResult
from regrad.demo.stateful import run_stateful
from regrad.demo.subject import Subject
from regrad.report.demo import demo_state_report
from regrad.torch import recompute
from regrad.torch.regions.region import RegionReport

SMALL = Subject(model="experts", layers=4, width=48, heads=2, sequence=64, batch_size=4, corpus_bytes=100_000)
BUDGET = "60%"
STEPS = 3

pytestmark = pytest.mark.memory


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rt.plan(SMALL.step(*SMALL.batches()[0]), budget=BUDGET, segments="blocks.*")


@pytest.fixture(scope="module")
def result(plan: Plan) -> StateResult:
    before = torch.get_rng_state()
    found = run_stateful(subject=SMALL, steps=STEPS, budget=BUDGET, plan=plan)
    assert torch.equal(torch.get_rng_state(), before)
    return found


def test_the_planned_run_is_the_eager_run_and_recomputes(result: StateResult) -> None:
    recomputed = len(result.plan.recomputed)
    assert 0 < recomputed < SMALL.layers
    assert result.failures == []
    eager, planned = result.row(EAGER), result.row(PLANNED)
    assert planned.differing == []
    assert planned.other_values == ()
    assert planned.losses == eager.losses
    assert len(set(planned.losses)) == STEPS
    assert (eager.block_forwards, eager.extra_forwards, eager.replays) == (SMALL.layers, 0, 0)
    assert (planned.block_forwards, planned.extra_forwards, planned.replays) == (
        SMALL.layers + recomputed,
        recomputed,
        recomputed,
    )


def test_peaks_are_those_that_were_predicted(result: StateResult) -> None:
    eager, planned, torchs = result.rows
    assert planned.measured_peak_bytes <= result.plan.budget_bytes < eager.measured_peak_bytes
    assert torchs.predicted_peak_bytes is None
    assert torchs.measured_peak_bytes < eager.measured_peak_bytes
    for row in (eager, planned):
        assert row.predicted_peak_bytes is not None
        assert abs(row.predicted_peak_bytes / row.measured_peak_bytes - 1) <= 0.01, row.name


def test_what_torchs_checkpoint_leaves(result: StateResult) -> None:
    """It reruns the same blocks, and every count in them comes out twice; the first loss cannot tell."""
    row = result.row(TORCH)
    assert (row.extra_forwards, row.replays) == (len(result.plan.recomputed), 0)
    assert set(row.differing) == set(COMPARED) - {"generator"}
    assert (row.first_other_gradients_step, row.first_other_loss_step) == (1, 2)
    assert row.losses[0] == result.row(EAGER).losses[0]
    assert row.gradient_error_ratio > 1e-3
    twice = {value.name: (value.eager_sum, value.found_sum) for value in row.other_values if value.counted_twice}
    tokens = SMALL.batch_size * SMALL.sequence
    wanted = {}
    for segment in result.plan.recomputed:
        wanted[f"buffer {segment.module}.convolution.norm.num_batches_tracked"] = (STEPS, 2 * STEPS)
        wanted[f"buffer {segment.module}.experts.router.tokens_per_expert"] = (STEPS * tokens, 2 * STEPS * tokens)
        wanted[f"attribute {segment.module}.experts.router.batches_seen"] = (STEPS, 2 * STEPS)
    assert twice == wanted


class Twice(rt.Checkpoint):
    """Runs a block again and forgets what it wrote; says, as an honest engine would, that it ran it again."""

    times = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def report(self) -> tuple[RegionReport, ...]:
        return (RegionReport("blocks", self.times, self.times, ()),)


class Never(rt.Checkpoint):
    """Runs nothing again, which is exact and worthless."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def report(self) -> tuple[RegionReport, ...]:
        return ()


class Boasts(Never):
    """The same, and claims to have replayed."""

    times = 0

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return function(*args, **kwargs)

    def report(self) -> tuple[RegionReport, ...]:
        return (RegionReport("blocks", self.times, self.times, ()),)


class Draws(rt.Checkpoint):
    """Leaves torch's generator at another point."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(function, *args, **kwargs)
        torch.rand(1)
        return result


def under(engine: rt.Checkpoint, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> StateResult:
    monkeypatch.setattr(recompute, "ENGINE", engine)
    return run_stateful(subject=SMALL, steps=2, budget=BUDGET, plan=plan)


@pytest.mark.parametrize(
    ("make", "differing"),
    [
        (Twice, {"losses", "gradients", "weights", "optimizer", "buffers", "attributes"}),
        (lambda: rt.Checkpoint(state=None, guard="off"), set(COMPARED) - {"generator"}),
        (Draws, set(COMPARED) - {"attributes"}),
    ],
    ids=["runs blocks twice", "brings back generators only", "leaves the generator elsewhere"],
)
def test_an_engine_that_changes_bytes_is_caught(
    make: Callable[[], rt.Checkpoint], differing: set[str], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = under(make(), plan, monkeypatch)
    assert set(found.row(PLANNED).differing) == differing
    assert len(found.failures) == 1
    assert "the planned run has other" in found.failures[0]


@pytest.mark.parametrize(("make", "claimed"), [(Never, 0), (Boasts, 1)], ids=["keeps all", "keeps all and boasts"])
def test_an_engine_that_recomputes_nothing_is_caught(
    make: Callable[[], rt.Checkpoint], claimed: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = under(make(), plan, monkeypatch)
    assert found.row(PLANNED).bit_identical
    wanted = len(plan.recomputed)
    counts, peak = found.failures
    assert f"{wanted} blocks are to be recomputed in a step; 0 ran again" in counts
    assert f"counted {claimed * wanted} replays" in counts
    assert "over the budget" in peak


def test_a_plan_that_keeps_all_shows_nothing() -> None:
    found = run_stateful(subject=SMALL, steps=2, budget="100%")
    assert found.failures == ["experts: its plan recomputes nothing, so nothing was shown"]


def test_attributes_are_compared() -> None:
    """What is compared holds the counter and not what a run is made with."""
    model = MixtureOfExperts(ExpertsConfig(GPTConfig(layers=1, width=8, heads=2, sequence=8)))
    stateful._checkpoint_blocks(model, {"blocks.0"})
    names = stateful._attributes(model)
    assert names["attribute blocks.0.experts.router.batches_seen"] == 0
    assert names["attribute training"] is True
    assert not any(name.endswith(".forward") for name in names)


def test_a_router_counts_in_training_only_and_prefers_the_idle() -> None:
    torch.manual_seed(3)
    router = Router(8, 4)
    x = torch.randn(64, 8)
    chosen, weights = router(x)
    assert torch.equal(router.tokens_per_expert, chosen.sum(dim=0))
    assert int(chosen.sum()) == 64
    assert router.batches_seen == 1
    assert torch.equal(weights != 0, chosen != 0)
    router.tokens_per_expert.copy_(torch.tensor([0, 1000, 1000, 1000]))
    router.score.weight.data.zero_()
    router.eval()
    assert router(x)[0].sum(dim=0).tolist() == [64, 0, 0, 0]
    assert router.tokens_per_expert.tolist() == [0, 1000, 1000, 1000]
    assert router.batches_seen == 1


def test_the_json_and_the_table(result: StateResult) -> None:
    answer = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert answer["bit_identical"] is True
    assert answer["torch_bit_identical"] is False
    assert [row["name"] for row in answer["rows"]] == [EAGER, PLANNED, TORCH]
    assert any(value["counted_twice"] for value in answer["rows"][2]["other_values"])
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(demo_state_report(answer))
    text = capture.get()
    for words in (
        "replays by regrad",
        "other gradients from step 1 on",
        "other losses from step 2 on",
        "twice: buffer blocks.*.experts.router.tokens_per_expert",
        "is no bug in torch",
    ):
        assert words in " ".join(text.split()), text
    assert "…" not in text
