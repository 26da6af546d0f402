"""``rt.advise``: what it predicts of a changed step is what a really changed step measures, and it says what is of no use."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from models import GPT, ConvNet, digits_batch, gpt_batch
from torch import nn

import regrad.torch as rt
from regrad.core.advice import (
    CHUNKED,
    MICRO_BATCH,
    MIXED,
    OFFLOAD,
    OPTIMIZER,
    OTHER_TRAINING,
    PLAN,
    SAME_BUT_ROUNDING,
    SHARDING,
    Advice,
)  # fmt: skip
from regrad.core.errors import InvalidQuantity, InvalidSubject, PlanMismatch, UsageError
from regrad.torch.advise import NO_ROOM
from regrad.torch.advise_batches import batch_size, micro_steps, micro_way, sliced
from regrad.torch.advise_optimizers import optimizer_swaps
from regrad.torch.advise_ways import way_of
from regrad.torch.measure import measure_peak

VOCABULARY, LENGTH = 4096, 64


def gpt_step(kind=torch.optim.AdamW, **settings) -> rt.Step:
    model = GPT(blocks=2)
    return rt.Step(model, gpt_batch(), optimizer=kind(model.parameters(), lr=1e-3, **settings))


def adam_heavy(**settings) -> rt.Step:
    """Wide layers on a handful of tokens: the optimizer's step is the peak."""
    model = GPT(width=256, blocks=2)
    return rt.Step(model, gpt_batch(2, 4), optimizer=torch.optim.AdamW(model.parameters(), **settings))


class WordModel(nn.Module):
    """A wide vocabulary over narrow blocks; ``chunks`` above one runs head and loss in so many pieces."""

    def __init__(self, chunks: int = 1) -> None:
        super().__init__()
        self.body = GPT(blocks=2, vocabulary=VOCABULARY, length=LENGTH)
        self.head = nn.Linear(64, VOCABULARY, bias=False)
        self.chunks = chunks

    def loss_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        body = self.body
        x = body.tokens(tokens) + body.positions(torch.arange(tokens.shape[1]))
        for block in body.blocks:
            x = block(x)
        x, targets = body.norm(x).flatten(0, 1), targets.flatten()
        if self.chunks == 1:
            return self.loss_of(x, targets) / targets.numel()
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(self.chunks), targets.chunk(self.chunks), strict=True):
            total = total + rt.checkpoint(self.loss_of, part, wanted)
        return total / targets.numel()


def word_step(chunks: int = 1) -> rt.Step:
    torch.manual_seed(1)
    model = WordModel(chunks)
    return rt.Step(model, gpt_batch(8, LENGTH, VOCABULARY), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def of_kind(advice: Advice, *kinds: str):
    return next((one for one in advice.suggestions if one.kinds == kinds), None)


def no_use(advice: Advice, kind: str):
    return next((one for one in advice.no_use if one.kind == kind), None)


@pytest.fixture(scope="module")
def advised() -> tuple[rt.Step, Advice, rt.Profile]:
    """A small language model with Adam, and advice for 60 % of what its step needs."""
    step = gpt_step()
    profile = rt.profile(step)
    return step, rt.advise(step, budget="60%", profile=profile), profile


def state_of(step: rt.Step) -> list[object]:
    """Everything of the user's that advice must leave as it is."""
    modules = list(step.model.modules())
    tensors = [tensor.clone() for tensor in (*step.model.state_dict().values(), *step.batch)]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
    gradients = [parameter.grad is None for parameter in step.model.parameters()]
    groups = [
        {name: value for name, value in group.items() if name != "params"} for group in step.optimizer.param_groups
    ]
    return [*map(str, (hooks, gradients, groups, step.optimizer.state, step.loss)),
            [module.training for module in modules], torch.get_rng_state().tolist(),
            [tensor.tolist() for tensor in tensors]]  # fmt: skip


# -- measured advice ----------------------------------------------------------------------------------------------------


def test_the_plan_is_the_one_of_rt_plan(advised):
    step, advice, profile = advised
    found, plan = of_kind(advice, PLAN), rt.plan(step, budget=advice.budget_bytes, profile=profile)
    assert found.step_ratio == plan.step_ratio
    assert found.fits
    assert found.predicted_peak_bytes == plan.predicted_peak_bytes <= advice.budget_bytes
    assert advice.peak_bytes == plan.eager_peak_bytes
    assert advice.persistent_bytes == plan.persistent_bytes
    assert found.step_ratio > 1
    assert advice.suggestions[0].fits
    assert [one.rank for one in advice.suggestions] == sorted(one.rank for one in advice.suggestions)
    assert sum(advice.at_peak.values()) + 256 == advice.peak_bytes
    assert Advice.from_json(advice.to_json()) == advice


@pytest.mark.memory
def test_micro_batches_measure_what_is_predicted(advised):
    step, advice, _ = advised
    model, (tokens, targets), optimizer = step.model, step.batch, step.optimizer
    found = of_kind(advice, MICRO_BATCH)
    assert found.what.startswith("4 micro-batches of 2")

    def accumulate() -> None:
        optimizer.zero_grad()
        for some, wanted in zip(tokens.chunk(4), targets.chunk(4), strict=True):
            (model(some, wanted) / 4).backward()
        optimizer.step()

    measured = measure_peak(accumulate, persistent=(model, optimizer, step.batch)).peak_bytes
    assert found.predicted_peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.memory
@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_bf16_measures_what_is_predicted(kind, advised):
    step, advice, _ = advised
    if kind == "conv":
        model = ConvNet()
        step = rt.Step(model, digits_batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        advice = rt.advise(step, budget="70%")
    found = of_kind(advice, MIXED)

    def narrow() -> None:
        step.clear_gradients()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step.model(*step.batch)
        loss.backward()
        step.optimizer.step()

    measured = measure_peak(narrow, persistent=(step.model, step.optimizer, step.batch)).peak_bytes
    assert found.predicted_peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.memory
def test_a_chunked_loss_measures_what_is_estimated():
    advice = rt.advise(word_step(), budget="35%")
    assert advice.peak_moment.operation == "aten._log_softmax_backward_data.default"
    found = of_kind(advice, CHUNKED)
    assert (found.fits, found.predicted_by) == (True, "estimate")
    chunks = int(found.what.split(" chunks")[0].split()[-1])
    eager, changed = word_step(), word_step(chunks)
    assert chunks > 1
    losses = []
    for step in (eager, changed):
        step.model.body.eval()  # dropout would draw other numbers; its masks are no part of what is measured here
        losses.append(step())
        step.model.body.train()
    assert torch.allclose(*losses)
    measured = measure_peak(changed).peak_bytes
    assert measured < 0.6 * measure_peak(eager).peak_bytes
    assert found.predicted_peak_bytes == pytest.approx(measured, rel=0.05)


@pytest.mark.memory
def test_another_optimizer_measures_what_is_predicted():
    step = adam_heavy()
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    found = of_kind(rt.advise(step, budget=weights + weights // 2), OPTIMIZER)
    assert (found.what, found.result) == ("SGD", OTHER_TRAINING)
    step.optimizer = torch.optim.SGD(step.model.parameters(), lr=0.1)
    assert found.predicted_peak_bytes == pytest.approx(measure_peak(step).peak_bytes, rel=0.02)


@pytest.mark.memory
def test_adafactor_by_rule_measures_what_is_predicted():
    step = adam_heavy()
    profile = rt.profile(step)
    floor = way_of(profile.trace).floor
    swaps = {swap.what: swap for swap in optimizer_swaps(profile, floor)}
    assert list(swaps) == ["AdamW, 8-bit", "Adafactor", "SGD with momentum", "SGD"]
    assert swaps["Adafactor"].by == "rule"
    step.optimizer = torch.optim.Adafactor(step.model.parameters())
    assert swaps["Adafactor"].peak(floor) == pytest.approx(measure_peak(step).peak_bytes, rel=0.02)


@pytest.mark.memory
def test_an_optimizers_step_one_parameter_at_a_time():
    step = adam_heavy(foreach=True)
    advice = rt.advise(step, budget="95%")
    found = next(one for one in advice.suggestions if one.how == "foreach=False")
    assert found.result == SAME_BUT_ROUNDING
    assert step.optimizer.param_groups[0]["foreach"] is True
    step.optimizer.param_groups[0]["foreach"] = False
    assert found.predicted_peak_bytes == pytest.approx(measure_peak(step).peak_bytes, rel=0.02)


# -- what is of no use --------------------------------------------------------------------------------------------------


def test_where_the_optimizer_is_the_peak_recomputation_will_not_help():
    step = adam_heavy()
    advice = rt.advise(step, budget=rt.estimate(step).peak_bytes - (1 << 20))
    held = sum(leaf.nbytes for state in _adam_state(step) for leaf in state)
    said = no_use(advice, PLAN)
    assert said.predicted_peak_bytes == advice.peak_bytes
    assert "recomputation will not help: the optimizer's step is the peak" in said.why
    assert said.why in advice.verdict
    assert abs(advice.at_peak["optimizer"] - held) <= 8 * 100
    assert {one.kind for one in advice.no_use} >= {PLAN, MICRO_BATCH, OFFLOAD, CHUNKED}
    assert {one.kinds for one in advice.suggestions} == {(OPTIMIZER,)}


def _adam_state(step: rt.Step):
    return [(parameter, parameter) for parameter in step.model.parameters()]


def test_a_loss_that_is_not_the_peak_is_not_cut(advised):
    assert "the loss is not the peak" in no_use(advised[1], CHUNKED).why
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    other = rt.advise(model, torch.randn(64, 8), loss=lambda m, x: m(x).square().mean(), budget="60%")
    assert "log-softmax" in no_use(other, CHUNKED).why
    assert no_use(other, OPTIMIZER).why == "the step has no optimizer"


def test_a_step_that_fits():
    advice = rt.advise(gpt_step(), budget="1 GiB")
    assert (advice.fits, advice.suggestions, advice.no_use) == (True, (), ())
    assert "fits as it is" in advice.verdict


def test_a_batch_that_cannot_be_cut():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    batch = (torch.randn(64, 8), torch.randn(3))
    step = rt.Step(model, batch, loss=lambda m, b: m(b[0]).square().mean() * b[1].sum())
    assert "no dimension that all of its tensors share" in no_use(rt.advise(step, budget="60%"), MICRO_BATCH).why


def test_a_model_that_needs_its_batch_size():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).view(16, 4, 64).square().mean()

    said = no_use(rt.advise(Fixed(), torch.randn(64, 8), budget="60%"), MICRO_BATCH)
    assert "does not run" in said.why


def test_make_batch_is_asked_for_micro_batches():
    asked = []

    def make_batch(size, sequence_length=None):
        asked.append(size)
        return gpt_batch(size)

    step = gpt_step()
    step.make_batch = make_batch
    assert of_kind(rt.advise(step, budget="60%"), MICRO_BATCH) is not None
    assert asked == [4, 2, 1]


@pytest.mark.parametrize(("norm", "result"), [("group", SAME_BUT_ROUNDING), ("batch", OTHER_TRAINING)])
def test_what_micro_batches_make_of_batch_norm(norm, result):
    step = rt.Step(ConvNet(norm), digits_batch(8))
    micro = micro_steps(step)[0]
    way = micro_way(micro, rt.trace(micro.step))
    assert way.result == result
    assert ("batch norm" in way.not_fixed) is (norm == "batch")


def test_examples_of_another_length_are_no_micro_batches():
    step = gpt_step()
    step.make_batch = lambda size, sequence_length=None: gpt_batch(size, sequence_length or 8)
    assert [tuple(micro.step.batch[0].shape) for micro in micro_steps(step)] == [(4, 32), (2, 32), (1, 32)]
    assert [micro.extra_bytes for micro in micro_steps(step)] == [2 * 8 * 32 * missing for missing in (4, 6, 7)]


def test_where_there_is_no_memory_left_to_price_a_change(monkeypatch, advised):
    def no_room(*given):
        raise MemoryError("Unable to allocate 9.63 MiB for an array with shape (1262250,) and data type float64")

    monkeypatch.setattr(sys.modules["regrad.torch.advise"], "plan_profile", no_room)
    advice = rt.advise(advised[0], budget="60%", profile=advised[2])
    assert no_use(advice, PLAN).why == NO_ROOM
    assert of_kind(advice, MICRO_BATCH).fits


# -- pairs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pair_where_nothing_single_fits():
    step = gpt_step()
    before = state_of(step)
    advice = rt.advise(step, budget="20%")
    assert state_of(step) == before
    fitting = [one for one in advice.suggestions if one.fits]
    assert len(fitting) == 1
    assert len(fitting[0].kinds) == 2
    assert advice.best is fitting[0] is advice.suggestions[0]
    assert fitting[0].predicted_peak_bytes <= advice.budget_bytes
    assert "no single change makes it fit; a pair does" in advice.verdict


@pytest.mark.slow
def test_where_nothing_makes_it_fit():
    step = gpt_step()
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    advice = rt.advise(step, budget=weights + 1024)
    assert advice.best is None
    least = min(one.predicted_peak_bytes for one in advice.suggestions)
    assert "nothing here makes it fit: the least is" in advice.verdict
    assert least > advice.budget_bytes


def test_shards():
    step = adam_heavy()
    advice = rt.advise(step, budget="45%", devices=4)
    found = of_kind(advice, SHARDING)
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    assert found.fits
    assert found.step_ratio is None
    assert "ZeRO stage 1" in found.what
    saved = (2 * weights - 2 * weights // 4) + (advice.at_peak["temporaries"] * 3 // 4)
    assert advice.peak_bytes - found.predicted_peak_bytes == pytest.approx(saved, rel=0.02)
    assert found.moved_bytes == pytest.approx(2 * weights * 3 / 4, rel=0.01)
    assert of_kind(rt.advise(step, budget="45%"), SHARDING) is None


# -- what it must not do ------------------------------------------------------------------------------------------------


def test_nothing_of_the_users_changes():
    step = gpt_step()
    step.model.blocks[1].eval()
    before = state_of(step)
    rt.advise(step, budget="60%", devices=2)
    assert state_of(step) == before


COLLECTED: list[torch.Tensor] = []


def test_lists_that_the_model_fills_are_put_back():
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x)
            COLLECTED.append(hidden)
            return hidden.square().mean()

    kept = torch.zeros(1)
    COLLECTED[:] = [kept]
    advice = rt.advise(Collecting(), torch.randn(128, 32), budget="60%")
    assert [trap.name for trap in advice.traps] == ["retained outputs"]
    assert len(COLLECTED) == 1
    assert COLLECTED[0] is kept


def test_bad_input(advised):
    step = gpt_step()
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    with pytest.raises(UsageError, match="below what is there before any step: weights"):
        rt.advise(step, budget=weights // 2)
    with pytest.raises(UsageError, match="there is no budget"):
        rt.advise(step)
    with pytest.raises(UsageError, match='"min" has no price'):
        rt.advise(step, budget="min")
    with pytest.raises(InvalidQuantity):
        rt.advise(step, budget="8 GiBs")
    with pytest.raises(UsageError, match="devices=0"):
        rt.advise(step, budget="60%", devices=0)
    with pytest.raises(UsageError, match="h1000"):
        rt.advise(step, budget="60%", device="h1000")
    with pytest.raises(UsageError, match="there is no folder"):
        rt.advise(step, budget="60%", offload_folder="/nowhere/at/all")
    with pytest.raises(InvalidSubject, match="there is no batch"):
        rt.advise(GPT(blocks=2), budget="60%")
    with pytest.raises(PlanMismatch):
        rt.advise(GPT(blocks=1), gpt_batch(), budget="60%", profile=advised[2])


@pytest.mark.parametrize(
    ("batch", "size"),
    [(torch.zeros(6, 2), 6), ((torch.zeros(6, 2), torch.zeros(6)), 6), ({"a": torch.zeros(6), "b": torch.zeros(())}, 6),
     ((torch.zeros(6), torch.zeros(5)), None), (None, None)],
)  # fmt: skip
def test_the_size_of_a_batch(batch, size):
    assert batch_size(batch) == size
    if size is not None:
        assert batch_size(sliced(batch, 2)) == 2
