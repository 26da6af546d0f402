"""The peak of a step that moves what autograd saved to another place and brings it back for the backward.

Trace arithmetic: a saved storage is here until its last use in the forward, and again from the backward node that wants
it on. That is the least that offloading can reach; a copy that is fetched ahead of its use needs its bytes earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import ACTIVATIONS, NO_HOOK, OPTIMIZER


@dataclass(frozen=True, slots=True)
class Offload:
    """What is moved out and back in one step, and the highest moment before the optimizer's step then."""

    moved_bytes: int
    storages: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class _Away:
    """A storage that can be away from slot ``left`` on until before slot ``back``."""

    index: int
    bytes: int
    left: int
    back: int


def offload(arithmetic: TraceArithmetic, limit_bytes: int) -> Offload:
    """Move the largest saved activations first, as few as bring the step's working peak to ``limit_bytes``; all of them
    where that does not. Cost: a dozen passes over the trace."""
    trace = arithmetic.trace
    levels = arithmetic.levels()
    end = trace.phase_starts[OPTIMIZER]
    order = sorted(_candidates(arithmetic), key=lambda one: -one.bytes)

    def peak(count: int) -> int:
        change = [0] * (len(levels.during) + 1)
        for one in order[:count]:
            change[one.left] -= one.bytes
            change[one.back] += one.bytes
        gone, highest = 0, 0
        for slot in range(end):
            gone += change[slot]
            highest = max(highest, levels.during[slot] + gone)
        return highest

    least, most = 0, len(order)
    while least < most:
        middle = (least + most) // 2
        if peak(middle) <= limit_bytes:
            most = middle
        else:
            least = middle + 1
    chosen = order[:least]
    return Offload(sum(one.bytes for one in chosen), len(chosen), peak(least))


def _candidates(arithmetic: TraceArithmetic) -> list[_Away]:
    """The activations that are away for some slots at least: saved by nodes with hooks, and by nothing else."""
    slots = list(range(len(arithmetic.trace.operations) + 1))
    found = []
    for index, storage in enumerate(arithmetic.trace.storages):
        saves = storage.saved_by
        if storage.birth < 0 or storage.category != ACTIVATIONS or not saves:
            continue
        if any(save.position == NO_HOOK for save in saves):
            continue
        last_save = max(save.position for save in saves)
        left = max(arithmetic.dropped(index, slots), last_save, storage.birth + 1)
        back = arithmetic.first_operation_of(max(save.node for save in saves))
        if left < back:
            found.append(_Away(index, storage.bytes, left, back))
    return found
