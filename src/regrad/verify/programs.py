"""Random programs for the suites, each with what a hidden state can do to a replay.

By construction every program has at least three segments and sixteen writes, an overlapping copy, a draw, several views
of one storage, and a first segment that reads, inside a nonlinearity, a version of the state that later writes replace.
:mod:`regrad.verify.shape` counts that this is so. Contents, windows, coefficients and order are drawn from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from regrad.replay.machine.program import (
    Affine,
    Copy,
    IntegerWrite,
    Nonlinearity,
    Operation,
    Program,
    Scatter,
    Segment,
    Unannounced,
)
from regrad.replay.machine.run import Inputs
from regrad.replay.machine.step import Job
from regrad.replay.machine.views import View

WIDTH = 8  # elements of an activation
STATE = 24  # elements of the buffer that all segments share
BANK = 16  # elements of the bank that is scattered into
CURVES = (Nonlinearity.TANH, Nonlinearity.SIN, Nonlinearity.SIGMOID, Nonlinearity.BELL)

X = View("x", "float64", 0, WIDTH)
H = View("h", "float64", 0, WIDTH)
WHOLE_STATE = View("state", "float64", 0, STATE)
WHOLE_BANK = View("bank", "float64", 0, BANK)
SLOTS = View("index", "int64", 0, 4)
COUNTER = View("index", "int64", 32, 1)
CODES = View("index", "int32", 40, WIDTH)
SINGLE = View("single", "float32", 0, 2 * WIDTH)


@dataclass(frozen=True, slots=True)
class Flavour:
    """What a program may contain beyond the common kinds.

    ``single``: float32 on the way of the gradient. ``raw``: bytes read and moved as another type than they were written
    as, which has exact bytes and no gradient.
    """

    single: bool = False
    raw: bool = False


def random_job(suite: int, number: int, flavour: Flavour | None = None) -> Job:
    """Program ``number`` of suite ``suite``: the same values always give the same program and inputs."""
    random = np.random.default_rng([suite, number])
    flavour = flavour if flavour is not None else Flavour(single=bool(random.integers(2)))
    return _Author(random, flavour).job()


def with_unannounced_write(job: Job) -> Job:
    """``job`` whose second segment also changes state without telling anyone: bytes that it does not write otherwise."""
    program, own = job.program, job.log.segments[1].written()
    spots = (View(v.storage, "float64", int(at), 1) for v in reversed(program.inputs) for at in v.starts)
    hidden = next(spot for spot in spots if own.missing(spot.span) == [spot.span])
    segments = list(program.segments)
    extra = Unannounced(Affine(hidden, ((hidden, 0.5),), Nonlinearity.TANH))
    segments[1] = Segment(segments[1].name, (*segments[1].operations, extra))
    return Job(replace(program, segments=tuple(segments)), job.inputs)


class _Author:
    """Writes one program."""

    def __init__(self, random: np.random.Generator, flavour: Flavour) -> None:
        self.random, self.flavour = random, flavour
        self.focus = int(random.integers(3, STATE - WIDTH - 2))  # the part of the state that everyone comes back to

    def job(self) -> Job:
        count = int(self.random.integers(3, 6))
        segments = [self._segment(index, count) for index in range(count)]
        weights = tuple(float(w) for w in self.random.choice([-1.0, -0.5, 0.5, 1.0], WIDTH))
        program = Program(
            storages=(("x", 64), ("h", 64), ("state", 192), ("bank", 128), ("index", 80), ("single", 64)),
            generators=(("noise", int(self.random.integers(2**31))), ("other", int(self.random.integers(2**31)))),
            inputs=(X, WHOLE_STATE, WHOLE_BANK),
            segments=tuple(segments),
            output=H,
            weights=weights,
        )
        return Job(program, self._inputs())

    def _inputs(self) -> Inputs:
        normal = self.random.standard_normal
        return (
            (X, 0.8 * normal(WIDTH)),
            (WHOLE_STATE, 0.8 * normal(STATE)),
            (WHOLE_BANK, 0.8 * normal(BANK)),
            (SLOTS, self.random.permutation(BANK)[:4]),
            (COUNTER, np.zeros(1, np.int64)),
            (CODES, np.zeros(WIDTH, np.int32)),
            (SINGLE, np.zeros(2 * WIDTH, np.float32)),
        )

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _segment(self, index: int, count: int) -> Segment:
        source = X if index == 0 else H
        middle = [self._kind(kind) for kind in self.random.permutation(self._kinds(index))]
        operations: list[Operation] = [self._read_state(source), *middle, self._write_state(index)]
        if index == count - 1:
            operations.append(self._affine(H, (H, self._window(), self._bank()), curve=False))
        return Segment(f"segment {index}", tuple(operations))

    def _kinds(self, index: int) -> list[str]:
        must = (
            [["draw", "copy", "counter"], ["scatter", "draw"], ["mix", "accumulate"]][index] if index < 3 else ["mix"]
        )
        more = ["mix", "mix", "draw", "copy", "scatter", "accumulate", "counter", "codes"]
        more += ["single"] * (3 * self.flavour.single) + ["raw"] * (3 * self.flavour.raw)
        kinds = must + [str(kind) for kind in self.random.choice(more, int(self.random.integers(2, 5)))]
        if self.flavour.single and index == 1:
            kinds.append("single")
        if self.flavour.raw and index == 0:
            kinds.append("raw")
        return kinds

    def _kind(self, kind: str) -> Operation:
        made: Operation = getattr(self, f"_{kind}")()
        return made

    def _coefficient(self) -> float:
        return float(self.random.uniform(0.4, 1.1) * self.random.choice([-1, 1]))

    def _curve(self) -> Nonlinearity:
        return CURVES[int(self.random.choice(len(CURVES), p=[0.4, 0.3, 0.15, 0.15]))]

    def _window(self, count: int = WIDTH) -> View:
        stride = int(self.random.integers(1, 1 + min(3, (STATE - 1) // (count - 1))))
        offset = int(self.random.integers(0, STATE - stride * (count - 1)))
        return View("state", "float64", 8 * offset, count, 8 * stride)

    def _bank(self) -> View:
        stride = int(self.random.integers(1, 3))
        offset = int(self.random.integers(0, BANK - stride * (WIDTH - 1)))
        return View("bank", "float64", 8 * offset, WIDTH, 8 * stride)

    def _near_focus(self) -> View:
        return View("state", "float64", 8 * (self.focus + int(self.random.integers(-2, 3))), WIDTH)

    def _affine(self, target: View, sources: tuple[View, ...], noise: float = 0.0, curve: bool = True) -> Affine:
        terms = tuple((view, self._coefficient()) for view in sources)
        generator = str(self.random.choice(["noise", "noise", "other"])) if noise else ""
        return Affine(target, terms, self._curve() if curve else Nonlinearity.IDENTITY, noise, generator)

    def _read_state(self, source: View) -> Affine:
        terms = ((source, self._coefficient()), (self._near_focus(), self._coefficient()))
        return Affine(H, terms, Nonlinearity.TANH)

    def _write_state(self, index: int) -> Affine:
        target = self._near_focus()
        terms = ((H, self._coefficient()), (target, 0.5 * self._coefficient()))
        return Affine(target, terms, Nonlinearity.SIN if index % 2 else Nonlinearity.IDENTITY)

    def _mix(self) -> Affine:
        target = (H, self._window(), self._bank())[int(self.random.integers(3))]
        return self._affine(target, (H, self._window()))

    def _draw(self) -> Affine:
        target = (H, self._window())[int(self.random.integers(2))]
        return self._affine(target, (H, self._near_focus()), noise=float(self.random.uniform(0.3, 0.8)))

    def _copy(self) -> Copy:
        shift = int(self.random.integers(1, 5))
        length = int(self.random.integers(shift + 2, STATE - shift))
        offset = int(self.random.integers(0, STATE - shift - length + 1))
        low = View("state", "float64", 8 * offset, length)
        high = View("state", "float64", 8 * (offset + shift), length)
        return Copy(low, high) if self.random.integers(2) else Copy(high, low)

    def _scatter(self, accumulate: bool = False) -> Scatter:
        target = View("bank", "float64", 0, BANK)
        source = View("h", "float64", 8 * int(self.random.integers(0, 5)), 4)
        return Scatter(target, SLOTS, source, self._coefficient(), self._curve(), accumulate)

    def _accumulate(self) -> Scatter:
        return self._scatter(accumulate=True)

    def _counter(self) -> IntegerWrite:
        if self.random.integers(2):
            return IntegerWrite(COUNTER, COUNTER, add=1)
        return IntegerWrite(SLOTS, SLOTS, add=int(self.random.integers(1, BANK)), modulus=BANK)

    def _codes(self) -> IntegerWrite:
        return IntegerWrite(CODES, H, scale=4.0, modulus=int(self.random.integers(3, 9)))

    def _single(self) -> Affine:
        view = View("single", "float32", 4 * int(self.random.integers(0, WIDTH)), WIDTH)
        return self._affine(view, (H, view)) if self.random.integers(2) else self._affine(H, (H, view))

    def _raw(self) -> Operation:
        if self.random.integers(2):
            # the bytes of the state as small integers
            source = View("state", "uint8", int(self.random.integers(0, 150)), WIDTH, int(self.random.integers(1, 6)))
            return IntegerWrite(CODES, source, modulus=251)
        length, shift = int(self.random.integers(9, 60)), int(self.random.integers(1, 8))
        offset = int(self.random.integers(0, 64 - length - shift + 1)) if length + shift < 64 else 0
        length = min(length, 64 - shift - offset)
        low, high = View("single", "uint8", offset, length), View("single", "uint8", offset + shift, length)
        return Copy(low, high) if self.random.integers(2) else Copy(high, low)
