"""What the walk charges for state against engines that run: bytes held, put aside and moved, at every backward."""

import random

import numpy as np
import pytest

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.plan import one_level
from regrad.core.simulate import simulate
from regrad.core.state import JOURNAL, SNAPSHOT, STAYS_BACK, UNION
from regrad.core.state_options import with_states
from regrad.replay.engines.journal import Accounting, Journal
from regrad.replay.engines.snapshot import Snapshot
from regrad.replay.log import AccessLog, SegmentLog, Version, Write
from regrad.replay.machine.memory import Memory
from regrad.replay.pricing import price, variables
from regrad.replay.ranges import ByteRange
from regrad.replay.retention import Subject
from regrad.replay.spec import StateSpec

SIZE = 24


def random_writes(rng, count):
    """For each segment the ranges that it overwrites, in order; some overlap, some segments write nothing."""
    found = []
    for _ in range(count):
        starts = [rng.randrange(SIZE) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        found.append([ByteRange("buffer", start, rng.randint(start + 1, SIZE)) for start in starts])
    found[rng.randrange(count)].append(ByteRange("buffer", 3, 9))
    return found


def log_of(writes):
    version, segments = 0, []
    for i, ranges in enumerate(writes):
        accesses = []
        for operation, where in enumerate(ranges):
            version += 1
            accesses.append(Write(operation, where, Version(version)))
        segments.append(SegmentLog(f"s{i}", tuple(accesses)))
    return AccessLog((("buffer", SIZE),), (), tuple(segments))


def overwrite(memory, retention, ranges, seed):
    random_bytes = np.random.default_rng(seed)
    for where in ranges:
        retention.before_write((where,))
        memory.write(where, random_bytes.integers(0, 256, where.nbytes, np.uint8))


def run(writes, replayed, stays_back):
    """Bytes at every backward, newest first, bytes moved, and whether every replay found and left the right bytes."""
    memory = Memory({"buffer": SIZE}, {})
    whole = ByteRange("buffer", 0, SIZE)
    names = tuple(f"s{i}" for i in range(len(writes)))
    engine = Journal(stays_back=stays_back)
    retention = engine.open(Subject(memory, StateSpec.declared(memory.sizes()), names))
    entries = []
    for i, ranges in enumerate(writes):
        entries.append(bytes(memory.read(whole)))
        if i >= min(replayed):
            retention.enter(i)
        overwrite(memory, retention, ranges, i)
        if i >= min(replayed):
            retention.leave()
            if i not in replayed:
                retention.release(i)
    present, levels, exact = bytes(memory.read(whole)), [], True
    for i in reversed(range(len(writes))):
        held = retention.meter.retained_bytes
        if i in replayed:
            with retention.replaying(i):
                exact &= bytes(memory.read(whole)) == entries[i]
                overwrite(memory, retention, writes[i], i)
            levels.append(held + retention.meter.transient_by_segment[i])
            retention.release(i)
            if i == min(replayed):
                retention.rest()
        else:
            levels.append(held + retention.meter.transient_bytes)
    meter = retention.meter
    assert (meter.retained_bytes, meter.transient_bytes) == (0, 0)
    return levels, (meter.gathered_bytes, meter.scattered_bytes), exact and bytes(memory.read(whole)) == present


@pytest.mark.parametrize("engine", [JOURNAL, STAYS_BACK])
def test_the_walk_charges_what_the_journal_holds_and_moves(engine):
    rng = random.Random(71)
    segment = Segment("s", (Option(KEEP, 0, 0), Option(RECOMPUTE, 0, 0, recomputes=True)))
    kept_between = several = 0
    for _ in range(400):
        count = rng.randint(1, 7)
        writes = random_writes(rng, count)
        replayed = {i for i in range(count) if rng.random() < 0.6} or {rng.randrange(count)}
        (variable,) = variables(log_of(writes))
        variable = type(variable)(variable.name, variable.nbytes, variable.entries, touched_by=tuple(range(count)))
        chain = with_states(Chain((segment,) * count), [variable], (engine,))
        plan = one_level([s.options[i in replayed].name for i, s in enumerate(chain.segments)])
        walked = simulate(plan, chain, states=[variable])
        levels, moved, exact = run(writes, replayed, engine == STAYS_BACK)
        assert exact
        assert list(walked.levels[count:-1]) == levels
        assert (walked.moves.gather_bytes, walked.moves.scatter_bytes) == moved
        several += len(replayed) > 1
        kept_between += max(replayed) - min(replayed) >= len(replayed)
    assert several > 200
    assert kept_between > 100


def test_costs_made_from_entries_are_those_made_from_the_log():
    rng = random.Random(72)
    for _ in range(200):
        writes = random_writes(rng, rng.randint(1, 6))
        log = log_of(writes)
        (variable,) = variables(log)
        for name, engine in ((UNION, Journal(Accounting.UNION)), (SNAPSHOT, Snapshot())):
            assert engine.label == name
            for cost in price(log, engine).costs:
                assert variable.cost(cost.segment, name) == cost
        shared = price(log, Journal()).shared
        for i in range(len(writes)):
            assert (variable.redo_bytes(i), variable.undone_bytes(i)) == (shared.redo_bytes(i), shared.undone_bytes(i))
