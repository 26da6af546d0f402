"""What the demo found: one row for each way to train, and one for each child that trained under a real limit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regrad.core.codec import plain
from regrad.core.plan import Plan
from regrad.demo.state_result import StateResult

OUT_OF_MEMORY = "out of memory"
COMPLETED = "completed"

EAGER = "eager"
EVERY_BLOCK = "every block"
PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to train: ``name`` is "eager", "every block" or "planned".

    predicted_peak_bytes   by the plan, before anything was trained
    measured_peak_bytes    of one step, by :func:`regrad.torch.measure`
    step_seconds           median process CPU seconds, the three ways timed in turns
    step_ratio             over the eager step's
    block_forwards         forwards of blocks in one step, counted as they ran
    extra_forwards         how many of them the eager step does not run
    ..._identical          whether it is bit for bit what the eager run has: every loss, the last gradients, weights,
                           optimizer state, state of the random generator
    """

    name: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_seconds: float
    step_ratio: float
    block_forwards: int
    extra_forwards: int
    first_loss: float
    last_loss: float
    losses_identical: bool
    gradients_identical: bool
    weights_identical: bool
    optimizer_identical: bool
    generator_identical: bool

    @property
    def bit_identical(self) -> bool:
        """All of them."""
        return (
            self.losses_identical
            and self.gradients_identical
            and self.weights_identical
            and self.optimizer_identical
            and self.generator_identical
        )


@dataclass(frozen=True, slots=True)
class Child:
    """One training run in a process of its own under RLIMIT_DATA.

    name                "eager under the limit", "planned under the limit" or "eager over the limit"
    target_bytes        the live bytes, by the measure of the rows, that the limit leaves room for
    before_bytes        VmData of the process when the limit was set
    existing_bytes      what of the target was there by then: weights, batch
    allowance_bytes     target_bytes - existing_bytes
    limit_bytes         before_bytes + allowance_bytes
    exit_code           of the process; negative: the signal that killed it
    verdict             "completed", "out of memory", "killed by SIGKILL", "failed: …", "timed out after … s"
    steps_completed     of the steps that it was to train
    phase, module       where it was when it ended: "planning", "forward", "backward", "optimizer"
    where               file, line and function of the last frame in the traceback that is not torch's own
    last_line           the last line of the traceback
    losses_identical    whether its losses are the parent's eager losses, bit for bit; None if it has none
    """

    name: str
    target_bytes: int
    before_bytes: int
    existing_bytes: int
    allowance_bytes: int
    limit_bytes: int
    exit_code: int
    verdict: str
    steps_completed: int
    phase: str
    module: str
    where: str
    last_line: str
    losses: tuple[float, ...]
    losses_identical: bool | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The proof under a real limit, or why there is none on this system (``children`` is empty then)."""

    kind: str
    unavailable: str
    steps: int
    children: tuple[Child, ...]

    def verdict(self, index: int) -> str:
        """What became of child ``index``; "not run: …" where there is none."""
        return self.children[index].verdict if index < len(self.children) else f"not run: {self.unavailable}"


@dataclass(frozen=True)
class DemoResult:
    """All that the demo found; bytes are of one step, budgets and peaks include what is there all the time.

    ``plan`` is the plan of the row "planned". ``parameters`` and ``text_bytes`` say what was trained, on how much.
    ``stateful`` is another model, with state in its blocks.
    """

    model: str
    parameters: int
    text_bytes: int
    device: str
    threads: int
    steps: int
    budget: str
    plan: Plan
    rows: tuple[Row, ...]
    limits: Limits
    stateful: StateResult
    seconds: float

    def row(self, name: str) -> Row:
        """The row called ``name``."""
        return next(row for row in self.rows if row.name == name)

    @property
    def bit_identical(self) -> bool:
        """Whether every way to train left the same bytes, here and in the children that finished."""
        finished = [child.losses_identical for child in self.limits.children if child.verdict == COMPLETED]
        return all(row.bit_identical for row in self.rows) and all(finished)

    @property
    def failures(self) -> list[str]:
        """What did not come out as the demo promises; empty if all did. A proof that could not be run is no failure."""
        planned = self.row(PLANNED)
        missed = []
        if planned.measured_peak_bytes > self.plan.budget_bytes:
            missed.append(f"measured peak {planned.measured_peak_bytes:,} over the budget {self.plan.budget_bytes:,}")
        if not self.bit_identical:
            missed.append("the runs are not bit-identical")
        for child, wanted in zip(self.limits.children, (OUT_OF_MEMORY, COMPLETED, COMPLETED), strict=False):
            if child.verdict != wanted:
                missed.append(f"{child.name}: {child.verdict}, expected {wanted}")
        return missed + self.stateful.failures

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; below the first level the fields of Row, Limits, Child, Plan and StateResult."""
        planned = self.row(PLANNED)
        return {
            "model": self.model,
            "parameters": self.parameters,
            "text_bytes": self.text_bytes,
            "device": self.device,
            "threads": self.threads,
            "steps": self.steps,
            "budget": self.budget,
            "budget_bytes": self.plan.budget_bytes,
            "eager_peak_bytes": self.row(EAGER).measured_peak_bytes,
            "recompute_all_peak_bytes": self.row(EVERY_BLOCK).measured_peak_bytes,
            "predicted_peak_bytes": planned.predicted_peak_bytes,
            "measured_peak_bytes": planned.measured_peak_bytes,
            "step_ratio": planned.step_ratio,
            "extra_forwards": planned.extra_forwards,
            "bit_identical": self.bit_identical,
            "eager_under_limit": self.limits.verdict(0),
            "plan_under_limit": self.limits.verdict(1),
            "eager_over_limit": self.limits.verdict(2),
            "limits": {**asdict(self.limits), "children": [asdict(child) for child in self.limits.children]},
            "rows": [{**asdict(row), "bit_identical": row.bit_identical} for row in self.rows],
            "plan": plain(self.plan),
            "stateful": self.stateful.to_dict(),
            "failures": self.failures,
            "seconds": self.seconds,
        }

    def write(self, folder: Path) -> None:
        """Write ``demo.json`` and ``plan.json`` into ``folder``, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "demo.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        (folder / "plan.json").write_text(self.plan.to_json() + "\n")
