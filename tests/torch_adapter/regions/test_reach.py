"""What a region reaches: found by name, never more than it needs."""

from __future__ import annotations

import time

import torch
from torch import nn

import regrad.torch as rt
from regrad.torch.regions.discover.names import Reach
from regrad.torch.regions.discover.walk import walk


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.norm(self.lin(x))) * self.calls


class Net(nn.Module):
    def __init__(self, ck, blocks=48):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.ck = ck

    def forward(self, x, order):
        for i in order:
            x = self.ck(lambda t, i=i: self.blocks[i](t), x)
        return x


def train(ck):
    torch.manual_seed(0)
    net, out, seconds = Net(ck), [], []
    for step in range(5):
        order = range(48) if step < 4 else range(47, -1, -1)
        x = torch.randn(6, 8, requires_grad=True)
        start = time.perf_counter()
        loss = net(x, order).sum()
        seconds.append(time.perf_counter() - start)
        loss.backward()
        out += [x.grad, loss.detach()]
    return [*out, *net.buffers(), *(torch.tensor(block.calls) for block in net.blocks)], seconds


def test_a_region_that_can_reach_a_whole_model_copies_what_runs():
    expected, _ = train(lambda f, *args: f(*args))
    got, seconds = train(rt.checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert seconds[3] < seconds[0] / 5  # the first step walks the model for each block, later ones a block


def test_an_object_that_no_code_names_is_left_alone():
    class Trainer:
        def __init__(self):
            self.block, self.history = Block(), [list(range(100)) for _ in range(1000)]

    trainer = Trainer()
    found = walk(Reach(), (lambda x: trainer.block(x),))
    assert len(found.boxes) < 100
    assert any(tensor is trainer.block.norm.running_mean for tensor in found.tensors)


def test_a_helper_function_and_a_global_are_followed():
    found = walk(Reach(), (uses_a_helper,))
    assert any(box is STATE for _, box, _ in found.boxes)


STATE = {"calls": 0}


def helper():
    STATE["calls"] += 1


def uses_a_helper(x):
    helper()
    return x


def test_kept_calls_are_reported(tmp_path):
    lin, ck = nn.Linear(4, 4), rt.Checkpoint()

    def region(x):
        (tmp_path / "log").write_text("x")
        return torch.sin(torch.tanh(lin(x)))

    for _ in range(2):
        ck(region, torch.randn(3, 4)).sum().backward()
    (report,) = ck.report()
    assert (report.calls, report.replays) == (2, 0)
    assert [count for _, count in report.kept] == [2]
