"""Backwards of every kind, and what stands around a forward: threads, modes, transforms, generators, hooks."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from comparing import as_bytes
from taping import check, layers, names_of, run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import DeviceContext

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.torch.dryrun import Rehearsal
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape import Range, Ranges, Tape


def test_a_second_backward_replays_again():
    model, x = layers()
    torch.manual_seed(1)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    wanted = as_bytes([p.grad for p in model.parameters()])
    model.zero_grad()
    tape = Tape()
    torch.manual_seed(1)
    with tape.forward([Range(0, 5), Range(1, 4)]):
        loss = model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert as_bytes([p.grad for p in model.parameters()]) == wanted
    assert [report.replays for report in tape.report()] == [2, 2]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward():
    model, x = layers()

    def penalty(tape=None, ranges=()):
        inputs = x.clone().requires_grad_()
        torch.manual_seed(2)
        if tape is None:
            loss = model(inputs).square().sum()
        else:
            with tape.forward(ranges):
                loss = model(inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        gradient.square().sum().backward()
        result = as_bytes([p.grad for p in model.parameters()])
        model.zero_grad()
        return result

    tape = Tape()
    assert penalty(tape, [Range(0, 6), Range(2, 4)]) == penalty()
    assert all(report.replays >= 1 for report in tape.report())


def test_a_gradient_inside_the_forward():
    model, x = layers()

    def forward():
        inputs = x * 1
        inputs.requires_grad_()
        y = model(inputs)
        (gradient,) = torch.autograd.grad(y.sum(), inputs, create_graph=True)
        return (gradient.square().sum() * y.cos().sum()), list(model.parameters())

    names = names_of(forward)
    assert "grad" not in names
    tape = Tape()
    assert run(forward, tape, [Range(1, len(names)), Range(2, 5)]) == run(forward)
    assert tape.report()[0].replays >= 1


def test_backward_on_other_threads():
    model, x = layers()
    wanted = [run(lambda: (model(x).sum(), list(model.parameters())), seed=seed) for seed in range(8)]
    gradients: list = [None] * 8
    tape = Tape(guard="always")
    barrier = threading.Barrier(4)

    def backward(seed, loss, parameters):
        barrier.wait()
        gradients[seed] = as_bytes(list(torch.autograd.grad(loss, parameters)))

    for first in (0, 4):
        threads = []
        for seed in range(first, first + 4):
            torch.manual_seed(seed)
            with tape.forward([Range(0, 5)]):
                loss = model(x).sum()
            threads.append(threading.Thread(target=backward, args=(seed, loss, list(model.parameters()))))
        state = torch.get_rng_state()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.equal(torch.get_rng_state(), state)
    assert gradients == [one["gradients"] for one in wanted]
    assert tape.report()[0].replays == 8


def test_without_gradients_nothing_is_recorded():
    model, x = layers()
    tape = Tape()
    with torch.no_grad(), tape.forward([Range(0, 5)]):
        model(x)
    with torch.inference_mode(), tape.forward([Range(0, 5)]):
        model(x)
    assert tape.report() == ()


def test_modes_around_the_forward():
    model, x = layers()

    def forward():
        return model(x).mul(torch.ones(8)).sum(), list(model.parameters())

    with DeviceContext(torch.device("cpu")):
        check(forward, [(0, len(names_of(forward)))])

    class Shouting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tape = Tape()
    with Shouting(), pytest.warns(RegionKept, match="another function mode"):
        assert run(forward, tape, [Range(0, 5)])["loss"] == run(forward)["loss"]
    assert tape.report()[0].replays == 0
    tape = Tape()
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("off"),
        pytest.warns(RegionKept, match="switched off"),
        tape.forward([Range(0, 5)]),
    ):
        model(x)


def test_functional_transforms_are_left_alone():
    model, x = layers()

    def forward():
        per_row = torch.func.vmap(lambda row: torch.tanh(model[0](row)).square())(x)
        return torch.exp(model[3](per_row)).sum(), list(model.parameters())

    names = names_of(forward)
    tape = Tape()
    assert run(forward, tape, [Range(0, len(names))]) == run(forward)
    assert tape.report()[0].replays == 1


def test_a_generator_of_the_users_own():
    weight = torch.randn(8, 8, requires_grad=True)
    generator = torch.Generator()

    def forward():
        generator.manual_seed(5)
        noise = torch.rand(8, 8, generator=generator)
        more = torch.empty(8, 8).normal_(generator=generator)
        state.append(generator.get_state())
        return torch.tanh((weight * noise).cos() * more).sum(), [weight]

    state: list = []
    tape = Tape()
    wanted = run(forward)
    with tape.forward([Range(0, len(names_of(forward)))]):
        loss, _ = forward()
    loss.backward()
    assert as_bytes(weight.grad) == wanted["gradients"][0]
    assert torch.equal(generator.get_state(), state[-1])
    assert tape.report()[0].replays == 1


def test_several_forwards_before_one_backward():
    model, x = layers()
    tape = Tape()

    def forward(taped):
        total = torch.zeros(())
        for turn in range(3):
            if taped:
                with tape.forward([Range(0, 5), Range(1, 3)]):
                    total = total + model(x + turn).sum()
            else:
                total = total + model(x + turn).sum()
        return total, list(model.parameters())

    assert run(lambda: forward(True)) == run(lambda: forward(False))
    assert [report.replays for report in tape.report()] == [3, 3]


def test_hooks_on_activations_see_what_eager_shows():
    model, x = layers()

    def forward():
        seen = []
        y = model[1](model[0](x))
        y.register_hook(lambda gradient: seen.append(as_bytes(gradient)))
        y.retain_grad()
        hooked.append((seen, y))
        return torch.exp(F.dropout(y, 0.5)).sum(), list(model.parameters())

    hooked: list = []
    check(forward, [(0, len(names_of(forward)))], times=1)
    (one, y), (other, z) = hooked[-2:]
    assert one == other != []
    assert torch.equal(y.grad, z.grad)


@pytest.mark.parametrize("how", ["not reentrant", "reentrant", "region"])
def test_a_checkpointed_part_inside_a_range(how):
    torch.manual_seed(0)
    parts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(3))
    x = torch.randn(4, 8)

    def middle(y):
        if how == "region":
            return rt.checkpoint(parts[1], y)
        return torch.utils.checkpoint.checkpoint(parts[1], y, use_reentrant=how == "reentrant")

    def forward():
        y = middle(torch.tanh(parts[0](x)))
        return torch.exp(parts[2](torch.sin(y))).sum(), list(parts.parameters())

    names = names_of(forward)
    assert names[4:7] == ["linear", "gelu", "dropout"]
    for ranges in ([Range(0, len(names))], [Range(0, 6), Range(1, 4), Range(7, len(names))]):
        tape = Tape()
        assert run(forward, tape, ranges) == run(forward)
        assert all(report.replays >= 1 for report in tape.report())
    tape = Tape()
    told = contextlib.nullcontext() if how == "reentrant" else pytest.warns(RegionKept, match="other code takes")
    with told:
        assert run(forward, tape, [Range(5, 9)]) == run(forward)


def test_hooks_of_the_users_own_get_what_they_ask_for():
    model, x = layers()
    packed: list = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    def forward():
        y = model[1](model[0](x))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = torch.tanh(model[3](y))
        return torch.exp(y).sum(), list(model.parameters())

    wanted = run(forward)
    eager, packed[:] = list(packed), []
    tape = Tape()
    assert run(forward, tape, [Range(0, 5)]) == wanted
    assert packed == eager != []
    assert tape.report()[0].replays == 1


def test_a_rehearsal_runs_under_a_tape():
    step = ZOO["batchnorm_conv"].make()
    step()
    rehearsal = Rehearsal(step)
    with rehearsal.entered():
        names = names_of(rehearsal.step.compute_loss)
        tape = Tape()
        with tape.forward(Ranges([Range(4, 40), Range(10, 20), Range(60, 90)], names)):
            loss = rehearsal.step.compute_loss()
        loss.backward()
    assert isinstance(loss, FakeTensor)
    fake = [(report.replays, report.calls_replayed) for report in tape.report()]
    real = Tape()
    with real.forward(Ranges([Range(4, 40), Range(10, 20), Range(60, 90)], names)):
        loss = step.compute_loss()
    loss.backward()
    assert fake == [(report.replays, report.calls_replayed) for report in real.report()]
    assert all(replays == 1 for replays, _ in fake)
