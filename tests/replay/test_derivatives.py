"""Four derivatives that agree, and that notice when one of them is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from regrad.replay import Eager
from regrad.replay.derivatives import reverse
from regrad.replay.derivatives.complex_step import complex_step
from regrad.replay.derivatives.finite import directional
from regrad.replay.derivatives.forward import jacobian
from regrad.replay.machine.program import Affine, IntegerWrite, Nonlinearity, Program, Segment
from regrad.replay.machine.step import Job, Step
from regrad.replay.machine.views import View
from regrad.verify.programs import Flavour, random_job

X, H = View("x", "float64", 0, 3), View("h", "float64", 0, 3)
VALUES = np.array([-0.7, 0.2, 1.3])


def chain(*curves):
    """``h = curve(1.5 x)`` and so on, in one segment."""
    operations = [Affine(H, ((X if k == 0 else H, 1.5),), curve) for k, curve in enumerate(curves)]
    program = Program((("x", 24), ("h", 24)), (), (X,), (Segment("one", tuple(operations)),), H, (1.0, 2.0, -1.0))
    return Job(program, ((X, VALUES),))


def by_reverse(job):
    step = Step(job, Eager())
    step.forward()
    return step.backward()


def by_complex_step(job):
    return np.array([complex_step(job.program, job.inputs, c) for c in range(job.program.coordinates)])


@pytest.mark.parametrize("curve", list(Nonlinearity))
def test_each_nonlinearity_four_ways(curve):
    job = chain(curve, curve)
    right = jacobian(job.program, job.inputs).gradient
    assert np.abs(by_reverse(job) - right).max() < 1e-15
    assert np.abs(by_complex_step(job) - right).max() < 1e-15
    for direction in np.eye(3):
        assert directional(job.program, job.inputs, direction) == pytest.approx(right @ direction, abs=1e-10)


def test_a_known_derivative():
    found = by_reverse(chain(Nonlinearity.TANH))
    assert found == pytest.approx(1.5 * (1 - np.tanh(1.5 * VALUES) ** 2) * np.array([1.0, 2.0, -1.0]), rel=1e-15)


def test_they_do_not_share_their_mistakes(monkeypatch):
    """A wrong slope in the reverse pass stands against the three others."""
    job = chain(Nonlinearity.TANH, Nonlinearity.SIN)
    right = by_reverse(job)
    monkeypatch.setattr(reverse, "slope", lambda function, z: np.ones_like(z))
    assert np.abs(by_reverse(job) - right).max() > 0.1
    assert np.abs(jacobian(job.program, job.inputs).gradient - right).max() < 1e-15
    assert np.abs(by_complex_step(job) - right).max() < 1e-15


def test_the_jacobian_itself():
    found = jacobian(*(lambda job: (job.program, job.inputs))(chain(Nonlinearity.IDENTITY)))
    assert np.array_equal(found.matrix, 1.5 * np.eye(3))
    assert found.loss == pytest.approx(1.5 * (VALUES @ [1.0, 2.0, -1.0]))


def test_forward_mode_marks_what_has_no_derivative():
    view = View("i", "int64", 0, 3)
    operations = (Affine(H, ((X, 1.0),)), IntegerWrite(view, H), Affine(H, ((view, 1.0),)))
    program = Program((("x", 24), ("h", 24), ("i", 24)), (), (X,), (Segment("one", operations),), H, (1.0,) * 3)
    assert np.isnan(jacobian(program, ((X, VALUES),)).gradient).all()


@pytest.mark.parametrize("number", range(8))
def test_the_interpreters_agree_on_bytes(number):
    job = random_job(31, number, Flavour(single=True))
    step = Step(job, Eager())
    step.forward()
    assert jacobian(job.program, job.inputs).storages == step.machine.memory.copy_bytes()


def test_every_coordinate_of_a_program():
    job = random_job(31, 1)
    assert np.abs(by_complex_step(job) - by_reverse(job)).max() < 1e-15


def test_the_order_of_the_differences_error():
    """Four times the step, 256 times the error: what is measured is a fourth-order formula and not noise."""
    job = chain(Nonlinearity.SIN, Nonlinearity.TANH)
    right, direction = jacobian(job.program, job.inputs).gradient, np.array([0.6, 0.0, 0.8])
    errors = [abs(directional(job.program, job.inputs, direction, step) - right @ direction) for step in (0.02, 0.08)]
    assert 180 < errors[1] / errors[0] < 340
