"""Prices: from an access log and an engine to the plain values of :mod:`regrad.core.state`.

Exact: an engine that runs the logged step reports these bytes. Costs for all segments come at once, since the journal's
do not belong to one segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from regrad.core.errors import UsageError
from regrad.core.state import READ_SET, LogEntry, Moves, SharedLogPrice, StateCost, StateVariable
from regrad.replay.engines.eager import Eager
from regrad.replay.engines.guarded import DIGEST_BYTES, Guarded
from regrad.replay.engines.journal import Accounting, Journal
from regrad.replay.engines.read_set import ReadSet
from regrad.replay.engines.snapshot import Snapshot
from regrad.replay.frame import HEADER_BYTES
from regrad.replay.log import Access, AccessLog, Draw, Read, SegmentLog, Write
from regrad.replay.ranges import RangeSet
from regrad.replay.retention import Engine


@dataclass(frozen=True)
class StatePrice:
    """What an engine charges a step: by segment, and for the log that the segments share, if there is one."""

    engine: str
    costs: tuple[StateCost, ...]
    shared: SharedLogPrice | None = None

    @property
    def peak_retained_bytes(self) -> int:
        """With every segment replayed: the most that is held, at the end of the forward."""
        if self.shared is not None:
            guard = sum(cost.retained_bytes for cost in self.costs)
            return guard + self.shared.peak_retained_bytes(range(self.shared.segments))
        return sum(cost.retained_bytes for cost in self.costs)


def price(log: AccessLog, engine: Engine, *, activations: tuple[int, ...] = ()) -> StatePrice:
    """The price of ``engine`` for the step of ``log``, all of whose storages and generators are declared.

    ``activations`` are the bytes that eager keeps per segment; only :class:`Eager` needs them. Raises
    :class:`UsageError` for an engine that has no price here. Cost: linear in the log, for the union quadratic.
    """
    if isinstance(engine, Eager):
        kept = activations or (0,) * len(log.segments)
        return StatePrice(engine.label, tuple(StateCost(i, engine.label, count, 0) for i, count in enumerate(kept)))
    if isinstance(engine, Snapshot):
        return StatePrice(engine.label, tuple(_snapshot(log, i, engine.label) for i in range(len(log.segments))))
    if isinstance(engine, ReadSet):
        return StatePrice(engine.label, tuple(_read_set(log, i, engine.label) for i in range(len(log.segments))))
    if isinstance(engine, Journal):
        return _journal(log, engine)
    if isinstance(engine, Guarded):
        return _guarded(log, engine)
    raise UsageError(f"there is no price for the engine {engine.label!r}")


def variables(log: AccessLog) -> tuple[StateVariable, ...]:
    """The storages of ``log`` that are written, for ``Problem.states``: the entries that a shared log would hold, who
    touches them, and what a read set takes of each. Generators are no variables: their states belong to no storage."""
    entries = [entry for index in range(len(log.segments)) for entry in log_entries(log, index)]
    sizes = dict(log.storages)
    written = dict.fromkeys(entry.state for entry in entries)
    return tuple(
        StateVariable(
            name,
            sizes[name],
            tuple(entry for entry in entries if entry.state == name),
            log.live_versions(name),
            touched_by=touched_by,
            costs=tuple(_read_set_of(log.segments[i], i, READ_SET, name) for i in touched_by),
        )
        for name in written
        for touched_by in [_touching(log, name)]
    )


def _touching(log: AccessLog, storage: str) -> tuple[int, ...]:
    """The segments that read or write ``storage``."""
    return tuple(
        index
        for index, one in enumerate(log.segments)
        if any(not isinstance(access, Draw) and access.where.storage == storage for access in one.accesses)
    )


def log_entries(log: AccessLog, segment: int) -> tuple[LogEntry, ...]:
    """What ``segment`` leaves in a shared log: the first time that it overwrites each byte."""
    known, found = RangeSet(), []
    for write in log.segments[segment].writes:
        for part in known.add(write.where):
            found.append(LogEntry(segment, part.storage, part.start, part.nbytes, HEADER_BYTES))
    return tuple(found)


def _own_generators(log: AccessLog, segment: SegmentLog) -> int:
    return log.generator_bytes(segment.generators)


def _snapshot(log: AccessLog, segment: int, label: str) -> StateCost:
    generators = log.generator_bytes(name for name, _ in log.generators)
    state = log.state_bytes
    return StateCost(
        segment,
        label,
        retained_bytes=state + generators,
        transient_bytes=state + generators,
        forward=Moves(state, 0),
        backward=Moves(state, 2 * state),
    )


def _read_pieces(log: SegmentLog, storage: str | None) -> tuple[int, int]:
    """Bytes and pieces that a read set takes (of one storage): a piece for each new stretch that one operand reads."""
    known, count, pieces = RangeSet(), 0, 0
    for _, group in groupby(log.accesses, key=_operand):
        batch = list(group)
        read = RangeSet(one.where for one in batch if isinstance(one, Read) and storage in (None, one.where.storage))
        known.update(one.where for one in batch if isinstance(one, Write))
        for where in read:
            for part in known.add(where):
                count, pieces = count + part.nbytes, pieces + 1
    return count, pieces


def _operand(access: Access) -> tuple[str, int, int]:
    return type(access).__name__, access.operation, access.operand if isinstance(access, Read) else 0


def _read_set(log: AccessLog, segment: int, label: str) -> StateCost:
    one = log.segments[segment]
    generators = _own_generators(log, one)
    cost = _read_set_of(one, segment, label)
    return replace(
        cost,
        retained_bytes=cost.retained_bytes + generators,
        transient_bytes=cost.transient_bytes + generators,
    )


def _read_set_of(one: SegmentLog, segment: int, label: str, storage: str | None = None) -> StateCost:
    """What a read set charges a segment for one storage, or for all of them, without generators."""
    count, pieces = _read_pieces(one, storage)
    needed = [where for where in (*one.read_at_entry(), *one.written()) if storage in (None, where.storage)]
    touched = RangeSet(needed).nbytes
    return StateCost(
        segment,
        label,
        retained_bytes=count + HEADER_BYTES * pieces,
        transient_bytes=touched,
        forward=Moves(count, 0),
        backward=Moves(touched, count + touched),
    )


def _journal(log: AccessLog, engine: Journal) -> StatePrice:
    count = len(log.segments)
    generators = tuple(_own_generators(log, one) for one in log.segments)
    entries = tuple(entry for index in range(count) for entry in log_entries(log, index))
    if engine.accounting is Accounting.UNION:
        return StatePrice(engine.label, tuple(_union(log, i, engine.label, generators[i]) for i in range(count)))
    shared = SharedLogPrice(count, entries, generators)
    costs = []
    for index in range(count):
        redo = shared.redo_bytes(index)
        aside = log.segments[index:] if engine.stays_back else log.segments[index : index + 1]
        present = log.generator_bytes({name for one in aside for name in one.generators})
        own = sum(entry.payload_bytes for entry in entries if entry.writer == index)
        moves = Moves() if engine.stays_back else Moves(redo, shared.undone_bytes(index) + redo)
        costs.append(StateCost(index, engine.label, 0, redo + present, Moves(own, 0), moves))
    return StatePrice(engine.label, tuple(costs), shared)


def _union(log: AccessLog, segment: int, label: str, generators: int) -> StateCost:
    known, payload, pieces = RangeSet(), 0, 0
    for later in log.segments[segment:]:
        for write in later.writes:
            for part in known.add(write.where):
                payload, pieces = payload + part.nbytes, pieces + 1
    return StateCost(
        segment,
        label,
        retained_bytes=payload + HEADER_BYTES * pieces + generators,
        transient_bytes=payload + generators,
        forward=Moves(payload, 0),
        backward=Moves(payload, 2 * payload),
    )


def _guarded(log: AccessLog, engine: Guarded) -> StatePrice:
    base = price(log, engine.base)
    digests = DIGEST_BYTES * len(log.storages)
    costs = []
    for cost, one in zip(base.costs, log.segments, strict=True):
        # in the forward the guard holds what the segment overwrites; the base holds the present in the backward
        transient = max(one.written().nbytes, cost.transient_bytes)
        retained = cost.retained_bytes + digests
        costs.append(StateCost(cost.segment, engine.label, retained, transient, cost.forward, cost.backward))
    return StatePrice(engine.label, tuple(costs), base.shared)
