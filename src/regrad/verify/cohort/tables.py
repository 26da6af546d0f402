"""The cohort in tables: condition by mode, torch's published figures beside what came out, what engines held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from regrad.core.units import format_bytes
from regrad.verify.cohort.judge import (
    CONDITIONS,
    DIVERGED,
    ENGINES,
    EXACT,
    MODES,
    NOT_PRESERVED,
    OURS,
    PLAIN,
    REFUSED,
)
from regrad.verify.records import Grid

FAIR = (
    "torch.utils.checkpoint documents that it assumes a function that behaves the same on both runs. Programs with hidden "
    "state, and a generator that is not preserved, are outside that assumption; where torch diverges here, that is use "
    "outside of it and not a bug in torch."
)
# what is counted, the modes, the conditions, the verdict, the published figure (``None`` where there is none)
_UNPRESERVED = tuple(name + NOT_PRESERVED for name in PLAIN)
FIGURES: tuple[tuple[str, tuple[str, ...], str, str, str], ...] = (
    ("torch plain, generator preserved: A, B exact", PLAIN, "AB", EXACT, "200 of 200"),
    ("torch plain, generator preserved: C, D diverged", PLAIN, "CD", DIVERGED, "200 of 200"),
    ("torch plain, generator preserved: E refused by eager", PLAIN, "E", REFUSED, "100 of 100"),
    ("torch plain, not preserved: A to D diverged", _UNPRESERVED, "ABCD", DIVERGED, "400 of 400"),
    ("regrad, eight modes: A to D exact", OURS, "ABCD", EXACT, "–"),
    ("regrad, eight modes: E refused, as in eager", OURS, "E", REFUSED, "–"),
)


def grids(runs: Sequence[dict[str, Any]]) -> list[Grid]:
    """All tables of ``runs``, the records of programs under modes."""
    return [_verdicts(runs), _figures(runs), _held(runs)]


def _verdicts(runs: Sequence[dict[str, Any]]) -> Grid:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for run in runs:
        counts.setdefault((run["mode"], run["condition"]), Counter())[run["verdict"]] += 1
    rows = tuple(
        (mode, *(_cell(counts.get((mode, condition), Counter())) for condition in CONDITIONS)) for mode in MODES
    )
    words = "; ".join(f"{letter} {meaning}" for letter, meaning in CONDITIONS.items())
    sizes = sorted({sum(cell.values()) for cell in counts.values()})
    title = f"verdicts by condition and mode, {' or '.join(map(str, sizes))} programs a cell"
    return Grid(title, ("mode", *CONDITIONS), rows, f"{words}.")


def _cell(counts: Counter[str]) -> str:
    """One word if all programs agree, else each verdict with its count."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in (EXACT, DIVERGED, REFUSED) if counts[verdict]) or "–"


def _figures(runs: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    for what, modes, conditions, verdict, published in FIGURES:
        mine = [run for run in runs if run["mode"] in modes and run["condition"] in conditions]
        came = sum(run["verdict"] == verdict for run in mine)
        rows.append((what, f"{came:,} of {len(mine):,}", published))
    return Grid("against the published figures", ("what", "here", "published"), tuple(rows), FAIR)


def held(runs: Sequence[dict[str, Any]], engine: str, condition: str = "CD") -> list[int]:
    """Bytes that ``engine`` held for its replays, a run each, with the state declared and discovered."""
    modes = [mode for mode in OURS if mode.split()[1] == engine]
    return [run["retained_bytes"] for run in runs if run["mode"] in modes and run["condition"] in condition]


def _held(runs: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    for engine in ENGINES:
        cells = [held(runs, engine, condition) for condition in "CD"]
        rows.append((engine, *(format_bytes(int(median(cell))) if cell else "–" for cell in cells)))
    return Grid("held for replays, median of the runs", ("engine", "C", "D"), tuple(rows))
