"""Bad programs: a typed error that names segment, bytes and version, and nothing written."""

from __future__ import annotations

import numpy as np
import pytest

from regrad.core.errors import ReplayError, UnsupportedGradient, UnwrittenRead, UsageError, ViewOutOfRange
from regrad.replay import Journal
from regrad.replay.machine.memory import Generator, Memory
from regrad.replay.machine.program import Affine, Copy, IntegerWrite, Program, Scatter, Segment
from regrad.replay.machine.run import Machine
from regrad.replay.machine.step import Job, Step
from regrad.replay.machine.views import View

X = View("x", "float64", 0, 4)
H = View("h", "float64", 0, 4)
INDEX = View("i", "int64", 0, 4)
STORAGES = (("x", 32), ("h", 32), ("i", 32))


def job_of(*operations, inputs=((X, [0.1, 0.2, 0.3, 0.4]), (INDEX, [0, 1, 2, 3])), storages=STORAGES, output=H):
    weights = (1.0,) * output.count
    given = tuple((view, np.array(values)) for view, values in inputs)
    return Job(Program(storages, (("noise", 1),), (X,), (Segment("only", operations),), output, weights), given)


def fails(job, kind):
    """The error of the forward; the state must be what it was before the operation that raised."""
    machine = Machine(job.program, job.inputs)
    states = [machine.memory.copy_bytes()]
    machine.on_operation = lambda segment, operation: states.append(machine.memory.copy_bytes())
    with pytest.raises(kind) as caught:
        machine.run(0)
    assert machine.memory.copy_bytes() == states[-1]
    return caught.value


def test_a_read_of_what_no_one_wrote():
    error = fails(job_of(Affine(H, ((X, 1.0),)), Copy(View("h", "float64", 0, 2), View("s", "float64", 8, 2)),
                         storages=(*STORAGES, ("s", 64))), UnwrittenRead)  # fmt: skip
    assert error.segment == "only, operation 1"
    assert error.where == "s[8:9]"
    assert error.version == "none"
    assert "byte 8" in str(error)


def test_a_read_of_bytes_half_of_which_are_written():
    error = fails(job_of(Affine(H, ((View("x", "float64", 0, 4), 1.0),)), Affine(H, ((View("s", "float64", 4, 4), 1.0),)),
                         inputs=((X, [1.0] * 4), (View("s", "float64", 0, 4), [1.0] * 4)),
                         storages=(*STORAGES, ("s", 64))), UnwrittenRead)  # fmt: skip
    assert error.where == "s[32:33]"


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        (Affine(H, ((View("x", "float64", 8, 4), 1.0),)), "reaches byte 40 of a storage of 32"),
        (Affine(View("h", "float64", 1, 4), ((X, 1.0),)), "reaches byte 33"),
        (Copy(View("nowhere", "float64", 0, 4), X), "no storage 'nowhere'"),
        (Copy(View("h", "float64", 0, 4, 4), X), "overlaps itself"),
        (Affine(View("i", "int64", 0, 4), ((X, 1.0),)), "needs a floating-point view"),
        (IntegerWrite(H, INDEX), "needs an integer view"),
        (Copy(View("h", "float32", 0, 4), X), "count and dtype must be the same"),
        (Affine(H, ((View("x", "float64", 0, 3), 1.0),)), "has 3 elements, its target 4"),
        (Scatter(View("h", "float64", 0, 3), INDEX, X), "index 3 of a scatter is 3"),
        (Scatter(H, X, X), "not an integer view"),
        (Affine(H, ((X, 1.0),), noise=1.0, generator="other"), "no generator 'other'"),
    ],
)
def test_bad_views(operation, says):
    error = fails(job_of(operation), ViewOutOfRange)
    assert says in str(error)
    assert error.exit_code == UsageError.exit_code
    assert "segment only, operation 0" in str(error)


@pytest.mark.parametrize(
    "values", [("float16", 0, 1, 0), ("float64", -8, 1, 0), ("float64", 0, 0, 0), ("float64", 0, 1, -8)]
)
def test_a_view_that_cannot_be(values):
    with pytest.raises(ViewOutOfRange):
        View("s", *values)


def test_weights_of_another_length():
    with pytest.raises(ViewOutOfRange, match="as many weights"):
        Program(STORAGES, (), (X,), (), H, (1.0,))


def test_a_view_that_overlaps_itself_can_be_read():
    step = Step(
        job_of(Affine(H, ((View("x", "float64", 0, 4, 0), 0.0), (View("x", "uint8", 0, 4, 1), 1.0)))), Journal()
    )
    step.forward()
    assert step.machine.memory.array(H)[0] == np.array([0.1]).view(np.uint8)[0]


def unsupported(*operations):
    """The refusal of a backward; the present must be intact."""
    step = Step(job_of(*operations), Journal())
    step.forward()
    before = step.machine.memory.copy_bytes(), step.machine.memory.copy_generators(), dict(step.machine.memory.counters)
    with pytest.raises(UnsupportedGradient) as caught:
        step.backward()
    after = step.machine.memory.copy_bytes(), step.machine.memory.copy_generators(), dict(step.machine.memory.counters)
    assert after == before
    return caught.value


def test_a_gradient_through_an_integer_write():
    error = unsupported(Affine(H, ((X, 1.0),)), IntegerWrite(INDEX, H, scale=8.0), Affine(H, ((INDEX, 0.5),)))
    assert error.segment == "only, operation 1"
    assert error.where == "i[0:32]"
    assert error.version == "v2"


def test_a_gradient_through_a_copy_between_integer_views():
    as_integers = (View("h", "int64", 0, 4), View("x", "int64", 0, 4))
    error = unsupported(Affine(H, ((X, 1.0),)), Copy(*as_integers))
    assert error.segment == "only, operation 1"


def test_a_gradient_through_bytes_taken_for_another_type():
    single = View("x", "float32", 0, 4)
    error = unsupported(Affine(H, ((single, 1e-30),)))
    assert "not written as the type" in str(error)
    assert error.where == "x[0:4]"
    assert error.version == "v0"


def test_half_an_element_is_no_version():
    # one byte in the middle of x[1] is overwritten: whatever it means now, it is no function with a derivative
    poke = Copy(View("x", "uint8", 11, 1), View("i", "uint8", 0, 1))
    assert unsupported(poke, Affine(H, ((X, 1.0),))).where == "x[8:16]"


def test_integers_that_depend_on_no_input_are_constants():
    step = Step(job_of(IntegerWrite(INDEX, INDEX, add=1), Affine(H, ((X, 2.0), (INDEX, 0.5)))), Journal())
    step.forward()
    assert step.backward().tolist() == [2.0] * 4


def test_an_integer_write_off_the_path_is_allowed():
    step = Step(job_of(Affine(H, ((X, 3.0),)), IntegerWrite(INDEX, H)), Journal())
    step.forward()
    assert step.backward().tolist() == [3.0] * 4


def test_a_scatter_with_an_index_twice():
    inputs = ((X, [0.1, 0.2, 0.3, 0.4]), (INDEX, [1, 1, 2, 1]), (H, [0.0] * 4))
    last = Step(job_of(Scatter(H, INDEX, X, 2.0), inputs=inputs), Journal())
    last.forward()
    assert last.machine.memory.array(H).tolist() == [0.0, 0.8, 0.6, 0.0]
    assert last.backward().tolist() == [0.0, 0.0, 2.0, 2.0]
    total = Step(job_of(Scatter(H, INDEX, X, 2.0, accumulate=True), inputs=inputs), Journal())
    total.forward()
    assert total.backward().tolist() == [2.0] * 4


def test_an_input_without_values():
    with pytest.raises(ViewOutOfRange, match="given no floating-point values"):
        Machine(job_of(inputs=((H, [0.0] * 4),)).program, ())


def test_a_generators_state_is_all_of_it():
    one = Generator(3)
    one.normal(7)
    state = one.state
    right = one.normal(5)
    two = Generator(99)
    two.state = state
    assert two.normal(5).tobytes() == right.tobytes()
    with pytest.raises(ReplayError, match="40 bytes"):
        two.state = b"short"


def test_quiet_writes_do_not_count():
    memory = Memory({"a": 8}, {})
    where = View("a", "float64", 0, 1).span
    with memory.quiet(), memory.quiet():
        memory.write(where, memory.read(where))
    assert memory.counters == {"a": 0}
    memory.write(where, memory.read(where))
    assert memory.counters == {"a": 1}
