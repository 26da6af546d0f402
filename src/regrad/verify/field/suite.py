"""Real bug reports as programs: each under eager, torch's two checkpoints and ``rt.checkpoint``, compared to the bit.

The cases run in processes of their own, by ``python -m regrad.torch.field_runner``; this room knows no framework.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from regrad.replay.contract import Verdict
from regrad.verify.records import Run, Summary
from regrad.verify.suite import Progress, Sink, Suite

CASES = Path(__file__).with_name("cases")
OURS = "regrad"
MOST_REFUSED = 4
_VERDICTS = {"exact": Verdict.EXACT, "raises": Verdict.UNSUPPORTED}


class Field(Suite):
    """All cases, always: there is no smaller size. Needs the extra ``torch``."""

    @property
    def name(self) -> str:
        """``field``."""
        return "field"

    @property
    def bound(self) -> float | None:
        """None: what is compared is bits."""
        return None

    def programs(self, full: bool) -> int:
        """The number of case files."""
        return len(list(CASES.glob("[0-9][0-9]_*.py")))

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Start the runner and read a line a case."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "regrad.torch.field_runner", str(CASES)]
        tally: dict[str, Counter[str]] = {}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as runner:
            assert runner.stdout is not None
            assert runner.stderr is not None
            for index, text in enumerate(runner.stdout):
                line = json.loads(text)
                add(_run(index, line, summary, tally))
                progress((index + 1) / max(1, summary.programs))
            errors = runner.stderr.read()
        if runner.returncode or summary.runs != summary.programs:
            summary.failures.append(f"the runner stopped after {summary.runs} cases: {errors.strip()[-300:]}")
        for mode, counts in tally.items():
            for what in ("exact", "silent", "raises", "bound", "recomputed"):
                if counts[what]:
                    summary.more[f"{mode} {what}"] = counts[what]
        summary.expected_unsupported = summary.unsupported
        if summary.unsupported > MOST_REFUSED:
            summary.failures.append(f"{summary.unsupported} cases are refused, more than {MOST_REFUSED}")


def _run(index: int, line: dict[str, Any], summary: Summary, tally: dict[str, Counter[str]]) -> Run:
    case, modes = line["case"], line["modes"]
    for mode, found in modes.items():
        counts = tally.setdefault(mode, Counter())
        counts[found["verdict"]] += 1
        counts["recomputed"] += found["recomputed"]
    more = {"case": case, "kind": line["kind"], "modes": modes}
    if OURS not in modes:
        summary.failures.append(f"{case} does not run in eager: {line.get('broken', '')[:200]}")
        return Run("field", index, Verdict.NOT_RUN, None, more)
    if "caught" in line:
        summary.plant("a region that runs twice", line["caught"])
    ours = modes[OURS]
    if not ours["passes"]:
        summary.failures.append(f"{case}: {ours['verdict']}: {ours['why'][:200]}")
    return Run("field", index, _VERDICTS.get(ours["verdict"], Verdict.DIVERGED), None, more)
