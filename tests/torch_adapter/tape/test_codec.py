"""Codecs: the same bytes or a refusal, in the bytes that the formulas say."""

from __future__ import annotations

import pytest
import torch

from regrad.core.errors import InvalidPlan
from regrad.torch.measure import measure_peak
from regrad.torch.tape import codec
from regrad.torch.tape.codec import PIECE, Packed, held_bytes, pack, temporary_bytes

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.complex64, *FLOATS,
]  # fmt: skip
SIZES = [1, 7, 8, 9, 1000, PIECE, 2 * PIECE + 13]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def two_values(size: int, dtype: torch.dtype, value: float) -> torch.Tensor:
    ones = torch.rand(size, generator=torch.Generator().manual_seed(size)) > 0.4
    row = torch.zeros(size, dtype=torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype)
    row[ones] = True if dtype == torch.bool else value
    return row.to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_come_back_as_they_were(dtype: torch.dtype, size: int) -> None:
    row = two_values(size, dtype, 1.5)
    packed = pack("bits", row)
    assert isinstance(packed, Packed)
    assert packed.nbytes == (size + 7) // 8 == held_bytes("bits", size)
    again = packed.unpack()
    assert again.dtype == dtype
    assert torch.equal(raw(again), raw(row))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0, -3.0, 6e-8, 0.0])
def test_any_one_value_will_do(dtype: torch.dtype, value: float) -> None:
    row = two_values(77, dtype, value)
    packed = pack("bits", row)
    assert isinstance(packed, Packed)
    assert torch.equal(raw(packed.unpack()), raw(row))
    constant = torch.full((77,), value, dtype=dtype)
    packed = pack("bits", constant)
    assert isinstance(packed, Packed)
    assert torch.equal(raw(packed.unpack()), raw(constant))


@pytest.mark.parametrize("where", [0, 5, PIECE, 2 * PIECE + 12])
def test_a_third_value_is_seen_wherever_it_is(where: int) -> None:
    row = two_values(2 * PIECE + 13, torch.float32, 2.0)
    for other in (1.0, float("nan"), -2.0, -0.0):
        row[where] = other
        assert pack("bits", row) == "it holds more than zero and one other value"


def test_the_value_may_come_late() -> None:
    row = torch.zeros(2 * PIECE + 13)
    row[-1] = 3.0
    packed = pack("bits", row)
    assert isinstance(packed, Packed)
    assert torch.equal(packed.unpack(), row)


@pytest.mark.parametrize(
    ("how", "row"),
    [
        ("bits", torch.zeros(4, dtype=torch.complex128)),
        ("bits", torch.empty(0)),
        ("signs", torch.empty(0)),
        ("signs", torch.ones(4, dtype=torch.int64)),
        ("narrow", torch.empty(0, dtype=torch.int64)),
        ("narrow", torch.ones(4)),
        ("narrow", torch.ones(4, dtype=torch.uint8)),
        ("narrow", torch.tensor([0, 1 << 31])),
        ("narrow", torch.tensor([-(1 << 31) - 1])),
        ("narrow", torch.tensor([0, 1 << 15], dtype=torch.int32)),
        ("narrow", torch.tensor([-1, 5], dtype=torch.int16)),
    ],
)
def test_what_cannot_be_packed_is_refused_with_a_reason(how: str, row: torch.Tensor) -> None:
    reason = pack(how, row)
    assert isinstance(reason, str)
    assert len(reason.split()) > 3


@pytest.mark.parametrize(
    ("low", "high", "dtype", "width"),
    [
        (0, 255, torch.int64, 1),
        (0, 255, torch.int16, 1),
        (0, 256, torch.int64, 2),
        (-1, 0, torch.int32, 2),
        (-(1 << 15), (1 << 15) - 1, torch.int64, 2),
        (0, 1 << 15, torch.int64, 4),
        (-(1 << 31), (1 << 31) - 1, torch.int64, 4),
    ],
)
def test_integers_take_the_narrowest_type_that_holds_them(low: int, high: int, dtype: torch.dtype, width: int) -> None:
    row = torch.tensor([low, high, high, low, 0], dtype=dtype)
    packed = pack("narrow", row)
    assert isinstance(packed, Packed)
    assert packed.nbytes == 5 * width == held_bytes("narrow", 5, width)
    again = packed.unpack()
    assert again.dtype == dtype
    assert torch.equal(again, row)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_signs_are_all_that_the_backward_of_relu_asks_for(dtype: torch.dtype) -> None:
    odd = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45, 6e-8, -6e-8, 1.0, -1.0]
    for row in (torch.tensor(odd * 9, dtype=torch.float64).to(dtype), torch.randn(PIECE + 5).to(dtype)):
        gradient = torch.randn(row.shape).to(dtype)
        for saved in (row, torch.relu(row)):
            packed = pack("signs", saved)
            assert isinstance(packed, Packed)
            assert packed.nbytes == (row.numel() + 7) // 8
            again = packed.unpack()
            assert again.dtype == dtype
            assert set(again.tolist()) == {0.0, 1.0}
            left = torch.ops.aten.threshold_backward(gradient, saved, 0)
            right = torch.ops.aten.threshold_backward(gradient, again, 0)
            assert torch.equal(raw(left), raw(right))


@pytest.mark.memory
@pytest.mark.parametrize("how", ["bits", "signs", "narrow"])
@pytest.mark.parametrize("size", [1000, 3 * PIECE + 5])
def test_packing_takes_what_the_formulas_say(how: str, size: int) -> None:
    dtype = torch.int64 if how == "narrow" else torch.float32
    row = two_values(size, dtype, 2)
    held = held_bytes(how, size, 1)
    packed = pack(how, row)
    assert isinstance(packed, Packed)
    assert packed.nbytes == held
    packing = measure_peak(lambda: pack(how, row)).peak_bytes
    unpacking = measure_peak(packed.unpack).peak_bytes
    most = max(packing - held, unpacking - row.nbytes)
    promised = temporary_bytes(how, size, dtype.itemsize)
    assert most <= promised + 256  # a scalar here and there
    assert promised <= most * 1.05 + 256


def test_bad_names_are_told() -> None:
    for call in (
        lambda: held_bytes("zip", 1),
        lambda: temporary_bytes("zip", 1, 4),
        lambda: codec.seconds_per_element("zip"),
    ):
        with pytest.raises(InvalidPlan, match=r"'zip'; they can as bits, signs, narrow, offload"):
            call()


def test_seconds_are_measured_once() -> None:
    for how in ("bits", "signs", "narrow"):
        seconds = codec.seconds_per_element(how)
        assert 0 < seconds < 1e-6
        assert codec.seconds_per_element(how) == seconds
