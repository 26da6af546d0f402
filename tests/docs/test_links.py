"""Links between the pages lead somewhere, and the pages keep to the project's own affairs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_paths_that_are_named_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
