"""The field suite: exact or refused for a stated reason, and recomputed, never quietly kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from regrad.verify.run import run_suites

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.mark.slow
def test_field_cases(tmp_path):
    file = tmp_path / "records.jsonl"
    (summary,) = run_suites(["field"], file=file)
    assert summary.failures == []
    assert summary.programs == summary.runs == 64
    assert summary.exact >= 60
    assert summary.exact + summary.unsupported == 64
    assert summary.faults_caught == summary.faults_planted >= 8
    runs = [json.loads(line) for line in file.read_text().splitlines()][:-1]
    ours = {run["case"]: run["modes"]["regrad"] for run in runs}
    kept = [case for case, mode in ours.items() if mode["verdict"] == "exact" and not mode["recomputed"]]
    assert len(kept) <= 2
    named = set(re.findall(r"\b(\d\d)_\w+", LIMITS.read_text(encoding="utf-8")))
    refused = [case for case, mode in ours.items() if mode["verdict"] == "raises"]
    assert {case[:2] for case in kept + refused} <= named  # each refusal and each KEEP is in docs/limits.md
    # wherever torch's checkpoint runs a body again, ours does too, unless it refuses or keeps
    torchs = {run["case"] for run in runs if run["modes"]["torch non-reentrant"]["recomputed"]}
    assert {case for case in torchs if not ours[case]["recomputed"]} <= set(kept + refused)
