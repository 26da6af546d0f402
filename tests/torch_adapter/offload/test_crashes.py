"""A hundred crashes leave no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CRASHES = 100


def test_no_file_is_left_after_a_hundred_kills(tmp_path: Path) -> None:
    script = Path(__file__).parent / "crashes.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(CRASHES), "7"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["killed"] == CRASHES
    assert found["left"] == 0
    assert os.listdir(tmp_path) == []
    assert found["held"] >= CRASHES // 3  # killed in the middle of steps, with a file open
    assert found["steps"] >= CRASHES
