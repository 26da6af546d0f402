"""Where retained bytes live, and what happens when there is no room."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from regrad.core.errors import PlaceFailed
from regrad.replay import ByteRange, FilePlace, Guarded, HostMemory, Journal, SameMemory, Snapshot
from regrad.replay.machine.memory import Memory
from regrad.replay.machine.step import Step
from regrad.replay.place import Address
from regrad.verify.checks import Present

PLACES = [SameMemory(), HostMemory(), FilePlace()]


def address(start, stop):
    return Address("first", ByteRange("a", start, stop), "v3")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: type(place).__name__)
def test_what_goes_in_comes_out(place):
    memory, keeper = Memory({"a": 100}, {}), place.open()
    memory.write(ByteRange("a", 0, 100), list(range(100)))
    kept = [
        keeper.put(memory, address(a, b), memory.read(ByteRange("a", a, b))) for a, b in ((0, 7), (7, 50), (50, 100))
    ]
    assert keeper.nbytes == 100
    keeper.free(kept[1])
    assert keeper.nbytes == 57
    again = keeper.put(memory, address(10, 40), memory.read(ByteRange("a", 10, 40)))
    for one in (kept[2], again, kept[0]):
        memory.write(ByteRange("a", 0, 100), [0] * 100)
        memory.write(one.where, keeper.get(memory, one))
        assert list(memory.read(one.where)) == list(range(one.where.start, one.where.stop))
    keeper.close()
    keeper.close()
    assert keeper.nbytes == 0


def test_the_file_has_no_name_while_it_is_open(tmp_path):
    memory, keeper = Memory({"a": 64}, {}), FilePlace(tmp_path).open()
    keeper.put(memory, address(0, 64), memory.read(ByteRange("a", 0, 64)))
    assert list(tmp_path.iterdir()) == []
    keeper.close()


def test_freed_room_is_used_again(tmp_path):
    memory, keeper = Memory({"a": 64}, {}), FilePlace(tmp_path).open()
    for _ in range(50):
        first = keeper.put(memory, address(0, 64), memory.read(ByteRange("a", 0, 64)))
        second = keeper.put(memory, address(0, 32), memory.read(ByteRange("a", 0, 32)))
        keeper.free(first)
        keeper.free(second)
    assert os.fstat(keeper._file.fileno()).st_size <= 96


def test_a_folder_that_is_not_there(tmp_path, job):
    step = Step(job, Journal(), place=FilePlace(tmp_path / "nowhere"))
    before = Present.of(step.machine.memory)
    with pytest.raises(PlaceFailed) as caught:
        step.forward()
    assert caught.value.errno == errno.ENOENT
    assert (caught.value.segment, caught.value.where, caught.value.version) == ("first", "h[0:32]", "none")
    assert Present.of(step.machine.memory) == before


def full_disk(monkeypatch, after):
    """From the ``after``-th write to a file on, the disk is full."""
    real, calls = os.pwrite, []

    def pwrite(*arguments):
        calls.append(1)
        if len(calls) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("engine", [Snapshot(), Journal(), Guarded(Journal())], ids=lambda engine: engine.label)
def test_a_full_disk_leaves_the_present_intact(monkeypatch, job, engine, after):
    step = Step(job, engine, place=FilePlace())
    states = [Present.of(step.machine.memory)]
    step.machine.on_operation = lambda segment, operation: states.append(Present.of(step.machine.memory))
    full_disk(monkeypatch, after)
    with pytest.raises(PlaceFailed) as caught:
        step.forward()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.segment in ("first", "second", "third", "first, operation 1", "second, operation 0")
    assert caught.value.where is not None
    assert str(caught.value.version).startswith(("v", "none"))
    assert Present.of(step.machine.memory) == states[-1]


def test_a_write_in_pieces_is_finished(monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:5], offset))
    memory, keeper = Memory({"a": 32}, {}), FilePlace().open()
    memory.write(ByteRange("a", 0, 32), list(range(32)))
    kept = keeper.put(memory, address(0, 32), memory.read(ByteRange("a", 0, 32)))
    assert list(keeper.get(memory, kept)) == list(range(32))


LIMITED = """
import resource, sys
from regrad.core.errors import PlaceFailed
from regrad.replay import FilePlace, Snapshot
from regrad.replay.machine.step import Step
from regrad.verify.checks import Present
from regrad.verify.programs import random_job

job = random_job(1, 0)
step = Step(job, Snapshot(), place=FilePlace())
states = [Present.of(step.machine.memory)]
step.machine.on_operation = lambda *at: states.append(Present.of(step.machine.memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))  # the operating system itself says no after 700 bytes
try:
    step.forward()
except PlaceFailed as error:
    assert Present.of(step.machine.memory) == states[-1]
    print(error.errno, error.segment, error.where, error.version, sep="|")
"""


def test_the_operating_systems_own_refusal():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    number, segment, where, version = done.stdout.strip().split("|")
    assert int(number) in (errno.EFBIG, errno.ENOSPC)
    assert segment == "segment 1"
    assert "[" in where
    assert version.startswith("v")


def test_a_file_that_lost_its_end():
    memory, keeper = Memory({"a": 32}, {}), FilePlace().open()
    kept = keeper.put(memory, address(0, 32), memory.read(ByteRange("a", 0, 32)))
    os.ftruncate(keeper._file.fileno(), 8)
    with pytest.raises(PlaceFailed, match="ends 24 bytes early") as caught:
        keeper.get(memory, kept)
    assert (caught.value.segment, caught.value.where, caught.value.version) == ("first", "a[0:32]", "v3")


def test_a_closed_file_in_the_backward_leaves_the_present_intact(job):
    step = Step(job, Snapshot(), place=FilePlace())
    step.forward()
    final = Present.of(step.machine.memory)
    step.retention.keeper.close()
    with pytest.raises(PlaceFailed):
        step.backward()
    assert Present.of(step.machine.memory) == final
