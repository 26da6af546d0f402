"""The table of devices, and the allocator that stands between a step and a device's memory."""

from __future__ import annotations

import random

import pytest

from regrad.core.errors import InvalidQuantity, UsageError
from regrad.memory.allocator import CachingAllocator, replay, round_bytes, segment_bytes
from regrad.memory.devices import DEVICES, as_device, find_device

MIB = 1 << 20


def test_names():
    assert find_device("H100-80GB") is DEVICES["h100-80gb"] is find_device("h100")
    assert find_device("RTX 4090") is DEVICES["rtx-4090"]
    assert {"h100-80gb", "a100-40gb", "a100-80gb", "h200", "l4", "rtx-4090", "t4"} <= set(DEVICES)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_row_is_sane(device):
    assert 0.9 * device.memory_bytes < device.usable_bytes < device.memory_bytes
    assert device.usable_bytes == device.memory_bytes - device.context_bytes - device.workspace_bytes
    assert device.fp32_flops <= device.fp16_flops
    assert device.bandwidth_bytes > 1e11
    assert "data sheet" in device.source
    assert device.validated_on_hardware is False
    assert "not validated on hardware" in device.in_words()


def test_memory_in_place_of_the_tables():
    assert find_device("h100", "40 GiB").memory_bytes == 40 << 30
    generic = find_device(memory="24GiB")
    assert (generic.name, generic.memory_bytes) == ("generic", 24 << 30)
    assert as_device(None) is None
    assert as_device(generic) is generic


def test_roofline():
    device = find_device("h100")
    computing = device.seconds(flops=1e15, moved_bytes=1, dtype="bf16")
    moving = device.seconds(flops=1, moved_bytes=1e12, dtype="bf16")
    assert computing > device.seconds(flops=1e15, moved_bytes=1e6, dtype="bf16") * 0.999
    assert device.seconds(flops=1e15, moved_bytes=1, dtype="fp32") > 10 * computing
    assert 0.3 < moving < 0.5  # 1 TB at a share of 3.35 TB/s


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("h1000",), UsageError, "h100"),
        ((None, None), UsageError, "no device is named"),
        ((None, "400 MiB"), UsageError, "no room for a step"),
        ((None, "24 GX"), InvalidQuantity, "GX"),
    ],
)
def test_bad_input(arguments, error, words):
    with pytest.raises(error, match=words):
        find_device(*arguments)


def test_rounding():
    assert [round_bytes(count) for count in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    sizes = (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512)
    assert [segment_bytes(count) // MIB for count in sizes] == [2, 2, 20, 20, 10, 12]


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    pieces = [allocator.take(1000) for _ in range(2048)]
    assert (allocator.allocated, allocator.reserved) == (2048 * 1024, 2 * MIB)
    for piece in pieces:
        allocator.give_back(piece)
    assert (allocator.allocated, allocator.reserved) == (0, 2 * MIB)
    # all grew together again: one request of the whole segment's pool fits
    allocator.take(MIB)
    assert allocator.reserved == 2 * MIB


def test_a_hole_that_is_too_small():
    found = replay([(16 * MIB, 0, 1), (14 * MIB, 1, 3), (14 * MIB, 2, 3)])
    # the second goes where the first was, which leaves 2 MiB; the third needs a segment of its own
    assert (found.allocated_peak_bytes, found.reserved_peak_bytes) == (28 * MIB, 30 * MIB)
    assert found.lost_bytes == 2 * MIB


def test_a_full_device_gets_free_segments_back():
    lives = [(16 * MIB, 0, 1), (20 * MIB, 1, 2)]
    assert replay(lives).reserved_peak_bytes == 36 * MIB
    assert replay(lives, limit_bytes=24 * MIB).reserved_peak_bytes == 20 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_books_balance(seed):
    draw = random.Random(seed)
    allocator, held, live = CachingAllocator(), [], 0
    for _ in range(400):
        if held and draw.random() < 0.45:
            piece, size = held.pop(draw.randrange(len(held)))
            allocator.give_back(piece)
            live -= size
        else:
            count = draw.choice([1, 700, 5000, MIB, 3 * MIB, 25 * MIB]) + draw.randrange(4096)
            held.append((allocator.take(count), round_bytes(count)))
            live += round_bytes(count)
        assert live <= allocator.allocated <= allocator.reserved
    for piece, _ in held:
        allocator.give_back(piece)
    assert allocator.allocated == 0
    free = sum(size for pool in allocator._free.values() for size, _ in pool)
    assert free == allocator.reserved
    assert all(piece.before is None and piece.after is None for piece in allocator._pieces.values())
