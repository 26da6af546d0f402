"""Alias: a queue, a scattered bank and overlapping views, restored through every alias, and integer writes refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regrad.core.errors import UnsupportedGradient
from regrad.replay.contract import Verdict
from regrad.replay.engines.journal import Journal
from regrad.replay.machine.step import Job, Step
from regrad.verify.checks import Expectation, Outcome, Present, judge, judge_bytes
from regrad.verify.records import Summary
from regrad.verify.suite import ENGINE_BOUND, ENGINES, Progress, Sink, Suite, lacking, plant_all, run_of
from regrad.verify.workloads import ALIASES, SAVED_OPERATIONS, WORKLOADS, with_integer_write, workload

DRAWS = 2


@dataclass(frozen=True, slots=True)
class Alias(Suite):
    """Seeds × three workloads × two draws of contents, sixteen saved operations each, under five engines.

    A restore is exact in bytes, generators, what every alias shows, the gradient, and a repeated backward. On each input
    the gradient through one integer write is asked for too, and must be refused by name, the present intact.
    """

    @property
    def name(self) -> str:
        """``alias``."""
        return "alias"

    @property
    def bound(self) -> float:
        """About seven times the float64 epsilon."""
        return ENGINE_BOUND

    def programs(self, full: bool) -> int:
        """300, or 24."""
        return (50 if full else 4) * len(WORKLOADS) * DRAWS

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run it."""
        count, planted, saved = self.programs(full), 60 if full else 6, 0
        summary.expected_unsupported = count
        for number in range(count):
            seed, rest = divmod(number, len(WORKLOADS) * DRAWS)
            kind, draw = list(WORKLOADS)[rest % len(WORKLOADS)], rest // len(WORKLOADS)
            job = workload(kind, seed, draw)
            expectation = Expectation.of(job)
            lacking(expectation, summary, number)
            which = {"workload": kind, "seed": seed, "draw": draw}
            for engine in ENGINES:
                outcome = judge(expectation, engine, self.bound)
                if engine.replays:
                    outcome = _worse(outcome, judge_bytes(expectation, engine, ALIASES))
                else:
                    saved += outcome.saved_operations
                    which["max_gradient"] = float(np.max(np.abs(expectation.gradient)))
                add(run_of(self.name, number, outcome, engine=engine.label, **which))
                which.pop("max_gradient", None)
            add(run_of(self.name, number, asks_integer(job), engine="journal", integer_write=True, **which))
            if number < planted:
                plant_all(expectation, summary, self.bound)
            progress((number + 1) / count)
        summary.more["saved_operations"] = saved
        if saved != SAVED_OPERATIONS * count:
            summary.failures.append(f"{saved} saved operations, not {SAVED_OPERATIONS * count}")


def _worse(first: Outcome, second: Outcome) -> Outcome:
    if second.verdict is not Verdict.EXACT:
        first.wrong(second.why)
    return first


def asks_integer(job: Job) -> Outcome:
    """Ask for the gradient through an integer write: UNSUPPORTED if refused by name with the present intact."""
    expectation = Expectation.of(with_integer_write(job))
    outcome = Outcome()
    step = Step(expectation.job, Journal())
    step.forward()
    try:
        step.backward()
    except UnsupportedGradient as error:
        outcome.verdict, outcome.why = Verdict.UNSUPPORTED, str(error)
        if not (error.segment and error.where and error.version):
            outcome.wrong(f"the refusal does not say where: {error}")
    else:
        outcome.wrong("a gradient came through an integer write")
    if Present.of(step.machine.memory) != expectation.final:
        outcome.wrong("the present is not intact after the refusal")
    step.close()
    return outcome
