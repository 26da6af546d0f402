"""What every suite is, and the steps that they share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

from regrad.replay.contract import Verdict
from regrad.replay.engines.eager import Eager
from regrad.replay.engines.guarded import Guarded
from regrad.replay.engines.journal import Journal
from regrad.replay.engines.read_set import ReadSet
from regrad.replay.engines.snapshot import Snapshot
from regrad.replay.retention import Engine
from regrad.verify.checks import Expectation, Outcome, judge, judge_bytes
from regrad.verify.faults import FAULTS, Faulty
from regrad.verify.records import Run, Summary
from regrad.verify.shape import LEAST_MEDIAN_GRADIENT

ENGINES: tuple[Engine, ...] = (Eager(), Snapshot(), Journal(), ReadSet(), Guarded(Journal()))
ENGINE_BOUND = 1.6e-15

Progress = Callable[[float], None]
Sink = Callable[[Run], None]


class Suite(ABC):
    """A suite: a value with a name, sizes, and one way to run. Suites are seeded; two runs give the same records."""

    @property
    @abstractmethod
    def name(self) -> str:
        """How the command line calls it."""

    @property
    @abstractmethod
    def bound(self) -> float | None:
        """The largest gradient error that passes; ``None`` where no gradient is taken."""

    @abstractmethod
    def programs(self, full: bool) -> int:
        """How many programs it has."""

    @abstractmethod
    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run everything: each run goes to ``add``, planted faults and the rest into ``summary``."""

    @final
    def run(
        self, *, full: bool = False, progress: Progress = lambda done: None, sink: Sink = lambda run: None
    ) -> Summary:
        """Run the suite. ``progress`` hears the share done, ``sink`` every record. Never raises for what it finds."""
        summary = Summary(self.name, programs=self.programs(full), bound=self.bound)
        start = time.perf_counter()

        def add(run: Run) -> None:
            summary.add(run)
            sink(run)

        self.execute(full, summary, add, progress)
        summary.seconds = time.perf_counter() - start
        if summary.gradients and summary.median_gradient < LEAST_MEDIAN_GRADIENT:
            summary.failures.append(f"the median of max |gradient| is {summary.median_gradient:.3g}, not 0.5")
        summary.judge()
        return summary


def run_of(suite: str, program: int, outcome: Outcome, **more: Any) -> Run:
    """The record of ``outcome``."""
    body = dict(more)
    if outcome.meter is not None:
        body["peak_retained_bytes"] = outcome.meter.peak_retained_bytes
        body["peak_transient_bytes"] = outcome.meter.peak_transient_bytes
        body["replays"] = outcome.meter.replays
    if outcome.why:
        body["why"] = outcome.why
    return Run(suite, program, outcome.verdict, outcome.error, body)


def lacking(expectation: Expectation, summary: Summary, program: int) -> None:
    """Fail the suite if a program is not of the shape that its thresholds are for."""
    missing = expectation.shape.missing()
    if missing:
        summary.failures.append(f"program {program} has {', '.join(missing)}")


def is_caught(expectation: Expectation, fault: Faulty, bound: float) -> bool:
    """Whether the checks of gradients, contracts and the present tell ``fault`` from a sound engine."""
    return judge(expectation, fault, bound).verdict is Verdict.DIVERGED


def is_caught_by_bytes(expectation: Expectation, fault: Faulty) -> bool:
    """Whether the comparison of bytes and generators alone tells ``fault`` from a sound engine."""
    return judge_bytes(expectation, fault).verdict is Verdict.DIVERGED


def plant_all(expectation: Expectation, summary: Summary, bound: float) -> None:
    """Plant every fault in one program and count what is caught."""
    for fault in FAULTS:
        summary.plant(fault.name, is_caught(expectation, fault, bound))
