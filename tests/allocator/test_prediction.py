"""Predicted against measured peaks on random nested plans of eight subjects, by profiler events and by a counting
allocator that is compiled here and loaded before the process starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrad.bench.subjects import SUBJECTS

BANDS = {subject.name: subject.band_ratio for subject in SUBJECTS}
FAST_PLANS = 3


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The counting allocator as a shared library."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, (
        "no C++ compiler: the counting allocator of tests/allocator/counting.cpp cannot be built; "
        "on Debian: apt-get install g++"
    )
    library = tmp_path_factory.mktemp("allocator") / "counting.so"
    source = Path(__file__).with_name("counting.cpp")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def run(allocator: Path, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Rows of the experiment, run in a process of its own under the counting allocator."""
    found = folder / "rows.json"
    subprocess.run(
        [sys.executable, "-m", "regrad.bench.prediction", "--json", str(found), *arguments],
        env={**os.environ, "LD_PRELOAD": str(allocator), "KINETO_LOG_LEVEL": "5"},
        stdout=subprocess.DEVNULL,
        check=False,
        timeout=900,
    )
    rows: list[dict[str, Any]] = json.loads(found.read_text())
    return rows


@pytest.mark.parametrize("subject", BANDS)
def test_predictions_lie_within_their_band_by_both_measures(allocator: Path, tmp_path: Path, subject: str) -> None:
    rows = run(allocator, tmp_path, "--subjects", subject, "--plans", str(FAST_PLANS))
    assert sorted(row["gradients"] for row in rows) == ["fresh"] * FAST_PLANS + ["kept"] * FAST_PLANS
    assert all(row["recomputed"] >= 1 for row in rows)
    assert len({row["predicted_bytes"] for row in rows}) > 1
    for row in rows:
        assert abs(row["error_ratio"]) <= BANDS[subject], row
        assert abs(row["allocator_error_ratio"]) <= BANDS[subject], row


def test_the_allocator_counts_to_the_byte(allocator: Path) -> None:
    script = (
        "import ctypes, torch; c = ctypes.CDLL(None); c.counted_peak.restype = ctypes.c_longlong;"
        "c.counted_now.restype = ctypes.c_longlong; before = c.counted_now(); c.counted_peak();"
        "x = torch.empty(1000); y = torch.empty(500); del x;"
        "print(c.counted_peak() - before, c.counted_now() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_PRELOAD": str(allocator)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["6000", "2000"]
