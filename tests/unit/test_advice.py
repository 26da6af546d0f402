"""Arithmetic of advice without a framework: ranks, swaps, shards, chunks of a loss, offload, fragmentation, words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regrad.core.advice import (
    OPTIMIZER,
    OTHER_ROUNDING,
    OTHER_TRAINING,
    PLAN,
    SAME_BYTES,
    SHARDING,
    Advice,
    NoUse,
    Suggestion,
    Trap,
)
from regrad.core.errors import InvalidPlan
from regrad.core.oom import OUTSIDE, Explanation
from regrad.core.plan import PeakMoment
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    TEMPORARIES,
    WEIGHTS,
    Operation,
    Save,
    Storage,
    Trace,
)  # fmt: skip
from regrad.memory.advice import Scale, Way, choose, is_of_use, optimizer_swap, ranked, sharded_optimizer, shards
from regrad.memory.chunked import added_seconds, chunked_peak, find_loss
from regrad.memory.fragmentation import fragmentation
from regrad.memory.offloading import offload
from regrad.memory.remedies import Floor

FLOOR = Floor(
    working_bytes=1000, weights_bytes=100, gradients_bytes=100, optimizer_bytes=200, others_bytes=40, step_bytes=80
)
EAGER = Way((), "", "", FLOOR, body_seconds=9.0, by="trace", result=SAME_BYTES, not_fixed="")
SCALE = Scale(budget_bytes=900, eager_seconds=10.0, optimizer_seconds=1.0)


def suggestion(peak=100, ratio=1.0, fits=True, result=SAME_BYTES, kind=PLAN):
    return Suggestion((kind,), "", "", peak, "trace", ratio, fits, result, "")


# -- ranks --------------------------------------------------------------------------------------------------------------


def test_rank():
    slow, quick = suggestion(ratio=1.5), suggestion(ratio=1.1)
    unknown, narrow = suggestion(ratio=None), suggestion(ratio=0.5, result=OTHER_ROUNDING)
    wide, wider = suggestion(peak=950, fits=False), suggestion(peak=990, fits=False)
    assert ranked([wider, narrow, wide, unknown, slow, quick]) == (quick, slow, unknown, narrow, wide, wider)
    assert choose([]) is None
    assert choose([wide, slow]) is slow


def test_use():
    assert is_of_use(suggestion(peak=999, fits=True), 1000)
    assert is_of_use(suggestion(peak=980, fits=False), 1000)
    assert not is_of_use(suggestion(peak=995, fits=False), 1000)


# -- swaps --------------------------------------------------------------------------------------------------------------


def test_another_optimizer():
    swap = optimizer_swap("SGD", "SGD(…)", 0, 0, 0.5, "trace")
    one = SCALE.with_swap(EAGER, swap)
    assert (one.kinds, one.predicted_peak_bytes, one.fits) == ((OPTIMIZER,), 800, True)
    assert one.step_ratio == 0.95
    assert one.result == OTHER_TRAINING
    on_a_plan = replace(EAGER, kinds=(PLAN,), floor=replace(FLOOR, working_bytes=600), body_seconds=12.0)
    pair = SCALE.with_swap(on_a_plan, swap)
    assert (pair.kinds, pair.predicted_peak_bytes, pair.step_ratio) == ((PLAN, OPTIMIZER), 400, 1.25)
    assert SCALE.with_swap(replace(on_a_plan, timed=False), swap).step_ratio is None


def test_the_optimizers_moment_is_a_floor():
    low = replace(EAGER, kinds=(PLAN,), floor=replace(FLOOR, working_bytes=10))
    assert SCALE.alone(low).predicted_peak_bytes == 100 + 100 + 200 + 40 + 80


def test_shards():
    first, second, third = shards(FLOOR, 4)
    assert first.peak(FLOOR) == 1000 - 150
    assert second.peak(FLOOR) == 1000 - 150  # gradients are not all there at the highest moment
    assert third.peak(FLOOR) == 1000 - 150 - 75
    assert [one.moved_bytes for one in (first, second, third)] == [150, 150, 225]
    assert shards(FLOOR, 1) == []
    assert SCALE.with_swap(EAGER, third).step_ratio is None
    both = sharded_optimizer(optimizer_swap("8-bit", "", 100, 0, None, "rule"), first, 4)
    assert (both.kind, both.optimizer_bytes, both.result) == (SHARDING, 25, OTHER_TRAINING)
    assert both.freed_bytes(FLOOR) == 175


# -- a trace by hand ----------------------------------------------------------------------------------------------------


def storage(size, category, birth, death, saved_by=(), drop=None):
    return Storage(size, category, birth, death, saved_by=saved_by, drop=drop)


def operation(name, phase, sequence, reads=(), makes=(), seconds=0.0):
    return Operation(name, phase, -1, sequence, tuple(reads), tuple(makes), seconds=seconds)


def head_and_loss() -> Trace:
    """hidden → product with the head's weight → log-softmax → mean, and back. Scores are 800 bytes, hidden 40."""
    storages = [
        storage(100, WEIGHTS, -1, None),  # 0 the head's weight
        storage(40, INPUTS, -1, None),  # 1
        storage(40, ACTIVATIONS, 0, 7, (Save(1, 1, 1),)),  # 2 hidden
        storage(800, ACTIVATIONS, 1, 3),  # 3 scores
        storage(800, ACTIVATIONS, 2, 6, (Save(2, 2, 3),)),  # 4 their log-softmax
        storage(4, ACTIVATIONS, 3, None),  # 5 the loss
        storage(800, TEMPORARIES, 4, 6),  # 6 its gradient
        storage(800, TEMPORARIES, 5, 8),  # 7 that of the scores
        storage(40, TEMPORARIES, 6, 9),  # 8 that of hidden
        storage(100, GRADIENTS, 7, None),  # 9 that of the weight
    ]
    operations = [
        operation("aten.tanh.default", FORWARD, 1, [1], [2], 1.0),
        operation("aten.mm.default", FORWARD, 2, [2, 0], [3], 5.0),
        operation("aten._log_softmax.default", FORWARD, 3, [3], [4], 3.0),
        operation("aten.mean.default", FORWARD, 4, [4], [5], 1.0),
        operation("aten.expand.default", BACKWARD, 3, [5], [6]),
        operation("aten._log_softmax_backward_data.default", BACKWARD, 2, [6, 4], [7]),
        operation("aten.mm.default", BACKWARD, 1, [7, 0], [8]),
        operation("aten.mm.default", BACKWARD, 1, [7, 2], [9]),
        operation("aten.tanh_backward.default", BACKWARD, 0, [8, 2]),
    ]
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


def test_head_and_loss_are_found():
    part = find_loss(head_and_loss())
    assert (part.start, part.softmax, part.softmax_bytes) == (1, 2, 800)
    assert (part.weight_bytes, part.hidden_bytes) == (100, 40)
    assert part.scaled == {3, 4, 5, 6, 7}
    assert added_seconds(head_and_loss(), part) == 9.0


def test_a_loss_in_chunks():
    trace = head_and_loss()
    part = find_loss(trace)
    always, kept = 140, 40
    assert chunked_peak(trace, part, 1) == always + kept + 2400 + 4
    # Three of the scores' size at an eighth, the loss's own bytes, and the gradients of the chunks before.
    assert chunked_peak(trace, part, 8) == always + kept + 3 * 100 + 1 + (100 + 40)
    # With chunks this small three gradients of the weight are what counts.
    assert chunked_peak(trace, part, 400) == always + kept + 3 * 100 + 40


@pytest.mark.parametrize("name", ["aten._softmax.default", "aten.tanh.default"])
def test_no_log_softmax_no_chunks(name):
    trace = head_and_loss()
    trace.operations[2].name = name
    assert find_loss(trace) is None


def test_scores_that_no_product_made():
    trace = head_and_loss()
    trace.operations[1].name = "aten.tanh.default"
    assert find_loss(trace) is None


def chain_of(count: int) -> Trace:
    """``count`` layers that each save what they make, 100 bytes, and the backward through them."""
    storages = [storage(10, WEIGHTS, -1, None)]
    operations = []
    for k in range(count):
        saves = (Save(k, k, k + 1),)
        storages.append(storage(100, ACTIVATIONS, k, 2 * count - k, saves, drop=min(k + 2, count)))
        operations.append(operation("aten.tanh.default", FORWARD, k + 1, [k], [k + 1]))
    for k in reversed(range(count)):
        operations.append(operation("aten.tanh_backward.default", BACKWARD, k, [k + 1]))
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


def test_offload():
    arithmetic = TraceArithmetic(chain_of(8))
    assert arithmetic.levels().peak_bytes == 810
    nothing, some, everything = (offload(arithmetic, limit) for limit in (810, 510, 0))
    assert (nothing.moved_bytes, nothing.working_bytes) == (0, 810)
    assert (some.moved_bytes, some.working_bytes) == (300, 510)
    # Two are there while a layer runs; the last layer's result is wanted at once and cannot be away.
    assert (everything.moved_bytes, everything.working_bytes) == (700, 210)


def test_what_cannot_be_moved():
    trace = chain_of(3)
    for one in trace.storages[1:]:
        one.saved_by = tuple(save._replace(position=-1) for save in one.saved_by)
    assert offload(TraceArithmetic(trace), 0).moved_bytes == 0


# -- fragmentation ------------------------------------------------------------------------------------------------------

GIB = 1 << 30


def stats(reserved, allocated, split):
    return {
        "reserved_bytes.all.current": reserved, "allocated_bytes.all.current": allocated,
        "inactive_split_bytes.all.current": split,
    }  # fmt: skip


def test_fragmentation():
    trap = fragmentation(stats(70 * GIB, 50 * GIB, 18 * GIB), 4 * GIB)
    assert trap.bytes == 20 * GIB
    assert "18.0 GiB of them in pieces" in trap.what
    assert "expandable_segments" in trap.cure
    assert fragmentation(stats(70 * GIB, 50 * GIB, 18 * GIB)) is not None


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (stats(70 * GIB, 69 * GIB, GIB), GIB // 2),  # hardly anything is unused
        (stats(70 * GIB, 50 * GIB, 18 * GIB), 30 * GIB),  # more was asked for than is unused
        (stats(70 * GIB, 50 * GIB, 0), 4 * GIB),  # whole blocks are unused: the allocator gives those back by itself
        ({}, GIB),
    ],
)
def test_no_fragmentation(given, asked):
    assert fragmentation(given, asked) is None


# -- values and words ---------------------------------------------------------------------------------------------------


def advice(**more) -> Advice:
    facts = {
        "budget_bytes": 900, "peak_bytes": 1000, "predicted_by": "fake trace", "band_ratio": 0.01, "eager_seconds": 1.0,
        "fits": False, "peak_moment": PeakMoment(BACKWARD, "head", "aten.mm.default"),
        "at_peak": {WEIGHTS: 400, OPTIMIZER_STATE: 600}, "holders": (), "persistent_bytes": 500, "device": "cpu",
    }  # fmt: skip
    return Advice(**(facts | more))


def test_words():
    trap = Trap("a trap", "what was seen", ("blocks.0", "blocks.1"), 2048, "what to do")
    text = str(
        advice(
            suggestions=(suggestion(peak=880), replace(suggestion(ratio=None, fits=False), moved_bytes=1 << 20)),
            no_use=(NoUse("offload", "nothing to move", None, "there is nothing"),), traps=(trap,),
            verdict="one change makes it fit", notes=("a remark",),
        )
    )  # fmt: skip
    for words in (
        "100 B too much", "weights 400 B, optimizer 600 B", "peak 880 B by trace, fits; step time 1.00x",
        "does not fit; step time not known", "moves 1.00 MiB a step", "offload: nothing to move: there is nothing",
        "a trap (2.00 KiB) in blocks.0, blocks.1", "what to do", "note: a remark", "one change makes it fit",
    ):  # fmt: skip
        assert words in text


def test_json():
    one = advice(suggestions=(suggestion(),))
    assert Advice.from_json(one.to_json()) == one
    with pytest.raises(InvalidPlan, match="format version 9"):
        Advice.from_json(replace(one, version=9).to_json())
    assert one.best == suggestion()
    assert advice().best is None


def test_an_explanation_in_words():
    inside = Explanation("cuda", 1 << 30, FORWARD, ("", "blocks.3"), "x = f(x)", "m.py:3", "F.linear(…)", {WEIGHTS: 5})
    outside = Explanation("cpu", None, OUTSIDE, (), "", "", "", {}, advice=advice(verdict="nothing here lowers it"))
    assert str(inside).splitlines()[0] == (
        "regrad: out of memory on cuda: 1.00 GiB (1,073,741,824 bytes) were asked for in the forward, module blocks.3"
    )
    assert "alive when it failed: 5 B (weights 5 B)" in str(inside)
    assert "an amount that the error does not name were asked for outside the model" in str(outside)
    assert "nothing here lowers it" in str(outside)
