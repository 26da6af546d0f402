"""``python -m regrad.bench``: run the main job at many budgets, print it, write ``benchmarks/results``.

``python -m regrad.bench side-by-side`` compares plans with what is done without a planner instead,
``python -m regrad.bench estimates`` predicted peaks with measured ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from regrad.bench.budgets import BUDGETS, CASES, run_case
from regrad.bench.estimates_run import THEME as ESTIMATES
from regrad.bench.estimates_run import main as estimates
from regrad.bench.record import write_result
from regrad.bench.side_by_side_run import THEME
from regrad.bench.side_by_side_run import main as side_by_side
from regrad.core.units import format_bytes, format_seconds


def main() -> int:
    """Exit code 1 if a plan went over its budget or changed a bit."""
    if sys.argv[1:2] == [THEME]:
        return side_by_side(sys.argv[2:])
    if sys.argv[1:2] == [ESTIMATES]:
        return estimates(sys.argv[2:])
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(
        prog="python -m regrad.bench",
        description=f"The main job at many budgets; python -m regrad.bench {THEME} --help for plans beside baselines, "
        f"python -m regrad.bench {ESTIMATES} --help for predicted beside measured peaks.",
    )
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="which subjects")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help='such as "50%%"')
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the result")
    settings = parser.parse_args()
    console, progress = Console(), Console(stderr=True)
    found: list[dict[str, Any]] = []
    for case in CASES:
        if case.name in settings.cases:
            found.append(run_case(case, settings.budgets, progress.print))
            console.print(_table(found[-1]))
    written = write_result("main-job", {"budgets": settings.budgets, "cases": found}, settings.out)
    console.print(f"written to {written}")
    rows = [row for case_found in found for row in case_found["rows"]]
    return 0 if all(row["within_budget"] and row["bit_identical"] for row in rows) else 1


def _table(found: dict[str, Any]) -> Table:
    title = (
        f"{found['name']}: {found['parameters']:,} parameters, eager peak {format_bytes(found['eager_peak_bytes'])} "
        f"(predicted {format_bytes(found['predicted_eager_peak_bytes'])}), "
        f"planned in {format_seconds(found['planning_seconds'])}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("budget", "", "predicted", "measured", "error", "recomputed", "step", "predicted step", "same bits"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        table.add_row(
            f"{row['budget']} = {format_bytes(row['budget_bytes'])}",
            ("fits" if row["within_budget"] else "OVER") if row["feasible"] else "floor",
            format_bytes(row["predicted_peak_bytes"]),
            format_bytes(row["measured_peak_bytes"]),
            f"{row['error_ratio']:+.2%}",
            f"{row['recomputed']} of {row['segments']}",
            f"{row['step_ratio']:.2f}x",
            f"{row['predicted_step_ratio']:.2f}x",
            "yes" if row["bit_identical"] else "NO",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
