"""Training in turns: runs do not touch each other, comparisons see a single bit, forwards are really counted."""

from __future__ import annotations

import pytest
import torch

import regrad.torch as rt
from regrad.core.errors import UsageError
from regrad.demo.gpt import MLP
from regrad.demo.run import run_demo
from regrad.demo.subject import Subject
from regrad.demo.train import Run, compare, counting_forwards, train_in_turns
from regrad.planners import RecomputeAll

SMALL = Subject(layers=3, width=32, heads=2, sequence=32, batch_size=2, corpus_bytes=50_000)


def trained(*names: str, steps: int = 3) -> list[Run]:
    batches = SMALL.batches()
    runs = [Run(name, SMALL.step(*batches[0])) for name in names]
    train_in_turns(runs, batches, steps, lambda done: None)
    return runs


def test_runs_beside_each_other_and_alone_are_the_same() -> None:
    before = torch.get_rng_state()
    first, second = trained("a", "b")
    (alone,) = trained("alone")
    assert torch.equal(torch.get_rng_state(), before)
    for run in (second, alone):
        identity = compare(run, first)
        assert identity.losses
        assert identity.gradients
        assert identity.weights
        assert identity.optimizer
        assert identity.generator
    assert len(first.losses) == len(first.seconds) == 3
    assert first.losses[-1] != first.losses[0]


def test_dropout_draws() -> None:
    (run,) = trained("a")
    assert not torch.equal(run.generator, Run("new", run.step).generator)


@pytest.mark.parametrize("what", ["losses", "gradients", "weights", "optimizer", "generator"])
def test_a_single_bit_is_seen(what: str) -> None:
    first, second = trained("a", "b", steps=1)
    parameter = next(second.step.model.parameters())
    with torch.no_grad():
        if what == "losses":
            second.losses[0] += 1e-9
        elif what == "generator":
            second.generator[100] ^= 1
        elif what == "weights":
            parameter.view(torch.int32)[0, 0] ^= 1
        elif what == "gradients":
            parameter.grad.view(torch.int32)[0, 0] ^= 1
        else:
            second.step.optimizer.state[parameter]["exp_avg"].view(torch.int32)[0, 0] ^= 1
    identity = compare(second, first)
    wrong = {
        name for name in ("losses", "gradients", "weights", "optimizer", "generator") if not getattr(identity, name)
    }
    assert wrong == {what}


def test_forwards_are_counted_replays_too() -> None:
    step = SMALL.step(*SMALL.batches()[0])
    original = MLP.forward
    with counting_forwards(MLP) as count:
        step()
    assert count.calls == 3
    plan = rt.plan(step, budget=1 << 40, planner=RecomputeAll())
    rt.apply(step.model, plan)
    with counting_forwards(MLP) as count:
        step()
    assert count.calls == 3 + len(plan.recomputed) > 3
    assert MLP.forward is original


def test_subjects() -> None:
    with pytest.raises(UsageError, match="no model 'bert'"):
        Subject(model="bert")
    with pytest.raises(UsageError, match="steps=1"):
        run_demo(steps=1)
    parameters = sum(p.numel() for p in Subject().step(*Subject().batches()[0]).model.parameters())
    assert 10_000_000 <= parameters <= 20_000_000


@pytest.mark.parametrize("model", ["gpt", "gpt2", "experts"])
def test_a_subject_is_built_the_same_twice(model: str) -> None:
    if model == "gpt2":
        pytest.importorskip("transformers")
    small = Subject(model=model, layers=2, width=32, heads=2, sequence=16, batch_size=2, corpus_bytes=20_000)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = small.step(*small.batches()[0])
    torch.rand(3)
    second = small.step(*small.batches()[0])
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), before)
    with counting_forwards(small.counted_class()) as count:
        first()
    assert count.calls == 2
