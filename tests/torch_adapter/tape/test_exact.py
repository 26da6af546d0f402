"""Ranges of real models: bit-identical to eager, every one of them replayed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, digits_batch
from taping import Range, Ranges, Tape, check, names_of, of_step, run, spans
from torch import nn

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.bench.zoo.attention import GPT
from regrad.bench.zoo.data import text


def gpt(layers=3):
    return of_step(rt.Step(GPT(32, 2, 16, layers, 0.1).train(), text(2, 16)))


def blocks(names):
    """The ordinal at which each block begins, and where the last ends."""
    starts = spans(names, "layer_norm", "linear", "Tensor.chunk")
    return [*starts, starts[-1] + (starts[-1] - starts[-2])]


def test_attention_core():
    forward = gpt()
    names = names_of(forward)
    cores = [(at, at + 8) for at in spans(names, "Tensor.matmul", "Tensor.div", "ones", "Tensor.triu")]
    assert names[cores[0][0] : cores[0][1]] == [
        "Tensor.matmul", "Tensor.div", "ones", "Tensor.triu", "Tensor.masked_fill", "Tensor.softmax", "dropout",
        "Tensor.matmul",
    ]  # fmt: skip
    tape = check(forward, cores)
    assert [report.calls_replayed for report in tape.report()] == [2 * 8] * 3


def test_gelu_and_dropout_across_the_border_of_modules():
    forward = gpt()
    names = names_of(forward)
    ranges = [(at, at + 4) for at in spans(names, "gelu", "linear", "dropout", "Tensor.add")]
    tape = check(forward, ranges)
    # gelu for the linear's argument; the linear and the mask for the dropout; the sum for nothing.
    assert [report.calls_replayed for report in tape.report()] == [2 * 3] * 3


def test_a_draw_that_is_not_needed_is_not_run_and_later_ones_get_their_own_state():
    torch.manual_seed(0)
    weight = torch.randn(6, 6, requires_grad=True)

    def forward():
        x = torch.randn(4, 6)
        noise = torch.rand(4, 6)  # only printed by the user
        y = F.dropout(torch.tanh(x @ weight), 0.5)
        assert noise.numel()
        return torch.rand(4, 6).mul(y).sum(), [weight]

    names = names_of(forward)
    assert names[:5] == ["randn", "rand", "Tensor.matmul", "tanh", "dropout"]
    tape = check(forward, [(0, 7)])
    assert tape.report()[0].calls_replayed == 2 * 5  # all but the first rand
    assert check(forward, [(1, 5)]).report()[0].calls_replayed == 2 * 3


def test_whole_blocks_across_two_blocks_and_nested():
    forward = gpt()
    names = names_of(forward)
    first, second, third, end = blocks(names)
    check(forward, [(first, second), (second, third), (third, end)])
    check(forward, [(first + 5, third - 4)])
    inner = spans(names, "Tensor.matmul", "Tensor.div")
    check(forward, [(first, end), (second, third), (inner[1], inner[1] + 8), (third, end)])
    check(forward, [(0, len(names)), (first, second), (second, end), (second + 3, third), (inner[1], inner[1] + 7)])


@pytest.mark.parametrize("inplace", [False, True])
def test_conv_net_with_batch_norm(inplace):
    model, batch = ConvNet("batch", blocks=3, inplace=inplace), digits_batch(8)
    forward = of_step(rt.Step(model, batch))
    names = names_of(forward)
    norms = spans(names, "batch_norm")
    relu = "relu_" if inplace else "relu"
    assert names[norms[0] + 1] == relu
    check(forward, [(at, at + 2) for at in norms[::2]])
    starts = spans(names, "conv2d", "Tensor.add_", "batch_norm", relu)
    check(forward, [(starts[0], starts[1] - 2), (starts[1] + 1, starts[2] + 3)])  # the second crosses a block's border


def test_range_across_residual_blocks_with_in_place_sums():
    step = ZOO["batchnorm_conv"].make()
    forward = of_step(step)
    names = names_of(forward)
    starts = spans(names, "conv2d", "Tensor.add_", "batch_norm", "relu_", "conv2d")
    assert len(starts) >= 8
    # From after a block's first convolution to the second convolution of the next block.
    check(forward, [(starts[1] + 1, starts[2] + 5), (starts[4], starts[6])])


def test_skip_of_a_unet_inside_a_range():
    forward = of_step(ZOO["unet"].make())
    names = names_of(forward)
    assert "cat" in names
    check(forward, [(3, len(names) - 2), (10, 20), (25, 60)])


def test_lstm():
    forward = of_step(ZOO["lstm"].make())
    count = len(names_of(forward))
    check(forward, [(1, count - 1)])
    check(forward, [(1, 10), (3, 6), (12, count - 2)])


def test_experts_with_counting_routers():
    forward = of_step(ZOO["moe"].make())
    names = names_of(forward)
    ranges = [(at, at + 2) for at in spans(names, "gelu", "linear")]
    ranges += [(at, at + 3) for at in spans(names, "scaled_dot_product_attention")]
    assert len(ranges) == 20
    check(forward, ranges)
    # A whole block: the counts are written before the range reads them, and by nobody after.
    starts = spans(names, "layer_norm", "linear", "Tensor.chunk")
    check(forward, [(starts[1], starts[2]), (starts[2] + 3, starts[3] + 8)])


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Dropout(0.2))
    x = torch.randn(4, 8)

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            y = layers(layers(x))  # the second use of each weight is served by the cache
        with torch.autocast("cpu", enabled=False):
            return y.float().square().mean(), list(layers.parameters())

    names = names_of(forward)
    check(forward, [(0, len(names))])
    check(forward, [(1, 4), (5, 9)])
    assert not torch.is_autocast_enabled("cpu")


class Cube(torch.autograd.Function):
    """Saves its argument where no range sees it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


class Doubled(torch.autograd.Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_custom_functions_inside_a_range():
    torch.manual_seed(0)
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)

    def forward():
        y = torch.tanh(x @ weight)
        y = torch.sin(Cube.apply(torch.sigmoid(y)))
        y = Doubled.apply(y + 1)
        return torch.exp(y.cos()).sum(), [weight]

    names = names_of(forward)
    check(forward, [(0, len(names))])
    check(forward, [(1, len(names) - 1), (2, 6)])


def test_views_written_in_place():
    torch.manual_seed(0)
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)

    def forward():
        out = torch.zeros(4, 12)
        out[:, :6] = torch.tanh(x @ weight)
        half = out[:, 6:]
        half.copy_(x).mul_(0.5).add_(weight.sum(0))
        out = out.exp()
        flat = torch.empty(12)
        torch.add(out[0], 1, out=flat.detach()) if not out.requires_grad else flat.copy_(out[0].detach())
        y = out.view(4, 3, 4).transpose(1, 2).contiguous()
        y[0].relu_()
        return (y.pow(2).flatten() * flat.repeat(4)).sum(), [weight]

    names = names_of(forward)
    count = len(names)
    check(forward, [(0, count)])
    tanh = names.index("tanh")
    with_writes = names.index("Tensor.exp")
    check(forward, [(0, with_writes + 1), (tanh, tanh + 1), (with_writes + 1, count)])


def test_constants_that_python_read_and_grad_modes():
    torch.manual_seed(0)
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)

    def forward():
        y = torch.tanh(x @ weight)
        scale = y.abs().max().item()
        with torch.no_grad():
            mean = y.mean(0)
            shift = y.detach().std() * len(y)
        rows = y[y.sum(1) > 0] if (y.sum(1) > 0).any() else y
        z = torch.cat([(y / scale - mean).sigmoid(), rows * shift, y[[0, 2]]])
        parts = torch.stack(z.unbind(0)).chunk(2)
        return (parts[0].square().sum() + parts[1].cos().sum()) * torch.ones((), dtype=torch.float64), [weight]

    check(forward, [(0, len(names_of(forward)))])


def test_statistics_are_updated_once_and_frozen_ones_are_read():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6), nn.Tanh())
    model[3].eval()
    x = torch.randn(5, 6)

    def forward():
        return model(x).square().sum(), [*model.parameters()]

    names = names_of(forward)
    before = [buffer.clone() for buffer in model.buffers()]
    tape = check(forward, [(0, len(names))], times=1)
    assert tape.report()[0].replays == 1
    now = dict(model.named_buffers())
    assert now["1.num_batches_tracked"] == before[2] + 3  # named, taped, eager: once each
    assert now["3.num_batches_tracked"] == before[5]


def test_calls_that_are_kept():
    forward = gpt()
    names = names_of(forward)
    first, second, third, _ = blocks(names)
    draws = frozenset(at for at in range(first, second) if names[at] == "dropout")
    assert len(draws) == 3
    tape = Tape()
    plan = Ranges([Range(first, second, keep=draws), Range(second, third), Range(second + 2, third - 2)], names)
    for seed in (1, 2):
        assert run(forward, tape, plan, seed=seed) == run(forward, seed=seed)
    kept, whole, _ = tape.report()
    # Neither the three draws nor the last sum run; nor do the two projections whose results only draws read.
    assert kept.calls_replayed // 2 == second - first - 3 - 1 - 2
    assert whole.replays == 2


def test_a_kept_call_may_read_state_that_is_written_later():
    names = names_of(of_step(ZOO["queue_encoder"].make()))
    copies = spans(names, "Tensor.clone")
    assert copies
    at = copies[0]
    tape = Tape()
    plan = Ranges([Range(at - 5, at + 4, keep=frozenset({at}))], names)
    assert run(of_step(ZOO["queue_encoder"].make()), tape, plan) == run(of_step(ZOO["queue_encoder"].make()))
    assert tape.report()[0].replays == 1
