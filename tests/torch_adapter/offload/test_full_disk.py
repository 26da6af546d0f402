"""A disk that is full is told before the step has done anything; without it the next steps are eager's to the bit."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import as_bytes
from training import SAVES, batch, files_in, net, planned, step

from regrad.core.errors import PlaceFailed
from regrad.torch.offload import FilePlace
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept

ROWS = 4096
BYTES = len(SAVES) * ROWS * 64 * 4


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The operating system lets no file of this process grow beyond ``size``: EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state_of(model: Any) -> Any:
    """All that a step changes."""
    return as_bytes(
        [
            dict(model.state_dict()),
            [None if p.grad is None else p.grad for p in model.parameters()],
            [p._version for p in model.parameters()],
            torch.get_rng_state(),
        ]
    )


def steps_of(model: Any, x: torch.Tensor, count: int) -> Any:
    for _ in range(count):
        step(model, x)
    return state_of(model)


def fails(model: Any, x: torch.Tensor, number: int, folder: Path) -> None:
    before, open_files, held = state_of(model), files_in(folder), retained_bytes()
    words = f"cannot reserve {BYTES:,} bytes for moved tensors in {folder}: {os.strerror(number)}"
    with pytest.raises(PlaceFailed, match=f"{words}.*Nothing of this step has run.*Free room on that disk") as caught:
        step(model, x)
    assert caught.value.errno == number
    assert state_of(model) == before
    assert retained_bytes() == held
    assert files_in(folder) == open_files
    assert os.listdir(folder) == []


@pytest.fixture(params=["a limit on files", "a small disk"])
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A folder, what fills it for a while, and the number of the error."""
    if request.param == "a limit on files":
        yield tmp_path, lambda: files_of_at_most(BYTES - 4096), errno.EFBIG
        return
    size = BYTES + (1 << 20)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("only root may mount a small disk; the other case runs the same code")

    @contextlib.contextmanager
    def filled() -> Iterator[None]:
        with open(tmp_path, opener=lambda path, _: os.open(path, os.O_RDWR | os.O_TMPFILE), mode="w+b") as other:
            os.posix_fallocate(other.fileno(), 0, 2 << 20)
            yield

    try:
        yield tmp_path, filled, errno.ENOSPC
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_told_and_the_step_can_be_run_again(full: Any) -> None:
    folder, filled, number = full
    model, twin, x = net(), net(), batch(ROWS)
    taped = planned(model, FilePlace(folder), rows=ROWS)
    torch.manual_seed(4)
    steps_of(twin, x, 1)
    eager = steps_of(twin, x, 2)
    torch.manual_seed(4)
    steps_of(model, x, 1)
    with filled():
        fails(model, x, number, folder)
        fails(model, x, number, folder)
    moved = steps_of(model, x, 2)
    assert moved == eager
    assert [report.moved for report in taped.tape.report_moves()] == [3] * len(SAVES)
    assert all(report.kept == () for report in taped.tape.report_moves())
    assert files_in(folder) == []


def test_a_forward_that_needs_more_than_was_said_keeps_the_rest_and_the_next_one_is_told(tmp_path: Path) -> None:
    model, twin, x = net(), net(), batch(ROWS)
    taped = planned(model, FilePlace(tmp_path), rows=ROWS, reserve=False)
    torch.manual_seed(4)
    eager = steps_of(twin, x, 1)
    torch.manual_seed(4)
    with files_of_at_most(BYTES // 2):
        with pytest.warns(RegionKept, match=r"took no more \(File too large\)") as told:
            assert steps_of(model, x, 1) == eager
        assert len(told) == 1
        assert [report.moved for report in taped.tape.report_moves()] == [1] * 3 + [0] * 3
        assert [dict(report.kept) for report in taped.tape.report_moves()][3:] == [
            {f"a file in {tmp_path} took no more (File too large)": 1}
        ] * 3
        fails(model, x, errno.EFBIG, tmp_path)
    torch.manual_seed(5)
    eager = steps_of(twin, x, 1)
    torch.manual_seed(5)
    assert steps_of(model, x, 1) == eager
    assert files_in(tmp_path) == []


def test_a_disk_that_fills_up_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system reserves nothing, and refuses after some bytes of the third tensor."""
    model, twin, x = net(), net(), batch(64)
    taped = planned(model, FilePlace(tmp_path), rows=64)
    torch.manual_seed(4)
    eager = steps_of(twin, x, 1)
    torch.manual_seed(4)
    write, calls = os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: 1000 if len(calls) == 3 else len(data)], offset)

    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.warns(RegionKept, match="No space left on device"):
        assert steps_of(model, x, 1) == eager
    assert len(calls) == 7
    assert [report.moved for report in taped.tape.report_moves()] == [1, 1, 0, 0, 0, 0]
    assert files_in(tmp_path) == []


def test_a_file_that_cannot_be_read_again_stops_the_backward_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net(), batch(64)
    planned(model, FilePlace(tmp_path), rows=64)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(PlaceFailed, match=r"cannot read 16,384 bytes.*\.grad may already hold part"):
            step(model, x)
    assert files_in(tmp_path) == []
    for parameter in model.parameters():
        parameter.grad = None
    step(model, x)


def test_an_exception_of_the_model_leaves_nothing(tmp_path: Path) -> None:
    class Fails(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    model, x = net(), batch(64)
    planned(model, FilePlace(tmp_path), rows=64)
    model.append(Fails())
    with pytest.raises(ValueError, match="no"):
        step(model, x)
    assert files_in(tmp_path) == []


def test_a_backward_that_never_comes_leaves_nothing(tmp_path: Path) -> None:
    model, x = net(), batch(64)
    planned(model, FilePlace(tmp_path), rows=64)
    loss = model(x).sum()
    assert len(files_in(tmp_path)) == 1
    other = model(x).sum()
    assert len(files_in(tmp_path)) == 2  # one a forward
    del loss
    assert len(files_in(tmp_path)) == 1
    other.backward(retain_graph=True)
    assert len(files_in(tmp_path)) == 1
    other.backward()
    assert files_in(tmp_path) == []
