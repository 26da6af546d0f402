"""``regrad advise``: the answer in text and JSON, its exit codes, and what it refuses."""

from __future__ import annotations

import pytest

import regrad as package
from regrad.core.advice import KINDS, RESULTS, Advice
from regrad.core.codec import load

SMALL = ("--batch", "128")


def test_json(regrad, subjects):
    said = regrad("advise", f"{subjects}:step", *SMALL, "--budget", "60%", "--devices", "2", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert (answer["regrad"], answer["command"], answer["device"]) == (package.__version__, "advise", "cpu")
    found = answer["advice"]
    assert found["budget_bytes"] < found["peak_bytes"]
    assert found["fits"] is False
    assert found["suggestions"][0]["fits"] is True
    plan = next(one for one in found["suggestions"] if one["kinds"] == ["plan"])
    assert plan["predicted_peak_bytes"] <= found["budget_bytes"]
    assert plan["step_ratio"] >= 1
    kinds = {kind for one in found["suggestions"] for kind in one["kinds"]} | {one["kind"] for one in found["no_use"]}
    assert kinds == set(KINDS)
    assert all(one["result"] in RESULTS and one["not_fixed"] for one in found["suggestions"])
    assert all(one["why"] for one in found["no_use"])
    import json

    assert load(Advice, json.dumps(found)).verdict == found["verdict"]


def test_text(regrad, subjects):
    said = regrad("advise", f"{subjects}:step", *SMALL, "--budget", "60%")
    assert said.exit_code == 0, said.err
    flat = " ".join(said.out.split())
    for words in ("peak as it is", "always there", "single changes make it fit", "fits", "micro-batch", "does not fix",
                  "of no use here", "SGD holds no state"):  # fmt: skip
        assert words in flat


def test_a_step_that_fits(regrad, subjects):
    said = regrad("advise", f"{subjects}:step", *SMALL, "--budget", "1 GiB")
    assert said.exit_code == 0
    assert "the step fits as it is" in said.out


def test_nothing_fits(regrad, subjects):
    """Six layers of 8,352 numbers: 200,448 bytes of weights."""
    said = regrad("advise", f"{subjects}:step", *SMALL, "--budget", "201000", "--json")
    assert said.exit_code == 1
    found = said.answer["advice"]
    assert "nothing here makes it fit: the least is" in found["verdict"]
    assert not any(one["fits"] for one in found["suggestions"])


def test_a_device_that_is_not_here(regrad, subjects):
    said = regrad("advise", f"{subjects}:step", *SMALL, "--device", "t4", "--budget", "60%", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert answer["device"] == answer["target"]["name"] == answer["advice"]["device"] == "t4"
    offload = next(one for one in answer["advice"]["suggestions"] if one["kinds"] == ["offload"])
    assert "to the host" in offload["what"]
    assert offload["at_most"] is True
    assert any("not been validated" in note for note in answer["advice"]["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no budget"),
        (("--budget", "lots"), "cannot read 'lots' as an amount of memory"),
        (("--budget", "min"), "has no price to weigh"),
        (("--budget", "1 GiB", "--device", "h1000"), "there is no device 'h1000'"),
        (("--budget", "1 GiB", "--offload-folder", "/nowhere/at/all"), "there is no folder of that name"),
        (("--budget", "100000"), "below what is there before any step: weights 196 KiB"),
        (("--budget", "1 GiB", "--devices", "0"), "--devices"),
        (("--budget", "1 GiB", "--config", "colour=red"), "cannot be called with"),
    ],
)
def test_bad_input(regrad, subjects, words, message):
    said = regrad("advise", f"{subjects}:step", *words)
    assert said.exit_code == 2
    assert message in " ".join(said.err.split())


@pytest.mark.parametrize(("factory", "code"), [("broken", 3), ("vector_loss", 2), ("wrong_type", 2), ("missing", 2)])
def test_the_subjects_own_errors(regrad, subjects, factory, code):
    said = regrad("advise", f"{subjects}:{factory}", "--budget", "1 GiB")
    assert said.exit_code == code
    assert said.err
