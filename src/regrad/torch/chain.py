"""From a trace to a chain: each candidate call a segment with its options, everything between them a segment that can
only be kept. The bytes of an option are read off the levels of a step in which every candidate takes that option.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from regrad.core.chain import KEEP, RECOMPUTE, Chain, Option, Segment
from regrad.core.levels import Levels
from regrad.core.simulate_trace import Range, TraceArithmetic
from regrad.core.trace import BACKWARD, GRADIENTS, Trace

_ACCUMULATES = 1 << 62
"""Nodes that accumulate a leaf's gradient have sequence numbers above this; they run right after the node before."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the forward pass: the candidate call ``module`` (which ``call`` of it), or what lies between two."""

    name: str
    module: str
    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One piece under one plan: r, f, t, g of the cost model, and the seconds of its replay."""

    retained: int
    forward: int
    transient: int
    gradients: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a recorded step is cut: a piece, its operations in the forward, and where its sequence numbers begin."""

    piece: Piece
    start: int
    stop: int
    first_sequence: int


def cut(trace: Trace, candidates: list[tuple[str, int, str]]) -> list[Cut]:
    """Cut the forward pass at the calls of ``candidates`` (module, which call, reason), in order of their start."""
    calls = {(call.module, call.count): call for call in trace.calls}
    chosen = sorted((calls[module, count].start, module, count, reason) for module, count, reason in candidates)
    end = trace.phase_starts[BACKWARD]
    repeated = {module for _, module, count, _ in chosen if count > 0}
    cuts: list[Cut] = []
    at, sequence, previous = 0, 0, ""

    def glue(stop: int, following: str) -> None:
        if stop > at:
            where = f"between {previous} and {following}" if previous and following else ""
            where = where or (f"before {following}" if following else f"after {previous}" if previous else "the model")
            cuts.append(Cut(Piece(where, "", 0, "it lies outside the repeated blocks"), at, stop, sequence))

    for start, module, count, reason in chosen:
        call = calls[module, count]
        name = f"{module}#{count}" if module in repeated else module
        glue(start, name)
        cuts.append(Cut(Piece(name, module, count, reason), start, call.stop, call.first_sequence))
        at, sequence, previous = call.stop, call.stop_sequence, name
    glue(end, "")
    return cuts


def _owners(arithmetic: TraceArithmetic, cuts: list[Cut]) -> list[int]:
    """For each operation of the backward: the piece whose backward it belongs to, by the sequence number of its node."""
    starts = [part.first_sequence for part in cuts]
    trace = arithmetic.trace
    owners = []
    at = len(cuts) - 1
    for operation in trace.operations[arithmetic.forward_stop : arithmetic.optimizer_start]:
        if 0 <= operation.sequence < _ACCUMULATES:
            at = min(at, max(0, bisect_right(starts, operation.sequence) - 1))
        owners.append(at)
    return owners


def read_levels(arithmetic: TraceArithmetic, levels: Levels, cuts: list[Cut]) -> tuple[list[Reading], int]:
    """Readings of all pieces, and o, the optimizer's bytes above P and all gradients."""
    trace = arithmetic.trace
    stop, optimizer_start = arithmetic.forward_stop, arithmetic.optimizer_start
    owners = _owners(arithmetic, cuts)
    most, gradients, added = [0] * len(cuts), [0] * len(cuts), [0.0] * len(cuts)
    optimizer_most, pending = 0, []
    for slot in range(stop, len(levels.operations)):
        index = levels.operations[slot]
        if index >= optimizer_start:
            optimizer_most = max(optimizer_most, levels.during[slot])
        elif levels.replayed[slot]:
            pending.append(slot)
        else:
            owner = owners[index - stop]
            for replay in pending:
                most[owner] = max(most[owner], levels.during[replay])
                added[owner] += levels.seconds[replay]
            pending.clear()
            most[owner] = max(most[owner], levels.during[slot])
            made = (trace.storages[i] for i in trace.operations[index].makes)
            gradients[owner] += sum(storage.bytes for storage in made if storage.category == GRADIENTS)
    readings: list[Reading] = []
    persistent, retained_so_far, later = levels.before[0], 0, sum(gradients)
    for i, part in enumerate(cuts):
        entry = levels.before[part.start]
        retained = levels.before[part.stop] - entry
        forward = max(levels.during[part.start : part.stop], default=entry) - entry
        retained_so_far += retained
        later -= gradients[i]
        transient = most[i] - persistent - retained_so_far - later if most[i] else 0
        readings.append(Reading(retained, max(0, forward), transient, gradients[i], added[i]))
    return readings, max(0, optimizer_most - persistent - sum(gradients))


def build_chain(
    arithmetic: TraceArithmetic, candidates: list[tuple[str, int, str]], ranges: dict[tuple[str, int], Range]
) -> tuple[Chain, tuple[Piece, ...]]:
    """The chain of a traced step. The bytes of an option are those of a step in which every candidate takes it."""
    trace = arithmetic.trace
    cuts = cut(trace, candidates)
    eager = arithmetic.levels()
    kept, optimizer = read_levels(arithmetic, eager, cuts)
    again, _ = read_levels(arithmetic, arithmetic.levels(ranges.values()), cuts)
    segments = []
    for part, keep, redo in zip(cuts, kept, again, strict=True):
        piece = part.piece
        options = [Option(KEEP, keep.retained, keep.transient, keep.forward)]
        if not piece.reason:
            options.append(
                Option(
                    RECOMPUTE, redo.retained, redo.transient, redo.forward, added_seconds=redo.seconds, recomputes=True
                )
            )
        segments.append(_segment(arithmetic, part, tuple(options), keep, redo))
    total = sum(operation.seconds for operation in trace.operations)
    return Chain(tuple(segments), eager.before[0], optimizer, total), tuple(part.piece for part in cuts)


def _segment(
    arithmetic: TraceArithmetic, part: Cut, options: tuple[Option, ...], keep: Reading, redo: Reading
) -> Segment:
    """A segment with what spans need to know of it: its boundary, and its forward as far as its own backward needs it."""
    trace, piece = arithmetic.trace, part.piece
    seconds = [operation.seconds for operation in trace.operations[part.start : part.stop]]
    boundary, tail = 0, None
    if piece.module:
        call = next(call for call in trace.calls if (call.module, call.count) == (piece.module, piece.call))
        boundary = sum(trace.storages[index].bytes for index in call.inputs if trace.storages[index].birth >= 0)
        last = arithmetic.last_save(part.start, part.stop)
        tail = sum(seconds[: max(0, last - part.start)])
    return Segment(
        piece.name, options, keep.gradients, sum(seconds), boundary_bytes=boundary, tail_seconds=tail,
        replay_bytes=redo.forward, reason=piece.reason,
    )  # fmt: skip
