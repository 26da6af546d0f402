"""The cohort: the published figures come out for torch's modes, ours are exact or refuse with eager, and it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from regrad.cli.main import app
from regrad.torch.cohort.faults import FAULTS
from regrad.torch.cohort.judge import compare, differing
from regrad.torch.cohort.modes import EAGER, MODES, save_products
from regrad.torch.cohort.programs import CONDITIONS, build
from regrad.torch.cohort.trial import run
from regrad.verify.cohort import judge, suite, tables
from regrad.verify.cohort.suite import Cohort
from regrad.verify.run import run_suites

SEED = 420_000


@pytest.fixture(scope="module")
def lines():
    """The runner's records of three seeds; the third writes a large part, which `guarded` copies whole."""
    command = [sys.executable, "-m", "regrad.torch.cohort", str(SEED), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(text) for text in done.stdout.splitlines()]


@pytest.fixture
def judged(monkeypatch):
    """Runs the suite on records that a test gives, as if a runner of three seeds had written them."""
    monkeypatch.setattr(suite, "FEW_SEEDS", 3)

    def verdict(given):
        monkeypatch.setattr(suite, "_lines", lambda first, seeds, summary: iter(given))
        return Cohort().run()

    return verdict


def changed(lines, record, condition, mode, **more):
    """``lines`` with other values in the first record of its kind."""
    found = next(
        i
        for i, line in enumerate(lines)
        if (line["record"], line["condition"], line.get("mode")) == (record, condition, mode)
    )
    return [*lines[:found], lines[found] | more, *lines[found + 1 :]]


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cohort(tmp_path):
    file = tmp_path / "records.jsonl"
    (summary,) = run_suites(["cohort"], file=file)
    assert summary.failures == []
    seeds = suite.FEW_SEEDS
    assert (summary.programs, summary.runs) == (5 * seeds, 70 * seeds)
    assert (summary.exact, summary.diverged, summary.unsupported) == (38 * seeds, 18 * seeds, 14 * seeds)
    assert summary.not_run == 0
    assert summary.median_gradient >= 0.5
    assert summary.faults_caught == summary.faults_planted == 28 * seeds
    assert set(summary.faults) == {fault.mode.name for fault in FAULTS}
    records = [json.loads(line) for line in file.read_text().splitlines()]
    runs = [record for record in records if record["record"] == "run"]
    assert len(runs) == summary.runs
    ours = [run for run in runs if run["mode"] in judge.OURS and run["condition"] != "E"]
    assert all(run["verdict"] == "exact" and run["replays"] == 3 and run["kept"] == [] for run in ours)
    assert all(run["storages_alive"] == 0 and run["bodies"] == 6 for run in ours)
    plain = [run for run in runs if run["mode"] in judge.PLAIN and run["condition"] in "CD"]
    assert all(run["gradient_difference"] > 0 for run in plain)  # not only the state: the gradients are wrong


def test_three_seeds_pass_and_are_counted(lines, judged):
    summary = judged(lines)
    assert summary.failures == []
    assert (summary.runs, summary.exact, summary.diverged, summary.unsupported) == (210, 114, 54, 42)
    verdicts, figures, engines = summary.grids
    assert verdicts.rows[0] == ("torch reentrant", "exact", "exact", "diverged", "diverged", "refused")
    assert {row[1:] for row in verdicts.rows[6:]} == {("exact", "exact", "exact", "exact", "refused")}
    assert [row[1:] for row in figures.rows[:4]] == [
        ("12 of 12", "200 of 200"),
        ("12 of 12", "200 of 200"),
        ("6 of 6", "100 of 100"),
        ("24 of 24", "400 of 400"),
    ]
    assert "not a bug in torch" in figures.note
    assert [row[0] for row in engines.rows] == list(judge.ENGINES)
    assert json.loads(summary.line())["tables"][0]["title"].startswith("verdicts")


def test_the_size_of_the_full_cohort():
    assert Cohort().programs(True) * len(judge.MODES) == 3500
    assert tuple(mode.name for mode in MODES) == judge.MODES
    assert tuple(judge.CONDITIONS) == tuple(CONDITIONS)
    wanted = Counter(judge.expected(condition, mode) for condition in CONDITIONS for mode in judge.MODES)
    assert {word: 50 * count for word, count in wanted.items()} == {"exact": 1900, "diverged": 900, "refused": 700}


def test_the_command_shows_the_tables(monkeypatch, lines):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(suite, "FEW_SEEDS", 3)
    monkeypatch.setattr(suite, "_lines", lambda first, seeds, summary: iter(lines))
    said = CliRunner().invoke(app, ["verify", "cohort"], catch_exceptions=False)
    assert said.exit_code == 0, said.stdout
    for words in ("torch non-reentrant, no generator", "200 of 200", "hidden buffer, overwrite", "read_set"):
        assert words in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


# --- the programs ----------------------------------------------------------------------------------------------------


def test_two_builds_are_equal_and_seeds_are_not():
    for condition in CONDITIONS:
        one, same = build(SEED, condition), build(SEED, condition)
        assert one.facts == same.facts
        assert torch.equal(one.storage, same.storage)
        assert all(map(torch.equal, one.parameters, same.parameters))
        shapes = {(str(sorted(build(SEED + i, condition).facts.items()))) for i in range(12)}
        assert len(shapes) == 12  # programs of their own, not one program with other numbers


def test_a_build_leaves_torchs_generator():
    before = torch.get_rng_state()
    build(SEED, "D")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("condition", "CD")
def test_what_is_written_overlaps_what_was_read(condition):
    for seed in range(SEED, SEED + 6):
        eager = run(seed, condition, EAGER)
        assert eager.old_versions >= 1
        assert eager.bodies == eager.steps == 3
        assert eager.alive > 0


def test_the_segments_pass_for_a_users_code():
    module = build(SEED, "C").segment.__class__.__module__
    assert not module.startswith("regrad")


def test_eager_refuses_the_raw_copy_and_clone_would_not():
    assert "Please clone()" in run(SEED, "E", EAGER).raised
    accepting = next(fault for fault in FAULTS if fault.mode.name == "runs where eager refuses")
    assert run(SEED, "E", accepting.mode).raised is None


def test_the_selective_policy_saves_products_and_no_draw():
    policies = {
        name: save_products(None, getattr(torch.ops.aten, name).default) for name in ("mm", "addmm", "bernoulli")
    }
    assert [policy.name for policy in policies.values()] == ["MUST_SAVE", "MUST_SAVE", "PREFER_RECOMPUTE"]


# --- the comparison --------------------------------------------------------------------------------------------------


def test_two_eager_runs_are_equal_and_one_bit_is_seen():
    eager, again = run(SEED, "D", EAGER), run(SEED, "D", EAGER)
    assert differing(eager, again) == []
    shape, dtype, data = again.slots[2, "buffer"]
    again.slots[2, "buffer"] = (shape, dtype, data[:-1] + bytes([data[-1] ^ 1]))
    found = compare(eager, again, EAGER)
    assert (found["verdict"], found["why"], found["recomputed"]) == ("diverged", "step 2: buffer", False)
    del again.slots[2, "buffer"]
    assert differing(eager, again) == [(2, "buffer")]


# --- a suite that can fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "mode", "more", "said"),
    [
        ("C", "regrad journal discovered", {"verdict": "diverged"}, "diverged, not exact"),
        ("C", "regrad journal discovered", {"recomputed": False}, "exact and not recomputed"),
        ("A", "regrad snapshot declared", {"replays": 2}, "2 replays in 3 steps"),
        ("D", "regrad read_set declared", {"kept": [["wrote", 1]]}, "kept"),
        ("E", "regrad guarded discovered", {"as_eager": False}, "another error than eager's"),
        ("E", "regrad guarded discovered", {"verdict": "exact"}, "exact, not refused"),
        ("C", "torch reentrant", {"verdict": "exact"}, "exact, not diverged"),
        ("B", "torch selective", {"verdict": "refused"}, "refused, not exact"),
    ],
)
def test_a_run_that_is_wrong_fails_the_suite(lines, judged, condition, mode, more, said):
    summary = judged(changed(lines, "run", condition, mode, **more))
    assert any(said in failure and mode in failure for failure in summary.failures)


def test_a_fault_that_is_not_caught_fails_the_suite(lines, judged):
    missed = changed(lines, "fault", "C", "reads the final storage", verdict="exact", recomputed=True)
    assert any("not caught: reads the final storage" in failure for failure in judged(missed).failures)
    unseen = changed(lines, "fault", "C", "reads the final storage, guarded", why="another reason")
    assert any("not caught: reads the final storage, guarded" in failure for failure in judged(unseen).failures)


@pytest.mark.parametrize(
    ("condition", "more", "said"),
    [
        ("C", {"old_versions": 0}, "no version that differs"),
        ("C", {"state_bytes": 1024}, "only 1,024 bytes"),
        ("A", {"draws": 0}, "no draws"),
        ("D", {"writes": 0}, "no writes"),
        ("B", {"storages_alive": 0}, "nothing that a replay could make"),
        ("E", {"refused": None}, "eager says None"),
    ],
)
def test_a_program_of_the_wrong_shape_fails_the_suite(lines, judged, condition, more, said):
    summary = judged(changed(lines, "program", condition, None, **more))
    assert any(said in failure for failure in summary.failures)


def test_records_that_are_missing_are_runs_not_run(lines, judged):
    summary = judged(lines[: len(lines) // 2])
    assert summary.not_run > 0
    assert summary.runs == 210
    assert any("were not run" in failure for failure in summary.failures)
    assert any("more than programs times modes" in failure for failure in judged([*lines, lines[1]]).failures)


def test_small_gradients_and_engines_that_are_one_fail_the_suite(lines, judged):
    flat = [line | {"max_gradient": 0.1} if line["record"] == "program" else line for line in lines]
    assert any("median of max |gradient|" in failure for failure in judged(flat).failures)
    alike = [line | {"retained_bytes": 7} if "retained_bytes" in line else line for line in lines]
    assert any("engines held" in failure for failure in judged(alike).failures)
    runs = [line for line in lines if line["record"] == "run"]
    assert sum(tables.held(runs, "journal")) < sum(tables.held(runs, "guarded")) < sum(tables.held(runs, "snapshot"))


def test_a_runner_that_dies_is_told(monkeypatch):
    monkeypatch.setattr(suite, "FEW_SEEDS", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    summary = Cohort().run()
    assert summary.not_run == 70
    assert any("the runner stopped" in failure for failure in summary.failures)
