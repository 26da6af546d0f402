"""Plans go to JSON and come back the same; anything else is refused with what is wrong."""

import json
from dataclasses import replace

import pytest

from regrad.core.codec import plain
from regrad.core.errors import InvalidPlan
from regrad.core.plan import FORMAT_VERSION, Choice, PeakMoment, Plan, SegmentPlan

PLAN = Plan(
    fingerprint="ab" * 32,
    budget_bytes=2**33,
    predicted_peak_bytes=9007199254740993,
    predicted_by="fake trace",
    band_ratio=0.01,
    peak_moment=PeakMoment("backward", "head", "aten._log_softmax_backward_data.default"),
    eager_peak_bytes=2**34,
    eager_peak_moment=PeakMoment("optimizer", "", "step"),
    persistent_bytes=123,
    least_bytes=2**20,
    added_seconds=0.1 + 0.2,
    eager_seconds=1.25,
    planner="Optimal",
    device="cpu",
    gradients="fresh",
    segments=(
        SegmentPlan("blocks.0", "keep", 10, 20, 0.0, reason="writes a buffer", module="blocks.0"),
        SegmentPlan("blocks.1", "recompute", 1, 30, 0.5, engine="journal", module="blocks.1", call=1),
        SegmentPlan("blocks.2", "recompute", 1, 30, 0.5),
        SegmentPlan("Σ head", "keep", 1, 30, 0.5),
    ),
    choices=(
        Choice(0, 1, "keep"),
        Choice(
            1,
            4,
            "recompute",
            (Choice(1, 3, "recompute", (Choice(1, 2, "keep"), Choice(2, 3, "keep"))), Choice(3, 4, "keep")),
        ),
    ),
    notes=("cache off",),
    cache_off="model.use_cache",
)


def test_a_plan_comes_back_equal_nesting_included():
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.choices[1].inner[0].inner[1] == Choice(2, 3, "keep")
    assert isinstance(again.choices[1].inner, tuple)
    assert again.to_json() == PLAN.to_json()


def test_the_json_has_the_names_of_the_attributes():
    data = json.loads(PLAN.to_json())
    assert data["predicted_peak_bytes"] == PLAN.predicted_peak_bytes
    assert data["peak_moment"] == {
        "phase": "backward",
        "module": "head",
        "operation": "aten._log_softmax_backward_data.default",
    }
    assert data["version"] == FORMAT_VERSION
    assert data == plain(PLAN)


def test_a_plan_of_another_format_version_is_refused():
    text = replace(PLAN, version=FORMAT_VERSION + 1).to_json()
    with pytest.raises(InvalidPlan, match=f"format version {FORMAT_VERSION + 1}, this regrad reads {FORMAT_VERSION}"):
        Plan.from_json(text)


def _changed(**changes):
    return json.dumps(plain(PLAN) | changes)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the whole text"),
        ("not json", "the whole text"),
        (PLAN.to_json()[:-20], "the whole text"),
        ("[]", "the whole text"),
        ("{}", "fingerprint"),
        (_changed(budget_bytes=1.5), "budget_bytes"),
        (_changed(budget_bytes="much"), "budget_bytes"),
        (_changed(peak_moment={"phase": "backward"}), "peak_moment.module"),
        (_changed(segments=None), "segments"),
        (_changed(choices=[{"start": 0, "option": "keep"}]), "choices.0.stop"),
        (_changed(choices=[{"start": 0, "stop": 2, "option": "recompute", "inner": [[]]}]), "choices.0.inner.0"),
    ],
)
def test_garbage_is_refused_with_the_place(text, named):
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json(text)
    assert str(caught.value).endswith(f"at {named}")
