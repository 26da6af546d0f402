"""Five programs with state a seed, under six modes of torch's checkpoint and eight of ours, against eager to the bit.

The programs run in a process of its own, ``python -m regrad.torch.cohort``; this room knows no framework. Torch's modes
are there for what they leave on such programs: the suite passes if that is what was published, and ours are right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from regrad.replay.contract import Verdict
from regrad.verify.cohort.judge import CONDITIONS, DIVERGED, MODES, REFUSED, caught, expected, wrong
from regrad.verify.cohort.tables import grids, held
from regrad.verify.records import Run, Summary
from regrad.verify.suite import Progress, Sink, Suite

FIRST_SEED, FULL_SEEDS, FEW_SEEDS = 420_000, 50, 8
LEAST_STATE_BYTES = 256 * 1024  # below it every engine copies everything
MOST_TOLD = 10
_VERDICTS = {"exact": Verdict.EXACT, DIVERGED: Verdict.DIVERGED, REFUSED: Verdict.UNSUPPORTED}


class Cohort(Suite):
    """50 seeds with ``--full``, 3,500 runs in about two minutes of one core; 8 seeds without. Needs the extra ``torch``."""

    @property
    def name(self) -> str:
        """``cohort``."""
        return "cohort"

    @property
    def bound(self) -> float | None:
        """None: what is compared is bits."""
        return None

    def programs(self, full: bool) -> int:
        """Five a seed."""
        return len(CONDITIONS) * (FULL_SEEDS if full else FEW_SEEDS)

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Start the runner and judge its records."""
        seeds = self.programs(full) // len(CONDITIONS)
        runs: list[dict[str, Any]] = []
        facts: dict[str, Any] = {}
        program = -1
        told: list[str] = []
        for line in _lines(FIRST_SEED, seeds, summary):
            name = f"seed {line['seed']} {line['condition']}"
            if line["record"] == "program":
                facts, program = line, program + 1
                told += [f"{name}: {lack}" for lack in lacking(line)]
                if line["refused"] is None:
                    summary.gradients.append(line["max_gradient"])
            elif line["record"] == "fault":
                summary.plant(line["mode"], caught(line))
            else:
                runs.append(line)
                add(_run(program, line, facts))
                why = wrong(line)
                told += [f"{name} under {line['mode']}: {why[:200]}"] if why else []
                progress(len(runs) / (summary.programs * len(MODES)))
        told += _not_run(runs, summary, seeds, add)
        summary.failures += told[:MOST_TOLD] + ([f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else [])
        summary.failures += engines_alike(runs)
        summary.grids = grids(runs)
        pairs = [expected(condition, mode) for condition in CONDITIONS for mode in MODES]
        summary.expected_diverged = seeds * pairs.count(DIVERGED)
        summary.expected_unsupported = seeds * pairs.count(REFUSED)


def lacking(facts: dict[str, Any]) -> list[str]:
    """What a program lacks for its verdicts to mean something."""
    found = [] if facts["state_bytes"] > LEAST_STATE_BYTES else [f"its state has only {facts['state_bytes']:,} bytes"]
    found += [f"it has no {what}" for what in ("reads", "draws", "products") if not facts[what]]
    if (facts["refused"] is not None) != (facts["condition"] == "E"):
        return [*found, f"eager says {facts['refused']}"]
    if facts["condition"] == "E":
        return found
    if not facts["writes"] and facts["condition"] != "A":
        found.append("it has no writes")
    if not facts["old_versions"]:
        found.append("a step reads no version that differs from the one that it leaves")
    if not facts["storages_alive"]:
        found.append("eager holds nothing that a replay could make again")
    return found


def engines_alike(runs: list[dict[str, Any]]) -> list[str]:
    """Engines that cannot be told apart by what they held under C and D, or a journal that is no smaller than a copy."""
    totals = {engine: sum(held(runs, engine)) for engine in ("snapshot", "journal", "read_set", "guarded")}
    if len(set(totals.values())) == len(totals) and totals["journal"] < totals["guarded"] < totals["snapshot"]:
        return []
    return [f"engines held {', '.join(f'{engine} {total:,}' for engine, total in totals.items())} bytes in all"]


def _run(program: int, line: dict[str, Any], facts: dict[str, Any]) -> Run:
    verdict = _VERDICTS[line["verdict"]]
    of_run = {key: value for key, value in line.items() if key not in ("record", "verdict")}
    of_program = {
        key: value for key, value in facts.items() if key not in ("record", "seed", "condition", "max_gradient")
    }
    return Run("cohort", program, verdict, None, of_run | {"facts": of_program})


def _not_run(runs: list[dict[str, Any]], summary: Summary, seeds: int, add: Sink) -> list[str]:
    """A record for each run that is missing, so that nothing is skipped in silence."""
    came = {(run["seed"], run["condition"], run["mode"]) for run in runs}
    missing = [
        (number, seed, condition, mode)
        for number, (seed, condition) in enumerate((FIRST_SEED + i, c) for i in range(seeds) for c in CONDITIONS)
        for mode in MODES
        if (seed, condition, mode) not in came
    ]
    for number, seed, condition, mode in missing:
        add(Run("cohort", number, Verdict.NOT_RUN, None, {"seed": seed, "condition": condition, "mode": mode}))
    twice = len(runs) + len(missing) - summary.programs * len(MODES)
    return [f"{twice} records more than programs times modes"] if twice else []


def _lines(first: int, seeds: int, summary: Summary) -> Iterator[dict[str, Any]]:
    """The runner's records as they come; that it stopped early is a failure."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "regrad.torch.cohort", str(first), str(seeds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as runner:
        assert runner.stdout is not None
        assert runner.stderr is not None
        for text in runner.stdout:
            yield json.loads(text)
        errors = runner.stderr.read()
    if runner.returncode:
        summary.failures.append(f"the runner stopped: {errors.strip()[-300:]}")
