"""The suites at their default sizes: all exact, every planted fault caught, and a suite that can fail."""

from __future__ import annotations

import json

import pytest

from regrad.core.errors import InvalidPlan
from regrad.replay.contract import Verdict
from regrad.verify import alias, engines, numeric
from regrad.verify.checks import Expectation, judge, judge_bytes
from regrad.verify.engines import Engines
from regrad.verify.failures import inject
from regrad.verify.faults import FAULTS, SOUND
from regrad.verify.numeric import Numeric
from regrad.verify.programs import Flavour, random_job
from regrad.verify.records import Run, Summary
from regrad.verify.run import SUITES, run_suites
from regrad.verify.shape import LEAST_MEDIAN_GRADIENT
from regrad.verify.suite import ENGINES

RUN_KEYS = {"record", "suite", "program", "verdict", "max_gradient_error"}
SUMMARY_KEYS = {
    "record", "suite", "programs", "exact", "diverged", "unsupported", "not_run", "max_gradient_error",
    "faults_planted", "faults_caught",
}  # fmt: skip
ENGINE_SUITES = [name for name in SUITES if name not in ("cohort", "field")]  # these have tests of their own
EVERY_FAULT = {fault.name for fault in FAULTS}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """All suites once: their summaries and the lines of their file."""
    file = tmp_path_factory.mktemp("verify") / "records.jsonl"
    summaries = {summary.suite: summary for summary in run_suites(ENGINE_SUITES, file=file)}
    return summaries, [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", ENGINE_SUITES)
def test_a_suite_passes_and_catches_every_fault(outcome, name):
    summary = outcome[0][name]
    assert summary.failures == []
    assert set(summary.faults) >= EVERY_FAULT
    assert summary.faults_caught == summary.faults_planted > 0
    assert summary.diverged == summary.not_run == 0
    assert summary.exact + summary.unsupported == summary.runs
    assert summary.unsupported == (summary.programs if name == "alias" else 0)


@pytest.mark.parametrize("name", ["numeric", "engines", "complex-step", "alias"])
def test_gradients_are_large_enough_for_thresholds_to_mean_something(outcome, name):
    assert outcome[0][name].median_gradient >= LEAST_MEDIAN_GRADIENT


def test_the_records(outcome):
    summaries, records = outcome
    for name, summary in summaries.items():
        mine = [record for record in records if record["suite"] == name]
        runs = [record for record in mine if record["record"] == "run"]
        assert len(runs) == summary.runs
        assert all(set(record) >= RUN_KEYS for record in runs)
        assert {record["verdict"] for record in runs} <= {"exact", "unsupported"}
        assert [record["record"] for record in mine].count("summary") == 1
        assert mine[-1]["record"] == "summary"
        assert set(mine[-1]) >= SUMMARY_KEYS
        assert mine[-1]["passed"] is True
        errors = [record["max_gradient_error"] for record in runs if record["max_gradient_error"] is not None]
        assert mine[-1]["max_gradient_error"] == (max(errors) if errors else None)


def test_programs_have_their_shape(outcome):
    shapes = [record for record in outcome[1] if "overlapping_copies" in record]
    assert len(shapes) > 200
    assert min(record["writes"] for record in shapes) >= 16
    assert min(record["segments"] for record in shapes) >= 3
    for name in ("overlapping_copies", "draws", "old_versions"):
        assert min(record[name] for record in shapes) >= 1
    assert min(record["views_of_one_storage"] for record in shapes) >= 2


def test_the_sizes_of_the_full_suites():
    assert {name: suite.programs(True) for name, suite in SUITES.items()} == {
        "numeric": 1024,
        "bytes": 1024,
        "engines": 1200,
        "complex-step": 96,
        "alias": 300,
        "cohort": 250,
        "field": 64,
    }
    assert len(ENGINES) == 5


def test_integer_writes_are_refused_by_name(outcome):
    refused = [record for record in outcome[1] if record.get("verdict") == "unsupported"]
    assert len(refused) == outcome[0]["alias"].programs
    assert all("segment" in record["why"] and "bytes codes[" in record["why"] for record in refused)


def test_the_same_seed_gives_the_same_records(monkeypatch):
    monkeypatch.setattr(numeric.Numeric, "programs", lambda self, full: 8)
    lines = [[], []]
    for into in lines:
        Numeric().run(sink=lambda run, into=into: into.append(run.line()))
    assert lines[0] == lines[1]


def test_an_unknown_suite(tmp_path):
    with pytest.raises(InvalidPlan, match="no suite exactness"):
        run_suites(["exactness"])
    with pytest.raises(InvalidPlan, match="cannot write"):
        run_suites(["alias"], file=tmp_path / "nowhere" / "file")


# --- a suite that can fail -------------------------------------------------------------------------------------------


def test_a_fault_that_is_not_caught_fails_the_suite(monkeypatch):
    monkeypatch.setattr("regrad.verify.suite.is_caught", lambda expectation, fault, bound: False)
    monkeypatch.setattr(engines.Engines, "programs", lambda self, full: 1)
    monkeypatch.setattr(engines, "inject", lambda *of: inject(Expectation.of(random_job(3, 0)), ENGINES[1]))
    summary = Engines().run()
    assert len([failure for failure in summary.failures if "not caught" in failure]) == len(FAULTS)


def test_an_engine_that_is_wrong_fails_the_suite(monkeypatch):
    monkeypatch.setattr(engines, "ENGINES", (FAULTS[0],))
    monkeypatch.setattr(engines.Engines, "programs", lambda self, full: 2)
    monkeypatch.setattr(engines, "inject", lambda *of: inject(Expectation.of(random_job(3, 0)), ENGINES[1]))
    summary = Engines().run()
    assert summary.diverged == 2
    assert "2 runs diverged" in summary.failures


def test_a_program_of_the_wrong_shape_fails_the_suite(monkeypatch):
    monkeypatch.setattr("regrad.verify.shape.LEAST_WRITES", 10_000)
    monkeypatch.setattr(numeric.Numeric, "programs", lambda self, full: 1)
    assert any("writes, not 10000" in failure for failure in Numeric().run().failures)


def test_an_error_above_the_bound_fails_the_suite():
    summary = Summary("numeric", bound=8.9e-16)
    summary.add(Run("numeric", 0, Verdict.EXACT, 9e-16))
    summary.plant("one", True)
    summary.judge()
    assert any("above" in failure for failure in summary.failures)


def test_an_integer_write_that_is_not_refused_is_seen(monkeypatch):
    monkeypatch.setattr(alias, "with_integer_write", lambda job: job)
    assert alias.asks_integer(random_job(1, 0)).verdict is Verdict.DIVERGED


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_where_the_engine_it_was_made_from_is_exact(fault):
    expectation = Expectation.of(random_job(41, 2))
    assert judge(expectation, fault, 1.6e-15).verdict is Verdict.DIVERGED
    for engine in SOUND:
        assert judge(expectation, engine, 1.6e-15).verdict is Verdict.EXACT


def test_values_alone_do_not_catch_a_forgotten_generator_everywhere():
    """The reason why exits compare generators: with bytes alone some programs would pass."""
    passed = 0
    for number in range(12):
        expectation = Expectation.of(random_job(42, number, Flavour(single=True, raw=True)))
        outcome = judge_bytes(expectation, next(f for f in FAULTS if f.name == "forgets the generator"))
        assert outcome.verdict is Verdict.DIVERGED
        passed += "generator" in outcome.why
    assert passed > 0


# --- failures injected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.label)
@pytest.mark.parametrize("number", range(3))
def test_a_failure_at_every_access_leaves_the_present_intact(engine, number):
    counts = inject(Expectation.of(random_job(43, number)), engine)
    assert counts.intact == counts.total, counts.why
    if engine.replays:
        assert counts.captures > 10
        assert counts.restores > 10


def test_a_lost_present_is_seen_by_the_injection():
    fault = next(f for f in FAULTS if f.name == "does not bring the present back")
    counts = inject(Expectation.of(random_job(43, 0)), fault)
    assert counts.intact < counts.total


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.label)
def test_a_failure_at_every_access_of_more_programs(engine):
    for number in range(5):
        counts = inject(Expectation.of(random_job(44, number)), engine)
        assert counts.intact == counts.total, counts.why
