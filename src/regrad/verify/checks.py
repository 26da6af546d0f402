"""One program under one engine, against what an undisturbed run and the forward-mode Jacobian say."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import ReplayError, UndeclaredWrite, UnsupportedGradient, VersionDropped
from regrad.replay.contract import Verdict
from regrad.replay.derivatives.forward import Jacobian, jacobian
from regrad.replay.engines.guarded import Guarded
from regrad.replay.frame import Meter
from regrad.replay.machine.memory import Memory
from regrad.replay.machine.run import Machine
from regrad.replay.machine.step import Job, Step
from regrad.replay.machine.tape import Tape
from regrad.replay.machine.views import View
from regrad.replay.retention import Engine
from regrad.verify.faults import Faulty
from regrad.verify.programs import with_unannounced_write
from regrad.verify.shape import Shape, shape_of

WRONG = 1e-9  # a relative difference that no rounding makes in these programs


def gradient_error(found: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """``max |a - b| / max(1, |b|)``, where b is right. NaN or infinity come out as infinity."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(found - right) / np.maximum(1.0, np.abs(right))
    return float(np.max(errors)) if np.isfinite(errors).all() else float("inf")


@dataclass(frozen=True)
class Present:
    """Bytes, generators and version counters at one moment."""

    storages: dict[str, bytes]
    generators: dict[str, bytes]
    counters: dict[str, int]

    @classmethod
    def of(cls, memory: Memory) -> Present:
        """Now."""
        return cls(memory.copy_bytes(), memory.copy_generators(), dict(memory.counters))


@dataclass(frozen=True)
class Expectation:
    """What an undisturbed run of a job does: its state before each segment and at the end; its gradient."""

    job: Job
    entries: tuple[Present, ...]
    final: Present

    @classmethod
    def of(cls, job: Job) -> Expectation:
        """Run ``job`` with no engine at all."""
        machine, entries = Machine(job.program, job.inputs), []
        for segment in range(len(job.program.segments)):
            entries.append(Present.of(machine.memory))
            machine.run(segment)
        return cls(job, tuple(entries), Present.of(machine.memory))

    @cached_property
    def jacobian(self) -> Jacobian:
        """By forward mode."""
        return jacobian(self.job.program, self.job.inputs)

    @cached_property
    def gradient(self) -> NDArray[np.float64]:
        """By forward mode."""
        return self.jacobian.gradient

    @cached_property
    def shape(self) -> Shape:
        """What the program has."""
        return shape_of(self.job, self.final.storages, [entry.storages for entry in self.entries])

    def at_exit(self, segment: int) -> Present:
        """The state after ``segment``."""
        return self.entries[segment + 1] if segment + 1 < len(self.entries) else self.final


@dataclass
class Outcome:
    """A verdict, the largest gradient error, and the first thing that was wrong."""

    verdict: Verdict = Verdict.EXACT
    error: float | None = None
    why: str = ""
    meter: Meter | None = None
    saved_operations: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def wrong(self, why: str) -> Outcome:
        """This outcome as DIVERGED, for the first reason given."""
        if self.verdict is not Verdict.DIVERGED:
            self.verdict, self.why = Verdict.DIVERGED, why
        return self


def judge(expectation: Expectation, engine: Engine, bound: float) -> Outcome:
    """Everything that a step under ``engine`` owes: outputs, contracts, gradients, a repeated backward, the present.

    A guard must also refuse the same program with an unannounced write in it.
    """
    outcome = Outcome()
    step = Step(expectation.job, engine)
    try:
        step.forward()
        if Present.of(step.machine.memory) != expectation.final:
            return outcome.wrong("the forward leaves another state than without an engine")
        _backwards(step, expectation, outcome, bound)
        if outcome.verdict is Verdict.EXACT:
            _consumed(step, outcome)
    except UnsupportedGradient as error:
        outcome.verdict, outcome.why = Verdict.UNSUPPORTED, str(error)
    except ReplayError as error:
        outcome.wrong(str(error))
    if Present.of(step.machine.memory) != expectation.final:
        outcome.wrong("the present is not what it was before the backward")
    outcome.meter, outcome.saved_operations = step.retention.meter, step.saved_operations
    step.close()
    if outcome.verdict is Verdict.EXACT and (left := step.retention.meter).retained_bytes + left.transient_bytes:
        outcome.wrong(f"{left.retained_bytes} retained and {left.transient_bytes} transient bytes are never given up")
    if watches(engine) and not refuses_unannounced(expectation.job, engine):
        outcome.wrong("a write that no one announced is not refused")
    return outcome


def _backwards(step: Step, expectation: Expectation, outcome: Outcome, bound: float) -> None:
    segments = len(expectation.job.program.segments)
    first = step.backward(retain=True)
    outcome.saved_operations = step.saved_operations
    if step.engine.replays and step.retention.meter.replays != segments:
        outcome.wrong(f"{step.retention.meter.replays} replays of {segments} segments")
    if Present.of(step.machine.memory) != expectation.final:
        outcome.wrong("the present is not what it was before the backward")
    outcome.error = gradient_error(first, expectation.gradient)
    if outcome.error > bound:
        outcome.wrong(f"the gradient is off by {outcome.error:.3g}")
    second = step.backward(retain=False)
    if first.tobytes() != second.tobytes():
        outcome.wrong("a second backward on retained state gives another gradient")


def _consumed(step: Step, outcome: Outcome) -> None:
    try:
        step.backward()
    except VersionDropped as error:
        outcome.more["second_backward"] = type(error).__name__
    else:
        outcome.wrong("a backward on consumed state is not refused")


def watches(engine: Engine) -> bool:
    """Whether ``engine`` claims to be a guard."""
    return isinstance(engine, Guarded) or (isinstance(engine, Faulty) and engine.guard)


def refuses_unannounced(job: Job, engine: Engine) -> bool:
    """Whether a forward of ``job`` with an unannounced write in it raises :class:`UndeclaredWrite`."""
    step = Step(with_unannounced_write(job), engine)
    try:
        step.forward()
    except UndeclaredWrite:
        return True
    return False


def seen_through(view: View, data: dict[str, bytes]) -> NDArray[Any]:
    """The elements of ``view`` in bytes that were copied."""
    return np.ndarray((view.count,), view.dtype, data[view.storage], view.offset, (view.step,))


def judge_bytes(expectation: Expectation, engine: Engine, aliases: tuple[View, ...] = ()) -> Outcome:
    """Replay each segment alone, newest first, and compare all state before, after, and when the present is back.

    Looks at values only: no gradient is taken, and the step's own audit is off, so that nothing is caught by it. What
    the machine reads through each of ``aliases`` at an entry must be what the undisturbed run had there.
    """
    outcome = Outcome()
    step = Step(expectation.job, engine, audit=False)
    memory = step.machine.memory
    step.forward()
    full = engine.restores_everything
    for segment in reversed(range(len(expectation.job.program.segments))):
        drawn = expectation.job.log.segments[segment].generators
        with step.retention.replaying(segment):
            found = Present.of(memory)
            if full and found.storages != expectation.entries[segment].storages:
                outcome.wrong(f"bytes at the entry of segment {segment} differ")
            if any(found.generators[name] != expectation.entries[segment].generators[name] for name in drawn):
                outcome.wrong(f"a generator at the entry of segment {segment} differs")
            for view in aliases if full else ():
                if memory.array(view).tobytes() != seen_through(view, expectation.entries[segment].storages).tobytes():
                    outcome.wrong(f"the alias {view} differs at the entry of segment {segment}")
            step.machine.run(segment, step.retention, Tape())
            left, right = Present.of(memory), expectation.at_exit(segment)
            if full and left.storages != right.storages:
                outcome.wrong(f"bytes at the exit of segment {segment} differ")
            if any(left.generators[name] != right.generators[name] for name in drawn):
                outcome.wrong(f"a generator at the exit of segment {segment} differs")
        if Present.of(memory) != expectation.final:
            outcome.wrong(f"the present after the replay of segment {segment} is not what it was")
    outcome.meter = step.retention.meter
    step.close()
    return outcome
