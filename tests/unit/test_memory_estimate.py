"""Estimates from bare numbers, formula beside trace, and what would make a step fit."""

from __future__ import annotations

import pytest

from regrad.core.errors import UsageError
from regrad.memory.compare import Kept, compare
from regrad.memory.devices import find_device
from regrad.memory.formula import Numbers, estimate_numbers
from regrad.memory.optimizers import state_bytes
from regrad.memory.remedies import Floor, remedies
from regrad.memory.transformer import MASK, MATRIX, Layer, Model, Split

LAYER = Layer(256, 4)
MODEL = Model(LAYER, 6, vocabulary=1024, positions=512)


def test_a_bare_count():
    found = estimate_numbers(Numbers(parameters=61_000_000, optimizer="momentum"))
    assert (found.method, found.parameter_memory_bytes) == ("formula", 732_000_000)
    assert found.inference.peak_bytes == 244_000_000
    assert "activations are not counted" in found.notes[0]
    assert [choice.parameter_memory_bytes for choice in found.optimizers[:3]] == [488e6, 732e6, 976e6]


def test_categories_sum_to_the_peak():
    for batch in (1, 64):
        found = estimate_numbers(Numbers(model=MODEL, batch=batch, sequence=512, dtype="bf16"))
        for usage in (found.training, found.inference):
            assert sum(usage.by_category().values()) == usage.peak_bytes
            assert sum(holder.bytes for holder in usage.holders) == usage.peak_bytes


def test_the_moment_moves_with_the_batch():
    small = estimate_numbers(Numbers(model=MODEL, batch=1, sequence=8, dtype="bf16"))
    large = estimate_numbers(Numbers(model=MODEL, batch=64, sequence=512, dtype="bf16"))
    assert small.training.peak_moment.phase == "optimizer"
    assert (large.training.peak_moment.phase, large.training.peak_moment.module) == ("backward", "loss")


def test_activations_are_in_proportion_to_the_batch():
    one, two = (estimate_numbers(Numbers(model=MODEL, batch=b, sequence=512, dtype="bf16")) for b in (16, 32))
    assert two.blocks[0].activation_bytes == 2 * one.blocks[0].activation_bytes
    assert two.parameter_memory_bytes == one.parameter_memory_bytes


def test_recomputing_layers_lowers_the_peak():
    peaks = [
        estimate_numbers(Numbers(model=MODEL, batch=64, sequence=512, dtype="bf16", recompute=how)).peak_bytes
        for how in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.5 * peaks[1]


def test_sharding_lowers_the_parameters():
    alone = Numbers(model=MODEL, batch=1, sequence=8, dtype="bf16", optimizer="adam", master_weights=True)
    spread = Numbers(**{**vars_of(alone), "split": Split(data=4, zero=3)})
    one, other = estimate_numbers(alone), estimate_numbers(spread)
    assert abs(other.parameter_memory_bytes - one.parameter_memory_bytes / 4) <= 4
    assert one.parameters == other.parameters


def vars_of(numbers):
    return {name: getattr(numbers, name) for name in numbers.__dataclass_fields__}


def test_fits():
    device = find_device("t4")
    assert estimate_numbers(Numbers(parameters=10**8), device).fits is True
    assert estimate_numbers(Numbers(parameters=10**9), device).fits is False
    assert "fits" in str(estimate_numbers(Numbers(parameters=10**9), device))


def test_a_difference_says_why():
    rows, matrix = 4 * 512, 4 * 4 * 512 * 512
    kept = [
        Kept(2 * matrix, matrix, 2),
        Kept(2 * matrix, matrix, 2, drawn=True),
        Kept(2 * rows * 256, rows * 256, 2),
        Kept(8 * rows, 2 * rows, 4),
    ]
    found = compare("block", kept, Layer(256, 4, mask_bytes=2), batch=4, sequence=512)
    assert found.over_unit(found.textbook_bytes) == 74
    assert found.over_unit(found.formula_bytes) == 84
    by_kind = {difference.kind: difference for difference in found.differences}
    assert "2 bytes" in by_kind[MASK].why
    assert by_kind[MATRIX].trace_bytes == 2 * matrix
    assert sum(one.trace_bytes for one in found.differences) == found.trace_bytes
    assert sum(one.formula_bytes for one in found.differences) == found.textbook_bytes


SHAPES = ((1000, 1000),) * 100
COUNT = 100_000_000


def test_remedies():
    state = state_bytes("adamw", SHAPES, "fp32")
    floor = Floor(2 * COUNT + state + 50 * 10**6, 2 * COUNT, 2 * COUNT, state, 0, 4 * COUNT)
    now = 2 * COUNT + 2 * COUNT + state + 4 * COUNT
    assert floor.peak() == now
    usable = 1_300_000_000
    found = {one.what: one for one in remedies(floor, SHAPES, "bf16", usable)}
    lean = found["the optimizer's step one parameter at a time (foreach=False)"]
    assert lean.peak_bytes == now - 4 * COUNT + 4_000_000
    assert lean.fits
    assert found["AdamW with its state in bf16"].peak_bytes == (2 + 2 + 4 + 2) * COUNT
    assert found["SGD"].peak_bytes == 4 * COUNT
    assert found["ZeRO stage 1 over 2 devices"].peak_bytes == 4 * COUNT + (state + 4 * COUNT) // 2
    assert all(one.peak_bytes < now for one in found.values())
    assert not any(one.fits for one in remedies(floor, SHAPES, "bf16", 10))


@pytest.mark.parametrize(
    "numbers",
    [
        Numbers(parameters=10, dtype="int8"),
        Numbers(parameters=10, optimizer="lion"),
        Numbers(model=MODEL, batch=1, sequence=8, split=Split(tensor=3)),
    ],
)
def test_bad_input(numbers):
    with pytest.raises(UsageError):
        estimate_numbers(numbers)
