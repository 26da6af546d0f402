"""Between the planner's tape ranges (operations of a trace) and the executor's (ordinals of torch calls)."""

from __future__ import annotations

from bisect import bisect_left

import torch

from regrad.core.chain import KEEP
from regrad.core.errors import InvalidPlan
from regrad.core.plan import Choices, RangePlan
from regrad.core.simulate_tape import KeptDraw, TapeArithmetic, TapeRange
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import Trace
from regrad.planners.tape_search import TapeSearch
from regrad.torch.move_plan import movables
from regrad.torch.policy import DEFAULT, Policy, short_name
from regrad.torch.record import Record
from regrad.torch.tape.calls import PRODUCTS as PRODUCTS
from regrad.torch.tape.calls import STATISTICS
from regrad.torch.tape.legal import problem_of_range
from regrad.torch.tape.masks import DROPOUT, seconds_per_element


def make_search(
    record: Record,
    arithmetic: TraceArithmetic,
    blocks: list[tuple[int, int]],
    *,
    masks: bool = False,
    policy: Policy = DEFAULT,
    call_seconds: float = 0.0,
) -> TapeSearch | None:
    """The search for tape ranges on a recorded step; None where its torch calls could not be numbered, or where ``masks``
    is asked for and no draw can be kept as bits.

    ``blocks`` are the calls of the segments, as intervals of operations; ``policy`` says what may be done; ``call_seconds``
    is what a recorded and replayed call takes beside its kernels.
    """
    trace = record.trace
    if not record.calls:
        return None
    calls = call_intervals(trace)
    draws = kept_draws(record) if masks else {}
    if masks and not draws:
        return None
    borders = {start for start, _ in calls} | {stop for _, stop in calls}
    return TapeSearch(
        TapeArithmetic(arithmetic, torch.get_rng_state().nbytes, draws, _products(record), call_seconds),
        calls,
        [(start, stop) for start, stop in blocks if start in borders and stop in borders],
        _Legal(trace, record.names, record.calls, policy),
        movables=movables(record, policy),
        recompute=policy.recompute,
    )


def _products(record: Record) -> set[int]:
    """The first operations of the products: they save their operands, copies of their own among them, before they compute."""
    operations = record.trace.operations
    return {
        start
        for start, stop in call_intervals(record.trace)
        if short_name(record.calls[operations[start].torch_call]) in PRODUCTS
        and not any(operation.writes for operation in operations[start:stop])
    }


def kept_draws(record: Record) -> dict[int, KeptDraw]:
    """The dropouts of a step whose noise can be kept as bits: the last operation of their call is the product with it."""
    trace, calls = record.trace, record.calls
    found: dict[int, KeptDraw] = {}
    for start, stop in call_intervals(trace):
        operations = trace.operations[start:stop]
        drawing = [start + k for k, operation in enumerate(operations) if operation.draws]
        if (
            calls[operations[0].torch_call] != DROPOUT
            or len(drawing) != 1
            or not operations[-1].name.startswith("aten.mul")
        ):
            continue
        noise = [trace.storages[index] for index in trace.operations[drawing[0]].writes]
        made = [trace.storages[index] for index in operations[-1].makes]
        if len(noise) != 1 or len(made) != 1 or noise[0].bytes != made[0].bytes or not noise[0].saved_by:
            continue
        spec = record.signatures[record.signature_of[drawing[0]]].leaves[0]
        elements = noise[0].bytes // spec.dtype.itemsize
        found[drawing[0]] = KeptDraw((elements + 7) // 8, elements * seconds_per_element(), stop - 1)
    return found


def call_intervals(trace: Trace) -> list[tuple[int, int]]:
    """The operations of each torch call that has any, in order."""
    found: list[tuple[int, int]] = []
    last = -1
    for position, operation in enumerate(trace.operations[: trace.phase_starts["backward"]]):
        if operation.torch_call < 0:
            last = -1
        elif operation.torch_call == last:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
            last = operation.torch_call
    return found


class _Legal:
    """Which intervals of operations can be recomputed call by call: :func:`problem_of_range` for all of them.

    An interval that starts at some operation is legal up to the first operation that reads what is written later; that
    limit depends on the start alone, and is worked out once for each.
    """

    def __init__(self, trace: Trace, names: dict[int, str], calls: tuple[str, ...], policy: Policy) -> None:
        self.trace, self.names, self.policy = trace, names, policy
        self.stop = trace.phase_starts["backward"]
        self._bad = [self._alone(position, calls) for position in range(self.stop)]
        self._next_bad = [self.stop] * (self.stop + 1)
        self._reads: dict[int, list[int]] = {}
        self._writes: list[tuple[int, int, int]] = []
        for position in range(self.stop - 1, -1, -1):
            self._next_bad[position] = position if self._bad[position] else self._next_bad[position + 1]
        for position, operation in enumerate(trace.operations[: self.stop]):
            for index in operation.reads:
                self._reads.setdefault(index, []).append(position)
            self._writes += [(position, index, trace.storages[index].birth) for index in operation.writes]
        self._limits: dict[int, int] = {}

    def _alone(self, position: int, calls: tuple[str, ...]) -> str:
        operation = self.trace.operations[position]
        if operation.torch_call < 0:
            return f"{operation.name} runs outside every torch call of the model's forward"
        if self.policy.keeps(calls[operation.torch_call]):
            return f"the policy keeps {calls[operation.torch_call]}"
        outside = any(self.trace.storages[index].birth < 0 for index in operation.writes)
        if outside and operation.makes and calls[operation.torch_call].rpartition(".")[2] not in STATISTICS:
            return f"{operation.name} writes state and computes something, so it cannot run again"
        return ""

    def _limit(self, start: int) -> int:
        """The first operation that an interval from ``start`` on must not hold."""
        found = self._limits.get(start)
        if found is None:
            found = self._next_bad[start]
            for written, index, birth in self._writes:
                if birth < start <= written:
                    reads = self._reads.get(index, [])
                    at = bisect_left(reads, start)
                    while at < len(reads) and reads[at] < min(written, found):
                        if not self._writes_outside(reads[at], start):
                            found = reads[at]
                        at += 1
            self._limits[start] = found
        return found

    def _writes_outside(self, position: int, start: int) -> bool:
        return any(self.trace.storages[index].birth < start for index in self.trace.operations[position].writes)

    def __call__(self, start: int, stop: int) -> str:
        if stop <= self._limit(start):
            return ""
        reason = next((reason for reason in self._bad[start:stop] if reason), "")
        return reason or problem_of_range(self.trace, start, stop, self.names)


def range_plans(
    search: TapeSearch, ranges: tuple[TapeRange, ...], calls: tuple[str, ...], depth: int = 0
) -> tuple[RangePlan, ...]:
    """The ranges as a plan states them, those inside others included, in order."""
    trace = search.tape.trace
    found: list[RangePlan] = []
    for one in ranges:
        first, last = trace.operations[one.start].torch_call, trace.operations[one.stop - 1].torch_call
        seconds = sum(search.tape.seconds[k] for k in search.tape.slice_of(one)[0])
        found.append(RangePlan(first, last + 1, name_of(trace, one), calls[first], calls[last], depth, seconds))
        found += range_plans(search, one.inner, calls, depth + 1)
    return tuple(found)


def tape_ranges(trace: Trace, plans: tuple[RangePlan, ...]) -> tuple[TapeRange, ...]:
    """The ranges that a plan states, as operations of ``trace``. Raises :class:`InvalidPlan` where it has no such calls."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, operation in enumerate(trace.operations[: trace.phase_starts["backward"]]):
        first.setdefault(operation.torch_call, position)
        last[operation.torch_call] = position + 1

    def build(inside: list[RangePlan]) -> tuple[TapeRange, ...]:
        found = []
        for one in [plan for plan in inside if not any(_holds(other, plan) for other in inside)]:
            if one.start not in first or one.stop - 1 not in last:
                raise InvalidPlan(
                    f"the plan recomputes torch calls {one.start} to {one.stop - 1}, which this step has not"
                )
            within = build([plan for plan in inside if _holds(one, plan)])
            found.append(TapeRange(first[one.start], last[one.stop - 1], within))
        return tuple(found)

    return build(list(plans))


def spans_as_ranges(cuts: list[tuple[int, int]], choices: Choices) -> tuple[TapeRange, ...]:
    """A plan of segments, spans among them, as ranges of operations. ``cuts`` are the operations of each segment.

    A span is a range that holds what its inner plan recomputes; a recomputed segment is a range of its own.
    """
    found = []
    for choice in choices:
        start, stop = cuts[choice.start][0], cuts[choice.stop - 1][1]
        if choice.is_span:
            inner = spans_as_ranges(cuts, choice.inner)
            found.append(TapeRange(start, stop, tuple(one for one in inner if (one.start, one.stop) != (start, stop))))
        elif choice.option != KEEP and stop > start:
            found.append(TapeRange(start, stop))
    return tuple(found)


def _holds(outer: RangePlan, inner: RangePlan) -> bool:
    return outer is not inner and outer.depth < inner.depth and outer.start <= inner.start and inner.stop <= outer.stop


def name_of(trace: Trace, one: TapeRange) -> str:
    """What a range is called: the modules of its first and last operation."""
    first, last = trace.operations[one.start], trace.operations[one.stop - 1]
    names = [trace.calls[operation.call].module if operation.call >= 0 else "" for operation in (first, last)]
    begin, end = (name or "the model" for name in names)
    return begin if begin == end else f"{begin} … {end}"
