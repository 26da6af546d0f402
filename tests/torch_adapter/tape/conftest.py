"""Makes the helpers importable, and clears what other tests left in cycles."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def clean():
    gc.collect()
