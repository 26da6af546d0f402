"""Live bytes by category against figures worked out by hand, and always summing to the levels of trace arithmetic."""

from __future__ import annotations

import json
import random

import pytest

from regrad.core.errors import InvalidPlan
from regrad.core.plan import PeakMoment
from regrad.core.simulate_trace import Range, StateCopy, TraceArithmetic
from regrad.core.timeline import Timeline, make_timeline
from regrad.core.trace import Call, Operation, Save, Storage, Trace

WEIGHTS, INPUTS = 10, 5


def four_layers() -> Trace:
    """Operations 0 … 3 forward, 4 … 7 backward, 8 and 9 optimizer.

    Operation i makes 100 · (i + 1) bytes that operation i + 1 saves; Python holds the last one, operation 1 makes 7
    bytes for itself, operation 4 has a workspace of 11. Each backward makes a gradient of 20 and a temporary of 50.
    """
    storages = [Storage(WEIGHTS, "weights", -1), Storage(INPUTS, "inputs", -1)]
    operations = []
    for i in range(4):
        saved = (Save(i + 1, 11 + i, i + 1),) if i < 3 else ()
        made = Storage(100 * (i + 1), "activations", i, 7 - i if i < 3 else 8, saved_by=saved)
        made.drop = i + 2 if i < 3 else None
        storages.append(made)
        before = 1 if i == 0 else i + 1
        operations.append(
            Operation(f"f{i}", "forward", i, 11 + i, (0, before), (i + 2,), seconds=1.0, where=f"model.py:{i}")
        )
    storages.append(Storage(7, "activations", 1, 2, drop=2))
    for i in range(4):
        storages += [Storage(50, "temporaries", 4 + i, 5 + i), Storage(20, "gradients", 4 + i)]
        operations.append(
            Operation(f"b{3 - i}", "backward", -1, 13 - i, seconds=2.0, workspace_bytes=11 if i == 0 else 0)
        )
    storages += [Storage(9, "optimizer", 8, 9), Storage(3, "optimizer", 9)]
    operations += [Operation("step0", "optimizer", -1, -1), Operation("step1", "optimizer", -1, -1)]
    calls = [Call(f"blocks.{i}", "Block", 0, i, i + 1, -1, 10 + i, 11 + i, (max(1, i + 1),)) for i in range(4)]
    return Trace(operations, storages, calls, "fake", "fresh", "cpu")


def test_the_eager_step_by_hand():
    timeline = make_timeline(TraceArithmetic(four_layers()))
    assert timeline.category_bytes == {
        "weights": (10,) * 10,
        "gradients": (0, 0, 0, 0, 20, 40, 60, 80, 80, 80),
        "optimizer": (0, 0, 0, 0, 0, 0, 0, 0, 0, 3),
        "buffers": (0,) * 10,
        "inputs": (5,) * 10,
        "activations": (100, 300, 600, 1000, 1000, 700, 500, 400, 0, 0),
        "temporaries": (0, 7, 0, 0, 50 + 11, 50, 50, 50, 9, 0),
    }
    assert [(band.phase, band.start, band.stop) for band in timeline.bands] == [
        ("forward", 0, 4),
        ("backward", 4, 8),
        ("optimizer", 8, 10),
    ]
    assert (timeline.peak_bytes, timeline.peak_slot) == (10 + 5 + 1000 + 20 + 61, 4)
    assert timeline.peak_moment == PeakMoment("backward", "blocks.3", "b3")
    assert timeline.eager_bytes == timeline.total_bytes
    assert timeline.seconds == 12.0
    assert [slot.start_seconds for slot in timeline.slots[:6]] == [0, 1, 2, 3, 4, 6]


def test_the_holders_of_the_peak():
    timeline = make_timeline(TraceArithmetic(four_layers()), names={0: "parameter blocks.3.weight"})
    held = [(h.bytes, h.count, h.category, h.operation, h.module, h.where) for h in timeline.holders]
    assert held == [
        (400, 1, "activations", "f3", "blocks.*", "model.py:3"),
        (300, 1, "activations", "f2", "blocks.*", "model.py:2"),
        (200, 1, "activations", "f1", "blocks.*", "model.py:1"),
        (100, 1, "activations", "f0", "blocks.*", "model.py:0"),
        (50, 1, "temporaries", "b3", "blocks.*", "model.py:3"),
        (20, 1, "gradients", "b3", "blocks.*", "model.py:3"),
        (11, 1, "temporaries", "workspace of b3", "blocks.*", "model.py:3"),
        (10, 1, "weights", "parameter blocks.*.weight", "", ""),
        (5, 1, "inputs", "", "", ""),
    ]
    assert sum(h.bytes for h in timeline.holders) == timeline.peak_bytes


def test_what_is_recomputed_is_a_temporary_the_first_time():
    arithmetic = TraceArithmetic(four_layers())
    ranges = (Range(1, 3, holds=(2,)),)
    timeline = make_timeline(arithmetic, ranges, budget_bytes=900)
    assert list(timeline.total_bytes) == arithmetic.levels(ranges).during
    assert [slot.operation for slot in timeline.slots if slot.replayed] == ["f1", "f2"]
    assert {slot.phase for slot in timeline.slots if slot.replayed} == {"backward"}
    assert timeline.category_bytes["activations"][:4] == (100, 100, 100 + 300, 100 + 300 + 400)
    assert timeline.category_bytes["temporaries"][:4] == (0, 200 + 7, 200, 0)
    assert timeline.added_seconds == 1.0
    assert [slot.seconds for slot in timeline.slots if slot.replayed] == [1.0, 0.0], "nothing needs what f2 gives"
    assert len(timeline.slots) == len(timeline.eager_slots) + 2
    at = next(number for number, slot in enumerate(timeline.slots) if slot.replayed)
    assert at not in timeline.eager_slots
    assert timeline.category_bytes["activations"][at] == 100 + 200 + 400  # f2's result is gone after b3 by now
    assert timeline.category_bytes["temporaries"][at] == 7


def random_ranges(chooser: random.Random, start: int, stop: int, depth: int) -> tuple[Range, ...]:
    found, at = [], start
    while at < stop:
        end = chooser.randint(at + 1, stop)
        if chooser.random() < 0.6:
            inner = random_ranges(chooser, at, end, depth - 1) if depth and end - at > 1 else ()
            copies = (StateCopy(("generator", 0, at), 13, 13),) if chooser.random() < 0.5 else ()
            found.append(Range(at, end, holds=(max(1, at + 1),), inner=inner, state=copies))
        at = end
    return tuple(found)


@pytest.mark.parametrize("seed", range(60))
def test_categories_sum_to_the_levels_under_any_plan(seed):
    arithmetic = TraceArithmetic(four_layers())
    ranges = random_ranges(random.Random(seed), 0, 4, 2)
    timeline, levels = make_timeline(arithmetic, ranges), arithmetic.levels(ranges)
    assert list(timeline.total_bytes) == levels.during
    assert all(level >= 0 for row in timeline.category_bytes.values() for level in row)
    assert sum(holder.bytes for holder in timeline.holders) == timeline.peak_bytes == levels.peak_bytes
    assert timeline.category_bytes["weights"] == (10,) * len(timeline.slots)


def test_a_ghost_of_another_length():
    """The eager step of a model whose cache is off under the plan has operations that the planned one has not."""
    longer = four_layers()
    longer.operations.insert(4, Operation("cat", "forward", 3, 14))
    timeline = make_timeline(TraceArithmetic(four_layers()), eager=longer)
    assert len(timeline.eager_bytes) == len(timeline.eager_slots) == 11
    assert list(timeline.eager_slots) == sorted(timeline.eager_slots)
    assert timeline.eager_slots[5] == 4  # the backward begins where the backward begins


def test_json_and_back():
    timeline = make_timeline(TraceArithmetic(four_layers()), (Range(1, 3, holds=(2,)),), budget_bytes=900)
    again = Timeline.from_json(timeline.to_json())
    assert again == timeline
    plain = json.loads(timeline.to_json())
    assert plain["version"] == 1
    with pytest.raises(InvalidPlan, match="format version 2"):
        Timeline.from_json(json.dumps(plain | {"version": 2}))
    with pytest.raises(InvalidPlan):
        Timeline.from_json("{}")
