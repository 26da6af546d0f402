"""What a suite says: one record a run, one summary a suite, both as JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from regrad.replay.contract import Verdict

GRADIENT_EDGES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, float("inf"))
ERROR_EDGES = (*(k * 1.1102230246251565e-16 for k in range(17)), float("inf"))  # in steps of half an epsilon


@dataclass(frozen=True)
class Run:
    """One run of one program. ``more`` holds what only some suites know."""

    suite: str
    program: int
    verdict: Verdict
    max_gradient_error: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """The record as one line of JSON."""
        error = self.max_gradient_error
        body = {
            "record": "run",
            "suite": self.suite,
            "program": self.program,
            "verdict": self.verdict.value.replace(" ", "_"),
            "max_gradient_error": None if error is None or not np.isfinite(error) else error,
        }
        return json.dumps(body | self.more, allow_nan=False)


@dataclass(frozen=True)
class Grid:
    """A table of a suite's own: a title, column heads (the first over the names of rows), rows of words, a note below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass
class Summary:
    """What a suite came to. It passed if ``failures`` is empty.

    Some suites show what another library leaves: ``expected_diverged`` and ``expected_unsupported`` say how often.
    """

    suite: str
    programs: int = 0
    runs: int = 0
    exact: int = 0
    diverged: int = 0
    unsupported: int = 0
    not_run: int = 0
    max_gradient_error: float = 0.0
    bound: float | None = None
    expected_diverged: int = 0
    expected_unsupported: int = 0
    faults_planted: int = 0
    faults_caught: int = 0
    faults: dict[str, list[int]] = field(default_factory=dict)  # name: [planted, caught]
    more: dict[str, Any] = field(default_factory=dict)
    grids: list[Grid] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, run: Run) -> None:
        """Count ``run``."""
        self.runs += 1
        name = {
            Verdict.EXACT: "exact",
            Verdict.DIVERGED: "diverged",
            Verdict.UNSUPPORTED: "unsupported",
            Verdict.NOT_RUN: "not_run",
        }[run.verdict]
        setattr(self, name, getattr(self, name) + 1)
        if run.max_gradient_error is not None:
            self.errors.append(run.max_gradient_error)
            self.max_gradient_error = max(self.max_gradient_error, run.max_gradient_error)
        if "max_gradient" in run.more:
            self.gradients.append(run.more["max_gradient"])

    def plant(self, fault: str, caught: bool) -> None:
        """Count a planted fault."""
        counts = self.faults.setdefault(fault, [0, 0])
        counts[0] += 1
        counts[1] += caught
        self.faults_planted += 1
        self.faults_caught += caught

    def judge(self) -> None:
        """Collect what is wrong in ``failures``."""
        if self.diverged != self.expected_diverged:
            wanted = f", not {self.expected_diverged}" if self.expected_diverged else ""
            self.failures.append(f"{self.diverged} runs diverged{wanted}")
        if self.unsupported != self.expected_unsupported:
            self.failures.append(f"{self.unsupported} runs are unsupported, not {self.expected_unsupported}")
        if self.not_run:
            self.failures.append(f"{self.not_run} runs were not run")
        if not np.isfinite(self.max_gradient_error):
            self.failures.append("a gradient is not a number")
        if self.bound is not None and self.max_gradient_error > self.bound:
            self.failures.append(f"the largest gradient error {self.max_gradient_error:.3g} is above {self.bound:.3g}")
        for fault, (planted, caught) in self.faults.items():
            if caught < planted:
                self.failures.append(f"{planted - caught} of {planted} planted faults were not caught: {fault}")
        if not self.faults_planted:
            self.failures.append("no fault was planted")
        if self.exact == 0:
            self.failures.append("nothing was found exact")

    @property
    def median_gradient(self) -> float:
        """Median over programs of the largest absolute gradient; 0 where the suite takes none."""
        return float(np.median(self.gradients)) if self.gradients else 0.0

    def histogram(self, values: list[float], edges: tuple[float, ...]) -> list[list[float]]:
        """``[from, count]`` for each interval of ``edges`` that is not empty."""
        counts = np.histogram([min(value, 1e300) for value in values], np.minimum(edges, 1e301))[0]
        return [[edge, int(count)] for edge, count in zip(edges, counts, strict=False) if count]

    def line(self) -> str:
        """The summary as one line of JSON."""
        names = ("programs", "runs", "exact", "diverged", "unsupported", "not_run")
        body: dict[str, Any] = {"record": "summary", "suite": self.suite} | {
            name: getattr(self, name) for name in names
        }
        finite = bool(np.isfinite(self.max_gradient_error))
        body |= {
            "max_gradient_error": self.max_gradient_error if self.errors and finite else None,
            "max_gradient_error_bound": self.bound,
            "faults_planted": self.faults_planted,
            "faults_caught": self.faults_caught,
            "faults": self.faults,
            "median_max_gradient": self.median_gradient if self.gradients else None,
            "max_gradient_histogram": self.histogram(self.gradients, GRADIENT_EDGES),
            "gradient_error_histogram": self.histogram(self.errors, ERROR_EDGES) if finite else [],
            "tables": [asdict(grid) for grid in self.grids],
            "passed": not self.failures,
            "failures": self.failures,
            "run_seconds": round(self.seconds, 3),
        }
        return json.dumps(body | self.more, allow_nan=False)


def lines(runs: list[Run], summaries: list[Summary]) -> Iterator[str]:
    """All records, the summary of a suite after its runs."""
    for summary in summaries:
        for run in runs:
            if run.suite == summary.suite:
                yield run.line()
        yield summary.line()
