"""What the README tells a newcomer to do works as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = re.findall(r"^\$ (regrad .*)$", README, flags=re.MULTILINE)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """``command`` as a user would run it, from ``folder``."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)


def test_it_opens_with_the_two_commands():
    first = re.search(r"```console\n(.*?)```", README, flags=re.DOTALL)
    assert first is not None
    assert README.index(first[0]) < 40
    assert first[1].split("\n")[:2] == ["$ make demo", "$ make test"]


def test_the_two_commands_are_targets_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"setup", "demo", "test", "check", "bench", "clean"} <= set(targets)


def test_ten_lines_plan_a_model(tmp_path):
    block, _ = PYTHON_BLOCKS
    assert len([line for line in block.splitlines() if line.strip()]) == 10
    file = tmp_path / "my_model.py"
    file.write_text(block, encoding="utf-8")
    done = run([sys.executable, file.name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "predicted peak" in done.stdout
    assert "recompute" in done.stdout
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_the_drop_in_counts_nothing_twice(tmp_path):
    _, block = PYTHON_BLOCKS
    file = tmp_path / "drop_in.py"
    file.write_text(block, encoding="utf-8")
    done = run([sys.executable, file.name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["tensor(1)"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    done = run(shlex.split(command), ROOT)
    assert done.returncode == 0, done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["plan"]["segments"]
    else:
        assert "predicted peak" in done.stdout


def test_there_are_commands_to_run():
    assert len(COMMANDS) >= 2
