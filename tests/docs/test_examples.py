"""Every script of examples/ runs, and what it shows comes out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "explain_oom": "first of all:",
    "fit": "samples in micro-batches of",
    "save_and_reuse": "the least is",
    "tiny_gpt": "equal to the bit: True",
}


def test_each_example_is_known():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_example(name, tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLES / f"{name}.py")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SHOWN[name] in done.stdout
