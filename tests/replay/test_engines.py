"""The semantic rules, engine by engine, on programs that would show a breach."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from regrad.core.errors import ContractViolated, PresentLost, UndeclaredWrite, VersionDropped
from regrad.replay import (
    Accounting,
    Eager,
    FilePlace,
    Guarded,
    HostMemory,
    Journal,
    Moment,
    Snapshot,
    StateSpec,
)
from regrad.replay.derivatives.forward import jacobian
from regrad.replay.machine.program import Affine, Nonlinearity, Unannounced
from regrad.replay.machine.step import Step
from regrad.replay.machine.tape import Tape
from regrad.replay.machine.views import View
from regrad.verify.checks import Expectation, Present, gradient_error, judge
from regrad.verify.programs import random_job, with_unannounced_write

STATE = View("state", "float64", 0, 1)


def after_forward(job, engine, **settings):
    step = Step(job, engine, **settings)
    step.forward()
    return step


def test_every_engine_gives_the_eager_gradient_to_the_bit(job, any_engine):
    right = after_forward(job, Eager()).backward()
    step = after_forward(job, any_engine)
    present = Present.of(step.machine.memory)
    assert step.backward().tobytes() == right.tobytes()
    assert Present.of(step.machine.memory) == present
    assert gradient_error(right, jacobian(job.program, job.inputs).gradient) < 1e-15


def test_it_really_replays(job, engine):
    step = after_forward(job, engine)
    step.backward()
    assert step.retention.meter.replays == 3
    assert step.retention.meter.peak_retained_bytes > 0
    assert step.retention.meter.peak_transient_bytes > 0


def test_eager_never_replays_and_its_bytes_are_its_arguments_and_noise(job):
    step = after_forward(job, Eager())
    assert step.saved_operations == 4
    assert step.retention.meter.retained_bytes == 4 * 32 + 2 * 32
    step.backward()
    assert step.retention.meter.replays == 0
    assert step.retention.meter.retained_bytes == 0


@pytest.mark.parametrize("number", range(6))
def test_random_programs(any_engine, number):
    outcome = judge(Expectation.of(random_job(11, number)), any_engine, 1.6e-15)
    assert outcome.verdict.value == "exact", outcome.why


def test_a_second_backward_needs_retained_state(job, any_engine):
    step = after_forward(job, any_engine)
    first, second = step.backward(retain=True), step.backward()
    assert first.tobytes() == second.tobytes()
    with pytest.raises(VersionDropped) as caught:
        step.backward()
    assert caught.value.segment == "third"
    assert caught.value.where is not None
    assert caught.value.version == "at the entry of third"


def test_a_backward_before_the_forward(job, any_engine):
    with pytest.raises(VersionDropped, match="has not run"):
        Step(job, any_engine).backward()


def test_a_segment_that_does_not_exist(job, engine):
    step = after_forward(job, engine)
    with pytest.raises(VersionDropped) as caught, step.retention.replaying(7):
        pass
    assert caught.value.segment == "7"


@pytest.mark.parametrize(("outer", "inner"), [(0, 2), (2, 0), (1, 1), (0, 1), (1, 2)])
def test_nested_replays(job, engine, outer, inner):
    expectation = Expectation.of(job)
    step = after_forward(job, engine)
    memory = step.machine.memory
    final = Present.of(memory)
    with step.retention.replaying(outer):
        step.machine.run(outer, step.retention, Tape())
        middle = Present.of(memory)
        with step.retention.replaying(inner):
            if engine.restores_everything:
                assert memory.copy_bytes() == expectation.entries[inner].storages
            step.machine.run(inner, step.retention, Tape())
        assert Present.of(memory) == middle
    step.retention.rest()
    assert Present.of(memory) == final


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_inside_a_replay(job, engine, at):
    step = after_forward(job, engine)
    final = Present.of(step.machine.memory)
    right = after_forward(job, engine).backward()

    def interrupt(segment, operation):
        if segment == at and operation == 0:
            raise KeyboardInterrupt

    step.machine.on_operation = interrupt
    with pytest.raises(KeyboardInterrupt):
        step.backward(retain=True)
    assert Present.of(step.machine.memory) == final
    step.machine.on_operation = lambda segment, operation: None
    assert step.backward().tobytes() == right.tobytes()


def test_a_replay_that_stops_early(job, engine):
    step = after_forward(job, engine)
    final = Present.of(step.machine.memory)
    right = after_forward(job, engine).backward()
    with step.retention.replaying(1):
        pass  # nothing of the segment ran
    step.retention.rest()
    assert Present.of(step.machine.memory) == final
    assert step.backward().tobytes() == right.tobytes()


def test_a_backward_in_another_thread(job, engine):
    step = after_forward(job, engine)
    final, right, found = Present.of(step.machine.memory), after_forward(job, engine).backward(), []
    thread = threading.Thread(target=lambda: found.append(step.backward()))
    thread.start()
    thread.join()
    assert found[0].tobytes() == right.tobytes()
    assert Present.of(step.machine.memory) == final


def test_replays_of_two_threads_wait_for_each_other(job, engine):
    step = after_forward(job, engine)
    final, inside, order = Present.of(step.machine.memory), threading.Event(), []

    def second():
        inside.wait()
        with step.retention.replaying(1):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with step.retention.replaying(2):
        inside.set()
        thread.join(timeout=0.05)
        order.append("first")
    thread.join()
    step.retention.rest()
    assert order == ["first", "second"]
    assert Present.of(step.machine.memory) == final


def test_version_counters_stand_still_in_the_backward(job, engine):
    step = after_forward(job, engine)
    before = dict(step.machine.memory.counters)
    assert before["state"] > 0
    step.backward()
    assert step.machine.memory.counters == before


@pytest.mark.parametrize("place", [HostMemory(), FilePlace()], ids=["host", "file"])
def test_any_engine_in_any_place(job, engine, place):
    here, there = after_forward(job, engine), after_forward(job, engine, place=place)
    assert there.backward().tobytes() == here.backward().tobytes()
    assert there.retention.meter.peak_retained_bytes == here.retention.meter.peak_retained_bytes
    there.close()


def test_nothing_is_held_after_the_last_backward(job, any_engine):
    step = after_forward(job, any_engine)
    step.backward()
    meter = step.retention.meter
    assert (meter.retained_bytes, meter.transient_bytes) == (0, 0)


def test_a_segment_that_is_not_a_function_of_its_state_breaks_its_contract(job, engine):
    step = after_forward(job, engine)
    final = Present.of(step.machine.memory)

    def meddle(segment, operation):
        if segment == 1 and operation == 0:
            array = step.machine.memory.array(View("state", "float64", 0, 1))
            array[0] += 1.0

    step.machine.on_operation = meddle
    with pytest.raises(ContractViolated) as caught:
        step.backward()
    assert caught.value.segment == "second"
    assert caught.value.violations[0].moment is Moment.EXIT
    assert "state" in str(caught.value.where)
    assert caught.value.version
    assert Present.of(step.machine.memory) == final


def test_the_contract_sees_a_generator_at_another_point(job):
    step = after_forward(job, Journal())
    expectation = Expectation.of(job)
    draw = step.machine.memory.generator("noise").normal
    step.machine.on_operation = lambda segment, operation: draw(operation)  # none after the first, one at the end
    with pytest.raises(ContractViolated) as caught:
        step.replay(1)
    assert [v.generator for v in caught.value.violations] == ["noise"]
    assert Present.of(step.machine.memory) == expectation.final


# --- guard and KEEP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [Journal(), Snapshot()], ids=lambda base: base.label)
def test_the_guard_refuses_an_unannounced_write(job, base):
    with pytest.raises(UndeclaredWrite) as caught:
        after_forward(with_unannounced_write(job), Guarded(base))
    assert caught.value.segment == "second"
    assert caught.value.where is not None
    assert caught.value.version


def test_without_a_guard_the_contract_sees_what_it_did(job):
    # the journal does not know of the write, so it restores too little
    step = after_forward(with_unannounced_write(job), Journal())
    with pytest.raises(ContractViolated):
        step.backward()


def test_the_guard_refuses_state_outside_the_specification(job):
    spec = StateSpec.declared({"x": 32, "h": 32}, ["noise"])
    machine_bytes = []
    step = Step(job, Guarded(Journal()), spec=spec)
    step.machine.on_operation = lambda *at: machine_bytes.append(step.machine.memory.copy_bytes())
    with pytest.raises(UndeclaredWrite) as caught:
        step.forward()
    assert caught.value.where == "state[16:48]"
    assert step.machine.memory.copy_bytes() == machine_bytes[-1]


def test_the_guard_lets_announced_writes_pass(job):
    assert after_forward(job, Guarded(Journal())).retention.meter.kept_segments == 0


def test_a_refused_segment_may_keep_its_activations_and_is_counted(job):
    hidden = with_unannounced_write(job)
    right = after_forward(hidden, Eager()).backward()
    step = after_forward(hidden, Guarded(Snapshot()), keep_refused=True)
    assert step.retention.meter.kept_segments == 1
    assert step.backward().tobytes() == right.tobytes()
    assert step.retention.meter.replays == 2


def test_a_guard_on_eager_only_watches(job):
    right = after_forward(job, Eager()).backward()
    assert after_forward(job, Guarded(Eager())).backward().tobytes() == right.tobytes()


# --- journal ---------------------------------------------------------------------------------------------------------


def test_staying_back_moves_less_and_returns_once():
    job = random_job(11, 7)
    back, there = after_forward(job, Journal(stays_back=True)), after_forward(job, Journal())
    assert back.backward().tobytes() == there.backward().tobytes()
    assert back.retention.meter.scattered_bytes < there.retention.meter.scattered_bytes
    assert back.retention.meter.gathered_bytes < there.retention.meter.gathered_bytes


def test_an_epoch_that_was_rolled_past_is_not_guessed(job):
    step = after_forward(job, Journal(stays_back=True))
    step.replay(2)
    step.retention.release(2)
    step.replay(1)
    step.retention.release(1)
    step.retention.rest()  # someone reads the present: from there the entry of segment 0 cannot be reached any more
    with pytest.raises(VersionDropped):
        step.replay(0)


def test_the_log_drops_an_entry_when_nobody_before_it_is_left(job):
    step = after_forward(job, Journal())
    held = [step.retention.meter.retained_bytes]
    for segment in (0, 1, 2):
        step.retention.release(segment)
        held.append(step.retention.meter.retained_bytes)
    assert held[0] > held[1] > held[2] > held[3] == 0
    step = after_forward(job, Journal())
    full = step.retention.meter.retained_bytes
    step.retention.release(2)
    step.retention.release(1)
    # segment 0 still needs everything that later ones overwrote; only a generator's state went
    assert full - step.retention.meter.retained_bytes == 40


def test_union_entries_have_no_order_to_stay_back_in():
    with pytest.raises(ValueError, match="not in write order"):
        Journal(Accounting.UNION, stays_back=True)


# --- the present -----------------------------------------------------------------------------------------------------


class Broken:
    """A memory that stops taking writes for good."""

    def __init__(self, memory):
        self._memory, self.broken = memory, False

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def write(self, where, chunk):
        if self.broken:
            raise OSError("gone")
        self._memory.write(where, chunk)


def test_a_present_that_cannot_be_written_back_is_said_to_be_lost(job):
    from regrad.replay.machine.run import Machine

    machine = Machine(job.program, job.inputs)
    store = Broken(machine.memory)
    step = Step(job, Journal(), machine=machine, store=store)
    step.forward()
    with pytest.raises(PresentLost) as caught, step.retention.replaying(0):
        store.broken = True
    assert caught.value.where is not None
    assert caught.value.version == "the present"


def test_labels_are_what_records_call_them():
    assert [engine.label for engine in (Eager(), Snapshot(), Guarded(Journal()), Journal(Accounting.UNION))] == [
        "eager",
        "snapshot",
        "guarded",
        "journal (union)",
    ]


def test_an_unannounced_operation_is_executed(job):
    hidden = Unannounced(Affine(STATE, ((STATE, 0.5),), Nonlinearity.TANH))
    assert isinstance(hidden.operation, Affine)
    assert np.isfinite(after_forward(with_unannounced_write(job), Eager()).backward()).all()


def test_an_access_of_the_forward_waits_while_another_thread_replays(job):
    step = after_forward(job, Journal())
    final, inside, order = Present.of(step.machine.memory), threading.Event(), []

    def forward():
        inside.wait()
        step.retention.before_write((STATE.span,))
        order.append("forward")

    thread = threading.Thread(target=forward)
    thread.start()
    with step.retention.replaying(0):
        inside.set()
        thread.join(timeout=0.05)
        order.append("replay")
    thread.join()
    assert order == ["replay", "forward"]
    assert Present.of(step.machine.memory) == final
