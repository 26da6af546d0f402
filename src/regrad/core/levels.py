"""Live bytes of a step slot by slot, and how a step with replays is laid out: what both kinds of trace arithmetic share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from regrad.core.trace import BACKWARD, Trace

Live = Callable[[int, int, int, int], None]
"""``live(bytes, first, end, storage)``: so many bytes are alive from slot ``first`` on until before slot ``end``, which
may lie beyond the last. ``first`` is -1 for what was there before the step, ``storage`` -1 for generator state."""


@dataclass(frozen=True, slots=True)
class Levels:
    """Live bytes of a step, operation by operation in the order in which they run, replays included.

    operations  index of the trace's operation that runs in each slot
    replayed    whether it runs there for a second time or more
    during      the most bytes alive while it runs, its workspace included
    before      bytes alive as it starts; one more entry for the end of the step
    seconds     that it takes; 0 where a replay needs nothing of it. What is moved out or in there is counted
    moving_seconds   of all that is moved out and in
    """

    operations: list[int]
    replayed: list[bool]
    during: list[int]
    before: list[int]
    seconds: list[float]
    moving_seconds: float = 0.0

    @property
    def added_seconds(self) -> float:
        """Seconds of all replays, and of all that is moved out and in."""
        again = sum(seconds for seconds, again in zip(self.seconds, self.replayed, strict=True) if again)
        return again + self.moving_seconds

    @property
    def peak_bytes(self) -> int:
        """The highest moment of the step."""
        return max(self.during, default=self.before[0])

    @property
    def peak_slot(self) -> int:
        """The slot of the peak; the first one if several share it."""
        return self.during.index(self.peak_bytes) if self.during else 0


@dataclass
class Replay:
    """The replay of a range while it is laid out.

    depth      how many ranges it stands inside
    trigger    the backward operation right before which it runs
    end_after  the backward operation after which nothing is wanted of it any more; -1 if it never runs
    slot_of, replay_end   where its operations run, and where they have ended
    """

    depth: int
    trigger: int = 0
    end_after: int = -1
    slot_of: dict[int, int] = field(default_factory=dict)
    replay_end: int = 0

    def until(self, slot: list[int], stop: int) -> int:
        """The slot before which the range is done with; ``stop`` for one that is never replayed."""
        return slot[self.end_after] + 1 if self.end_after >= 0 else stop


class Layout:
    """A step under a plan: the order of its operations, replays included, and the account of what lives when.

    operations, replayed   as in :class:`Levels`
    slot                   for each operation of the trace where it runs for the first time
    """

    def __init__(
        self, trace: Trace, replays: Iterable[tuple[Replay, Iterable[int]]] = (), watch: Live | None = None
    ) -> None:
        """``replays`` go with the forward operations that each runs; ``watch`` is told of every life."""
        due: dict[int, list[tuple[Replay, Iterable[int]]]] = {}
        for replay, runs in replays:
            if replay.end_after >= 0:
                due.setdefault(replay.trigger, []).append((replay, runs))
        stop = trace.phase_starts[BACKWARD]
        self.trace, self.watch = trace, watch
        self.operations: list[int] = []
        self.replayed: list[bool] = []
        self.slot: list[int] = []
        self._run(0, stop)
        at = stop
        for position in sorted(due):
            self._run(at, position)
            at = position
            for replay, runs in sorted(due[position], key=lambda pair: pair[0].depth):
                for k in runs:
                    replay.slot_of[k] = len(self.operations)
                    self.operations.append(k)
                    self.replayed.append(True)
                replay.replay_end = len(self.operations)
        self._run(at, len(trace.operations))
        count = len(self.operations)
        self._made, self._freed = [0] * (count + 1), [0] * (count + 1)
        self._workspace = [trace.operations[index].workspace_bytes for index in self.operations]
        self._passing: dict[int, int] = {}

    def _run(self, start: int, stop: int) -> None:
        """Operations ``start`` … ``stop - 1`` of the trace run, for the first time."""
        base = len(self.operations)
        self.slot += range(base, base + stop - start)
        self.operations += range(start, stop)
        self.replayed += [False] * (stop - start)

    def live(self, size: int, first: int, end: int, storage: int) -> None:
        """Something lives; see :data:`Live`."""
        if first >= 0:
            self._made[first] += size
        self._freed[min(end, len(self.operations))] += size
        if self.watch is not None:
            self.watch(size, first, end, storage)

    def aside(self, size: int, slots: Iterable[int]) -> None:
        """``size`` bytes are put aside while the operations in ``slots`` run."""
        for at in slots:
            self._workspace[at] += size
            if self.watch is not None:
                self.watch(size, at, at + 1, -1)

    def room(self, size: int, slot: int) -> None:
        """``size`` bytes come and go right after the kernel of the operation in ``slot``, which has let go of its own."""
        self._workspace[slot] = max(self._workspace[slot], size)

    def passing(self, size: int, slot: int) -> None:
        """``size`` bytes come, of which some may go, before the operation in ``slot`` makes anything."""
        self._passing[slot] = max(self._passing.get(slot, 0), size)

    def levels(self, base_bytes: int, seconds: list[float], moving_seconds: float = 0.0) -> Levels:
        """The levels over ``base_bytes``, with the seconds of each slot."""
        level, before, during = base_bytes, [], []
        for freed, made, extra in zip(self._freed, self._made, self._workspace, strict=False):  # one more for the end
            level -= freed
            before.append(level)
            level += made
            during.append(level + extra)
        for slot, size in self._passing.items():
            during[slot] = max(during[slot], before[slot] + size)
        before.append(level - self._freed[len(self._workspace)])
        return Levels(self.operations, self.replayed, during, before, seconds, moving_seconds)


class _Holds(Protocol):
    @property
    def inner(self) -> Sequence[Any]: ...


Nested = TypeVar("Nested", bound=_Holds)


def every(nodes: Iterable[Nested]) -> list[Nested]:
    """The nodes and all those inside them, each before what is inside it."""
    found = []
    for node in nodes:
        found.append(node)
        found += every(node.inner)
    return found
