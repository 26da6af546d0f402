"""Makes the helpers importable, and clears what other tests left in cycles."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def clean():
    gc.collect()


@pytest.fixture
def place(tmp_path):
    """Where offloaded tensors go."""
    from regrad.torch.offload import FilePlace

    return FilePlace(tmp_path)


@pytest.fixture
def net():
    """A forward with a draw, a relu and products: the loss, and the tensors that get gradients."""
    torch.manual_seed(5)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def forward():
        h = F.dropout(torch.relu(x @ weight), 0.4)
        return (torch.tanh(h @ weight) * h.sigmoid()).sum(), [x, weight]

    return forward
