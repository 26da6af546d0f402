"""``regrad fit``: a table, one JSON object, exit codes, and refusals before the work."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from regrad.core.fit import Fit

SUBJECTS = """
import torch
from torch import nn
import regrad.torch as rt

class Net(nn.Module):
    def __init__(self, width=32, longest=24):
        super().__init__()
        self.places = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(3)
        )
    def forward(self, x):
        x = x + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def step(sequence=8, optimizer=None):
    torch.manual_seed(0)
    model = Net()
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    def make_batch(batch_size, sequence_length=sequence):
        return torch.randn(batch_size, sequence_length, 32)
    return rt.Step(model, optimizer=make(model.parameters()), make_batch=make_batch)

def no_batches():
    return rt.Step(Net(), torch.randn(4, 8, 32))

def wrong_size():
    return rt.Step(Net(), make_batch=lambda n: torch.randn(5, 8, 32))

def broken():
    model = Net()
    def loss(model, batch):
        raise ArithmeticError("the loss is broken")
    return rt.Step(model, loss=loss, make_batch=lambda n: torch.randn(n, 8, 32))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of a file of factories; plans need not be the fastest, and paths are put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    fit, trials = importlib.import_module("regrad.torch.fit"), importlib.import_module("regrad.torch.fit_trials")
    monkeypatch.setattr(fit, "FAIR_SECONDS", 0.02)
    for module in (fit, trials):
        monkeypatch.setattr(module, "THOROUGH_SECONDS", 0.05)
    path = tmp_path / "fit_subjects.py"
    path.write_text(SUBJECTS)
    yield path
    sys.modules.pop("fit_subjects", None)


def test_json(regrad, file):
    said = regrad("fit", f"{file}:step", "--budget", "400kB", "--effective-batch", "48", "--sequence", "12", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert {"regrad", "command", "subject", "device"} < set(answer)
    assert (answer["command"], answer["device"], answer["budget_bytes"], answer["confirmed"]) == (
        "fit",
        "cpu",
        400_000,
        True,
    )
    found = Fit.from_json(json.dumps(answer["fit"]))
    assert answer["largest"] == found.largest.size >= answer["best"] == found.best.size
    assert answer["largest_eager"] == found.largest_eager.size < found.largest.size
    assert answer["accumulation_steps"] * found.best.size >= 48
    assert found.sequence_length == 12
    assert answer["fit"]["best"]["plan"]["predicted_peak_bytes"] <= 400_000
    for name, value in answer["fit"]["best"].items():
        if isinstance(value, float):
            assert name.endswith(("_seconds", "_ratio")), name
    assert "target" not in answer


def test_text_over_the_sequence(regrad, file):
    said = regrad("fit", f"{file}:step", "--budget", "1MB", "--over", "sequence", "--batch", "2", "--optimizer", "adam")
    assert said.exit_code == 0, said.err
    flat = " ".join(said.out.split())
    for words in (
        "largest, planned",
        "largest, eager",
        "best throughput",
        "one more",
        "does not run",
        "batch 2",
        "a token",
    ):
        assert words in flat
    assert "IndexError: index out of range: 24 for an embedding of 24 rows" in flat
    assert max(map(len, said.out.splitlines())) <= 80


def test_a_device_that_is_not_here(regrad, file):
    said = regrad("fit", f"{file}:step", "--device", "t4", "--most", "2", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert (answer["device"], answer["confirmed"], answer["largest"]) == ("t4", None, 2)
    assert answer["budget_bytes"] == answer["target"]["usable_bytes"]


def test_models_of_transformers_have_a_make_batch(regrad, file):
    pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = [word for key, value in sizes.items() for word in ("--config", f"{key}={value}")]
    said = regrad("fit", "transformers:GPT2Config", *config, "--budget", "2MB", "--most", "2", "--no-confirm", "--json")
    assert said.exit_code == 0, said.err
    assert (said.answer["largest"], said.answer["confirmed"]) == (2, None)
    said = regrad("fit", "transformers:GPT2Config", *config, "--budget", "2MB", "--sequence", "17")
    assert said.exit_code == 2
    assert "longer than the 16 positions" in said.err


def test_not_even_one_sample_fits(regrad, file):
    said = regrad("fit", f"{file}:step", "--budget", "10kB", "--json")
    assert said.exit_code == 1
    error = said.answer["error"]
    assert error["type"] == "InfeasibleBudget"
    assert error["least_bytes"] == error["plan"]["predicted_peak_bytes"] > 10_000
    assert "a step of 1 sample: not even that fits" in said.err


@pytest.mark.parametrize(
    ("factory", "words", "code"),
    [
        ("no_batches", "there is no make_batch", 2),
        ("wrong_size", "no tensor has 1 in its first dimension", 2),
        ("broken", "ArithmeticError: the loss is broken", 3),
    ],
)
def test_subjects_that_cannot_be_fitted(regrad, file, factory, words, code):
    said = regrad("fit", f"{file}:{factory}", "--budget", "1MB")
    assert (said.exit_code, said.out) == (code, "")
    assert words in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no budget"),
        (("--budget", "much"), "much"),
        (("--budget", "1GB", "--batch", "8"), "--batch 8 is what --over batch searches"),
        (("--budget", "1GB", "--over", "sequence", "--sequence", "8"), "give --most 8"),
        (("--budget", "1GB", "--over", "width"), "width"),
        (("--budget", "1GB", "--effective-batch", "0"), "greater than or equal"),
        (("--device", "h1000"), "Did you mean"),
        (("--budget", "1GB", "--config", "n"), "write KEY=VALUE"),
    ],
)
def test_bad_input_is_refused_before_the_subject_is_read(regrad, words, message):
    said = regrad("fit", "absent.py:step", *words)
    assert (said.exit_code, said.out) == (2, "")
    assert message in " ".join(said.err.split())


def test_a_share_is_refused(regrad, file):
    said = regrad("fit", f"{file}:step", "--budget", "60%")
    assert said.exit_code == 2
    assert "is a share of what one step needs" in said.err


def test_the_example_of_the_page_is_a_subject(regrad, file):
    example = Path(__file__).parents[2] / "examples" / "fit.py"
    said = regrad("fit", f"{example}:make_step", "--budget", "3MB", "--most", "2", "--no-confirm", "--json")
    assert said.exit_code == 0, said.err
    assert said.answer["largest"] == 2
