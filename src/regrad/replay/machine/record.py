"""The access log of a program: run it once, and write down which bytes of which versions each operation touched."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from regrad.replay.log import Access, AccessLog, Draw, Read, SegmentLog, Version, Write
from regrad.replay.machine.memory import Memory
from regrad.replay.machine.run import Inputs, Machine, Program
from regrad.replay.ranges import ByteRange, Ranges


def record(program: Program, inputs: Inputs) -> AccessLog:
    """Run ``program`` on ``inputs`` and return what it did to its state. Cost: one run, and one pass over its reads."""
    machine = Machine(program, inputs)
    segments = []
    for index, name in enumerate(program.names):
        recorder = _Recorder(machine, program.first_write[index])
        machine.on_operation = recorder.next
        machine.run(index, recorder)
        segments.append(SegmentLog(name, tuple(recorder.accesses)))
    generators = tuple((name, len(machine.memory.get_generator(name))) for name, _ in program.generators)
    return AccessLog(program.storages, generators, tuple(segments))


def split(memory: Memory, where: ByteRange) -> list[tuple[ByteRange, Version]]:
    """``where`` in parts that are each of one version."""
    writes = memory.cell_write[memory.names[where.storage][where.start : where.stop]]
    cuts = [0, *(np.flatnonzero(np.diff(writes)) + 1).tolist(), where.nbytes]
    return [
        (ByteRange(where.storage, where.start + a, where.start + b), Version(int(writes[a]))) for a, b in pairwise(cuts)
    ]


class _Recorder:
    def __init__(self, machine: Machine, first_write: int) -> None:
        self._memory, self._first, self._operation, self._operand = machine.memory, first_write, 0, 0
        self.accesses: list[Access] = []

    def next(self, segment: int, operation: int) -> None:
        self._operation, self._operand = operation + 1, 0

    def before_read(self, ranges: Ranges) -> None:
        for where in ranges:
            for part, version in split(self._memory, where):
                self.accesses.append(Read(self._operation, part, version, self._operand))
        self._operand += 1

    def before_write(self, ranges: Ranges) -> None:
        version = Version(self._first + self._operation)
        self.accesses += [Write(self._operation, where, version) for where in ranges]

    def before_draw(self, generator: str) -> None:
        self.accesses.append(Draw(self._operation, generator))
