"""Plans of whole segments and of ranges of torch calls on every model of the zoo: the eager bytes, and the priced peak."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import numpy
import pytest
import torch
from comparing import as_bytes

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.errors import InfeasibleBudget
from regrad.torch.execute import replays
from regrad.torch.measure import measure_peak
from regrad.torch.regions.region import RegionKept

STEPS = 3
LAZY = {"spiking"}
"""Models whose first step takes another path, which a plan of ranges keeps."""


def trained(step: rt.Step) -> dict[str, Any]:
    """Everything that some steps leave: losses, gradients, weights, buffers, attributes, generators."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    losses = [as_bytes(step().detach()) for _ in range(STEPS)]
    model = step.model
    return {
        "losses": losses,
        "gradients": {name: as_bytes(p.grad) for name, p in model.named_parameters() if p.grad is not None},
        "tensors": as_bytes(dict([*model.named_parameters(), *model.named_buffers()])),
        "generator": as_bytes(torch.get_rng_state()),
        "python": random.getstate(),
        "attributes": {
            (name, key): as_bytes(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float, list)) and not key.startswith("_")
        },
    }


@pytest.mark.parametrize("name", ZOO)
def test_exact_and_at_its_price_at_every_budget(name: str) -> None:
    step = ZOO[name].make("small")
    start = copy.deepcopy(step)
    expected = trained(step)
    profile = rt.profile(start)
    for budget in ("75%", "50%", "min"):
        try:
            plan = rt.plan_profile(profile, budget)
        except InfeasibleBudget:
            continue
        planned = copy.deepcopy(start)
        rt.apply(planned.model, plan)
        before = replays(planned.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if name in LAZY else "error", RegionKept)
            found = trained(planned)
        for what, value in expected.items():
            assert found[what] == value, f"{what} under {budget}"
        if plan.recomputed:
            assert replays(planned.model) - before >= STEPS - (name in LAZY)
        measured = measure_peak(planned).peak_bytes
        assert measured <= plan.predicted_peak_bytes * 1.01
        assert abs(plan.predicted_peak_bytes / measured - 1) <= 0.02
