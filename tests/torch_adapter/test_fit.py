"""``rt.fit``: the largest size fits and the next does not, by trace and by measured steps; and what stands in its way."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import GPT, ConvNet, digits_batch, gpt_batch
from torch import nn

import regrad.torch as rt
from regrad.core.errors import InfeasibleBudget, InvalidQuantity, InvalidSubject, PlannerMismatch, UsageError, is_users
from regrad.planners import Optimal
from regrad.torch import fit_trials
from regrad.torch.measure import measure_peak
from regrad.torch.store import real_copy

search = importlib.import_module("regrad.torch.fit")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans need not be the fastest here, and one thread is enough."""
    monkeypatch.setattr(search, "FAIR_SECONDS", 0.05)
    monkeypatch.setattr(search, "THOROUGH_SECONDS", 0.1)
    monkeypatch.setattr(fit_trials, "THOROUGH_SECONDS", 0.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gpt(blocks: int = 2) -> rt.Step:
    """A small GPT with dropout, 32 positions."""
    model = GPT(blocks=blocks)

    def make(batch_size: int, sequence_length: int | None = None) -> Any:
        return gpt_batch(batch_size, sequence_length or 32)

    return rt.Step(model, optimizer=torch.optim.AdamW(model.parameters()), make_batch=make)


def conv() -> rt.Step:
    """A small residual net with batch norm, on digits."""
    model = ConvNet("batch", blocks=3)
    return rt.Step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), make_batch=digits_batch)


class Tower(nn.Module):
    """Plain layers behind each other; ``norm`` puts a batch norm into each."""

    def __init__(self, layers: int = 4, *, norm: bool = False, most_rows: int | None = None) -> None:
        super().__init__()
        self.most_rows = most_rows
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(32, 128), nn.BatchNorm1d(128) if norm else nn.Identity(), nn.GELU(), nn.Linear(128, 32)
                )
                for _ in range(layers)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.most_rows is not None and len(x) > self.most_rows:
            raise ArithmeticError(f"{len(x)} rows are too many")
        return self.layers(x).square().mean()


def tower(make_batch: Callable[..., Any] | None = None, model: nn.Module | None = None) -> rt.Step:
    model = model or Tower()
    make = make_batch or (lambda n: torch.randn(n, 32))
    return rt.Step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), make_batch=make)


def run(step: rt.Step, size: int, plan: Any, gradients: str = "fresh") -> int:
    """Peak of a measured step of a size under a plan, on a copy."""
    given = rt.Step(step.model, step.make_batch(size), step.loss, step.optimizer, gradients=gradients)
    copy = real_copy(given)
    if plan is not None:
        rt.apply(copy.model, plan)
    return measure_peak(copy).peak_bytes


def state(step: rt.Step) -> list[bytes]:
    tensors = [*step.model.parameters(), *step.model.buffers()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


# -- the answer is exact, by trace and in measured steps ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.memory
@pytest.mark.parametrize(("make", "budget"), [(gpt, 4_000_000), (conv, 800_000)], ids=["gpt", "conv net"])
def test_one_more_sample_breaks_the_budget(make: Callable[[], rt.Step], budget: int) -> None:
    step = make()
    before, generator = state(step), torch.get_rng_state()
    found = rt.fit(step, budget=budget)
    # nothing of the user's has changed
    assert state(step) == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert not step.optimizer.state
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not rt.is_applied(step.model)
    # by trace
    largest, beyond, eager = found.largest, found.beyond, found.largest_eager
    assert beyond is not None
    assert eager is not None
    assert 4 <= eager.size < largest.size == beyond.size - 1 <= 40
    assert largest.peak_bytes <= budget < beyond.peak_bytes
    assert eager.eager_peak_bytes <= budget
    with pytest.raises(InfeasibleBudget) as raised:
        rt.plan(rt.Step(step.model, step.make_batch(beyond.size), optimizer=step.optimizer), budget=budget)
    assert raised.value.least_bytes == beyond.peak_bytes
    # in measured steps: each under its own best plan, and without one
    assert found.confirmed is True
    assert run(step, largest.size, largest.plan) <= budget < run(step, beyond.size, beyond.plan)
    assert run(step, eager.size, None) <= budget < run(step, eager.size + 1, None)
    assert largest.measured_peak_bytes is not None
    assert abs(largest.measured_peak_bytes - largest.peak_bytes) < 0.01 * largest.peak_bytes


@pytest.mark.slow
@pytest.mark.memory
def test_accumulation_keeps_the_budget() -> None:
    """One optimizer step over micro-batches, as a user writes it, stays within what was priced with kept gradients."""
    step = gpt()
    budget, effective = 4_000_000, 24
    found = rt.fit(step, budget=budget, effective_batch=effective, planner=Optimal())
    best = found.best
    assert best.gradients == best.plan.gradients == "kept"
    assert best.accumulation_steps > 1
    assert best.micro_batch * best.accumulation_steps == effective
    fresh = rt.plan(rt.Step(step.model, step.make_batch(best.size), optimizer=step.optimizer), budget="min")
    gradient_bytes = sum(parameter.nbytes for parameter in step.model.parameters())
    assert best.plan.persistent_bytes - fresh.persistent_bytes == gradient_bytes
    model, optimizer = step.model, step.optimizer
    rt.apply(model, best.plan)
    batch = step.make_batch(best.size)

    def loop() -> None:
        optimizer.zero_grad()
        for _ in range(best.accumulation_steps):
            (model(*batch) / best.accumulation_steps).backward()
        optimizer.step()

    peak = measure_peak(loop, warmup=2, persistent=(model, optimizer, batch)).peak_bytes
    assert peak <= budget
    assert peak > 0.97 * best.peak_bytes


def test_an_effective_batch_that_fits_needs_no_accumulation() -> None:
    found = rt.fit(tower(), budget=1_000_000, effective_batch=60, planner=Optimal(), confirm=False)
    assert (found.largest.size, found.largest.accumulation_steps, found.largest.gradients) == (60, 1, "fresh")
    assert found.beyond is None
    assert any("the effective batch was reached" in note for note in found.notes)
    assert {size.gradients for size in found.sizes if size.size < 60} == {"kept"}


def test_what_does_not_divide_is_said() -> None:
    found = rt.fit(tower(), budget=700_000, effective_batch=401, planner=Optimal(), confirm=False)
    largest = found.largest
    assert 401 % largest.size
    assert largest.accumulation_steps == -(-401 // largest.size)
    assert any(f"{largest.size} does not divide 401" in note for note in found.notes)
    seconds = [size.unit_seconds for size in found.sizes if size.fits]
    assert found.best.unit_seconds <= 1.051 * min(seconds)


def test_the_best_is_never_above_the_largest_and_the_fastest_of_those_tried() -> None:
    found = rt.fit(tower(), budget=1_000_000, planner=Optimal(), confirm=False)
    fitting = [size for size in found.sizes if size.fits]
    assert found.best.size in {size.size for size in fitting}
    assert max(size.size for size in fitting) == found.largest.size
    # a plan that was made once more may only have become faster
    assert found.best.unit_seconds <= min(size.unit_seconds for size in fitting)
    assert found.best.plan is not None
    assert all(size.plan is None for size in found.sizes)
    assert rt.Fit.from_json(found.to_json()) == found


def test_most_is_kept() -> None:
    found = rt.fit(tower(), budget=1_000_000, most=9, planner=Optimal())
    assert (found.largest.size, found.beyond) == (9, None)
    assert any("most=9 was reached" in note for note in found.notes)


def test_a_device_that_is_not_here() -> None:
    found = rt.fit(tower(), device="t4", most=3, planner=Optimal())
    assert (found.device, found.confirmed, found.largest.size) == ("t4", None, 3)
    assert found.budget_bytes > 10 << 30
    assert "no step was run: the device is not here" in found.notes


# -- lengths --------------------------------------------------------------------------------------------------------


def test_a_length_within_the_positions() -> None:
    found = rt.fit(gpt(1), budget=1_700_000, over="sequence", batch_size=8, planner=Optimal())
    assert found.beyond is not None
    assert found.largest.size < 31
    assert found.largest.peak_bytes <= 1_700_000 < found.beyond.peak_bytes
    assert (found.batch_size, found.unit, found.largest.micro_batch) == (8, "token", 8)


def test_the_models_positions_end_the_search_and_it_is_said() -> None:
    found = rt.fit(gpt(1), budget=30_000_000, over="sequence", planner=Optimal())
    assert (found.largest.size, found.beyond.size, found.confirmed) == (32, 33, True)
    assert "IndexError: index out of range: 32 for an embedding of 32 rows" in found.beyond.why
    assert any("at 33 the step does not run (IndexError" in note for note in found.notes)


class Late(nn.Module):
    """Looks positions up by an index that no fake step knows: only a real step finds out that there is no such row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 32), nn.Embedding(12, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.ones(ids.shape[1]).cumsum(0).long() - 1
        return (self.tokens(ids) + self.places(places)).tanh().square().mean()


def test_what_only_a_real_step_finds_out() -> None:
    def make(batch_size: int, sequence_length: int) -> torch.Tensor:
        return torch.randint(16, (batch_size, sequence_length))

    found = rt.fit(Late(), make, budget=100_000, over="sequence", planner=Optimal())
    assert (found.largest.size, found.beyond.size, found.confirmed) == (12, 13, True)
    assert "IndexError" in found.beyond.why
    assert all(size.measured_peak_bytes for size in found.sizes if size.fits and size.size in (1, 12))


# -- what stands in the way -----------------------------------------------------------------------------------------


def test_a_measured_step_over_the_budget_counts_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavier(step: rt.Step) -> Any:
        peak = measure_peak(step)
        return peak._replace(peak_bytes=peak.peak_bytes + 20_000)

    monkeypatch.setattr(fit_trials, "measure_peak", heavier)
    found = rt.fit(tower(model=Tower(2)), budget=400_000, planner=Optimal())
    assert found.largest.measured_peak_bytes <= 400_000 < found.beyond.measured_peak_bytes
    assert found.beyond.peak_bytes <= 400_000
    assert (found.confirmed, found.beyond.size) == (True, found.largest.size + 1)
    assert any("over the budget that its prediction keeps" in note for note in found.notes)


def test_a_step_of_one_that_does_not_run_is_skipped() -> None:
    found = rt.fit(tower(model=Tower(norm=True)), budget=1_000_000, planner=Optimal(), most=8)
    assert found.largest.size == 8
    assert any("a step of 1 sample does not run (ValueError: Expected more than 1 value" in n for n in found.notes)


def test_a_model_that_raises_for_large_batches_ends_the_search() -> None:
    found = rt.fit(tower(model=Tower(most_rows=13)), budget=10_000_000, planner=Optimal(), confirm=False)
    assert (found.largest.size, found.beyond.size) == (13, 14)
    assert any("at 14 the step does not run (ArithmeticError: 14 rows are too many)" in note for note in found.notes)


class Branching(Tower):
    """Looks at the value of its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss if loss.item() > 1e9 else 2 * loss


def test_a_model_that_needs_values_is_run_and_it_is_said() -> None:
    found = rt.fit(tower(model=Branching()), budget=700_000, planner=Optimal(), confirm=False)
    assert found.predicted_by == "trace"
    assert any("the step was run for real on a copy" in note for note in found.notes)
    assert found.largest.peak_bytes <= 700_000 < found.beyond.peak_bytes
    tried = [size.size for size in found.sizes]
    assert max(tried) <= 2 * found.largest.size  # a real step must not be far above what fits


def test_a_real_step_without_room_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_trials, "available_bytes", lambda: 300_000)
    found = rt.fit(tower(model=Branching()), budget=700_000, planner=Optimal())
    assert "CannotTrace: the step can only be recorded by running it" in found.beyond.why
    assert found.confirmed is None
    assert any("no step was run: a copy that runs takes" in note for note in found.notes)


def test_not_even_one_sample_fits() -> None:
    with pytest.raises(InfeasibleBudget, match="This is a step of 1 sample: not even that fits") as raised:
        rt.fit(tower(), budget=50_000, planner=Optimal())
    assert raised.value.plan.predicted_peak_bytes == raised.value.least_bytes > 50_000
    assert "are always there" in str(raised.value)
    with pytest.raises(InfeasibleBudget, match="gradients that micro-batches add to among them"):
        rt.fit(tower(), budget=50_000, effective_batch=4, planner=Optimal())


def test_what_make_batch_raises_is_the_users() -> None:
    def make(n: int) -> torch.Tensor:
        raise OSError("the data are not there")

    with pytest.raises(OSError, match="the data are not there") as raised:
        rt.fit(tower(make), budget=700_000)
    assert is_users(raised.value)


def test_data_that_end_end_the_search() -> None:
    def make(n: int) -> torch.Tensor:
        if n > 10:
            raise LookupError("there are 10 samples")
        return torch.randn(n, 32)

    found = rt.fit(tower(make), budget=10_000_000, planner=Optimal(), confirm=False)
    assert (found.largest.size, found.beyond.size) == (10, 11)
    assert any("LookupError: there are 10 samples" in note for note in found.notes)


def test_lists_of_samples_are_batches() -> None:
    class OfLists(Tower):
        def forward(self, rows: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.stack(rows)) * scale

    def make(n: int) -> Any:
        return {"rows": [torch.randn(32) for _ in range(n)], "scale": torch.ones(())}

    assert rt.fit(tower(make, OfLists()), budget=10_000_000, most=4, planner=Optimal(), confirm=False).largest.size == 4


SHORT = lambda n, sequence_length=None: torch.randn(n, 32)  # noqa: E731


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"make_batch": None}, InvalidSubject, "there is no make_batch"),
        (
            {"make_batch": lambda n: torch.randn(7, 32)},
            InvalidSubject,
            r"no tensor has 1 in its first dimension.*\[7, 32\]",
        ),
        ({"make_batch": lambda n: None}, InvalidSubject, "no tensor at all"),
        (
            {"make_batch": lambda n: torch.randn(n, 32), "over": "sequence"},
            InvalidSubject,
            "cannot be called as make_batch",
        ),
        (
            {"make_batch": lambda n: torch.randn(n, 32), "sequence_length": 4},
            InvalidSubject,
            "parameter sequence_length",
        ),
        ({"make_batch": SHORT, "over": "sequence"}, InvalidSubject, "no tensor is 1 long"),
        ({"budget": None}, UsageError, "there is no budget"),
        ({"budget": "60%"}, UsageError, "is a share of what one step needs"),
        ({"budget": "min"}, UsageError, "is a share of what one step needs"),
        ({"budget": "much"}, InvalidQuantity, "much"),
        ({"over": "width"}, UsageError, 'it is "batch" or "sequence"'),
        ({"most": 0}, UsageError, "most=0"),
        ({"effective_batch": True}, UsageError, "effective_batch=True"),
        ({"batch_size": 4}, UsageError, "leave it out, or give most=4"),
        ({"over": "sequence", "sequence_length": 4}, UsageError, "leave it out, or give most=4"),
        ({"over": "sequence", "batch_size": 8, "effective_batch": 4}, UsageError, "is smaller than batch_size=8"),
        ({"planner": Optimal}, PlannerMismatch, "is no planner"),
        ({"device": "h1000"}, UsageError, "there is no device"),
    ],
)
def test_bad_input(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"make_batch": SHORT, "budget": 700_000} | arguments
    with pytest.raises(error, match=words):
        rt.fit(Tower(), given.pop("make_batch"), **given)


def test_steps_of_the_zoo_make_batches() -> None:
    from regrad.bench.zoo import ZOO

    step = ZOO["gpt"].make()
    tokens, _ = step.make_batch(3)
    assert tokens.shape == (3, 64)
    assert step.make_batch(2, sequence_length=16)[0].shape == (2, 16)
    assert all(torch.equal(one, other) for one, other in zip(step.make_batch(4), step.batch, strict=True))
    with pytest.raises(UsageError, match="has no sequence length"):
        ZOO["unet"].make().make_batch(2, 16)


def test_an_index_whose_value_is_not_known_is_left_alone() -> None:
    """A real tensor that was written from a fake one has lost its values: what still stands in it says nothing."""

    class Written(Late):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = torch.full((ids.shape[1],), 99, dtype=torch.long)
            places.copy_(self.tokens.weight[0, :1].mul(0).expand(ids.shape[1]))
            return (self.tokens(ids) + self.places(places)).tanh().square().mean()

    def make(batch_size: int, sequence_length: int) -> torch.Tensor:
        return torch.randint(16, (batch_size, sequence_length))

    found = rt.fit(Written(), make, budget=1_000_000, over="sequence", most=4, planner=Optimal(), confirm=False)
    assert found.largest.size == 4


def test_a_mapping_and_an_object_of_ones_own_are_batches() -> None:
    from collections import UserDict

    class Rows:
        def __init__(self, n: int) -> None:
            self.rows = torch.randn(n, 32)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"] if isinstance(batch, UserDict) else batch.rows)

    for make in (lambda n: UserDict(x=torch.randn(n, 32)), Rows):
        found = rt.fit(Tower(1), make, loss=loss, budget=10_000_000, most=3, planner=Optimal(), confirm=False)
        assert found.largest.size == 3
    with pytest.raises(InvalidSubject, match="no tensor has 1 in its first dimension"):
        rt.fit(Tower(1), lambda n: UserDict(x=torch.randn(9, 32)), loss=loss, budget=10_000_000)
