"""``regrad plan`` on steps that can be planned, and on models that raise."""

from __future__ import annotations

import re

import pytest

import regrad as package

PLAN_FIELDS = {
    "budget_bytes",
    "predicted_peak_bytes",
    "predicted_by",
    "band_ratio",
    "peak_moment",
    "added_seconds",
    "segments",
}
SEGMENT_FIELDS = {"name", "option", "engine", "retained_bytes", "transient_bytes", "added_seconds", "reason"}


def test_json(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "50%", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert set(answer) == {"regrad", "command", "subject", "device", "plan"}
    assert answer["regrad"] == package.__version__
    assert answer["subject"] == f"{subjects}:step"
    assert answer["device"] == "cpu"
    plan = answer["plan"]
    assert set(plan) >= PLAN_FIELDS
    assert set(plan["peak_moment"]) == {"phase", "module", "operation"}
    assert all(set(segment) >= SEGMENT_FIELDS for segment in plan["segments"])
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"]
    assert any(segment["option"] in ("recompute", "ranges") for segment in plan["segments"])


def test_names_of_figures_carry_their_unit(regrad, subjects):
    plan = regrad("plan", f"{subjects}:step", "--budget", "50%", "--json").answer["plan"]
    for holder in (plan, *plan["segments"]):
        for name, value in holder.items():
            if isinstance(value, float):
                assert name.endswith(("_seconds", "_ratio")), name
            elif isinstance(value, int) and not isinstance(value, bool) and name not in ("version", "call"):
                assert name.endswith("_bytes"), name


def test_text(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "50%")
    assert said.exit_code == 0, said.err
    for words in ("budget", "predicted peak", "eager peak", "least feasible", "recompute"):
        assert words in said.out
    assert re.search(r"± \d", said.out)


def test_out_is_a_plan(regrad, subjects, tmp_path):
    file = tmp_path / "plan.json"
    said = regrad("plan", f"{subjects}:step", "--budget", "50%", "--out", file, "--json")
    assert said.answer["plan_file"] == str(file)
    plan = package.Plan.from_json(file.read_text())
    assert plan.predicted_peak_bytes == said.answer["plan"]["predicted_peak_bytes"]


def test_segments(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "min", "--segments", "blocks.[12]", "--json")
    recomputed = {s["module"] for s in said.answer["plan"]["segments"] if s["option"] == "recompute"}
    assert recomputed
    assert recomputed <= {"blocks.1", "blocks.2"}


def test_a_larger_batch_has_a_higher_peak(regrad, subjects):
    def eager_peak(batch: int) -> int:
        said = regrad("plan", f"{subjects}:step", "--budget", "100%", "--batch", str(batch), "--json")
        return int(said.answer["plan"]["eager_peak_bytes"])

    assert eager_peak(512) > eager_peak(128)


def test_options_reach_the_factory_as_values(regrad, subjects):
    options = ("--batch", "8", "--sequence", "16", "--dtype", "bf16", "--optimizer", "momentum", "--config", "width=64")
    said = regrad("plan", f"{subjects}:with_options", "--budget", "100%", *options, "--json")
    assert said.exit_code == 0, said.err
    weights = 6 * (2 * 64 * 256 + 64 + 256) * 2
    inputs = 8 * 16 * 64 * 2
    assert said.answer["plan"]["persistent_bytes"] >= 2 * weights + inputs


def test_infeasible(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "1000", "--json")
    assert said.exit_code == 1
    error = said.answer["error"]
    assert error["type"] == "InfeasibleBudget"
    assert error["budget_bytes"] == 1000
    assert error["least_bytes"] > 1000
    assert error["plan"]["predicted_peak_bytes"] <= error["least_bytes"]
    again = regrad("plan", f"{subjects}:step", "--budget", str(error["least_bytes"]), "--json")
    assert again.exit_code == 0, again.err


def test_infeasible_in_words(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "1000")
    assert (said.exit_code, said.out) == (1, "")
    assert "the least that this step can run in is" in said.err
    assert "The plan that reaches the least" in said.err


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("broken", "ArithmeticError: the model is broken"),
        ("wrong_batch", "shape"),
        ("factory_raises", "LookupError: no data set"),
    ],
)
def test_a_model_that_raises(regrad, subjects, factory, words):
    said = regrad("plan", f"{subjects}:{factory}", "--budget", "50%")
    assert said.exit_code == 3, said.err
    assert said.out == ""
    assert words in said.err
    assert str(subjects) in said.err
    assert "src/regrad" not in said.err


def test_a_model_that_raises_in_json(regrad, subjects):
    said = regrad("plan", f"{subjects}:broken", "--budget", "50%", "--json")
    assert said.exit_code == 3
    assert said.answer["error"]["type"] == "ArithmeticError"


GPT2 = ("n_layer=4", "n_embd=64", "n_head=4", "vocab_size=128")
LLAMA = ("num_hidden_layers=4", "hidden_size=64", "intermediate_size=128", "num_attention_heads=4", "vocab_size=128")


@pytest.mark.parametrize(("name", "settings"), [("GPT2Config", GPT2), ("LlamaConfig", LLAMA)])
def test_transformers(regrad, name, settings):
    words = [f"--config={setting}" for setting in settings]
    size = ("--batch", "8", "--sequence", "64")
    said = regrad("plan", f"transformers:{name}", *words, *size, "--budget", "50%", "--json")
    assert said.exit_code == 0, said.err
    plan = said.answer["plan"]
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"] < plan["eager_peak_bytes"]
    assert any(segment["option"] in ("recompute", "ranges") for segment in plan["segments"])


def test_a_policy(regrad, subjects, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    said = regrad(
        "plan",
        f"{subjects}:step",
        "--budget",
        "80%",
        "--no-recompute",
        "--offload",
        tmp_path,
        "--keep",
        "gelu",
        "--json",
    )
    assert said.exit_code == 0, said.err
    plan = said.answer["plan"]
    assert plan["ranges"] == []
    assert {one["how"] for one in plan["moves"]} == {"offload"}
    assert set(plan["moves"][0]) == {"saves", "how", "name", "bytes", "held_bytes", "added_seconds"}
    assert not any(plan["calls"][call] == "gelu" for one in plan["moves"] for call, _ in one["saves"])
    moved = sum(segment["moved_bytes"] for segment in plan["segments"])
    assert moved == sum(one["bytes"] for one in plan["moves"]) > 0
    assert list(place.iterdir()) == []
    said = regrad("plan", f"{subjects}:step", "--budget", "80%", "--no-recompute", "--offload", place)
    assert re.search(r"moved +\d+ saved tensors?: \d+ offload", said.out)


def test_a_policy_that_allows_too_little(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "60%", "--no-recompute", "--no-pack", "--json")
    assert said.exit_code == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "gello"), "Did you mean gelu"),
        (("--offload", "host"), "Name a folder"),
        (("--offload", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_a_policy_that_names_what_is_not_there(regrad, subjects, words, message):
    said = regrad("plan", f"{subjects}:step", "--budget", "60%", *words)
    assert said.exit_code == 2
    assert message in said.err
