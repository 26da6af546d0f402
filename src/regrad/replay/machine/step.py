"""A training step of the machine under an engine: forward, then backward by replaying segments, newest first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrad.core.errors import UndeclaredWrite, VersionDropped
from regrad.replay.contract import Fingerprint, Moment, ReplayContract
from regrad.replay.derivatives.reverse import Adjoints
from regrad.replay.log import AccessLog
from regrad.replay.machine.memory import Bookkeeping
from regrad.replay.machine.record import record
from regrad.replay.machine.run import Inputs, Machine, Program
from regrad.replay.machine.tape import Tape
from regrad.replay.place import Place, SameMemory
from regrad.replay.ranges import Ranges
from regrad.replay.retention import Engine, Retention, Subject
from regrad.replay.spec import StateSpec
from regrad.replay.store import Store


@dataclass(frozen=True)
class Job:
    """A program with its inputs, and what one observed run says of it: its log, its state, what each segment owes."""

    program: Program
    inputs: Inputs

    @cached_property
    def log(self) -> AccessLog:
        """What the program does to its state."""
        return record(self.program, self.inputs)

    @cached_property
    def spec(self) -> StateSpec:
        """All of its storages and generators, as declared."""
        return StateSpec.declared(dict(self.program.storages), [name for name, _ in self.program.generators])

    def owed(self, segment: int, engine: Engine) -> tuple[Ranges, Ranges, tuple[str, ...]]:
        """Bytes that a replay under ``engine`` owes at entry and exit of ``segment``, and the generators."""
        if engine.restores_everything:
            return self.spec.ranges, self.spec.ranges, self.log.segments[segment].generators
        log = self.log.segments[segment]
        return tuple(log.read_at_entry()), tuple(log.written()), log.generators


class Step:
    """One forward and its backwards.

    With ``audit`` every replay is held to its contract at entry and exit (:class:`ContractViolated`). With
    ``keep_refused`` a segment that the engine refuses keeps its activations, as eager would, and is counted in the
    meter's ``kept_segments``; otherwise the refusal is raised. ``store`` stands between the engine and the memory (for
    injected faults); ``spec`` is the state that the engine is told of. ``width`` is the float of the adjoints.

    Any :class:`ReplayError` out of :meth:`backward` leaves the present intact; so does any other exception.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        *,
        place: Place | None = None,
        audit: bool = True,
        keep_refused: bool = False,
        store: Store | None = None,
        machine: Machine | None = None,
        spec: StateSpec | None = None,
        width: type[np.floating[Any]] = np.float64,
    ) -> None:
        self.job, self.engine = job, engine
        self.machine = machine or Machine(job.program, job.inputs)
        self.store: Store = store or self.machine.memory
        subject = Subject(
            self.store, spec or job.spec, job.program.names, place or SameMemory(), self.machine.memory.version_at
        )
        self.retention: Retention = engine.open(subject)
        self._audit, self._keep_refused, self._width = audit, keep_refused, width
        self._tapes: dict[int, Tape] = {}
        self._books: dict[int, Bookkeeping] = {}
        self._contracts: dict[int, ReplayContract] = {}
        self._output: NDArray[np.int64] | None = None
        self.saved_operations = 0

    def forward(self) -> float:
        """Run all segments and return the loss."""
        for segment in range(len(self.job.program.segments)):
            self._forward_of(segment)
        output = self.job.program.output
        self.machine.memory.check(output)
        cells = self.machine.memory.cells_of(output)[:, 0].copy()
        cells[~self.machine.memory.cell_active[cells]] = -1
        self._output = cells
        values = self.machine.memory.array(output).astype(np.float64)
        return float(np.dot(values, np.asarray(self.job.program.weights)))

    def _forward_of(self, segment: int) -> None:
        memory, engine = self.machine.memory, self.engine
        self.retention.enter(segment)
        self._books[segment] = memory.bookkeeping()
        owed = self.job.owed(segment, engine) if self._audit and engine.replays else None
        entry = None if owed is None else Fingerprint.take(memory, owed[0], owed[2])
        tape = Tape() if self._keep_refused or not engine.replays else None
        self.machine.run(segment, self.retention, tape)
        keep = not engine.replays
        try:
            self.retention.leave()
        except UndeclaredWrite:
            if not self._keep_refused:
                raise
            keep = True
        if keep and tape is not None:
            self._tapes[segment] = tape
            self.saved_operations += tape.saved_operations
            self.retention.keep_activations(segment, tape.saved_bytes)
        elif owed is not None and entry is not None:
            exit_ = Fingerprint.take(memory, owed[1], owed[2])
            self._contracts[segment] = ReplayContract(self.job.program.names[segment], entry, exit_)

    def backward(self, *, retain: bool = False) -> NDArray[np.float64]:
        """The gradient of the loss, one number per coordinate of the inputs in their order.

        With ``retain`` another backward may follow; without it a second one raises :class:`VersionDropped`.
        """
        if self._output is None:
            raise VersionDropped("there is nothing to go back from: the forward has not run", version="of the loss")
        adjoints = Adjoints(self.machine.memory.cells, self._width)
        adjoints.seed(self._output, self.job.program.weights)
        try:
            for segment in reversed(range(len(self.job.program.segments))):
                tape = self._tapes[segment] if segment in self._tapes else self.replay(segment)
                adjoints.accumulate(tape, self.job.program.names)
                if not retain:
                    self._tapes.pop(segment, None)
                    self.retention.release(segment)
        finally:
            self.retention.rest()
        return np.concatenate([adjoints.values[cells] for cells in self.machine.input_cells]).astype(np.float64)

    def replay(self, segment: int) -> Tape:
        """Run ``segment`` again from what it found, and return its tape. The present is back when this returns."""
        memory, tape, contract = self.machine.memory, Tape(), self._contracts.get(segment)
        present = memory.bookkeeping()
        with self.retention.replaying(segment):
            try:
                memory.set_bookkeeping(self._books[segment])
                if contract is not None:
                    contract.enforce(memory, Moment.ENTRY, memory.version_at)
                self.machine.run(segment, self.retention, tape)
                if contract is not None:
                    contract.enforce(memory, Moment.EXIT, memory.version_at)
            finally:
                memory.set_bookkeeping(present)
        self.saved_operations += tape.saved_operations
        return tape

    def close(self) -> None:
        """Give up all retained bytes."""
        self._tapes.clear()
        self._books.clear()
        self.retention.close()
