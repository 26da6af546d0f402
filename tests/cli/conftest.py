"""Running the command line in this process, and files of subjects for it to read."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from regrad.cli.main import app

SUBJECTS = """
import torch
from torch import nn
import regrad.torch as rt

class Net(nn.Module):
    def __init__(self, layers=6, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

def step(batch=256, sequence=None):
    torch.manual_seed(0)
    model = Net()
    return rt.Step(model, torch.randn(batch, 32), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def with_options(batch, sequence, dtype, optimizer, width):
    model = Net(width=width).to(dtype)
    return rt.Step(model, torch.randn(batch * sequence, width, dtype=dtype), optimizer=optimizer(model.parameters()))

class Broken(Net):
    def forward(self, x):
        return self.explode(x)
    def explode(self, x):
        raise ArithmeticError("the model is broken")

def broken():
    return rt.Step(Broken(), torch.randn(4, 32))

def wrong_batch():
    return rt.Step(Net(), torch.randn(4, 33))

def vector_loss():
    return rt.Step(Net(), torch.randn(4, 32), loss=lambda model, batch: batch * model.blocks[0][2].bias)

def factory_raises():
    raise LookupError("no data set")

def wrong_type():
    return {"model": Net()}

not_a_function = 3
"""


@dataclass
class Said:
    """What one run of the command line came to."""

    exit_code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """stdout as the one JSON object that ``--json`` promises."""
        return json.loads(self.out)


@pytest.fixture
def regrad():
    """``regrad("plan", "file.py:step", "--budget", "min")``; a defect (any exception but an exit) is raised."""

    def run(*words: str) -> Said:
        done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        return Said(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def subjects(tmp_path, monkeypatch):
    """The path of a file with factories of many kinds; what importing it leaves behind is undone."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "cli_subjects.py"
    file.write_text(SUBJECTS)
    yield file
    sys.modules.pop("cli_subjects", None)
    sys.modules.pop("cli_subjects_subject", None)
