"""``regrad frontier``: a table, one JSON object, pictures, and refusals before the work."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from regrad.core.frontier_curve import OURS, Frontier
from regrad.report import frontier as reports
from regrad.report.frontier import write_picture

BUDGETS = ("--budget", "min", "--budget", "50%", "--budget", "75%")


@pytest.fixture
def asked(regrad, subjects, tmp_path):
    """One run with both pictures and JSON."""
    svg, png = tmp_path / "curve.svg", tmp_path / "curve.png"
    said = regrad("frontier", f"{subjects}:step", *BUDGETS, "--svg", svg, "--png", png, "--json")
    assert said.exit_code == 0, said.err
    return said.answer, svg, png


def test_json_and_pictures(asked, subjects):
    answer, svg, png = asked
    assert set(answer) == {"regrad", "command", "subject", "device", "frontier", "svg_file", "png_file"}
    assert (answer["command"], answer["svg_file"], answer["png_file"]) == ("frontier", str(svg), str(png))
    found = Frontier.from_json(json.dumps(answer["frontier"]))
    assert len(found.budgets_bytes) == 3
    assert len(found.of(OURS)) == 3
    assert found.behind() == ()
    for name, value in answer["frontier"]["points"][0].items():
        if isinstance(value, float):
            assert name.endswith(("_seconds", "_ratio")), name
    assert png.read_bytes().startswith(b"\x89PNG")
    root = ElementTree.fromstring(svg.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    words = ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("text")]
    for expected in (OURS, "FirstK", "least feasible", "eager peak", "peak of the step", f"{subjects}:step"):
        assert expected in words
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    for line in lines:
        numbers = [float(number) for pair in line.get("points", "").split() for number in pair.split(",")]
        assert numbers
        assert min(numbers) >= 0
        assert max(numbers) <= 1100


def test_the_same_curve_is_the_same_picture(asked, tmp_path):
    answer, svg, _ = asked
    found = Frontier.from_json(json.dumps(answer["frontier"]))
    write_picture(found, tmp_path / "again.svg", answer["subject"])
    assert (tmp_path / "again.svg").read_bytes() == svg.read_bytes()
    write_picture(found, tmp_path / "other.svg", "a <title> & more")
    assert "a &lt;title&gt; &amp; more" in (tmp_path / "other.svg").read_text()


def test_text(regrad, subjects):
    said = regrad("frontier", f"{subjects}:step", "--budget", "50%", "--budget", "1 KiB")
    assert said.exit_code == 0, said.err
    for words in ("eager peak", "least feasible", OURS, "the best of the others", "FirstK", "Optimal", "left out"):
        assert words in said.out
    assert "nothing fits 1.00 KiB" in said.out


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--svg", "curve.png", "ends in .svg"),
        ("--png", "curve.svg", "ends in .png"),
        ("--svg", "absent/curve.svg", "there is no folder"),
        ("--svg", "folder.svg", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_written(regrad, tmp_path, option, name, words):
    (tmp_path / "folder.svg").mkdir()
    said = regrad("frontier", "nowhere.py:step", option, tmp_path / name)
    assert (said.exit_code, said.out) == (2, "")
    assert words in said.err
    assert "nowhere.py" not in said.err


def test_a_png_takes_matplotlib_and_an_svg_does_not(regrad, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "can_draw", lambda: False)
    said = regrad("frontier", "nowhere.py:step", "--png", tmp_path / "curve.png")
    assert said.exit_code == 2
    assert "pip install 'regrad[plot]'" in said.err
    said = regrad("frontier", "nowhere.py:step", "--svg", tmp_path / "curve.svg")
    assert "matplotlib" not in said.err


@pytest.mark.parametrize("budget", ["much", "-5", ""])
def test_a_budget_that_cannot_be_read(regrad, budget):
    said = regrad("frontier", "nowhere.py:step", "--budget", budget)
    assert said.exit_code == 2
    assert "cannot read" in said.err


def test_a_model_that_raises(regrad, subjects):
    assert regrad("frontier", f"{subjects}:broken", "--budget", "50%").exit_code == 3
