"""Levels of steps with moves against figures worked out by hand; plans of moves to JSON, to text and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from regrad.core.plan import MovePlan, PeakMoment, Plan, SegmentPlan, one_level
from regrad.core.simulate_moves import Movable, seconds_of
from regrad.core.simulate_tape import TapeArithmetic, TapeRange
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.text import fold_segments, plan_text
from regrad.core.trace import NO_HOOK, Operation, Save, Storage, Trace

HELD, OUT, IN = 10, 30, 140


def four_layers(extra: Save | None = None) -> Trace:
    """Operations 0 … 3 forward, 4 … 7 backward, 8 optimizer, over 15 persistent bytes.

    Operation i makes 100 · (i + 1) bytes that operation i + 1 saves. Each backward makes a gradient of 20 and a
    temporary of 50; the first has a workspace of 11. ``extra`` saves the second storage too.
    """
    storages, operations = [Storage(15, "weights", -1)], []
    for i in range(4):
        saves = (Save(i + 1, 11 + i, i + 1),) if i < 3 else ()
        saves += (extra,) if extra is not None and i == 1 else ()
        storages.append(Storage(100 * (i + 1), "activations", i, 7 - i if i < 3 else 8, saved_by=saves))
        storages[-1].drop = i + 2 if i < 3 else None
        operations.append(Operation(f"f{i}", "forward", -1, 11 + i, (i,), (i + 1,), seconds=1.0))
    for i in range(4):
        storages += [Storage(50, "temporaries", 4 + i, 5 + i), Storage(20, "gradients", 4 + i)]
        operations.append(Operation(f"b{3 - i}", "backward", -1, 13 - i, seconds=2.0, workspace_bytes=0 if i else 11))
    operations.append(Operation("step", "optimizer", -1, -1))
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


def tape_of(trace: Trace) -> TapeArithmetic:
    return TapeArithmetic(TraceArithmetic(trace), 0)


SECOND = Movable(2, "bits", HELD, OUT, IN, out_seconds=1.0, in_seconds=2.0)
"""What operation 1 made, 200 bytes, and operation 2 saved; its node is operation 5."""
EAGER = [115, 315, 615, 1015, 1015 + 81, 715 + 90, 515 + 110, 415 + 130, 95]


def test_without_moves_it_is_the_eager_step():
    levels = tape_of(four_layers()).levels()
    assert levels.during == EAGER
    assert levels.added_seconds == 0.0


def test_a_move_by_hand():
    levels = tape_of(four_layers()).levels(moves=[SECOND])
    during = list(EAGER)
    during[2] += HELD + OUT  # it goes out right after the call that saves it
    during[3] += HELD - 200
    during[4] += HELD - 200
    level = 15 + 20 + 100 + 400 + HELD
    assert levels.before[5] == level
    during[5] = max(EAGER[5] + HELD, level + 200 + IN)  # it comes in before its node's first operation makes anything
    assert levels.during == during
    assert levels.added_seconds == 3.0
    assert levels.seconds[2] == 2.0
    assert levels.seconds[5] == 4.0


def test_what_python_holds_lives_on():
    trace = four_layers()
    trace.storages[2].drop = 4
    assert tape_of(trace).levels(moves=[SECOND]).during[3] == EAGER[3] + HELD


def test_each_node_gets_it_back_by_itself():
    trace = four_layers(extra=Save(3, 13, 3))
    tape = tape_of(trace)
    levels = tape.levels(moves=[SECOND])
    assert levels.added_seconds == seconds_of(tape.arithmetic, SECOND) == 1.0 + 2 * 2.0
    assert levels.during[3] == EAGER[3] + HELD  # the second call that saves it runs here
    assert levels.during[4] == max(EAGER[4] + HELD, levels.before[4] + 200 + IN)
    assert levels.during[5] == max(EAGER[5] + HELD, levels.before[5] + 200 + IN)
    assert levels.during[6] == EAGER[6]


def test_two_at_the_same_node_come_one_after_the_other():
    trace = four_layers(extra=Save(3, 13, 3))
    both = [replace(SECOND, in_bytes=600), Movable(3, "offload", 0, in_bytes=700)]
    levels = tape_of(trace).levels(moves=both)
    assert levels.during[4] == levels.before[4] + 200 + 300 + 700


def test_what_a_call_in_a_range_saves_is_not_moved():
    tape = tape_of(four_layers())
    inside, beside = TapeRange(1, 4), TapeRange(0, 1)
    assert tape.levels([inside], moves=[SECOND]).during == tape.levels([inside]).during
    assert tape.levels([beside], moves=[SECOND]).added_seconds == 3.0 + tape.levels([beside]).added_seconds


def test_moves_may_be_part_of_the_arithmetic():
    tape = tape_of(four_layers())
    lives = []
    levels = tape.with_moves([SECOND]).levels([], lambda *life: lives.append(life))
    assert levels.during == tape.levels(moves=[SECOND]).during
    assert tape.levels().during == EAGER
    assert (HELD, 2, 6, 2) in lives
    assert (200, 5, 6, 2) in lives
    assert (200, 1, 3, 2) in lives


def test_a_save_without_a_hook_counts_as_eager_has_it():
    trace = four_layers()
    trace.storages[1].saved_by = (Save(1, 11, NO_HOOK),)
    assert tape_of(trace).levels(moves=[SECOND]).during[3] == EAGER[3] + HELD - 200


MOVES = (
    *(
        MovePlan(((7 * i + 3, 0), (7 * i + 5, 1)), "bits", f"blocks.{i}.mlp: dropout", 1 << 20, 1 << 15, 0.002)
        for i in range(3)
    ),
    MovePlan(((30, 0),), "offload", "head: linear", 5 << 20, 0, 0.01),
)
PLAN = Plan(
    "ab" * 32, 1 << 30, 1 << 29, "fake trace", 0.01, PeakMoment("backward", "head", "mm"), 1 << 31,
    PeakMoment("backward", "head", "mm"), 123, 1 << 20, 0.016, 1.0, "Portfolio", "cpu", "fresh",
    tuple(SegmentPlan(f"blocks.{i}", "moved", 10, 20, 0.002, "1 moved", moved_bytes=1 << 20, held_bytes=1 << 15,
                      moved_seconds=0.002) for i in range(3)),
    one_level(["moved"] * 3), moves=MOVES,
)  # fmt: skip


def test_a_plan_of_moves_goes_to_json_and_back():
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    first = json.loads(PLAN.to_json())["moves"][0]
    assert first["saves"] == [[3, 0], [5, 1]]
    assert (first["how"], first["bytes"], first["held_bytes"]) == ("bits", 1 << 20, 1 << 15)
    assert json.loads(PLAN.to_json())["segments"][1]["held_bytes"] == 1 << 15
    older = json.loads(PLAN.to_json())
    del older["moves"]
    assert Plan.from_json(json.dumps(older)).moves == ()


def test_a_plan_of_moves_in_words():
    text = plan_text(PLAN)
    assert "4 saved tensors: 3 bits, 1 offload; 8.00 MiB held in 96.0 KiB, adds 16.0 ms" in text
    assert "3 x blocks.*.mlp: dropout, bits: 1.00 MiB in 32.0 KiB, 6.0 ms" in text
    assert "1 x head: linear, offload: 5.00 MiB in 0 B" in text
    assert "0 of 3 segments recomputed" in text
    assert [row.option for row in fold_segments(PLAN.segments)] == ["moved"]
    assert "saved tensors in fewer bytes" not in plan_text(replace(PLAN, moves=()))


@pytest.mark.parametrize("how", ["bits", "offload"])
def test_one_saved_tensor_in_words(how):
    text = plan_text(replace(PLAN, moves=(replace(MOVES[3], how=how),)))
    assert f"1 saved tensor: 1 {how};" in text
