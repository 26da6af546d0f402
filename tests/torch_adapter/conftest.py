"""Makes the shared models importable; every test starts from the same generators, on one thread."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

# One thread: small kernels on several threads crawl when the cores are shared, and bytes do not depend on it.
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same generators."""
    torch.manual_seed(0)
    random.seed(0)
