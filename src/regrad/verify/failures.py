"""Something fails at the n-th access of an engine to the store, for every n, and the present must be intact each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from regrad.replay.machine.memory import Memory
from regrad.replay.machine.run import Machine
from regrad.replay.machine.step import Job, Step
from regrad.replay.ranges import ByteRange
from regrad.replay.retention import Engine
from regrad.verify.checks import Expectation, Present


class InjectedFailure(Exception):
    """What was planted."""


class FailingStore:
    """A memory whose ``fail_at``-th access by an engine raises, once. 0: none does."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.fail_at = self.accesses = 0

    def arm(self, fail_at: int) -> None:
        """Fail at the ``fail_at``-th access from now."""
        self.fail_at, self.accesses = fail_at, 0

    @property
    def fired(self) -> bool:
        """Whether it failed since it was armed."""
        return 0 < self.fail_at <= self.accesses

    def _count(self, what: str) -> None:
        self.accesses += 1
        if self.accesses == self.fail_at:
            raise InjectedFailure(f"access {self.accesses}: {what}")

    def sizes(self) -> Mapping[str, int]:
        """As the memory."""
        return self._memory.sizes()

    def read(self, where: ByteRange) -> Any:
        """As the memory, or a failure."""
        self._count(f"read {where}")
        return self._memory.read(where)

    def write(self, where: ByteRange, chunk: Any) -> None:
        """As the memory, or a failure."""
        self._count(f"write {where}")
        self._memory.write(where, chunk)

    def to_host(self, chunk: Any) -> bytes:
        """As the memory."""
        return self._memory.to_host(chunk)

    def from_host(self, data: bytes) -> Any:
        """As the memory."""
        return self._memory.from_host(data)

    def get_generator(self, name: str) -> bytes:
        """As the memory, or a failure."""
        self._count(f"get {name}")
        return self._memory.get_generator(name)

    def set_generator(self, name: str, state: bytes) -> None:
        """As the memory, or a failure."""
        self._count(f"set {name}")
        self._memory.set_generator(name, state)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """As the memory."""
        with self._memory.quiet():
            yield


@dataclass
class Injected:
    """How often something failed in a capture (forward) or a restore (backward), and how often all was intact."""

    captures: int = 0
    restores: int = 0
    intact: int = 0
    why: str = ""

    @property
    def total(self) -> int:
        """All failures."""
        return self.captures + self.restores

    def note(self, intact: bool, why: str) -> None:
        """Count one."""
        self.intact += intact
        if not intact:
            self.why = self.why or why


def before_each_operation(job: Job) -> dict[tuple[int, int], Present]:
    """The state before each operation of an undisturbed run, by segment and number."""
    machine, states = Machine(job.program, job.inputs), {}

    def note(segment: int, operation: int) -> None:
        states[segment, operation + 1] = Present.of(machine.memory)

    machine.on_operation = note
    for segment in range(len(job.program.segments)):
        states[segment, 0] = Present.of(machine.memory)
        machine.run(segment)
    return states


def inject(expectation: Expectation, engine: Engine) -> Injected:
    """Fail at every access in turn, first of a forward, then of a backward that is repeated on retained state.

    The present is intact when bytes, generators and version counters are those before the operation that failed
    (forward) or before the backward. In the end the same step must still give the right gradient.
    """
    counts = Injected()
    states = before_each_operation(expectation.job)
    number = 1
    while _fails_forward(expectation.job, engine, number, states, counts):
        number += 1
    step, store = _step(expectation.job, engine)
    step.forward()
    store.arm(0)
    right = step.backward(retain=True)
    number = 1
    while _fails_backward(step, store, number, expectation.final, counts):
        number += 1
    store.arm(0)
    if step.backward(retain=True).tobytes() != right.tobytes():
        counts.note(False, "after all failures the gradient is another one")
    step.close()
    return counts


def _step(job: Job, engine: Engine) -> tuple[Step, FailingStore]:
    machine = Machine(job.program, job.inputs)
    store = FailingStore(machine.memory)
    return Step(job, engine, machine=machine, store=store, audit=False), store


def _fails_forward(
    job: Job, engine: Engine, number: int, states: dict[tuple[int, int], Present], counts: Injected
) -> bool:
    step, store = _step(job, engine)
    done = (0, 0)

    def note(segment: int, operation: int) -> None:
        nonlocal done
        done = (segment, operation + 1)

    step.machine.on_operation = note
    store.arm(number)
    try:
        step.forward()
    except InjectedFailure:
        counts.captures += 1
        # after the last operation of a segment the state is that before the first one of the next
        counts.note(Present.of(step.machine.memory) == states[done], f"capture {number} under {engine.label}")
    step.close()
    return store.fired


def _fails_backward(step: Step, store: FailingStore, number: int, final: Present, counts: Injected) -> bool:
    store.arm(number)
    try:
        step.backward(retain=True)
    except InjectedFailure:
        counts.restores += 1
        meter = step.retention.meter
        intact = Present.of(step.machine.memory) == final and meter.transient_bytes == 0
        counts.note(intact, f"restore {number} under {step.engine.label}")
        return True
    return store.fired
