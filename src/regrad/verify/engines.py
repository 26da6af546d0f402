"""Engines: five of them on the same programs, with contracts, repeated backwards, and a failure at every access."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regrad.verify.checks import Expectation, judge
from regrad.verify.failures import inject
from regrad.verify.programs import random_job
from regrad.verify.records import Summary
from regrad.verify.suite import ENGINE_BOUND, ENGINES, Progress, Sink, Suite, lacking, plant_all, run_of

SEED = 3


@dataclass(frozen=True, slots=True)
class Engines(Suite):
    """Every engine gives the forward-mode gradient, keeps its contract, and leaves the present as it was.

    On the first programs something also fails at each access of an engine to the store, one at a time.
    """

    @property
    def name(self) -> str:
        """``engines``."""
        return "engines"

    @property
    def bound(self) -> float:
        """About seven times the float64 epsilon."""
        return ENGINE_BOUND

    def programs(self, full: bool) -> int:
        """1,200, or 64."""
        return 1200 if full else 64

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run it."""
        count, planted, failing = self.programs(full), 64 if full else 4, 100 if full else 3
        failures = {"failures_injected": 0, "failures_present_intact": 0, "failure_programs": failing}
        for number in range(count):
            expectation = Expectation.of(random_job(SEED, number))
            lacking(expectation, summary, number)
            most = float(np.max(np.abs(expectation.gradient)))
            for position, engine in enumerate(ENGINES):
                outcome = judge(expectation, engine, self.bound)
                once = {"max_gradient": most} | expectation.shape.record() if position == 0 else {}
                add(run_of(self.name, number, outcome, engine=engine.label, **once))
                if number < failing:
                    injected = inject(expectation, engine)
                    failures["failures_injected"] += injected.total
                    failures["failures_present_intact"] += injected.intact
                    if injected.why:
                        summary.failures.append(f"program {number}: the present is lost after {injected.why}")
            if number < planted:
                plant_all(expectation, summary, self.bound)
            progress((number + 1) / count)
        summary.more |= failures
        if not failures["failures_injected"]:
            summary.failures.append("no failure was injected")
