"""What engines hold for a large buffer: the asserted bounds, on real bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from regrad.bench import state_costs
from regrad.bench.state_costs import cells, check


@pytest.fixture(scope="module")
def corners():
    """All engines and workloads at the four corners of the table."""
    return cells((0.001, 1.0), (1, 64))


def one(table, engine, workload, fraction, versions):
    return next(
        c
        for c in table
        if (c.engine, c.workload, c.write_fraction, c.live_versions) == (engine, workload, fraction, versions)
    )


def test_everything_restored_is_right(corners):
    assert len(corners) == 3 * 2 * 2 * 3
    assert all(cell.exact for cell in corners)
    assert check(corners) == []


@pytest.mark.parametrize("workload", state_costs.WORKLOADS)
def test_sparse_writes_and_many_versions(corners, workload):
    log, whole = (one(corners, name, workload, 0.001, 64) for name in ("shared log", "snapshot"))
    live = state_costs.BUFFER_BYTES
    assert whole.retained_bytes == 64 * live
    assert (log.retained_bytes + live) / (whole.retained_bytes + live) <= 0.02
    assert log.retained_bytes < one(corners, "union", workload, 0.001, 64).retained_bytes


@pytest.mark.parametrize("workload", state_costs.WORKLOADS)
@pytest.mark.parametrize("versions", [1, 64])
def test_dense_writes_are_equal_but_for_headers(corners, workload, versions):
    log, whole = (one(corners, name, workload, 1.0, versions) for name in ("shared log", "snapshot"))
    assert log.retained_bytes - whole.retained_bytes == log.header_bytes == 32 * versions


def test_a_table_that_is_wrong_is_refused(corners):
    wrong = [replace(cell, exact=False, snapshot_ratio=0.5, header_bytes=0) for cell in corners]
    said = "\n".join(check(wrong))
    assert "restores other bytes" in said
    assert "more than 2 %" in said
    assert "not equal to snapshots" in said


def test_the_command_writes_json(tmp_path, monkeypatch, capsys, corners):
    monkeypatch.setattr(state_costs, "cells", lambda *of: corners)
    assert state_costs.main(["--quick", "--out", str(tmp_path / "sub" / "table.json")]) == 0
    body = json.loads((tmp_path / "sub" / "table.json").read_text())
    assert len(body["cells"]) == len(corners)
    assert body["failures"] == []
    assert "written to" in capsys.readouterr().out
