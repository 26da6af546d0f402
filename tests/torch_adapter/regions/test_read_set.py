"""The engine that copies what is read: what it takes of the target of a write, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.public import Checkpoint

ROWS, WIDTH = 20_000, 8
STORAGE_BYTES = ROWS * WIDTH * 4


def index_add(bank, rows, h):
    bank.index_add_(0, rows, h)


def index_copy(bank, rows, h):
    bank.index_copy_(0, rows, h)


def index_put(bank, rows, h):
    bank[rows] = h


def index_put_adding(bank, rows, h):
    bank.index_put_((rows,), h, accumulate=True)


def slice_copy(bank, rows, h):
    bank[20:30] = h


WRITES = [index_add, index_copy, index_put, index_put_adding, slice_copy]


class Bank:
    """Reads ten rows, writes ten others that overlap them."""

    def __init__(self, write):
        self.write = write
        self.bank = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)

    def __call__(self, x):
        h = torch.tanh(x + self.bank[25:35].clone())
        self.write(self.bank, torch.tensor([2, 3, 5, 7, 11, 26, 27, 28, 29, 30]), h.detach())
        return torch.sin(h)


def train(checkpoint, write):
    bank, found, x = Bank(write), [], torch.full((10, WIDTH), 0.1, requires_grad=True)
    for _ in range(4):
        checkpoint(bank, checkpoint(bank, x)).sum().backward()  # the second call overwrites what the first one wrote
        found += [x.grad.clone(), bank.bank.clone()]
    return found


@pytest.mark.parametrize("write", WRITES)
def test_the_present_comes_back_where_more_is_written_than_read(write):
    checkpoint = Checkpoint(engine="read_set")
    expected = train(lambda function, x: function(x), write)
    assert all(map(torch.equal, expected, train(checkpoint, write)))
    assert sum(report.replays for report in checkpoint.report()) == 8


@pytest.mark.parametrize("write", WRITES)
def test_the_target_of_a_write_is_not_read_whole(write):
    bank, checkpoint = Bank(write), Checkpoint(engine="read_set")
    x = torch.full((10, WIDTH), 0.1, requires_grad=True)
    for _ in range(3):
        checkpoint(bank, x).sum().backward()
    before = retained_bytes()
    out = checkpoint(bank, x)
    held = retained_bytes() - before
    assert 0 < held < 20_000 < STORAGE_BYTES
    out.sum().backward()
    assert retained_bytes() == before
