"""Importing regrad is cheap, and so is asking the command line for help."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "jax", "transformers"}
HEAVY = FRAMEWORKS | {"numpy", "typer", "click", "rich", "pydantic", "matplotlib", "scipy"}


def loaded_by(code: str) -> set[str]:
    """The top-level modules in ``sys.modules`` after ``code`` ran in a process of its own."""
    program = f"{code}\nimport sys\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_import_regrad_loads_nothing_heavy():
    assert loaded_by("import regrad").isdisjoint(HEAVY)


def test_import_core_loads_nothing_heavy():
    modules = ["errors", "units", "chain", "trace", "plan", "schedule", "simulate", "codec", "text"]
    code = "\n".join(f"import regrad.core.{name}" for name in modules)
    assert loaded_by(code).isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["regrad.planners", "regrad.report.text", "regrad.cli.main"])
def test_without_a_framework(module):
    assert loaded_by(f"import {module}").isdisjoint(FRAMEWORKS)


def test_the_helper_sees_what_is_loaded():
    assert "numpy" in loaded_by("import numpy")
