"""The live bytes of a step over time, by category, with the holders of its peak: what pictures are drawn from.

The levels are those of :mod:`regrad.core.simulate_trace`; here every life is put under a category. What the forward
makes is an activation if autograd or Python holds it on to the backward, and a temporary if not; a kernel's workspace is
a temporary. Under a plan that is decided anew: what is recomputed was a temporary the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from regrad.core.levels import Levels
from regrad.core.plan import PeakMoment
from regrad.core.simulate_tape import TapeArithmetic
from regrad.core.simulate_trace import TraceArithmetic, live_levels
from regrad.core.text import without_numbers
from regrad.core.trace import (
    ACTIVATIONS,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    OPTIMIZER_STATE,
    PHASES,
    TEMPORARIES,
    Trace,
)

FORMAT_VERSION = 1
WORKSPACE, GENERATOR_STATE = "workspace", "generator state"


@dataclass(frozen=True, slots=True)
class Slot:
    """One operation as it runs: in which phase, of which module, when.

    replayed       it runs again, during the backward, because of the plan
    where          file:line of the user's code that called it, or whose backward it is; "" if it is not known
    start_seconds  from the start of the step, the sum of what ran before
    """

    operation: str
    phase: str
    module: str
    where: str
    replayed: bool
    start_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Band:
    """Slots ``start`` … ``stop - 1`` are one phase: forward, backward (replays included) or optimizer."""

    phase: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Holder:
    """Storages alive at the peak that differ at most in the number of their block: ``count`` of them, ``bytes`` in all.

    operation  that made them; what they are, such as ``parameter blocks.*.weight``, if they were there before the step
    module     in which they were made, numbers of blocks as ``*``
    """

    bytes: int
    count: int
    category: str
    operation: str
    module: str
    where: str
    replayed: bool


@dataclass(frozen=True)
class Timeline:
    """Live bytes of a step, slot by slot.

    category_bytes  for each category the bytes alive while each slot runs; they sum to the level of that slot
    peak_bytes      the highest sum; ``peak_slot`` is the first slot that has it
    holders         who holds the peak, largest first; their bytes sum to ``peak_bytes``
    eager_bytes     the same step without a plan: bytes while each of its operations runs
    eager_slots     for each of those the slot of this step at which to draw it
    seconds         of the whole step; 0 if operations were not timed
    source          of the record: "fake" or "real"
    """

    slots: tuple[Slot, ...]
    bands: tuple[Band, ...]
    category_bytes: dict[str, tuple[int, ...]]
    peak_bytes: int
    peak_slot: int
    peak_moment: PeakMoment
    holders: tuple[Holder, ...]
    eager_bytes: tuple[int, ...]
    eager_slots: tuple[int, ...]
    budget_bytes: int | None
    seconds: float
    added_seconds: float
    device: str
    source: str
    gradients: str
    version: int = FORMAT_VERSION

    @property
    def eager_peak_bytes(self) -> int:
        """The highest moment of the step without a plan."""
        return max(self.eager_bytes, default=0)

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each slot runs."""
        return tuple(map(sum, zip(*self.category_bytes.values(), strict=True)))

    def to_json(self) -> str:
        """The timeline as JSON, to be read by :meth:`from_json`."""
        import json

        from regrad.core.codec import plain

        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what :meth:`to_json` wrote. Raises :class:`regrad.core.errors.InvalidPlan` for anything else."""
        from regrad.core.codec import load
        from regrad.core.errors import InvalidPlan

        timeline = load(cls, text)
        if timeline.version != FORMAT_VERSION:
            raise InvalidPlan(
                f"the timeline has format version {timeline.version}, this regrad reads {FORMAT_VERSION}. "
                "Write it again with regrad plan --timeline."
            )
        return timeline


def make_timeline(
    arithmetic: TraceArithmetic | TapeArithmetic,
    ranges: Iterable[Any] = (),
    *,
    eager: Trace | None = None,
    names: Mapping[int, str] | None = None,
    budget_bytes: int | None = None,
) -> Timeline:
    """The timeline of a step with ``ranges`` recomputed, of the kind that ``arithmetic`` takes.

    ``eager`` is the step that a plan is compared with, the arithmetic's own trace unless it is given; ``names`` are
    those of storages that were there before the step. Cost: a few passes over the trace, milliseconds for a thousand
    operations.
    """
    trace = arithmetic.trace
    lives = _Lives(arithmetic)
    levels = arithmetic.levels(ranges, lives.watch)
    slots = _slots(trace, levels)
    first = {index: at for at, index in reversed(list(enumerate(levels.operations))) if not levels.replayed[at]}
    ghost = trace if eager is None else eager
    return Timeline(
        slots=slots,
        bands=_bands(slots),
        category_bytes=lives.by_category(levels),
        peak_bytes=levels.peak_bytes,
        peak_slot=levels.peak_slot,
        peak_moment=peak_moment(trace, levels),
        holders=lives.holders(levels, slots, names or {}),
        eager_bytes=tuple(live_levels(ghost).during),
        eager_slots=_drawn_at(trace, ghost, first),
        budget_bytes=budget_bytes,
        seconds=sum(slot.seconds for slot in slots),
        added_seconds=levels.added_seconds,
        device=trace.device,
        source=trace.source,
        gradients=trace.gradients,
    )


def peak_moment(trace: Trace, levels: Levels) -> PeakMoment:
    """Where the peak of a step is; in the backward the module is that of the forward operation whose node runs."""
    slot = levels.peak_slot
    index = levels.operations[slot]
    phase = BACKWARD if levels.replayed[slot] else trace.operations[index].phase
    return PeakMoment(phase, modules(trace)[index], trace.operations[index].name)


def modules(trace: Trace) -> list[str]:
    """For each operation the name of the innermost module that it belongs to, "" outside every call."""
    of_node: dict[int, str] = {}
    for call in trace.calls:
        of_node.update(dict.fromkeys(range(call.first_sequence, call.stop_sequence), call.module))
    found = []
    for operation in trace.operations:
        own = trace.calls[operation.call].module if operation.call >= 0 else ""
        found.append(of_node.get(operation.sequence, own) if operation.phase == BACKWARD else own)
    return found


def _slots(trace: Trace, levels: Levels) -> tuple[Slot, ...]:
    names = modules(trace)
    lines: dict[int, str] = {}
    for operation in trace.operations[: trace.phase_starts[BACKWARD]]:
        lines.setdefault(operation.sequence - 1, operation.where)  # the node was made just before its operation ran
    slots, clock = [], 0.0
    for index, again, seconds in zip(levels.operations, levels.replayed, levels.seconds, strict=True):
        operation = trace.operations[index]
        phase = BACKWARD if again else operation.phase
        where = operation.where or (lines.get(operation.sequence, "") if operation.phase == BACKWARD else "")
        slots.append(Slot(operation.name, phase, names[index], where, again, clock, seconds))
        clock += seconds
    return tuple(slots)


def _bands(slots: tuple[Slot, ...]) -> tuple[Band, ...]:
    order = [PHASES.index(slot.phase) for slot in slots]
    edges = [sum(phase < number for phase in order) for number in range(len(PHASES) + 1)]
    return tuple(Band(phase, edges[i], edges[i + 1]) for i, phase in enumerate(PHASES) if edges[i] < edges[i + 1])


def _drawn_at(trace: Trace, eager: Trace, first: dict[int, int]) -> tuple[int, ...]:
    """For each operation of ``eager`` the slot at which its like runs first; where the two differ, phase by phase."""
    if [operation.name for operation in eager.operations] == [operation.name for operation in trace.operations]:
        return tuple(first[index] for index in range(len(eager.operations)))
    found: list[int] = []
    for phase in PHASES:
        mine = [i for i, operation in enumerate(trace.operations) if operation.phase == phase]
        count = sum(operation.phase == phase for operation in eager.operations)
        found += [first[mine[i * len(mine) // count]] if mine else len(found) for i in range(count)]
    return tuple(found)


class _Lives:
    """Gathers the lives of a step's storages from trace arithmetic, each with the category that it counts under."""

    def __init__(self, arithmetic: TraceArithmetic | TapeArithmetic) -> None:
        self.trace = arithmetic.trace
        self.found: list[tuple[int, int, int, int]] = []

    def watch(self, size: int, first: int, end: int, storage: int) -> None:
        """Trace arithmetic tells of a life; see :data:`regrad.core.simulate_trace.Live`."""
        self.found.append((size, first, end, storage))

    def _category(self, first: int, end: int, storage: int, pause: list[int]) -> str:
        """``pause[first]`` is the slot at which the forward, or the replay, that ``first`` lies in is over."""
        recorded = ACTIVATIONS if storage < 0 else self.trace.storages[storage].category
        if first < 0:
            return recorded
        if recorded == ACTIVATIONS:
            return TEMPORARIES if end <= pause[first] else ACTIVATIONS
        if recorded == OPTIMIZER_STATE and self.trace.storages[storage].death is not None:
            return TEMPORARIES
        return recorded

    def _pauses(self, levels: Levels) -> list[int]:
        """For each slot of the forward or of a replay the first one after it that is not; for others 0."""
        pauses = [0] * len(levels.operations)
        for slot in range(len(pauses) - 1, -1, -1):
            again = levels.replayed[slot]
            if again or self.trace.operations[levels.operations[slot]].phase == FORWARD:
                goes_on = slot + 1 < len(pauses) and pauses[slot + 1] and levels.replayed[slot + 1] == again
                pauses[slot] = pauses[slot + 1] if goes_on else slot + 1
        return pauses

    def _each(self, levels: Levels) -> Iterable[tuple[int, int, int, int, str]]:
        pauses = self._pauses(levels)
        for size, first, end, storage in self.found:
            yield size, first, end, storage, self._category(first, end, storage, pauses)

    def by_category(self, levels: Levels) -> dict[str, tuple[int, ...]]:
        """For each category the bytes alive while each slot runs, workspace among the temporaries."""
        count = len(levels.operations)
        change = {category: [0] * (count + 1) for category in CATEGORIES}
        for storage in self.trace.storages:
            if storage.birth < 0:
                change[storage.category][0] += storage.bytes
        for size, first, end, _, category in self._each(levels):
            if first >= 0:
                change[category][first] += size
            change[category][min(end, count)] -= size
        found = {}
        for category in CATEGORIES:
            level, row = 0, []
            for slot in range(count):
                level += change[category][slot]
                row.append(level)
            found[category] = row
        for slot, index in enumerate(levels.operations):
            found[TEMPORARIES][slot] += self.trace.operations[index].workspace_bytes
        return {category: tuple(row) for category, row in found.items()}

    def holders(self, levels: Levels, slots: tuple[Slot, ...], names: Mapping[int, str]) -> tuple[Holder, ...]:
        """What is alive at the peak, folded over blocks, largest first."""
        if not slots:
            return ()
        peak = levels.peak_slot
        ended = {storage for _, first, end, storage in self.found if first < 0 and end <= peak}
        groups: dict[tuple[str, str, str, str, bool], list[int]] = {}
        for index, storage in enumerate(self.trace.storages):
            if storage.birth < 0 and index not in ended:
                name = without_numbers(names.get(index, ""))
                groups.setdefault((storage.category, name, "", "", False), []).append(storage.bytes)
        for size, first, end, index, category in self._each(levels):
            if 0 <= first <= peak < end:
                maker = slots[first]
                name = GENERATOR_STATE if index < 0 else maker.operation
                key = (category, name, without_numbers(maker.module), maker.where, maker.replayed)
                groups.setdefault(key, []).append(size)
        workspace = self.trace.operations[levels.operations[peak]].workspace_bytes
        if workspace:
            running = slots[peak]
            name, module = f"{WORKSPACE} of {running.operation}", without_numbers(running.module)
            groups[TEMPORARIES, name, module, running.where, running.replayed] = [workspace]
        found = [
            Holder(sum(sizes), len(sizes), category, operation, module, where, replayed)
            for (category, operation, module, where, replayed), sizes in groups.items()
            if sum(sizes)
        ]
        return tuple(sorted(found, key=lambda holder: -holder.bytes))
