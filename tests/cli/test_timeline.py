"""``regrad plan --timeline``: the file's ending says what is written."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from regrad.core.timeline import Holder, Timeline
from regrad.report import timeline as pictures
from regrad.report.timeline import holder_lines, write_timeline


@pytest.fixture
def planned(regrad, subjects, tmp_path):
    def run(name: str):
        file = tmp_path / name
        said = regrad("plan", f"{subjects}:step", "--budget", "50%", "--timeline", file, "--json")
        assert said.exit_code == 0, said.err
        assert said.answer["timeline_file"] == str(file)
        return file, said.answer["plan"]

    return run


def test_json(planned):
    file, plan = planned("memory.json")
    timeline = Timeline.from_json(file.read_text())
    assert timeline.budget_bytes == plan["budget_bytes"]
    assert 0 <= plan["predicted_peak_bytes"] - timeline.peak_bytes < 1024
    assert max(timeline.total_bytes) == timeline.peak_bytes
    assert json.loads(file.read_text())["version"] == 1


def svg_words(file) -> str:
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    return "\n".join("".join(node.itertext()) for node in root.iter() if node.tag.endswith("text"))


def test_svg(planned, subjects):
    file, _ = planned("memory.svg")
    words = svg_words(file)
    for expected in (
        "forward",
        "backward",
        "optimizer",
        "budget ",
        "without the plan: ",
        "At the peak: ",
        "activations",
    ):
        assert expected in words
    assert "cli_subjects.py:" in words  # a holder's source line
    assert f"{subjects}:step" in words
    assert file.stat().st_size < 2**20


def test_the_same_timeline_is_the_same_picture(planned, tmp_path):
    file, _ = planned("memory.json")
    timeline = Timeline.from_json(file.read_text())
    for name in ("one.svg", "two.svg"):
        write_timeline(timeline, tmp_path / name, "a step")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_png(planned):
    file, _ = planned("memory.png")
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending", [".trace.json", ".perfetto.json"])
def test_a_trace_for_perfetto(planned, ending):
    file, plan = planned(f"memory{ending}")
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    operations = [event for event in events if event["ph"] == "X"]
    counters = [event for event in events if event["ph"] == "C"]
    assert len(operations) == len(counters)
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in operations)
    starts = [event["ts"] for event in operations]
    assert starts == sorted(starts)
    levels = [sum(event["args"].values()) for event in counters]
    assert 0 <= plan["predicted_peak_bytes"] - max(levels) < 1024
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(rows.values()) == ["forward", "backward", "optimizer"]
    assert {rows[event["tid"]] for event in operations if event["cat"] == "replay"} == {"backward"}
    assert [event["name"] for event in events if event["ph"] == "i"] == [f"peak: {max(levels):,} bytes"]


def test_the_text_says_where_it_is(regrad, subjects, tmp_path):
    file = tmp_path / "memory.json"
    said = regrad("plan", f"{subjects}:step", "--budget", "50%", "--timeline", file)
    assert re.sub(r"\s", "", str(file)) in re.sub(r"\s", "", said.out)


def test_an_unknown_ending_is_refused_before_anything_is_done(regrad, tmp_path):
    said = regrad("plan", "nowhere.py:step", "--budget", "50%", "--timeline", tmp_path / "memory.pdf")
    assert (said.exit_code, said.out) == (2, "")
    for ending in (".svg", ".png", ".json", ".trace.json"):
        assert ending in said.err
    assert "nowhere.py" not in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_not_there(regrad, tmp_path):
    said = regrad("plan", "nowhere.py:step", "--budget", "50%", "--timeline", tmp_path / "absent" / "memory.svg")
    assert said.exit_code == 2
    assert "there is no folder" in said.err
    (tmp_path / "folder.svg").mkdir()
    assert regrad("plan", "nowhere.py:step", "--budget", "min", "--timeline", tmp_path / "folder.svg").exit_code == 2


def test_without_matplotlib(regrad, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    said = regrad("plan", "nowhere.py:step", "--budget", "50%", "--timeline", tmp_path / "memory.svg")
    assert said.exit_code == 2
    assert "pip install 'regrad[plot]'" in said.err
    said = regrad("plan", "nowhere.py:step", "--budget", "50%", "--timeline", tmp_path / "memory.json")
    assert "matplotlib" not in said.err


def test_lines_about_holders_fit_their_panel():
    long = Holder(2**20, 12, "activations", "aten._scaled_dot_product_flash_attention_for_cpu.default",
                  "model.decoder.layers.*.self_attention.core", "/a/long/way/to/modeling_something.py:1234", True)  # fmt: skip
    for line, room in zip(holder_lines(long), (29, 36), strict=True):
        assert 10 < len(line) <= room
    weights = Holder(2**20, 12, "weights", "parameter blocks.*.weight", "", "", False)
    assert holder_lines(weights) == ("12 × parameter", "blocks.*.weight")
    state = Holder(2**20, 3, "optimizer", "", "", "", False)
    assert holder_lines(state) == ("3 × tensor", "optimizer")
