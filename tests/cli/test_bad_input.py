"""Bad input to ``regrad plan``: exit code 2, a message that says what to do, and one object with ``--json``."""

from __future__ import annotations

import pytest

import regrad as package


def test_version(regrad):
    said = regrad("--version")
    assert (said.exit_code, said.out) == (0, f"regrad {package.__version__}\n")


@pytest.mark.parametrize("budget", ["8 GX", "-5", "much", "", "1.5", "60 % %"])
def test_a_budget_that_cannot_be_read(regrad, budget):
    said = regrad("plan", "nowhere.py:step", "--budget", budget)
    assert said.exit_code == 2
    assert said.out == ""
    assert "cannot read" in said.err
    assert '"8 GiB"' in said.err


def test_no_budget(regrad):
    assert regrad("plan", "nowhere.py:step").exit_code == 2


@pytest.mark.parametrize(
    "option", [("--dtype", "fp8"), ("--optimizer", "lion"), ("--batch", "0"), ("--sequence", "-1")]
)
def test_an_option_outside_its_table(regrad, option):
    assert regrad("plan", "nowhere.py:step", "--budget", "min", *option).exit_code == 2


@pytest.mark.parametrize("setting", ["n_layer", "=3"])
def test_a_setting_without_a_value(regrad, setting):
    said = regrad("plan", "transformers:GPT2Config", "--budget", "min", "--config", setting)
    assert said.exit_code == 2
    assert "KEY=VALUE" in said.err


@pytest.mark.parametrize("subject", ["step", "file.py:", ":step", ":"])
def test_a_subject_without_a_factory(regrad, subject):
    said = regrad("plan", subject, "--budget", "min")
    assert said.exit_code == 2
    assert "FILE:FACTORY" in said.err


def test_a_file_that_is_not_there(regrad, tmp_path):
    said = regrad("plan", f"{tmp_path}/absent.py:step", "--budget", "min")
    assert said.exit_code == 2
    assert "absent.py" in said.err


def test_a_file_that_is_not_python(regrad, tmp_path):
    (tmp_path / "notes.txt").write_text("x = 1")
    said = regrad("plan", f"{tmp_path}/notes.txt:step", "--budget", "min")
    assert said.exit_code == 2
    assert ".py" in said.err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import absent_package_x", "ModuleNotFoundError"),
        ("x = (", "SyntaxError"),
        ("\nx = 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_imported(regrad, tmp_path, text, name):
    file = tmp_path / "cannot_import.py"
    file.write_text(text)
    said = regrad("plan", f"{file}:step", "--budget", "min")
    assert said.exit_code == 2
    assert name in said.err
    assert "cannot be imported" in said.err


def test_the_line_that_stopped_the_import_is_named(regrad, tmp_path):
    file = tmp_path / "cannot_import.py"
    file.write_text("x = 1\ny = x / 0\n")
    assert f"{file}:2" in regrad("plan", f"{file}:step", "--budget", "min").err


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("absent", "does not define 'absent'"),
        ("not_a_function", "has a int, not a function"),
        ("wrong_type", "returned a dict"),
        ("with_options", "missing a required argument"),
        ("vector_loss", "must be a scalar"),
    ],
)
def test_a_factory_that_is_of_no_use(regrad, subjects, factory, words):
    said = regrad("plan", f"{subjects}:{factory}", "--budget", "min")
    assert said.exit_code == 2, said.err
    assert words in said.err


def test_an_option_that_the_factory_does_not_take(regrad, subjects):
    said = regrad("plan", f"{subjects}:step", "--budget", "min", "--optimizer", "adam")
    assert said.exit_code == 2
    assert "'optimizer'" in said.err
    assert "step(batch=256, sequence=None)" in said.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("transformers:GPT2Confg",), "Did you mean GPT2Config"),
        (("transformers:AutoModel",), "not as a model configuration"),
        (("transformers:GPT2Config", "--config", "n_layers=2"), "n_layer"),
        (("transformers:GPT2Config", "--config", "n_layer=many"), "refused by transformers"),
        (("transformers:GPT2Config", "--config", "n_layer=1", "--config", "n_head=5"), "cannot build a model"),
        (("transformers:GPT2Config", "--config", "n_layer=1", "--sequence", "4096"), "1024 positions"),
        (("transformers:LlamaConfig", "--config", "num_hidden_layers=4000"), "can be had"),
        (("transformers:ViTConfig", "--config", "num_hidden_layers=1", "--sequence", "9"), "images"),
        (("transformers:ClapConfig",), "FILE:FACTORY"),
    ],
)
def test_a_transformers_subject_that_cannot_be_built(regrad, words, hint):
    said = regrad("plan", *words, "--budget", "min")
    assert said.exit_code == 2, said.err
    assert hint in said.err


def test_a_place_for_the_plan_that_is_not_there(regrad, subjects, tmp_path):
    for out in (tmp_path, tmp_path / "absent" / "plan.json"):
        said = regrad("plan", f"{subjects}:step", "--budget", "min", "--out", out)
        assert said.exit_code == 2
        assert "--out" in said.err


def test_json_of_an_error(regrad):
    said = regrad("plan", "nowhere.py:step", "--budget", "8 GX", "--json")
    assert said.exit_code == 2
    assert set(said.answer) == {"regrad", "command", "subject", "device", "error"}
    assert said.answer["command"] == "plan"
    assert said.answer["device"] is None
    assert said.answer["error"]["type"] == "InvalidQuantity"
    assert said.answer["error"]["text"] == "8 GX"
    assert "cannot read" in said.err
