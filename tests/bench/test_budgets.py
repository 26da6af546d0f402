"""The experiment runs on a small subject and writes a result that says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regrad.bench.budgets import CASES, Case, run_case
from regrad.bench.record import write_result


def test_a_small_case(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = {"n_layer": "3", "n_embd": "32", "n_head": "2", "vocab_size": "64"}
    case = Case("tiny", "transformers:GPT2Config", tuple(settings.items()))
    said: list[str] = []
    found = run_case(case, ("50%", "1 KiB"), said.append)
    assert said == ["tiny: profiling", "tiny: 50%", "tiny: 1 KiB"]
    fits, floor = found["rows"]
    assert fits["feasible"]
    assert not floor["feasible"]
    assert fits["measured_peak_bytes"] <= fits["budget_bytes"] < found["eager_peak_bytes"]
    assert floor["budget_bytes"] == 1024 < floor["least_bytes"] <= fits["predicted_peak_bytes"]
    assert floor["recomputed"] >= fits["recomputed"] > 0
    assert all(row["bit_identical"] and row["step_ratio"] > 0 for row in found["rows"])

    written = write_result("main-job", {"cases": [found]}, tmp_path)
    assert written.name.startswith("main-job_cpu-")
    read = json.loads(written.read_text())
    assert read["theme"] == "main-job"
    assert read["machine"]["torch"]
    assert read["cases"][0]["rows"] == found["rows"]


def test_the_cases_that_ship() -> None:
    assert [case.name for case in CASES] == ["gpt", "gpt2", "llama"]
    step = CASES[0].step()
    assert type(step.model).__name__ == "GPT"
