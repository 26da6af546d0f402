"""Trace arithmetic for moves: what autograd saved of a storage is held in fewer bytes, or elsewhere, until it is asked for.

The storage itself lives until Python drops it and the last torch call that saves it has run. What stands for it lives from
the end of the first of these calls to the end of the last node that saved it. Each of those nodes gets the storage back
before its first operation and lets go of it after its last one. Going out and coming in need bytes of their own for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regrad.core.levels import Layout
from regrad.core.simulate_trace import TraceArithmetic

BITS, SIGNS, NARROW, ELSEWHERE = "bits", "signs", "narrow", "offload"
PACKING = (BITS, SIGNS, NARROW)


@dataclass(frozen=True, slots=True)
class Movable:
    """One way to move what was saved of one storage, with its price.

    storage      its index in the trace; every node that saved it did so through a saved-tensor hook
    how          "bits", "signs", "narrow" or "offload"
    held_bytes   what stands for it, in the memory that is planned
    out_bytes    needed for a moment while it goes out, beside it and ``held_bytes``
    in_bytes     needed for a moment while it comes in, beside it and ``held_bytes``
    out_seconds  once
    in_seconds   for each node that saved it
    """

    storage: int
    how: str
    held_bytes: int
    out_bytes: int = 0
    in_bytes: int = 0
    out_seconds: float = 0.0
    in_seconds: float = 0.0


class Moving:
    """The moves of one step. ``in`` asks whether a storage is moved; ``call_stop`` is for each forward operation the one
    after its torch call."""

    def __init__(self, arithmetic: TraceArithmetic, moves: Iterable[Movable], call_stop: Sequence[int]) -> None:
        self.arithmetic, self.call_stop = arithmetic, call_stop
        self.moves = {one.storage: one for one in moves}

    def __contains__(self, storage: int) -> bool:
        return storage in self.moves

    def lay_out(self, layout: Layout, seconds: list[float]) -> float:
        """Tell ``layout`` of the lives of all that is moved and add its time to ``seconds``; that time in all."""
        arithmetic, slot, total = self.arithmetic, layout.slot, 0.0
        passing: dict[int, list[int]] = {}

        def passes(at: int, stays: int, goes: int) -> None:
            found = passing.setdefault(at, [0, 0])
            found[0], found[1] = found[0] + stays, max(found[1], goes)

        for index, one in self.moves.items():
            storage = arithmetic.trace.storages[index]
            at = min(self.call_stop[save.operation] for save in storage.saved_by) - 1
            end = max(slot[arithmetic.release_of(save.node)] + 1 for save in storage.saved_by)
            layout.live(one.held_bytes, at, end, index)
            layout.room(one.out_bytes, at)
            seconds[at] += one.out_seconds
            total += one.out_seconds
            for node in {save.node for save in storage.saved_by}:
                begin, last = arithmetic.first_operation_of(node), arithmetic.release_of(node)
                if begin <= last:
                    layout.live(storage.bytes, slot[begin], slot[last] + 1, index)
                    passes(slot[begin], storage.bytes, one.in_bytes)
                    seconds[slot[begin]] += one.in_seconds
                    total += one.in_seconds
        for at, (stays, goes) in passing.items():
            layout.passing(stays + goes, at)
        return total


def seconds_of(arithmetic: TraceArithmetic, one: Movable) -> float:
    """What a move takes in a step: out once, in for each node that runs."""
    nodes = {save.node for save in arithmetic.trace.storages[one.storage].saved_by}
    runs = sum(arithmetic.first_operation_of(node) <= arithmetic.last_operation_of(node) for node in nodes)
    return one.out_seconds + runs * one.in_seconds
