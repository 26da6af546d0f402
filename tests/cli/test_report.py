"""How plans and the demo's result read."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from regrad.core.plan import PeakMoment, Plan, SegmentPlan, one_level
from regrad.core.text import fold_segments
from regrad.demo.state_result import COMPARED
from regrad.report.demo import demo_report
from regrad.report.text import plan_report

MIB = 1024**2


def segment(name: str, option: str = "keep", retained: int = 8 * MIB, reason: str = "") -> SegmentPlan:
    return SegmentPlan(name, option, retained, 2 * MIB, 0.5 if option == "recompute" else 0.0, reason)


SEGMENTS = (
    segment("before h.0", reason="it lies outside the blocks"),
    *(segment(f"h.{i}", "recompute", MIB + i, "frees 7 MiB") for i in range(3)),
    segment("h.3"),
)


@pytest.fixture
def plan() -> Plan:
    moment = PeakMoment("backward", "h.2", "aten.mm.default")
    return Plan(
        fingerprint="0123456789abcdef" * 4,
        budget_bytes=100 * MIB,
        predicted_peak_bytes=90 * MIB,
        predicted_by="fake trace",
        band_ratio=0.01,
        peak_moment=moment,
        eager_peak_bytes=150 * MIB,
        eager_peak_moment=PeakMoment("forward", "", ""),
        persistent_bytes=10 * MIB,
        least_bytes=80 * MIB,
        added_seconds=1.5,
        eager_seconds=3.0,
        planner="Portfolio",
        device="cpu",
        gradients="fresh",
        segments=SEGMENTS,
        choices=one_level([segment.option for segment in SEGMENTS]),
        notes=("a cache is off",),
    )


def drawn(renderable: object) -> str:
    """What a terminal of 80 columns shows."""
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_neighbours_that_read_alike_are_one_row():
    rows = fold_segments(SEGMENTS)
    assert [(row.name, row.count) for row in rows] == [("before h.0", 1), ("h.0 … 2", 3), ("h.3", 1)]
    assert rows[1].retained_bytes == MIB + 2
    assert rows[1].added_seconds == pytest.approx(1.5)


def test_neighbours_that_read_differently_are_not():
    assert len(fold_segments((segment("a.0"), segment("a.1", retained=9 * MIB)))) == 2
    assert len(fold_segments((segment("a.0"), segment("a.1", reason="it writes a buffer")))) == 2
    assert len(fold_segments((segment("a.0"), replace(segment("a.1"), engine="journal")))) == 2


@pytest.mark.parametrize("show", [str, lambda plan: drawn(plan_report(plan))], ids=["text", "table"])
def test_a_plan_says(plan, show):
    text = show(plan)
    for words in (
        "100 MiB",
        "94,371,840 bytes; ± 1.0%, by fake trace",
        "backward of h.2, aten.mm.default",
        "150 MiB, in forward",
        "80.0 MiB",
        "4.50 s a step, 1.50x the eager step",
        "3 of 5 segments recomputed",
        "h.0 … 2 (3)",
        "frees 7 MiB",
        "a cache is off",
    ):
        assert words in text, text


def demo_state_result() -> dict:
    """The part about the model with state: a planned run that is exact, and one under torch's checkpoint that is not."""
    row = {f"{what}_identical": True for what in COMPARED} | {
        "predicted_peak_bytes": 40 * MIB,
        "measured_peak_bytes": 39 * MIB,
        "extra_forwards": 4,
        "replays": 4,
        "losses": [5.5, 4.25],
        "first_other_loss_step": None,
        "first_other_gradients_step": None,
        "gradient_error_ratio": 0.0,
        "other_values": [],
        "values": 24,
        "bit_identical": True,
    }
    counters = [
        {"name": f"buffer blocks.{i}.router.tokens", "eager_sum": 1_024, "found_sum": 2_048, "counted_twice": True}
        for i in range(4)
    ]
    torchs = {
        "name": "torch's checkpoint",
        "predicted_peak_bytes": None,
        "replays": 0,
        "gradients_identical": False,
        "buffers_identical": False,
        "first_other_gradients_step": 2,
        "gradient_error_ratio": 0.125,
        "other_values": counters,
        "bit_identical": False,
    }
    return {
        "model": "mixture of experts",
        "parameters": 2_000_000,
        "steps": 2,
        "budget": "60%",
        "budget_bytes": 41 * MIB,
        "torch_bit_identical": False,
        "torch_assumption": "torch documents what it assumes.",
        "rows": [row | {"name": "eager"}, row | {"name": "planned"}, row | torchs],
    }


def demo_result(plan: Plan, *, equal: bool = True) -> dict:
    row = {
        "predicted_peak_bytes": 90 * MIB,
        "measured_peak_bytes": 89 * MIB,
        "step_seconds": 0.5,
        "step_ratio": 1.25,
        "extra_forwards": 12,
        "last_loss": 3.25,
        "losses_identical": True,
        "gradients_identical": True,
        "weights_identical": equal,
        "optimizer_identical": True,
        "generator_identical": True,
    }
    child = {
        "name": "eager under the limit",
        "verdict": "out of memory",
        "losses_identical": None,
        "limit_bytes": 200 * MIB,
        "allowance_bytes": 50 * MIB,
        "exit_code": 77,
        "steps_completed": 0,
        "phase": "forward",
        "module": "blocks.3",
        "last_line": "RuntimeError: cannot allocate",
    }
    return {
        "model": "gpt",
        "parameters": 12_000_000,
        "text_bytes": 4 * MIB,
        "device": "cpu",
        "threads": 2,
        "steps": 20,
        "budget": "50%",
        "budget_bytes": plan.budget_bytes,
        "rows": [row | {"name": name} for name in ("eager", "every block", "planned")],
        "limits": {"kind": "RLIMIT_DATA", "unavailable": "", "steps": 5, "children": [child]},
        "stateful": demo_state_result(),
        "failures": [] if equal else ["the runs are not bit-identical"],
        "seconds": 100.0,
    }


def test_the_demo_says(plan):
    text = drawn(demo_report(demo_result(plan)))
    for words in ("every block", "89.0 MiB", "1.25x", "12", "out of memory", "forward blocks.3", "all as it should be"):
        assert words in text, text
    assert "…" not in text  # nothing is cut off at 80 columns


def test_the_demo_says_what_became_of_the_state(plan):
    text = drawn(demo_report(demo_result(plan)))
    for words in (
        "mixture of experts, 2,000,000 parameters",
        "under torch's checkpoint:",
        "other gradients from step 2 on, there by 12.50% of their norm",
        "other values in 4 of 24 buffers and attributes",
        "twice: buffer blocks.*.router.tokens (4)",
        "2,048, in the eager run 1,024",
        "torch documents what it assumes.",
    ):
        assert words in text, text
    assert "other losses" not in text


def test_the_demo_says_what_failed(plan):
    text = drawn(demo_report(demo_result(plan, equal=False)))
    assert "not as it should be: the runs are not bit-identical" in text
    assert "all as it should be" not in text


def test_the_demo_says_that_it_could_not_prove_it(plan):
    result = demo_result(plan)
    result["limits"] |= {"children": [], "unavailable": "this system has no RLIMIT_DATA"}
    assert "no run under a real limit: this system has no RLIMIT_DATA" in drawn(demo_report(result))
