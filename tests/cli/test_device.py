"""``regrad plan --device``: planning for a device that is not here, up to a model that no machine here could hold."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import regrad.torch as rt
from regrad.memory.devices import find_device

SEVEN = ("transformers:LlamaConfig", "--batch", "1", "--sequence", "4096", "--dtype", "bf16", "--optimizer", "adam")
GIB = 1 << 30
COUNT = 6_738_415_616


def test_a_plan_for_a_device(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--device", "t4", "--json")
    assert said.exit_code == 0, said.err
    answer, device = said.answer, find_device("t4")
    assert answer["device"] == answer["plan"]["device"] == "t4"
    assert answer["plan"]["budget_bytes"] == answer["target"]["usable_bytes"] == device.usable_bytes
    assert answer["target"]["validated_on_hardware"] is False
    assert answer["plan"]["predicted_peak_bytes"] <= answer["reserved_peak_bytes"]
    assert any("not been validated on hardware" in note for note in answer["plan"]["notes"])


def test_a_budget_beside_the_device(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--device", "t4", "--budget", "60%", "--batch", "4096", "--json")
    assert said.exit_code == 0, said.err
    plan = said.answer["plan"]
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"] < plan["eager_peak_bytes"]
    assert not any("dry run" in note for note in plan["notes"])
    assert said.answer["reserved_fits"] is True


def test_text(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--device-memory", "8 GiB")
    assert said.exit_code == 0, said.err
    flat = " ".join(said.out.split())
    assert "a device of 8.00 GiB" in flat
    assert "not validated on hardware" in flat


def test_nothing_fits(regrad):
    said = regrad(
        "plan", "transformers:LlamaConfig", "--config", "num_hidden_layers=4", "--batch", "1", "--sequence", "64",
        "--device-memory", "8 GiB", "--json",
    )  # fmt: skip
    assert said.exit_code == 1
    answer = said.answer
    assert answer["error"]["least_bytes"] > answer["error"]["budget_bytes"] == answer["target"]["usable_bytes"]
    assert "no plan fits" in said.err
    assert all(one["peak_bytes"] < answer["error"]["least_bytes"] for one in answer["remedies"])
    fitting = {one["what"] for one in answer["remedies"] if one["fits"]}
    assert fitting
    assert "remedies" not in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no budget"),
        (("--device", "h1000"), "Did you mean"),
        (("--device-memory", "much"), "much"),
        (("--device-memory", "1 MiB"), "no room"),
    ],
)
def test_bad_input(regrad, words, message):
    said = regrad("plan", "absent.py:step", *words)
    assert (said.exit_code, said.out) == (2, "")
    assert message in " ".join(said.err.split())


def seven(optimizer_dtype: str) -> tuple[int, dict]:
    """Exit code and answer of the command, in a process that may hold 4 GiB of data."""
    command = [str(Path(sys.executable).with_name("regrad")), "plan", *SEVEN, "--optimizer-dtype", optimizer_dtype]
    limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (4 * GIB, 4 * GIB))  # noqa: E731
    done = subprocess.run(
        [*command, "--device", "h100-80gb", "--json"], capture_output=True, text=True, preexec_fn=limit
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_seven_billion_parameters_with_narrow_moments():
    code, answer = seven("bf16")
    assert code == 0
    assert 0 <= answer["model_state_bytes"] - 8 * COUNT < 512 * 4 * 300  # rounding
    plan, usable = answer["plan"], answer["target"]["usable_bytes"]
    assert plan["predicted_peak_bytes"] <= usable < 80 * GIB
    # foreach makes a copy of the second moments' roots
    assert 0 <= plan["predicted_peak_bytes"] - 10 * COUNT < 0.01 * COUNT
    assert plan["peak_moment"]["phase"] == "optimizer"


@pytest.mark.slow
def test_seven_billion_parameters_with_wide_moments():
    code, answer = seven("fp32")
    assert code == 1
    assert 0 <= answer["model_state_bytes"] - 12 * COUNT < 512 * 4 * 300
    assert answer["error"]["least_bytes"] > answer["target"]["usable_bytes"]
    remedies = {one["what"]: one for one in answer["remedies"]}
    assert remedies["AdamW with its state in bf16"]["fits"]
    assert remedies["ZeRO stage 1 over 2 devices"]["fits"]


def test_the_profile_serves_budgets_in_python(subjects):
    from regrad.torch.subject import load_subject

    profile = rt.profile(load_subject(f"{subjects}:step"), device="h100")
    made = rt.plan_profile(profile, "70%")
    assert made.device == "h100-80gb"
    assert made.predicted_peak_bytes % 512 == 256  # rounded storages, and what no record shows
