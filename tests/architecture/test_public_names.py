"""The public surface: ``__all__`` says all of it, and nothing leaks beside it."""

from __future__ import annotations

import importlib
import types

import pytest

PUBLIC = ["regrad", "regrad.torch", "regrad.planners"]


@pytest.fixture(params=PUBLIC)
def module(request):
    return importlib.import_module(request.param)


def test_all_is_a_list_of_what_is_there(module):
    names = module.__all__
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []


def test_nothing_public_is_missing_from_all(module):
    leaked = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name not in module.__all__
    ]
    assert [name for name in leaked if name != "annotations"] == []


def test_everything_public_is_documented(module):
    undocumented = [
        name
        for name in module.__all__
        if callable(getattr(module, name)) and not (getattr(module, name).__doc__ or "").strip()
    ]
    assert undocumented == []


def test_promised_names_are_there():
    import regrad.torch as rt

    assert {"Step", "apply", "measure", "plan", "remove"} <= set(rt.__all__)
