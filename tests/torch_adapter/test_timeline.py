"""``rt.timeline`` on real models: categories sum to the levels, and mean what they say."""

from __future__ import annotations

import random

import models
import pytest
import torch

import regrad.torch as rt
from regrad.core.errors import PlanMismatch
from regrad.core.simulate_trace import Range
from regrad.core.timeline import make_timeline


def subject(model, batch) -> rt.Step:
    return rt.Step(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


@pytest.fixture(scope="module", params=["gpt", "conv"])
def profile(request) -> rt.Profile:
    if request.param == "gpt":
        return rt.profile(subject(models.GPT(blocks=4), models.gpt_batch()))
    return rt.profile(subject(models.ConvNet("group"), models.digits_batch()))


def test_categories_sum_to_the_levels_on_several_plans(profile):
    chooser = random.Random(5)
    for share in (0.0, 0.3, 0.5, 0.8, 1.0):
        options = tuple("recompute" if p.module and chooser.random() < share else "keep" for p in profile.pieces)
        timeline = make_timeline(profile.arithmetic, profile.ranges(options))
        assert list(timeline.total_bytes) == profile.levels(options).during
        assert sum(holder.bytes for holder in timeline.holders) == timeline.peak_bytes
        assert all(level >= 0 for row in timeline.category_bytes.values() for level in row)


def test_nested_ranges(profile):
    calls = [profile.ranges_of[key] for key in profile.ranges_of]
    outer = Range(calls[0].start, calls[-1].stop, calls[0].holds, inner=tuple(calls), state=calls[0].state)
    timeline = make_timeline(profile.arithmetic, (outer,))
    assert list(timeline.total_bytes) == profile.arithmetic.levels((outer,)).during


def test_categories_mean_what_they_say(profile):
    model, optimizer = profile.rehearsal.original.model, profile.rehearsal.original.optimizer
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    timeline = rt.timeline(profile)
    rows = timeline.category_bytes
    assert set(rows["weights"]) == {weights}
    assert rows["gradients"][0] == 0
    assert rows["gradients"][-1] == weights
    moments = 2 * weights
    assert isinstance(optimizer, torch.optim.AdamW)
    assert moments <= rows["optimizer"][0] <= moments + 64 * len(list(model.parameters()))
    assert set(rows["optimizer"]) == {rows["optimizer"][0]}  # what its step makes for itself are temporaries
    forward = timeline.bands[0]
    # As many as autograd holds, and the loss, and Python numbers.
    kept = rt.saved(profile.rehearsal.original).activation_bytes
    assert kept <= max(rows["activations"]) <= kept + 1024
    assert max(rows["activations"]) == rows["activations"][forward.stop - 1]


def test_under_a_plan(profile):
    plan = rt.plan_profile(profile, "min")
    timeline = rt.timeline(profile, plan)
    assert timeline.budget_bytes == plan.budget_bytes
    assert 0 <= plan.predicted_peak_bytes - timeline.peak_bytes < 1024
    assert 0 <= plan.eager_peak_bytes - timeline.eager_peak_bytes < 1024
    assert timeline.peak_moment == plan.peak_moment
    assert timeline.added_seconds == plan.added_seconds
    assert any(slot.replayed for slot in timeline.slots)
    assert timeline.holders[0].bytes > 0
    made = [holder for holder in timeline.holders if holder.category == "activations"]
    assert any(holder.where.rpartition(":")[0].endswith("models.py") for holder in made)


def test_a_plan_of_another_model_is_refused(profile):
    other = rt.plan(subject(models.GPT(blocks=2), models.gpt_batch()), budget="min")
    with pytest.raises(PlanMismatch):
        rt.timeline(profile, other)
