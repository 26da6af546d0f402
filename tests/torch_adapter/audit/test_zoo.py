"""The audit on models of every kind, each for three plans: recompute all, half the room, and a random choice.

Exact means: outputs, every gradient, buffers, generators, Python state; with replays counted, so that nothing passes by
not being recomputed.
"""

from __future__ import annotations

import random

import pytest

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.chain import RECOMPUTE
from regrad.core.errors import InfeasibleBudget
from regrad.core.plan import Plan
from regrad.torch.describe import Found, describe
from regrad.torch.profile import Profile

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


def with_options(profile: Profile, chooser: random.Random) -> Plan:
    """A plan that recomputes some segments and keeps others, as ``rt.plan`` states it: with what kept ones must log."""
    options = tuple(chooser.choice([option.name for option in segment.options]) for segment in profile.chain.segments)
    found = Found(options, profile.levels(options))
    return describe(profile, found, budget_bytes=1 << 40, least_bytes=0, planner="random", notes=())


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
    profile = rt.profile(step, segments=model.segments)
    plan = with_options(profile, random.Random(name))
    found = rt.audit(step, plan=plan, steps=1, compare_torch=False)
    assert found.verdict == "EXACT", found
    wanted = sum(segment.option == RECOMPUTE for segment in plan.segments)
    assert sum(row.recomputed for row in found.segments) == wanted
    assert {row.replays for row in found.segments if not row.recomputed} <= {0}
    if wanted:
        assert found.replays > 0
