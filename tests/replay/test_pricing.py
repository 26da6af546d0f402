"""A price is what the engine then reports, to the byte."""

from __future__ import annotations

import pytest

from regrad.core.errors import UsageError
from regrad.core.state import LogEntry, Moves, SharedLogPrice
from regrad.replay import Accounting, Eager, Guarded, Journal, ReadSet, Snapshot, price, variables
from regrad.replay.log import AccessLog, SegmentLog
from regrad.replay.machine.step import Step
from regrad.verify.faults import FINAL_STORAGE
from regrad.verify.programs import random_job
from regrad.verify.workloads import WORKLOADS, workload

PRICED = [
    Snapshot(),
    Journal(),
    Journal(Accounting.UNION),
    Journal(stays_back=True),
    ReadSet(),
    Guarded(Journal()),
    Guarded(ReadSet()),
]
JOBS = [random_job(21, number) for number in range(5)] + [workload(name, 0, 0) for name in WORKLOADS]


@pytest.mark.parametrize("engine", PRICED, ids=lambda engine: engine.label)
@pytest.mark.parametrize("number", range(len(JOBS)))
def test_price_is_what_the_meter_says(engine, number):
    job = JOBS[number]
    step = Step(job, engine, audit=False)
    step.forward()
    meter, told = step.retention.meter, price(job.log, engine)
    assert meter.retained_bytes == told.peak_retained_bytes
    forward = sum((cost.forward for cost in told.costs), Moves())
    assert (meter.gathered_bytes, meter.scattered_bytes) == (forward.gather_bytes, forward.scatter_bytes)
    step.backward()
    assert [meter.transient_by_segment[i] for i in range(len(told.costs))] == [c.transient_bytes for c in told.costs]
    if told.shared is None:
        backward = sum((cost.backward for cost in told.costs), Moves())
    else:
        everything = range(told.shared.segments)
        backward = told.shared.moves(everything, stays_back=getattr(engine, "stays_back", False))
    total = forward + backward
    assert (meter.gathered_bytes, meter.scattered_bytes) == (total.gather_bytes, total.scatter_bytes)


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_the_coupling_rule_is_what_the_log_does(number):
    """Replay some segments only, release the others at once, and compare what is held at every backward."""
    job = JOBS[number]
    segments = range(len(job.program.segments))
    shared = price(job.log, Journal()).shared
    for chosen in ({0}, {len(segments) - 1}, {0, 2}, {1, 2}, set(segments), {1}):
        step = Step(job, Journal(), audit=False)
        step.forward()
        for segment in segments:
            if segment not in chosen:
                step.retention.release(segment)
        for at in reversed(segments):
            assert step.retention.meter.retained_bytes == shared.retained_bytes(chosen, at), (chosen, at)
            if at in chosen:
                step.replay(at)
                step.retention.release(at)
        assert step.retention.meter.retained_bytes == 0


def test_eager_is_priced_by_its_activations():
    job = JOBS[0]
    step = Step(job, Eager())
    step.forward()
    kept = tuple(step._tapes[i].saved_bytes for i in range(len(job.program.segments)))
    assert price(job.log, Eager(), activations=kept).peak_retained_bytes == step.retention.meter.retained_bytes


def test_an_engine_without_a_price():
    with pytest.raises(UsageError, match="no price"):
        price(JOBS[0].log, FINAL_STORAGE)


def test_variables_hold_every_entry_once():
    job = JOBS[0]
    entries = [entry for variable in variables(job.log) for entry in variable.entries]
    assert sorted(map(str, entries)) == sorted(map(str, price(job.log, Journal()).shared.entries))


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_variables_say_who_touches_them(number):
    log = JOBS[number].log
    touched = {(variable.name, i) for variable in variables(log) for i in variable.touching}
    accesses = {(one.where.storage, i) for i, part in enumerate(log.segments) for one in (*part.reads, *part.writes)}
    written = {variable.name for variable in variables(log)}
    assert touched == {(name, i) for name, i in accesses if name in written}
    # a segment that only reads needs the state back for its replay too
    assert all(variable.cost(i, ReadSet().label) for variable in variables(log) for i in variable.touching)
    assert all(
        variable.cost(i, ReadSet().label) is None for variable in variables(log) for i in (-1, len(log.segments))
    )


def alone(log, storage):
    """``log`` as if its step had no state but ``storage``."""
    segments = []
    for one in log.segments:
        kept = [access for access in one.accesses if hasattr(access, "where") and access.where.storage == storage]
        segments.append(SegmentLog(one.name, tuple(kept)))
    return AccessLog(((storage, dict(log.storages)[storage]),), (), tuple(segments))


@pytest.mark.parametrize("number", range(len(JOBS)))
def test_read_sets_of_the_storages_add_up_to_the_engine_s(number):
    """What the engine charges a segment is the sum over its storages, and the generators."""
    log = JOBS[number].log
    parts = {name: price(alone(log, name), ReadSet()).costs for name, _ in log.storages}
    for variable in variables(log):
        assert variable.costs == tuple(parts[variable.name][i] for i in variable.touched_by)
    for told in price(log, ReadSet()).costs:
        costs = [part[told.segment] for part in parts.values()]
        generators = log.generator_bytes(log.segments[told.segment].generators)
        assert sum(cost.retained_bytes for cost in costs) + generators == told.retained_bytes
        assert sum(cost.transient_bytes for cost in costs) + generators == told.transient_bytes
        assert sum((cost.forward for cost in costs), Moves()) == told.forward
        assert sum((cost.backward for cost in costs), Moves()) == told.backward


def log_of(versions, buffer, share):
    """A log of disjoint writes of ``share`` bytes, one a segment, without headers."""
    entries = tuple(LogEntry(k, "buffer", k * share, share, 0) for k in range(versions))
    return SharedLogPrice(versions, entries, (0,) * versions)


def test_the_figures_for_sixty_four_versions():
    """1,024 MiB, a write fraction of 0.001, 64 live versions, disjoint writes."""
    buffer = 1024 * 2**20
    share = buffer // 1000
    log = log_of(64, buffer, share)
    everything = range(64)
    assert log.peak_retained_bytes(everything) / buffer == pytest.approx(0.064, rel=1e-3)
    union = sum(share * (64 - i) for i in everything)
    assert union / buffer == pytest.approx(2.08, rel=1e-3)
    assert (log.peak_retained_bytes(everything) + buffer) / (65 * buffer) == pytest.approx(0.016, abs=5e-4)
    assert (union + buffer) / (65 * buffer) == pytest.approx(0.047, abs=5e-4)
    # 2,080 entries are undone when the present returns after each replay, 64 when it returns once
    assert log.moves(everything).scatter_bytes == 2 * 2080 * share
    # 64 undone at first, then each replay but the last leaves its own writes behind, and 64 return at the end
    assert log.moves(everything, stays_back=True).scatter_bytes == (64 + 63 + 64) * share


def test_a_log_without_replays_holds_nothing():
    log = log_of(4, 100, 10)
    assert log.peak_retained_bytes(()) == 0
    assert log.moves(()) == log.moves((), stays_back=True) == Moves()
    # only the last segment is replayed: entries of earlier writers serve nobody
    assert log.retained_bytes({3}, 3) == 10
    assert log.retained_bytes({3}, 2) == 0
