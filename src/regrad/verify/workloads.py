"""Three workloads with aliases, as hidden state comes in practice: a queue, a scattered bank, overlapping views.

Each has four segments and exactly sixteen saved operations (operations inside a nonlinearity), and reads the buffer
through views that share bytes with what it writes. Floats, counters and pointers live in one storage; the counters are
also read as single bytes, and the suite looks at the whole through views of four types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from regrad.replay.machine.program import Affine, Copy, IntegerWrite, Nonlinearity, Operation, Program, Scatter, Segment
from regrad.replay.machine.run import Inputs
from regrad.replay.machine.step import Job
from regrad.replay.machine.views import View

SAVED_OPERATIONS = 16
SEGMENTS = 4
ROW = 6  # elements of an activation, and of a row
ROWS = 8
ELEMENTS = ROW * ROWS
END = 8 * ELEMENTS  # the floats end here, integers follow in the same storage

X = View("x", "float64", 0, ROW)
H = View("h", "float64", 0, ROW)
BUFFER = View("buffer", "float64", 0, ELEMENTS)
PAIR = View("buffer", "int64", END, 2)
POINTER = View("buffer", "int64", END + 16, ROW)
BYTES = View("buffer", "uint8", 0, END + 16 + 8 * ROW)
ALIASES = (BUFFER, BYTES, View("buffer", "float64", 8, ELEMENTS // 2, 16), View("buffer", "int32", 0, END // 4))
CODES = View("codes", "int64", 0, ROW)

Maker = Callable[[np.random.Generator, int], list[Operation]]


def workload(name: str, seed: int, draw: int) -> Job:
    """The workload called ``name`` (queue, scatter, overlap): the program by ``seed``, its contents by ``draw`` too."""
    kind = list(WORKLOADS).index(name)
    random = np.random.default_rng([kind, seed])
    segments = []
    for index in range(SEGMENTS):
        operations = WORKLOADS[name](random, index)
        operations += [IntegerWrite(PAIR, PAIR, add=1), Affine(H, ((H, 1.0), (HALVES_AS_NUMBERS, 0.0)))]
        segments.append(Segment(f"{name} {index}", tuple(operations)))
    program = Program(
        storages=(("x", 8 * ROW), ("h", 8 * ROW), ("buffer", END + 16 + 8 * ROW), ("codes", 8 * ROW)),
        generators=(("noise", int(random.integers(2**31))),),
        inputs=(X, BUFFER),
        segments=tuple(segments),
        output=H,
        weights=tuple(float(w) for w in random.choice([-1.0, -0.5, 0.5, 1.0], ROW)),
    )
    return Job(program, _inputs(np.random.default_rng([kind, seed, draw]), name))


def with_integer_write(job: Job) -> Job:
    """``job`` whose last activation is rounded to integers and read back, with its gradient asked for."""
    last = job.program.segments[-1]
    extra = (IntegerWrite(CODES, H, scale=8.0), Affine(H, ((CODES, 0.125), (H, 0.5))))
    segments = (*job.program.segments[:-1], Segment(last.name, last.operations + extra))
    return Job(replace(job.program, segments=segments), job.inputs)


def _inputs(random: np.random.Generator, name: str) -> Inputs:
    row = ROW * int(random.integers(ROWS)) + np.arange(ROW)
    pointers = row if name == "queue" else random.permutation(ELEMENTS)[:ROW]
    return (
        (X, 0.8 * random.standard_normal(ROW)),
        (BUFFER, 0.8 * random.standard_normal(ELEMENTS)),
        (PAIR, random.integers(0, 2**40, 2)),
        (POINTER, pointers),
        (CODES, np.zeros(ROW, np.int64)),
    )


# six bytes of the pair, each read as a number: another type, another stride, the same storage
HALVES_AS_NUMBERS = View("buffer", "uint8", END, ROW, 2)


def _coefficient(random: np.random.Generator) -> float:
    return float(random.uniform(0.4, 1.1) * random.choice([-1, 1]))


def _window(random: np.random.Generator) -> View:
    stride = int(random.integers(1, 4))
    return View("buffer", "float64", 8 * int(random.integers(0, ELEMENTS - stride * (ROW - 1))), ROW, 8 * stride)


def _read(random: np.random.Generator, index: int, view: View, noise: float = 0.0) -> Affine:
    source = X if index == 0 else H
    terms = ((source, _coefficient(random)), (view, _coefficient(random)))
    return Affine(H, terms, Nonlinearity.TANH, noise, "noise" if noise else "")


def _queue(random: np.random.Generator, index: int) -> list[Operation]:
    """Read rows by fixed views, push two rows at the pointer, advance it; a stretch of the ring moves over itself."""
    return [
        _read(random, index, _window(random)),
        _read(random, 1, _window(random), noise=0.4),
        Scatter(BUFFER, POINTER, H, _coefficient(random), Nonlinearity.SIN),
        IntegerWrite(POINTER, POINTER, add=ROW, modulus=ELEMENTS),
        Scatter(BUFFER, POINTER, H, _coefficient(random), Nonlinearity.BELL),
        IntegerWrite(POINTER, POINTER, add=ROW, modulus=ELEMENTS),
        _overlapping_copy(random, longest=2 * ROW),
    ]


def _scatter(random: np.random.Generator, index: int) -> list[Operation]:
    """Read scattered elements by strided views, then write where the pointers say, and move the pointers."""
    return [
        _read(random, index, _window(random), noise=0.4),
        Scatter(BUFFER, POINTER, H, _coefficient(random), Nonlinearity.TANH),
        IntegerWrite(POINTER, POINTER, add=int(random.integers(1, ELEMENTS)), modulus=ELEMENTS),
        _read(random, 1, _window(random)),
        Scatter(BUFFER, POINTER, H, _coefficient(random), Nonlinearity.SIN, accumulate=True),
        _overlapping_copy(random),
    ]


def _overlap(random: np.random.Generator, index: int) -> list[Operation]:
    """Views that share elements with each other are read and written in turn."""
    start = 8 * int(random.integers(4, ELEMENTS - 2 * ROW - 4))
    first, second = View("buffer", "float64", start, ROW), View("buffer", "float64", start + 16, ROW)
    strided = View("buffer", "float64", start, ROW, 16)
    return [
        _read(random, index, first),
        Affine(second, ((first, _coefficient(random)), (H, _coefficient(random))), Nonlinearity.SIN),
        _read(random, 1, strided, noise=0.4),
        Affine(strided, ((second, _coefficient(random)), (H, _coefficient(random))), Nonlinearity.TANH),
        _overlapping_copy(random),
    ]


def _overlapping_copy(random: np.random.Generator, longest: int = ELEMENTS - 6) -> Copy:
    shift, length = int(random.integers(1, 5)), int(random.integers(8, longest))
    start = 8 * int(random.integers(0, ELEMENTS - length - shift + 1))
    low, high = View("buffer", "float64", start, length), View("buffer", "float64", start + 8 * shift, length)
    return Copy(low, high) if random.integers(2) else Copy(high, low)


WORKLOADS: dict[str, Maker] = {"queue": _queue, "scatter": _scatter, "overlap": _overlap}
