"""Places by themselves: bytes come back, room is given back, and every failure is told with its place and its cause."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from training import files_in

from regrad.core.errors import InvalidPlace, PlaceFailed
from regrad.torch import offload
from regrad.torch.offload import FilePlace, HostPlace, default_place, seconds_per_byte


def row_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def file_of(spool: Any) -> os.stat_result:
    return os.fstat(spool._descriptor)


@pytest.mark.parametrize("nameless", [True, False])
def test_bytes_come_back_in_any_order(tmp_path: Path, nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    rows = [row_of(size, size) for size in (1, 4096, 4097, 100_003, 7)]
    spool = FilePlace(tmp_path).open()
    tickets = [spool.put(row) for row in rows]
    assert os.listdir(tmp_path) == []  # it has no name
    assert len(files_in(tmp_path)) == 1
    for index in (3, 0, 4, 2, 1, 3):
        again = spool.get(tickets[index], rows[0])
        assert again.data_ptr() != rows[index].data_ptr()
        assert torch.equal(again, rows[index])
    del spool
    assert files_in(tmp_path) == []


def test_the_file_shrinks_as_its_last_pieces_go(tmp_path: Path) -> None:
    spool = FilePlace(tmp_path).open()
    tickets = [spool.put(row_of(10_000, seed)) for seed in range(4)]
    assert file_of(spool).st_size == 40_000
    spool.free(tickets[3])
    assert file_of(spool).st_size == 30_000
    spool.free(tickets[1])  # in the middle: nothing to cut off
    assert file_of(spool).st_size == 30_000
    spool.free(tickets[2])
    assert file_of(spool).st_size == 10_000
    late = spool.put(row_of(5, 9))
    assert torch.equal(spool.get(late, row_of(1)), row_of(5, 9))
    assert torch.equal(spool.get(tickets[0], row_of(1)), row_of(10_000, 0))
    spool.free(tickets[0])
    spool.free(late)
    assert file_of(spool).st_size == 0


def test_what_is_reserved_is_there(tmp_path: Path) -> None:
    spool = FilePlace(tmp_path).open(1 << 20)
    assert file_of(spool).st_size == 1 << 20
    assert file_of(spool).st_blocks * 512 >= 1 << 20
    spool.free(spool.put(row_of(100)))
    assert file_of(spool).st_size == 0


def test_equal_folders_are_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = FilePlace(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert place == FilePlace(str(tmp_path)) == FilePlace(tmp_path.name)
    assert hash(place) == hash(FilePlace(str(tmp_path)))
    assert pickle.loads(pickle.dumps(place)) == copy.deepcopy(place) == place
    assert FilePlace() == FilePlace("")
    assert str(place) == f"a file in {tmp_path}"


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in (
        (tmp_path / "nowhere", "No such file or directory"),
        (tmp_path / "file", "Not a directory"),
        (Path("/proc"), ""),
    ):
        with pytest.raises(
            InvalidPlace, match=rf"cannot be moved to a file in {folder}: {why}.*Give a folder"
        ) as caught:
            FilePlace(folder).check()
        assert caught.value.place == FilePlace(folder)
        with pytest.raises(PlaceFailed, match=f"moved tensors in {folder}") as failed:
            FilePlace(folder).open(10)
        assert failed.value.errno != 0
        with pytest.raises(InvalidPlace):
            seconds_per_byte(FilePlace(folder))
    FilePlace(tmp_path).check()
    assert files_in(tmp_path) == []
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_that_is_always_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_nameless", lambda folder: os.open("/dev/full", os.O_RDWR))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    spool: Any = FilePlace(tmp_path).open(100)
    with pytest.raises(
        PlaceFailed, match=r"cannot write 100 bytes of a moved tensor.*No space left on device"
    ) as caught:
        spool.put(row_of(100))
    assert caught.value.errno == errno.ENOSPC
    os.close(spool._descriptor)
    spool._descriptor = -1  # a device has no length that could be cut
    with pytest.raises(InvalidPlace, match="No space left on device"):
        FilePlace(tmp_path).check()


def test_a_file_system_that_reserves_nothing_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    spool = FilePlace(tmp_path).open(100)
    assert torch.equal(spool.get(spool.put(row_of(100)), row_of(1)), row_of(100))


def test_bytes_that_are_gone_are_told(tmp_path: Path) -> None:
    spool: Any = FilePlace(tmp_path).open()
    ticket = spool.put(row_of(100))
    os.ftruncate(spool._descriptor, 60)
    with pytest.raises(
        PlaceFailed, match=r"the file ends 40 bytes early.*may already hold part of this backward"
    ) as caught:
        spool.get(ticket, row_of(1))
    assert caught.value.errno == errno.EIO


def test_a_forked_process_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    spool = FilePlace(tmp_path).open()
    ticket = spool.put(row_of(1000))
    child = os.fork()
    if not child:
        spool.free(ticket)
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(spool.get(ticket, row_of(1)), row_of(1000))


def test_a_forked_process_that_lives_on_does_not_keep_the_room(tmp_path: Path) -> None:
    spool = FilePlace(tmp_path).open(1 << 20)
    descriptor = os.dup(spool._descriptor)  # type: ignore[attr-defined]
    del spool
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_seconds_are_measured_once_for_each_place(tmp_path: Path) -> None:
    seconds = seconds_per_byte(FilePlace(tmp_path))
    assert 1e-12 < seconds < 1e-5
    assert seconds_per_byte(FilePlace(str(tmp_path))) == seconds
    assert files_in(tmp_path) == []


def test_host_memory_is_for_cuda() -> None:
    assert default_place("cpu") == FilePlace()
    assert default_place("cuda:1") == HostPlace()
    assert pickle.loads(pickle.dumps(HostPlace())) == HostPlace()
    if not torch.cuda.is_available():
        for call in (HostPlace().check, HostPlace().open, lambda: seconds_per_byte(HostPlace())):
            with pytest.raises(InvalidPlace, match="no CUDA device here"):
                call()
