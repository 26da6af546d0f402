"""Fake steps take the road of the eager one: layouts are the kernels' own, and masks of one number keep their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import regrad.torch as rt
from regrad.torch.layouts import as_the_kernel_does
from regrad.torch.measure import measure_peak
from regrad.torch.values import LARGEST_MASK

torch.set_num_threads(1)
aten = torch.ops.aten
SHAPE = (2, 8, 4, 4)


def laid(layout: str) -> torch.Tensor:
    x = torch.rand(SHAPE) * 0.5 + 0.25
    if layout == "channels last":
        return x.to(memory_format=torch.channels_last)
    return x if layout == "contiguous" else torch.rand((2, 8, 4, 4)).transpose(2, 3)


def norm_backward(g: torch.Tensor, x: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    statistics = torch.zeros(2, 8, 4, 1)
    weight = torch.ones(4)
    return aten.native_layer_norm_backward.default, (g, x, [4], statistics, statistics + 1, weight, weight, [True] * 3)


def batch_norm_backward(g: torch.Tensor, x: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    w, ones = torch.ones(8), [True] * 3
    return aten.native_batch_norm_backward.default, (g, x, w, None, None, w, w, True, 1e-5, ones)


def group_norm_backward(g: torch.Tensor, x: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    statistics = torch.ones(2, 2)
    return aten.native_group_norm_backward.default, (
        g, x, statistics, statistics, torch.ones(8), 2, 8, 16, 2, [True, False, False]
    )  # fmt: skip


def plain(func: Any, *more: Any) -> Callable[[torch.Tensor, torch.Tensor], tuple[Any, tuple[Any, ...]]]:
    return lambda g, x: (func.default, (g, *more, x) if func is aten.elu_backward else (g, x, *more))


CALLS = {
    "layer norm": norm_backward,
    "batch norm": batch_norm_backward,
    "group norm": group_norm_backward,
    "log softmax": plain(aten._log_softmax_backward_data, -1, torch.float32),
    "mse": lambda g, x: (aten.mse_loss_backward.default, (g, x, x * 2, 0)),
    "smooth l1": lambda g, x: (aten.smooth_l1_loss_backward.default, (g, x, x * 2, 0, 1.0)),
    "elu": plain(aten.elu_backward, 1.0, 1.0, 1.0, False),
    "hardswish": plain(aten.hardswish_backward),
    "hardtanh": plain(aten.hardtanh_backward, 0.0, 1.0),
    "softplus": plain(aten.softplus_backward, 1.0, 20.0),
    "dropout": lambda g, x: (aten.native_dropout_backward.default, (g, x > 0.5, 1.0)),
    "cross entropy": lambda g, x: (aten.binary_cross_entropy_backward.default, (g, x, x, None, 0)),
    "softmax": plain(aten._softmax_backward_data, -1, torch.float32),
    "gelu": plain(aten.gelu_backward),
}


LAYOUTS = ("contiguous", "channels last", "transposed")
CASES = [(name, gradient, operand) for name in CALLS for gradient in LAYOUTS for operand in LAYOUTS]
# Group norm's kernel takes no transposed operand, and torch's shape function no transposed gradient.
CASES = [case for case in CASES if case[0] != "group norm" or "transposed" not in case]


@pytest.mark.parametrize(("name", "gradient", "operand"), CASES)
def test_the_first_result_lies_as_the_kernel_lays_it(name: str, gradient: str, operand: str) -> None:
    func, args = CALLS[name](laid(gradient), laid(operand))
    real = pytree.tree_leaves(func(*args))[0]
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, args)
        found = pytree.tree_leaves(as_the_kernel_does(func, fakes, func(*fakes), mode))[0]
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


def test_a_gradient_that_nobody_wants_stays_away() -> None:
    func, args = norm_backward(laid("transposed"), laid("contiguous"))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
        fakes[-1] = [False, True, True]
        result = as_the_kernel_does(func, fakes, func(*fakes), mode)
    assert result[0] is None


class Pooled(nn.Module):
    """A layer norm whose gradient comes back transposed, behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.linear, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(torch.tanh(self.up(x))))
        return F.adaptive_avg_pool1d(x.transpose(1, 2), 1).square().mean()


class Masked(nn.Module):
    """Looks at its mask of ones, as libraries do, and goes without it if it masks nothing; for a fake one it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2])[:, None, :].expand(-1, x.shape[1], -1)
        needed = isinstance(mask, FakeTensor) or not bool(mask.all())
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2)
        if needed:
            scores = scores + (1 - mask) * -1e4
        return (scores.softmax(-1) @ value).square().mean()


@pytest.mark.parametrize("model", [Pooled, Masked])
def test_a_fake_step_runs_the_operations_of_a_real_one(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made = model()
    step = rt.Step(made, (torch.randn(8, 16, 64),), optimizer=torch.optim.SGD(made.parameters(), lr=0.1))
    fake, real = (rt.trace(step, source=source) for source in ("fake", "real"))
    assert [operation.name for operation in fake.operations] == [operation.name for operation in real.operations]


class Written(nn.Module):
    """Writes a computed value into a constant of one number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.out, self.how = nn.Linear(64, 64), nn.Linear(64, 64), how

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        board = torch.full((len(x), 64), -1.0)
        if self.how == "scatter":
            board.scatter_(1, places, hidden)
        elif self.how == "slice":
            board[:, :32] = hidden[:, :32]
        else:
            board += hidden
        return self.out(torch.sigmoid(board)).square().mean()


@pytest.mark.memory
@pytest.mark.parametrize("how", ["scatter", "slice", "add"])
def test_a_constant_that_is_written_loses_its_values_and_keeps_its_gradient(how: str) -> None:
    torch.manual_seed(0)
    model = Written(how)
    batch = (torch.randn(256, 64), torch.randint(64, (256, 64)))
    step = rt.Step(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = rt.estimate(step)
    assert found.method == "fake trace"
    assert abs(found.training.peak_bytes - measure_peak(step).peak_bytes) <= 256


def test_a_large_constant_takes_no_memory() -> None:
    side = 1 << 18
    assert side * side > LARGEST_MASK

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.ones(side, side) * self.linear(x)).mean()

    model = Large()
    step = rt.Step(model, (torch.randn(1, 4),), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert rt.estimate(step).training.peak_bytes > side * side * 4
