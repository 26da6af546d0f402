"""Numeric: reverse accumulation over replayed versions against the forward-mode Jacobian, and finite differences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regrad.replay.contract import Verdict
from regrad.replay.derivatives.finite import directional
from regrad.replay.derivatives.forward import jacobian
from regrad.replay.engines.journal import Journal
from regrad.replay.machine.step import Step
from regrad.verify.checks import WRONG, Expectation, gradient_error, judge
from regrad.verify.faults import FINAL_STORAGE
from regrad.verify.programs import random_job
from regrad.verify.records import Summary
from regrad.verify.suite import Progress, Sink, Suite, lacking, plant_all, run_of

SEED = 1
FINITE_BOUND = 1e-8  # relative to max(1, |derivative|); the differences themselves are good to about 1e-11


@dataclass(frozen=True, slots=True)
class Numeric(Suite):
    """Outputs are those of the second interpreter to the byte, and gradients are its Jacobian's.

    The control replays every program from the bytes that are there at the end, with all contracts off, and must get
    another gradient on each. Finite differences are taken where no float32 makes a staircase of the loss.
    """

    @property
    def name(self) -> str:
        """``numeric``."""
        return "numeric"

    @property
    def bound(self) -> float:
        """Four times the float64 epsilon."""
        return 8.9e-16

    def programs(self, full: bool) -> int:
        """1,024, or 96."""
        return 1024 if full else 96

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run it."""
        count, planted = self.programs(full), 64 if full else 6
        taken = left_out = 0
        finite, narrow, weakest = 0.0, 0.0, float("inf")
        for number in range(count):
            job = random_job(SEED, number)
            expectation = Expectation.of(job)
            lacking(expectation, summary, number)
            outcome = judge(expectation, Journal(), self.bound)
            if expectation.jacobian.storages != expectation.final.storages:
                outcome.wrong("the two interpreters leave different bytes")
            if uses_single(expectation):
                left_out += 1
            else:
                taken += 1
                error = finite_error(expectation, number)
                finite = max(finite, error)
                if error > FINITE_BOUND:
                    outcome.wrong(f"finite differences are off by {error:.3g}")
            off = final_storage_error(expectation, expectation.gradient)
            weakest = min(weakest, off)
            summary.plant("control: reads the final storage, judged by its gradient alone", off > WRONG)
            same_width = jacobian(job.program, job.inputs, np.float64).gradient
            narrow = max(narrow, gradient_error(gradient_of(expectation), same_width))
            most = float(np.max(np.abs(expectation.gradient)))
            add(run_of(self.name, number, outcome, max_gradient=most, control_error=off, **expectation.shape.record()))
            if number < planted and outcome.verdict is Verdict.EXACT:
                plant_all(expectation, summary, self.bound)
            progress((number + 1) / count)
        summary.more |= {
            "finite_differences": taken,
            "finite_differences_not_run": left_out,
            "max_finite_difference_error": finite,
            "least_control_error": weakest,
            "max_gradient_error_with_a_float64_jacobian": narrow,
        }


def uses_single(expectation: Expectation) -> bool:
    """Whether float32 was written in the program."""
    return any(write.where.storage == "single" for log in expectation.job.log.segments for write in log.writes)


def gradient_of(expectation: Expectation) -> NDArray[np.float64]:
    """By reverse accumulation under the journal."""
    step = Step(expectation.job, Journal(), audit=False)
    step.forward()
    return step.backward()


def final_storage_error(expectation: Expectation, right: NDArray[np.float64]) -> float:
    """How far the gradient is off ``right`` when each segment is replayed from the final bytes, with no contract."""
    step = Step(expectation.job, FINAL_STORAGE, audit=False)
    step.forward()
    return min(gradient_error(step.backward(), right), 1e300)


def finite_error(expectation: Expectation, number: int) -> float:
    """Along one random direction: finite differences against the Jacobian's directional derivative."""
    direction = np.random.default_rng([SEED, number, 1]).standard_normal(expectation.job.program.coordinates)
    direction /= np.linalg.norm(direction)
    right = float(expectation.gradient @ direction)
    found = directional(expectation.job.program, expectation.job.inputs, direction)
    return abs(found - right) / max(1.0, abs(right))
