"""Complex step: every coordinate of the gradient by a run on complex numbers, against reverse accumulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regrad.replay.derivatives.complex_step import complex_step
from regrad.replay.engines.journal import Journal
from regrad.verify.checks import WRONG, Expectation, gradient_error, judge
from regrad.verify.numeric import final_storage_error, gradient_of
from regrad.verify.programs import random_job
from regrad.verify.records import Summary
from regrad.verify.suite import Progress, Sink, Suite, lacking, plant_all, run_of

SEED = 4


@dataclass(frozen=True, slots=True)
class ComplexStep(Suite):
    """The gradient of a replayed step agrees with the complex step in each coordinate, and a final-storage one not."""

    @property
    def name(self) -> str:
        """``complex-step``."""
        return "complex-step"

    @property
    def bound(self) -> float:
        """Four and a half times the float64 epsilon."""
        return 1.0e-15

    def programs(self, full: bool) -> int:
        """96, or 12."""
        return 96 if full else 12

    def execute(self, full: bool, summary: Summary, add: Sink, progress: Progress) -> None:
        """Run it."""
        count, planted, coordinates = self.programs(full), 8 if full else 2, 0
        for number in range(count):
            expectation = Expectation.of(random_job(SEED, number))
            lacking(expectation, summary, number)
            program, inputs = expectation.job.program, expectation.job.inputs
            right = np.array([complex_step(program, inputs, c) for c in range(program.coordinates)])
            coordinates += program.coordinates
            judged = judge(expectation, Journal(), self.bound)
            judged.error = gradient_error(gradient_of(expectation), right)
            if judged.error > self.bound:
                judged.wrong(f"the complex step is off by {judged.error:.3g}")
            # the control is measured with this suite's own reference, not with the Jacobian
            control = final_storage_error(expectation, right)
            summary.plant("control: reads the final storage, judged by its gradient alone", control > WRONG)
            most = float(np.max(np.abs(right)))
            more = {"max_gradient": most, "coordinates": program.coordinates, "control_error": control}
            add(run_of(self.name, number, judged, **more, **expectation.shape.record()))
            if number < planted:
                plant_all(expectation, summary, self.bound)
            progress((number + 1) / count)
        summary.more["coordinates"] = coordinates
