"""``python -m regrad.bench estimates``: predicted and measured peaks of every pair of :mod:`regrad.bench.estimates`."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from regrad.bench.estimates import BUDGET, EXCEPTIONS, Row, defects, try_pair
from regrad.bench.estimates_subjects import SUBJECTS
from regrad.bench.record import write_result
from regrad.bench.zoo.model import BENCH, SMALL
from regrad.core.units import format_bytes

THEME = "estimates"
FILE_WIDTH = 160
"""Columns of a table that goes to a file."""


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 if :func:`defects` finds any."""
    names = [subject.name for subject in SUBJECTS]
    parser = argparse.ArgumentParser(
        prog=f"python -m regrad.bench {THEME}", description="Predicted and measured peaks."
    )
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--size", choices=(SMALL, BENCH), default=BENCH)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the result")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    began = time.monotonic()
    rows: list[Row] = []
    for subject in SUBJECTS:
        for setting in subject.settings if subject.name in asked.models else ():
            progress.print(f"{subject.name}: {setting}", markup=False)
            rows.append(try_pair(subject, setting, asked.size))
            gc.collect()
    console.print(table_of(rows))
    wrong = defects(rows)
    body: dict[str, Any] = {
        "size": asked.size,
        "budget": BUDGET,
        "seconds": time.monotonic() - began,
        "exceptions": [{"model": m, "setting": s, "error_ratio": e} for (m, s), e in EXCEPTIONS.items()],
        "rows": [asdict(row) for row in rows],
        "defects": wrong,
    }
    written = write_result(THEME, body, asked.out)
    for line in wrong:
        console.print(f"DEFECT {line}", markup=False)
    console.print(f"written to {written}")
    return 1 if wrong else 0


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table(title=f"predicted and measured peaks of {len(rows)} pairs", title_justify="left")
    for name in ("model", "setting", "predicted by"):
        table.add_column(name)
    for name in ("of eager", "predicted", "measured", "error", "by the allocator", "allowed", ""):
        table.add_column(name, justify="right")
    for row in rows:
        counted = row.allocator_error_ratio
        table.add_row(
            row.model, str(row.setting) + (" (least)" if row.least else ""), row.predicted_by,
            f"{row.predicted_peak_bytes / row.eager_peak_bytes:.2f}", format_bytes(row.predicted_peak_bytes),
            format_bytes(row.measured_peak_bytes), f"{row.error_ratio:+.3%}",
            "" if counted is None else f"{counted:+.3%}", f"{row.allowed_ratio:.0%}",
            "within" if row.within else "listed" if row.exception else "OUTSIDE",
        )  # fmt: skip
    return table
