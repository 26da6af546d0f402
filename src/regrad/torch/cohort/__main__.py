"""``python -m regrad.torch.cohort FIRST COUNT``: every program of ``COUNT`` seeds from ``FIRST`` on under every mode.

Prints JSON Lines: a program's facts, then a record for each mode, then one for each fault that is planted in it.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from regrad.torch.cohort.faults import FAULTS
from regrad.torch.cohort.judge import compare
from regrad.torch.cohort.modes import EAGER, MODES
from regrad.torch.cohort.programs import CONDITIONS, build
from regrad.torch.cohort.trial import run
from regrad.torch.regions.region import RegionKept


def say(record: str, seed: int, condition: str, body: dict[str, Any]) -> None:
    """One line."""
    line = {"record": record, "seed": seed, "condition": condition} | body
    print(json.dumps(line, allow_nan=False), flush=True)  # noqa: T201 - the parent reads it


def one(seed: int, condition: str) -> None:
    """One program under all modes and with all faults."""
    eager = run(seed, condition, EAGER)
    facts = build(seed, condition).facts | {
        "max_gradient": eager.max_gradient,
        "old_versions": eager.old_versions,
        "storages_alive": eager.alive,
        "refused": eager.raised,
    }
    say("program", seed, condition, facts)
    for mode in MODES:
        say("run", seed, condition, compare(eager, run(seed, condition, mode), mode))
    for fault in FAULTS:
        if condition in fault.conditions:
            with fault.planted() as mode:
                found = compare(eager, run(seed, condition, mode), mode)
            say("fault", seed, condition, found | {"refused_for": fault.refused_for})


def main() -> int:
    """Run the seeds that the command line names."""
    first, count = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RegionKept)  # counted in the records
    for seed in range(first, first + count):
        for condition in CONDITIONS:
            one(seed, condition)
    return 0


if __name__ == "__main__":
    sys.exit(main())
