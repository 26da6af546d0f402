"""``regrad audit``: verdicts as exit codes, text and JSON, plans, and what it refuses."""

from __future__ import annotations

import sys

import pytest

import regrad as package

MORE = """
import torch
from torch import nn
import regrad.torch as rt
from cli_subjects import Net

class Counting(nn.Module):
    def __init__(self, entropy=False):
        super().__init__()
        self.linear, self.out, self.entropy = nn.Linear(8, 8), nn.Linear(8, 8), entropy
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.entropy:
            y = y * torch.rand(1, generator=torch.Generator().manual_seed(torch.Generator().seed() % 99991))
        self.seen.add_(1)  # the write
        return torch.tanh(self.out(y))

def make(entropy=False, batch=4):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting(entropy), Counting())
    return rt.Step(model, None if batch is None else torch.randn(batch, 8), loss=lambda m, b: m(b).square().mean())

def exact(batch=4):
    return make(batch=batch)

def random():
    return make(entropy=True)

def no_batch():
    return rt.Step(Net(), None)

def batch_left_out():
    return rt.Step(Net())
"""


@pytest.fixture
def more(subjects):
    """A second file of subjects, beside the shared one."""
    file = subjects.with_name("audit_subjects.py")
    file.write_text(MORE)
    return file


def test_exact(regrad, more):
    said = regrad("audit", f"{more}:exact", "--json")
    assert said.exit_code == 0, said.err
    answer = said.answer
    assert set(answer) == {"regrad", "command", "subject", "device", "audit"}
    assert (answer["regrad"], answer["command"], answer["device"]) == (package.__version__, "audit", "cpu")
    audit = answer["audit"]
    assert (audit["verdict"], audit["reason"], audit["first"], audit["engine"]) == ("EXACT", "", None, "regrad")
    assert [(row["name"], row["forwards"], row["replays"]) for row in audit["segments"]] == [
        ("0", 3, 3), ("1", 3, 3), ("2", 3, 3),
    ]  # fmt: skip
    assert audit["replays"] == 9
    use = audit["segments"][0]["state"][0]
    assert (use["slot"], use["storage_bytes"], use["found"]) == ("buffer 0.seen", 4, "declared")
    assert use["write_line"].startswith(str(more))
    assert audit["torch"]["verdict"] in ("SAME", "DIVERGED")


def test_diverged(regrad, more):
    said = regrad("audit", f"{more}:exact", "--engine", "torch", "--segments", "1", "--json")
    lines = more.read_text().splitlines()
    write = next(i for i, line in enumerate(lines, 1) if "# the write" in line)
    assert said.exit_code == 1, said.err
    audit = said.answer["audit"]
    assert audit["verdict"] == "DIVERGED"
    first = audit["first"]
    assert (first["segment"], first["slot"], first["operation"]) == ("1", "buffer 1.seen", "aten.add_.Tensor")
    assert (first["line"], first["moment"], first["step"]) == (f"{more}:{write}", "backward of 1", 0)
    assert audit["torch"]["verdict"] == "NOT RUN"


def test_text(regrad, more):
    said = regrad("audit", f"{more}:exact", "--engine", "torch")
    assert said.exit_code == 1
    for words in ("DIVERGED", "buffer 2.seen", "aten.add_.Tensor", "segment", "3 + 3"):
        assert words in said.out
    said = regrad("audit", f"{more}:exact")
    assert said.exit_code == 0
    assert "EXACT: 3 steps under regrad" in said.out
    assert "torch.utils.checkpoint" in said.out


def test_a_step_that_is_not_deterministic(regrad, more):
    said = regrad("audit", f"{more}:random", "--json")
    assert said.exit_code == 1
    audit = said.answer["audit"]
    assert audit["verdict"] == "UNSUPPORTED"
    assert "not deterministic" in audit["reason"]
    assert audit["first"]["operation"] == "aten.rand.generator"


def test_a_plan(regrad, subjects, tmp_path):
    file = tmp_path / "plan.json"
    assert regrad("plan", f"{subjects}:step", "--budget", "50%", "--out", file).exit_code == 0
    del sys.modules["cli_subjects"]  # as in a process of its own: the name of a class's module is part of a fingerprint
    said = regrad("audit", f"{subjects}:step", "--plan", file, "--steps", "2", "--json")
    assert said.exit_code == 0, said.err
    audit = said.answer["audit"]
    again = [row for row in audit["segments"] if row["recomputed"]]
    assert again or audit["range_replays"]
    assert audit["replays"] == 2 * len(again) + audit["range_replays"] > 0
    other = regrad("audit", f"{subjects}:with_options", "--plan", file, *OPTIONS, "--json")
    assert other.exit_code == 2
    assert other.answer["error"]["type"] == "PlanMismatch"


OPTIONS = (
    "--batch", "2", "--sequence", "3", "--dtype", "bf16", "--optimizer", "sgd", "--config", "width=16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("absent.py:step",), "absent.py"),
        (("step",), "FILE:FACTORY"),
        ((), ""),
        (("{more}:no_batch",), "no batch"),
        (("{more}:batch_left_out",), "no batch"),
        (("{more}:exact", "--plan", "absent.json"), "absent.json"),
        (("{more}:exact", "--plan", "{more}"), "not a Plan"),
        (("{more}:exact", "--engine", "other"), ""),
        (("{more}:exact", "--steps", "0"), ""),
        (("{more}:exact", "--segments", "nothing.*"), "nothing.*"),
    ],
)
def test_bad_input(regrad, more, words, message):
    said = regrad("audit", *(word.format(more=more) for word in words))
    assert (said.exit_code, said.out) == (2, "")
    assert message in said.err


def test_a_model_that_raises(regrad, subjects):
    said = regrad("audit", f"{subjects}:broken", "--json")
    assert said.exit_code == 3
    assert said.answer["error"]["type"] == "ArithmeticError"
