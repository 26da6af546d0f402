"""``regrad calibrate``: what it writes, what it says, and what it refuses before it measures anything."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Neither the caches nor the settings of whoever runs the tests play a part."""
    monkeypatch.delenv("REGRAD_CALIBRATION", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # threads that wait for shared cores make this crawl
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_measuring(monkeypatch):
    def never(**_: object) -> None:
        raise AssertionError("it measured before it knew where to write")

    monkeypatch.setattr("regrad.torch.calibrate.learn", never)


def test_json(regrad, tmp_path):
    file = tmp_path / "mine.json"
    said = regrad("calibrate", "--quick", "--out", file, "--json")
    assert said.exit_code == 0, said.err
    assert set(said.answer) == {"regrad", "command", "subject", "device", "calibration"}
    found = said.answer["calibration"]
    assert found["calibration_file"] == str(file)
    rows = {row["operation"]: row for row in found["operations"]}
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten.mkldnn_rnn_layer.default"} <= set(
        rows
    )
    for row in rows.values():
        assert row["entries"] == row["same"] + row["changed"] + row["new"] > 0
    assert found["entries"] == sum(row["entries"] for row in rows.values())
    written = json.loads(file.read_text())
    assert {name: len(entries) for name, entries in written["operations"].items()} == {
        name: row["entries"] for name, row in rows.items()
    }


def test_it_goes_where_plans_look_for_it(regrad, tmp_path, monkeypatch):
    from regrad.torch.workspace_table import Entry, WorkspaceTable, current_table

    made_up = WorkspaceTable.of([("aten.of_a_test.default", Entry("f32[4]", 16, 4096, (16,)))])
    monkeypatch.setattr("regrad.torch.calibrate.learn", lambda **_: made_up)
    assert "aten.of_a_test.default" not in current_table().operations
    said = regrad("calibrate")
    assert said.exit_code == 0, said.err
    for words in ("operation", "largest change", "of_a_test.default", "1 entries"):
        assert words in said.out
    assert (tmp_path / "cache" / "regrad" / "workspace.json").is_file()
    assert current_table().operations["aten.of_a_test.default"] == made_up.operations["aten.of_a_test.default"]


@pytest.mark.parametrize("place", ["a folder", "no folder", "below a file", "cannot be opened"])
@pytest.mark.usefixtures("no_measuring")
def test_an_unwritable_path(regrad, tmp_path, place):
    (tmp_path / "file").write_text("")
    path = {
        "a folder": tmp_path,
        "no folder": tmp_path / "absent" / "table.json",
        "below a file": tmp_path / "file" / "table.json",
        "cannot be opened": tmp_path / ("x" * 300),
    }[place]
    said = regrad("calibrate", "--quick", "--out", path)
    assert (said.exit_code, said.out) == (2, "")
    assert "cannot write" in said.err
    assert "--out" in said.err


@pytest.mark.usefixtures("no_measuring")
def test_an_unwritable_default(regrad, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGRAD_CALIBRATION", str(tmp_path / "file" / "table.json"))
    said = regrad("calibrate", "--json")
    assert said.exit_code == 2
    assert said.answer["error"]["type"] == "UsageError"


def test_a_broken_file_stops_a_plan(regrad, subjects, tmp_path, monkeypatch):
    file = tmp_path / "broken.json"
    file.write_text("{")
    monkeypatch.setenv("REGRAD_CALIBRATION", str(file))
    said = regrad("plan", f"{subjects}:step", "--budget", "60%")
    assert (said.exit_code, said.out) == (2, "")
    assert f"regrad calibrate --out {file}" in said.err.replace("\n", " ")
