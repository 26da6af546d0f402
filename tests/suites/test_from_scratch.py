"""docs/from-scratch.py runs, says what it promises, and stays short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "from-scratch.py"


def test_it_runs(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "journal   against eager:              0.0e+00" in done.stdout
    assert "no error was raised" in done.stdout


def test_it_is_short_and_stands_alone():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 300
    imports = [line for line in lines if line.startswith(("import", "from"))]
    assert imports == ["import numpy as np"]
