"""Imports go one way: the contracts of pyproject.toml hold, and they catch what they are there to catch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the source tree below ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run([str(LINT), "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    """A copy of the sources in which a test may break things."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_layers_hold():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/units.py", "import regrad.report.text", "Imports go one way"),
        ("core/units.py", "def lazily():\n    import torch", "The core knows no framework"),
        ("planners/optimal.py", "import regrad.torch.step", "Imports go one way"),
        ("planners/optimal.py", "import regrad.planners.exhaustive", "Planners do not know each other"),
        ("report/text.py", "def lazily():\n    import torch", "Planners and reports know no framework"),
        ("demo/__init__.py", "import regrad.bench", "Imports go one way"),
    ],
)
def test_a_planted_violation_is_caught(copy, file, line, contract):
    path = copy / "src" / "regrad" / file
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    broken = [text for text in done.stdout.splitlines() if "BROKEN" in text]
    assert any(contract in text for text in broken), done.stdout


def test_a_room_that_nobody_placed_is_caught(copy):
    room = copy / "src" / "regrad" / "attic"
    room.mkdir()
    (room / "__init__.py").write_text("")
    done = lint(copy)
    assert done.returncode == 1
    assert "attic" in done.stdout
