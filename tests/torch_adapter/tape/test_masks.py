"""Dropout's draw kept as bits: the same tensor to the bit, fewer bytes, and the eager step's bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from comparing import train

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.torch.describe import Found, describe
from regrad.torch.measure import measure_peak
from regrad.torch.tape.masks import Mask
from regrad.torch.tape.ranges import Range
from regrad.torch.tape.tape import Tape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_noise_comes_back_to_the_bit(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(0)
    noise = torch.empty(37, 129, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
    mask = Mask.of(noise)
    assert mask is not None
    again = mask.noise()
    assert (again.dtype, again.shape, again.stride()) == (noise.dtype, noise.shape, noise.stride())
    assert torch.equal(again.view(torch.uint8), noise.view(torch.uint8))
    assert mask.bits.nbytes == (noise.numel() + 7) // 8


@pytest.mark.parametrize("case", ["three values", "strided", "integers", "empty", "two zeros"])
def test_what_is_no_mask_is_not_packed(case: str) -> None:
    noise = {
        "three values": torch.tensor([0.0, 1.0, 2.0]),
        "strided": torch.zeros(4, 4).t()[1:],
        "integers": torch.ones(4, dtype=torch.int64),
        "empty": torch.empty(0),
        "two zeros": torch.tensor([0.0, -0.0, 1.5]),
    }[case]
    assert Mask.of(noise) is None


@pytest.mark.parametrize("where", [(0, 1), (0, 3), (0, 6), (3, 6)])
def test_exact_and_nothing_is_drawn_again(where: tuple[int, int]) -> None:
    def forward() -> torch.Tensor:
        h = torch.nn.functional.dropout(x, 0.3)
        h = torch.tanh(h) * h
        h = torch.nn.functional.dropout(h, 0.5)
        return torch.sigmoid(h).mul(h).sum()

    x = torch.randn(64, 256, requires_grad=True)
    found = []
    for ranges in ([], [Range(*where)]):
        torch.manual_seed(3)
        x.grad = None
        tape = Tape(masks=True)
        with tape.forward(ranges):
            loss = forward()
        loss.backward()
        assert x.grad is not None
        found.append((loss.detach().clone(), x.grad.clone(), torch.get_rng_state()))
        assert all(report.replays == 1 for report in tape.report())
    for eager, planned in zip(*found, strict=True):
        assert torch.equal(eager, planned)


def test_a_plan_with_masks_is_exact_and_fits() -> None:
    step = ZOO["gpt"].make("small")
    twin = copy.deepcopy(step.model)
    profile = rt.profile(step)
    assert profile.masked_search is not None
    search = profile.masked_search
    one = min(search.pool, key=lambda one: abs(one.peak_bytes - 0.6 * search.pool[0].peak_bytes))
    found = Found(tuple("keep" for _ in profile.pieces), search.levels(one.ranges), one.ranges, search)
    plan = describe(profile, found, budget_bytes=1 << 40, least_bytes=0, planner="masks", notes=())
    assert plan.masks
    rt.apply(step.model, plan)
    torch.manual_seed(1)
    planned = train(step.model, step.batch)
    torch.manual_seed(1)
    assert planned == train(twin, step.batch)
    assert measure_peak(step).peak_bytes <= plan.predicted_peak_bytes * 1.001
