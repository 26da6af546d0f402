"""Bytes of optimizer states, and what sharding leaves of them."""

from __future__ import annotations

import math

import pytest

from regrad.core.errors import UsageError
from regrad.memory.optimizers import RULES, parameter_memory, square, state_bytes
from regrad.memory.sharding import shard
from regrad.memory.transformer import Split

ALEXNET = 61_000_000


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 2), ("momentum", 3), ("adam", 4), ("adamw", 4)])
def test_copies_of_the_weights(optimizer, copies):
    found = parameter_memory(square(ALEXNET), dtype="fp32", optimizer=optimizer)
    assert found.parameter_memory_bytes == copies * 4 * ALEXNET
    assert found.weights_bytes == 4 * ALEXNET


def test_sixteen_bytes_a_parameter():
    # bf16 weights and gradients, FP32 moments and masters: 2 + 2 + 8 + 4
    found = parameter_memory(((1000, 1000),), dtype="bf16", optimizer="adam", master_weights=True)
    assert found.parameter_memory_bytes == 16 * 1_000_000
    assert found.master_bytes == 4_000_000


def test_moments_of_a_type_of_their_own():
    narrow = parameter_memory(((8, 8),), dtype="bf16", optimizer="adamw")
    wide = parameter_memory(((8, 8),), dtype="bf16", optimizer="adamw", optimizer_dtype="fp32")
    assert (narrow.optimizer_bytes, wide.optimizer_bytes) == (2 * 2 * 64, 2 * 4 * 64)
    assert (narrow.step_bytes, wide.step_bytes) == (2 * 64, 4 * 64)


def test_eight_bit_moments():
    large, small = (4096, 4), (63, 65)
    assert state_bytes("adamw-8bit", [large]) == 2 * (4096 * 4 + 4 * 64)
    assert state_bytes("adamw-8bit", [small]) == 2 * 4 * 63 * 65  # below 4,096 elements they stay FP32


def test_adafactor_keeps_rows_and_columns():
    assert state_bytes("adafactor", [(300, 200)]) == 4 * 500
    assert state_bytes("adafactor", [(7,)]) == 4 * 7
    assert state_bytes("adafactor", [(2, 3, 5)]) == 4 * 2 * (3 + 5)


@pytest.mark.parametrize("count", [1, 2, 3, 61_000_000, 7, 10**9 + 7])
def test_a_square_has_every_element(count):
    assert sum(math.prod(shape) for shape in square(count)) == count


def test_every_rule_has_a_source():
    assert all(rule.source and rule.title for rule in RULES.values())


@pytest.mark.parametrize(
    ("stage", "spread"),
    [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")), (3, ("optimizer", "gradients", "weights"))],
)
def test_zero_stages(stage, spread):
    whole = parameter_memory(((1001,),), dtype="bf16", optimizer="adam", master_weights=True)
    found = shard(whole, Split(data=4, zero=stage) if stage else Split(data=4))
    for name in ("weights", "gradients", "optimizer"):
        total = getattr(whole, f"{name}_bytes")
        assert getattr(found, f"{name}_bytes") == (-(-total // 4) if name in spread else total)
    assert found.master_bytes == (-(-whole.master_bytes // 4) if stage else whole.master_bytes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "lion"}, "lion"),
        ({"dtype": "fp8"}, "fp8"),
        ({"master_weights": True}, "own master weights"),
    ],
)
def test_bad_input(settings, words):
    with pytest.raises(UsageError, match=words):
        parameter_memory(((2, 2),), **settings)
