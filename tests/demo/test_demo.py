"""The whole demo on a small model: every figure and every verdict, the children under a real limit included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regrad.core.plan import Plan
from regrad.core.timeline import Timeline
from regrad.demo.limits import why_unavailable
from regrad.demo.result import EAGER, EVERY_BLOCK, PLANNED, DemoResult
from regrad.demo.run import run_demo
from regrad.demo.subject import Subject

SMALL = Subject(layers=6, width=64, heads=4, sequence=256, batch_size=8, corpus_bytes=2**20)
SMALL_EXPERTS = Subject(model="experts", layers=4, width=64, heads=4, sequence=128, batch_size=4, corpus_bytes=2**20)

pytestmark = [pytest.mark.slow, pytest.mark.memory]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "results"


@pytest.fixture(scope="module")
def result(folder: Path) -> DemoResult:
    stages: list[tuple[str, float]] = []
    found = run_demo(
        steps=3,
        subject=SMALL,
        stateful=SMALL_EXPERTS,
        out=folder,
        child_steps=2,
        progress=lambda stage, done: stages.append((stage, done)),
    )
    wanted = {"training three ways", "measuring peaks", "training a model with state", "training under a real limit"}
    assert wanted <= {stage for stage, _ in stages}
    assert all(0 <= done <= 1 for _, done in stages)
    return found


@pytest.fixture(scope="module")
def answer(result: DemoResult) -> dict[str, Any]:
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))


def test_nothing_is_amiss(result: DemoResult) -> None:
    assert result.failures == []
    assert result.bit_identical


def test_the_fields_that_others_read(answer: dict[str, Any]) -> None:
    assert answer["bit_identical"] is True
    assert answer["steps"] == 3
    assert answer["measured_peak_bytes"] <= answer["budget_bytes"] < answer["eager_peak_bytes"]
    assert answer["recompute_all_peak_bytes"] < answer["eager_peak_bytes"]
    assert abs(answer["predicted_peak_bytes"] / answer["measured_peak_bytes"] - 1) <= 0.01
    assert answer["step_ratio"] > 0
    assert answer["model"] == "gpt"
    assert answer["text_bytes"] == 2**20
    assert [row["name"] for row in answer["rows"]] == [EAGER, EVERY_BLOCK, PLANNED]
    assert answer["plan"]["budget_bytes"] == answer["budget_bytes"]


def test_forwards_are_counted(result: DemoResult) -> None:
    """A plan of ranges runs no block again, but torch calls of it: the peak tells that it did."""
    plan = result.plan
    recomputed = len(plan.recomputed) if not plan.ranges else 0
    assert len(plan.recomputed) > 0
    assert [row.block_forwards for row in result.rows] == [6, 12, 6 + recomputed]
    assert [row.extra_forwards for row in result.rows] == [0, 6, recomputed]
    assert result.rows[2].measured_peak_bytes < 0.8 * result.rows[0].measured_peak_bytes


def test_every_row_is_the_eager_run_to_the_bit(answer: dict[str, Any]) -> None:
    for row in answer["rows"]:
        for what in ("losses", "gradients", "weights", "optimizer", "generator"):
            assert row[f"{what}_identical"] is True, (row["name"], what)
        assert row["last_loss"] != row["first_loss"]
        assert abs(row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1) <= 0.01, row["name"]


def test_the_model_with_state_counts(result: DemoResult, answer: dict[str, Any]) -> None:
    """Its figures stand in the answer, and what it owes and does not do fails the demo."""
    assert answer["stateful"] == json.loads(json.dumps(result.stateful.to_dict()))
    assert answer["stateful"]["bit_identical"] is True
    assert answer["stateful"]["torch_bit_identical"] is False
    rows = result.stateful.rows
    assert rows[1].replays == rows[1].extra_forwards == len(result.stateful.plan.recomputed) > 0
    for planned in (replace(rows[1], buffers_identical=False), replace(rows[1], replays=0, extra_forwards=0)):
        worse = replace(result, stateful=replace(result.stateful, rows=(rows[0], planned, rows[2])))
        assert len(worse.failures) == 1
        assert worse.to_dict()["failures"] == worse.failures


@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
def test_the_proof_under_a_real_limit(answer: dict[str, Any]) -> None:
    assert answer["eager_under_limit"] == "out of memory"
    assert answer["plan_under_limit"] == "completed"
    assert answer["eager_over_limit"] == "completed"
    eager, planned, control = answer["limits"]["children"]
    assert [child["exit_code"] for child in (eager, planned, control)] == [77, 0, 0]
    assert eager["allowance_bytes"] == planned["allowance_bytes"] < control["allowance_bytes"]
    midway = (answer["eager_peak_bytes"] + answer["measured_peak_bytes"]) / 2
    assert abs(eager["target_bytes"] - midway) <= 1
    assert (
        control["target_bytes"] - answer["eager_peak_bytes"] == planned["target_bytes"] - answer["measured_peak_bytes"]
    )
    for child in (eager, planned, control):
        assert child["limit_bytes"] == child["before_bytes"] + child["allowance_bytes"]
        assert child["allowance_bytes"] == child["target_bytes"] - child["existing_bytes"]
    assert "allocate memory" in eager["last_line"]
    assert eager["phase"] in ("forward", "backward", "optimizer")
    assert eager["phase"] == "optimizer" or eager["module"]
    assert eager["steps_completed"] < 2
    for child in (planned, control):
        assert child["steps_completed"] == 2
        assert child["losses_identical"] is True
        assert child["last_line"] == ""
    assert planned["losses"] == control["losses"]


def test_it_writes_its_files(result: DemoResult, answer: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "demo.json").read_text()) == answer
    assert Plan.from_json((folder / "plan.json").read_text()) == result.plan
    timeline = Timeline.from_json((folder / "timeline.json").read_text())
    assert timeline.budget_bytes == result.plan.budget_bytes
    assert "At the peak" in (folder / "timeline.svg").read_text(encoding="utf-8")
