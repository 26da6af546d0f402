"""Every test searches for ranges and moves briefly: what is tested is that a plan is right, not how good it is."""

from __future__ import annotations

import importlib

import pytest

QUICK_SECONDS = 0.3


@pytest.fixture(autouse=True, scope="session")
def quick_search() -> None:
    """``regrad.torch.profile.SEARCH_SECONDS`` for this process."""
    importlib.import_module("regrad.torch.profile").SEARCH_SECONDS = QUICK_SECONDS
