"""The audit on models of every kind, each for three plans: recompute all, half the room, and a random choice.

Exact means: outputs, every gradient, buffers, generators, Python state; with replays counted, so that nothing passes by
not being recomputed.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.chain import KEEP, RECOMPUTE
from regrad.core.errors import InfeasibleBudget
from regrad.core.plan import Plan, one_level

pytest.importorskip("transformers")
STEPS = 2


def test_the_zoo_has_the_kinds_that_are_promised():
    promised = {
        "gpt", "gpt2", "llama", "mixtral", "bert", "batchnorm_conv", "unet", "queue_encoder", "vq_autoencoder",
        "spectral_norm", "lstm", "spiking",
    }  # fmt: skip
    assert promised <= set(ZOO)


def half(step: rt.Step, segments: str | None) -> Plan:
    """A plan for half of what eager needs, or the one of the least peak if that is more."""
    try:
        return rt.plan(step, budget="50%", segments=segments)
    except InfeasibleBudget as error:
        return error.plan


def with_options(plan: Plan, options: list[str]) -> Plan:
    """``plan`` with other options; its figures no longer count."""
    segments = tuple(replace(s, option=option) for s, option in zip(plan.segments, options, strict=True))
    return replace(plan, segments=segments, choices=one_level(options), ranges=(), calls=(), masks=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_recompute_all(name):
    model = ZOO[name]
    found = rt.audit(model.make(), segments=model.segments)
    assert found.verdict == "EXACT", found
    # one that saves nothing but its arguments has nothing to run again, and there is one with something
    assert {row.replays for row in found.segments} <= {0, found.steps}
    assert found.replays >= found.steps
    assert (found.torch.verdict != "SAME") == model.rerun_diverges, found
    if found.torch.verdict == "DIVERGED":
        assert found.torch.first.operation
        assert found.torch.first.line


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_half_and_random(name):
    model = ZOO[name]
    step = model.make()
    plan = half(step, model.segments)
    found = rt.audit(step, plan=plan, steps=STEPS, compare_torch=False)
    assert found.verdict == "EXACT", found
    rng = random.Random(name)
    options = [
        rng.choice((KEEP, RECOMPUTE)) if segment.module and "can only" not in segment.reason else segment.option
        for segment in plan.segments
    ]
    found = rt.audit(step, plan=with_options(plan, options), steps=STEPS, compare_torch=False)
    assert found.verdict == "EXACT", found
    wanted = sum(option == RECOMPUTE for option in options)
    assert sum(row.recomputed for row in found.segments) == wanted
    assert {row.replays for row in found.segments if not row.recomputed} <= {0}
    if wanted:
        assert found.replays > 0
