"""Searches for moves alone against every set of them, on random steps; larger budgets are never answered slower."""

from __future__ import annotations

import itertools
import random

import pytest

from regrad.core.simulate_moves import Movable
from regrad.core.simulate_tape import TapeArithmetic
from regrad.core.simulate_trace import TraceArithmetic
from regrad.core.trace import Operation, Save, Storage, Trace
from regrad.planners.tape_search import TapeSearch


def random_step(rng: random.Random, count: int) -> Trace:
    """``count`` forward operations, each of which makes something, and as many backward ones."""
    storages, operations = [Storage(50, "weights", -1)], []
    for i in range(count):
        operations.append(Operation(f"f{i}", "forward", -1, 101 + i, (i,), (i + 1,), seconds=1.0, torch_call=i))
        made = Storage(rng.randint(10, 200), "activations", i, drop=min(count, i + rng.randint(1, 3)))
        savers = sorted({rng.randint(i, min(count - 1, i + 3)) for _ in range(rng.randint(0, 2))})
        made.saved_by = tuple(Save(k, 100 + k, k + (k == i), k) for k in savers)
        made.death = 2 * count - min(savers) if savers else made.drop
        storages.append(made)
    for i in range(count):
        storages.append(Storage(rng.randint(0, 60), "temporaries", count + i, count + i + 1))
        operations.append(
            Operation(f"b{i}", "backward", -1, 100 + count - i, workspace_bytes=rng.choice((0, 0, rng.randint(1, 80))))
        )
    return Trace(operations, storages, [], "fake", "fresh", "cpu")


def random_search(rng: random.Random, most: int) -> TapeSearch:
    trace = random_step(rng, rng.randint(6, 12))
    saved = [index for index, storage in enumerate(trace.storages) if storage.saved_by]
    movables = [
        Movable(
            index, rng.choice(("bits", "offload")), rng.randint(0, trace.storages[index].bytes // 2), rng.randint(0, 9),
            rng.randint(0, 9), float(rng.randint(0, 5)), float(rng.randint(1, 5)),
        )
        for index in rng.sample(saved, min(most, len(saved)))
    ]  # fmt: skip
    calls = [(i, i + 1) for i in range(len(trace.operations) // 2)]
    tape = TapeArithmetic(TraceArithmetic(trace), 0)
    return TapeSearch(tape, calls, [], lambda *_: "none", tuple(movables), recompute=False, limit_seconds=0.15)


@pytest.mark.parametrize("seed", range(12))
def test_moves_alone_are_as_good_as_the_best_of_all_sets(seed: int) -> None:
    search = random_search(random.Random(seed), 6)
    every = [
        search.price((), chosen)
        for count in range(len(search.movables) + 1)
        for chosen in itertools.combinations(search.movables, count)
    ]
    low, high = min(one.peak_bytes for one in every), every[0].peak_bytes
    for budget in sorted({low, (2 * low + high) // 3, (low + 2 * high) // 3, high}):
        best = min(one.added_seconds for one in every if one.peak_bytes <= budget)
        found = search.fastest(budget)
        if found is None:
            assert budget < search.least().peak_bytes
            assert search.least().peak_bytes <= low * 1.02
            continue
        assert found.peak_bytes <= budget
        assert found.added_seconds == pytest.approx(best, abs=1e-9)
        assert found.ranges == ()


@pytest.mark.parametrize("seed", range(6))
def test_a_larger_budget_is_never_slower(seed: int) -> None:
    search = random_search(random.Random(100 + seed), 10)
    low, high = search.least().peak_bytes, search.price(()).peak_bytes
    seconds = [
        found.added_seconds
        for step in range(6)
        if (found := search.fastest(low + (high - low) * step // 5)) is not None
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0


def test_two_ways_to_move_one_storage_are_never_both_taken() -> None:
    rng = random.Random(5)
    search = random_search(rng, 6)
    doubled = [Movable(one.storage, "narrow", 5, out_seconds=0.5) for one in search.movables]
    search.movables = (*search.movables, *doubled)
    for one in (*search.pool, search.fastest(search.least().peak_bytes)):
        assert one is not None
        storages = [move.storage for move in one.moves]
        assert len(set(storages)) == len(storages)
