"""Small programs to break, and engines by name."""

from __future__ import annotations

import numpy as np
import pytest

from regrad.replay import Accounting, Eager, Guarded, Journal, ReadSet, Snapshot
from regrad.replay.machine.program import Affine, Copy, Nonlinearity, Program, Segment
from regrad.replay.machine.step import Job
from regrad.replay.machine.views import View

REPLAYING = [
    Snapshot(),
    Journal(),
    Journal(stays_back=True),
    Journal(Accounting.UNION),
    ReadSet(),
    Guarded(Journal()),
    Guarded(Snapshot()),
    Guarded(ReadSet()),
]
ALL_ENGINES = [Eager(), *REPLAYING]


@pytest.fixture(params=REPLAYING, ids=lambda engine: engine.label)
def engine(request):
    """Every engine that runs segments again."""
    return request.param


@pytest.fixture(params=ALL_ENGINES, ids=lambda engine: engine.label)
def any_engine(request):
    """Every engine."""
    return request.param


def small_program(*extra, storages=(("x", 32), ("h", 32), ("state", 64))):
    """Three segments: read the state inside a tanh with noise, move it over itself, overwrite it. ``extra`` ends it."""
    x, h = View("x", "float64", 0, 4), View("h", "float64", 0, 4)
    low, high = View("state", "float64", 0, 4), View("state", "float64", 16, 4)
    tanh = Nonlinearity.TANH
    return Program(
        storages=storages,
        generators=(("noise", 5),),
        inputs=(x, View("state", "float64", 0, 8)),
        segments=(
            Segment("first", (Affine(h, ((x, 0.9), (low, 0.8)), tanh, 0.3, "noise"), Affine(high, ((h, 0.7),)))),
            Segment("second", (Copy(low, high), Affine(h, ((h, 1.1), (high, -0.6)), tanh, 0.2, "noise"))),
            Segment(
                "third", (Affine(low, ((h, 1.0), (low, 0.5)), tanh), Affine(h, ((h, 0.9), (low, 0.8)), tanh), *extra)
            ),
        ),
        output=h,
        weights=(1.0, -1.0, 0.5, 1.0),
    )


def small_inputs():
    """What :func:`small_program` is given."""
    random = np.random.default_rng(3)
    state = View("state", "float64", 0, 8)
    return (View("x", "float64", 0, 4), random.standard_normal(4)), (state, random.standard_normal(8))


@pytest.fixture
def make_job():
    """``make_job(*operations)``: the small program with ``operations`` at its end."""
    return lambda *extra, **settings: Job(small_program(*extra, **settings), small_inputs())


@pytest.fixture
def job(make_job):
    """The small program with its inputs."""
    return make_job()
