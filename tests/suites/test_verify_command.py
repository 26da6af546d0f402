"""``regrad verify``: words in, a table, a file of records and an exit code out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from regrad.cli.main import app
from regrad.verify.alias import Alias


@pytest.fixture
def regrad(monkeypatch):
    """The command line in this process, on a terminal wide enough for the table."""
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def short(monkeypatch):
    """An alias suite of six programs."""
    monkeypatch.setattr(Alias, "programs", lambda self, full: 6)


def test_a_table_a_histogram_and_a_file(regrad, short, tmp_path):
    file = tmp_path / "records.jsonl"
    said = regrad("verify", "alias", "--json", file)
    assert said.exit_code == 0, said.stdout
    for word in ("programs", "exact", "diverged", "unsupported", "not", "run", "max |gradient|", "planted fault"):
        assert word in said.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["record"] for record in records].count("run") == 36
    assert records[-1]["exact"] == 30
    assert records[-1]["unsupported"] == 6


def test_a_suite_that_fails_ends_with_one(regrad, short, monkeypatch):
    monkeypatch.setattr("regrad.verify.suite.is_caught", lambda *of: False)
    said = regrad("verify", "alias")
    assert said.exit_code == 1
    assert "FAILED alias" in said.stdout


def test_bad_input_ends_with_two(regrad, tmp_path):
    assert regrad("verify", "nonsense").exit_code == 2
    said = regrad("verify", "alias", "--json", tmp_path / "no" / "file.jsonl")
    assert said.exit_code == 2
    assert "cannot write" in said.stderr
