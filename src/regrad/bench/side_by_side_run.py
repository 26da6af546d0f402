"""``python -m regrad.bench side-by-side``: the comparison of :mod:`regrad.bench.side_by_side`, workload by workload.

A workload that is done is kept in a file of its own until all are; a run that was stopped takes those up again, as
long as neither the settings nor a line of regrad changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import regrad
from regrad.bench.record import machine, write_result
from regrad.bench.side_by_side import BUDGETS, OURS, ROUNDS, WORKLOADS, Comparison, defects
from regrad.bench.zoo import BENCH, SMALL, ZOO
from regrad.core.units import format_bytes

THEME = "side-by-side"
PARTS = Path("build") / THEME
FILE_WIDTH = 132
"""Columns of a table that goes to a file."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 if :func:`defects` finds any."""
    parser = argparse.ArgumentParser(prog=f"python -m regrad.bench {THEME}", description="Plans beside baselines.")
    parser.add_argument("--workloads", nargs="+", choices=list(ZOO), default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help='such as "50%%"')
    parser.add_argument("--size", choices=(SMALL, BENCH), default=BENCH)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed rounds, 5 or more for a result")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the result")
    parser.add_argument("--parts", type=Path, default=PARTS, help="folder for workloads that are done")
    parser.add_argument("--fresh", action="store_true", help="do not take up what an earlier run left in --parts")
    settings = parser.parse_args(words)
    if settings.rounds < 2:
        parser.error(f"--rounds {settings.rounds}: quartiles take two rounds or more")
    torch.set_num_threads(1)
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    found, files = [], []
    for name in settings.workloads:
        file = settings.parts / f"{settings.size}_{name}.json"
        head = _head(settings)
        part = None if settings.fresh else read_part(file, head)
        if part is None:
            part = Comparison(ZOO[name], settings.size, settings.rounds, progress.print).run(settings.budgets)
            write_part(file, head, part)
        else:
            progress.print(f"{name}: taken from {file}")
        found.append(part)
        files.append(file)
        console.print(table_of(part))
        console.print(standings_of(part))
    body = {"budgets": settings.budgets, "rounds": settings.rounds, "size": settings.size, "workloads": found}
    wrong = defects([row for part in found for row in part["rows"]])
    written = write_result(THEME, body | {"defects": wrong}, settings.out)
    for file in files:
        file.unlink()
    for line in wrong:
        console.print(f"DEFECT {line}", markup=False)
    console.print(f"written to {written}")
    return 1 if wrong else 0


def _head(settings: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a part to be taken up again."""
    return {"budgets": settings.budgets, "rounds": settings.rounds, "machine": machine(), "code": _code()}


def _code() -> str:
    """A digest of every source file of regrad."""
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(regrad.__file__).parent.rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


def read_part(file: Path, head: dict[str, Any]) -> dict[str, Any] | None:
    """The workload in ``file``; None if there is none, or one that was made under another head."""
    if not file.exists():
        return None
    kept = json.loads(file.read_text(encoding="utf-8"))
    part: dict[str, Any] | None = kept["part"] if kept["head"] == head else None
    return part


def write_part(file: Path, head: dict[str, Any], part: dict[str, Any]) -> None:
    """Keep a workload that is done."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"head": head, "part": part}, allow_nan=False), encoding="utf-8")


def table_of(part: dict[str, Any]) -> Table:
    """One workload as a table: a block of rows for each budget, ours first."""
    title = (
        f"{part['name']} ({part['size']}): eager peak {format_bytes(part['eager_peak_bytes'])}, "
        f"{format_bytes(part['persistent_bytes'])} of it before the step"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("budget")
    table.add_column("method")
    table.add_column("setting")
    for name in ("", "peak", "of eager", "unused", "step", "± quartiles", "same bytes"):
        table.add_column(name, justify="right")
    for row in part["rows"]:
        if row["method"] == OURS:
            table.add_section()
        table.add_row(
            f"{row['budget']} = {format_bytes(row['budget_bytes'])}" if row["method"] == OURS else "",
            row["method"], *_cells(row, part["eager_peak_bytes"]),
        )  # fmt: skip
    table.caption = "\n".join(f"{method} not run: {why}" for method, why in part["not_run"].items()) or None
    table.caption_justify = "left"
    return table


def standings_of(part: dict[str, Any]) -> Table:
    """Ours over the fastest baseline, budget by budget."""
    table = Table(title=f"{part['name']}: ours over the fastest baseline within the budget", title_justify="left")
    for name in ("budget", "baselines", "fastest", "ours over it", "noise"):
        table.add_column(name)
    for one in part["standings"]:
        among = "same bytes as eager" if one["exact"] else "all"
        if one["baseline"] is None:
            table.add_row(one["budget"], among, "none fits", "", "")
        else:
            noise, relative = one["noise_ratio"], one["relative_ratio"]
            table.add_row(one["budget"], among, one["baseline"], f"{relative:.3f}x", f"± {noise:.1%}")
    return table


def _cells(row: dict[str, Any], eager_peak_bytes: int) -> list[str]:
    if row["failed"]:
        return [row["failed"][:40], "failed", *[""] * 6]
    peak, unused = row["measured_peak_bytes"], row["unused_ratio"]
    fits = row["feasible"] and peak <= row["budget_bytes"]
    return [
        row["setting"],
        "fits" if fits else "OVER" if row["feasible"] else f"floor {format_bytes(row['floor_bytes'])}",
        format_bytes(peak),
        f"{peak / eager_peak_bytes:.3f}",
        "" if unused is None else f"{unused:.1%}",
        f"{row['step_ratio']:.3f}x",
        f"{row['spread_ratio'] / 2:.1%}",
        "yes" if row["identical"] else "NO",
    ]
