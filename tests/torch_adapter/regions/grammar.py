"""Modules built at random from a grammar of kinds of state, and a runner that records everything that they touch.

A program is a few regions in a row, each a chain of pieces, some of them regions again. Two builds from one seed are
equal, so a program can run once in eager and once under a checkpoint.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, deque

import numpy as np
import torch
from torch import nn

WIDTH, ROWS = 6, 4
LARGE = 128 * 1024  # floats: more than is copied at every call
GLOBAL = {"calls": 0, "log": []}


class Piece(nn.Module):
    """One kind of state; what it holds goes into the output, so that a wrong value shows in gradients."""

    def __init__(self, seed):
        super().__init__()
        self.late = seed % 3 == 0  # touches its state from step 2 on only
        self.step = 0
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.make(seed)

    def make(self, seed):
        pass

    def forward(self, x, world):
        h = torch.tanh(self.lin(x)).float()
        if self.late and world["step"] < 2:
            return h
        return self.body(h, world)


class InPlace(Piece):
    def make(self, seed):
        self.register_buffer("mean", torch.zeros(WIDTH))

    def body(self, h, world):
        self.mean.lerp_(h.detach().mean(0), 0.3)
        return torch.tanh(h - self.mean.clone())


class Rebound(Piece):
    def make(self, seed):
        self.register_buffer("seen", torch.ones(1, WIDTH))

    def body(self, h, world):
        self.seen = torch.cat([self.seen, h.detach().mean(0, keepdim=True)])
        return torch.tanh(h * self.seen.sum(0))


class DataWrite(Piece):
    def make(self, seed):
        self.register_buffer("code", torch.ones(WIDTH))

    def body(self, h, world):
        self.code.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.2)
        return torch.sin(h * self.code.clone())


class DataAssign(Piece):
    def make(self, seed):
        self.register_buffer("code", torch.ones(WIDTH))

    def body(self, h, world):
        self.code.data = self.code * 0.7 + h.detach().mean(0)
        return torch.sin(h * self.code)


class AliasView(Piece):
    def make(self, seed):
        self.register_buffer("flat", torch.zeros(2 * WIDTH))
        self.low, self.high = self.flat[:WIDTH], self.flat[WIDTH:]

    def body(self, h, world):
        self.flat.mul_(0.5).add_(torch.cat([h.detach().mean(0), h.detach().abs().amax(0)]), alpha=0.5)
        return torch.tanh((h - self.low.clone()) / (self.high.clone() + 1))


class PythonCounter(Piece):
    def make(self, seed):
        self.calls = 0

    def body(self, h, world):
        self.calls += 1
        return torch.sin(h * self.calls)


class Window(Piece):
    def make(self, seed):
        self.window = deque(maxlen=3)

    def body(self, h, world):
        self.window.append(h.detach().mean(0))
        return torch.tanh(h + torch.stack(list(self.window)).sum(0))


class OwnGenerator(Piece):
    def make(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def body(self, h, world):
        return torch.tanh(h * torch.empty_like(h).bernoulli_(0.5, generator=self.generator))


class NumpyGenerator(Piece):
    def make(self, seed):
        self.numbers = np.random.default_rng(seed)

    def body(self, h, world):
        return torch.tanh(h * torch.from_numpy(self.numbers.uniform(0.5, 1.5, WIDTH)).float())


class PythonRandom(Piece):
    def make(self, seed):
        self.dice = random.Random(seed)

    def body(self, h, world):
        return torch.sin(h * (1 + self.dice.random()) * (1 + random.random()) * (1 + np.random.rand()))


class LazyCache(Piece):
    def make(self, seed):
        self.freq = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.table = None

    def body(self, h, world):
        if self.table is None or self.table[0] != world["step"]:
            self.table = (world["step"], torch.cos(torch.arange(ROWS)[:, None] * self.freq))
        return torch.tanh(h * self.table[1])


class LazyBuffer(Piece):
    def body(self, h, world):
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.rand(WIDTH))
        return torch.tanh(h * self.made)


class MutatedArgument(Piece):
    def body(self, h, world):
        world["state"].mul_(0.5).add_(h.detach().mean(0))
        return torch.tanh(h - world["state"].clone())


class Bag(Piece):
    def body(self, h, world):
        world["bag"].append(h.square().mean())
        return torch.sin(h * len(world["bag"]))


class GrowingCache(Piece):
    def body(self, h, world):
        cache = world["cache"]
        cache[id(self)] = torch.cat([cache[id(self)], h]) if id(self) in cache else h
        return torch.tanh(h + cache[id(self)].mean(0))


class NumpyState(Piece):
    def make(self, seed):
        self.total, self.seen = np.zeros(WIDTH), {"count": 0, "peaks": []}

    def body(self, h, world):
        self.total += h.detach().numpy().mean(0)
        self.seen["count"] += 1
        self.seen["peaks"].append(float(h.detach().max()))
        return torch.tanh(h - torch.from_numpy(self.total).float() / self.seen["count"])


class Norm(Piece):
    def make(self, seed):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if seed % 2 else 0.1)
        self.drop = nn.Dropout(0.3)

    def body(self, h, world):
        return self.drop(self.norm(h)) + self.norm.running_mean.clone()


class Queue(Piece):
    def make(self, seed):
        self.register_buffer("queue", torch.zeros(LARGE // WIDTH, WIDTH))
        self.at = 0

    def body(self, h, world):
        out = torch.tanh(h + self.queue[: ROWS * 3].clone().sum(0))
        self.queue[self.at : self.at + ROWS] = h.detach()
        self.queue.index_add_(0, torch.tensor([0, 2]), h.detach()[:2])
        self.at += ROWS
        return out


class LargeWhole(Piece):
    def make(self, seed):
        self.register_buffer("bank", torch.zeros(LARGE))

    def body(self, h, world):
        self.bank.mul_(0.5).add_(h.detach().sum())
        return torch.sin(h * (1 + self.bank[0].item()))


class Teacher(Piece):
    def make(self, seed):
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def body(self, h, world):
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.lin.parameters(), strict=True):
                t.mul_(0.7).add_(s, alpha=0.3)
            goal = self.teacher(h)
        return torch.tanh(h - goal)


class Counted(Piece):
    def make(self, seed):
        self.ids = itertools.count(1)

    def body(self, h, world):
        return torch.sin(h * next(self.ids))


class InPlaceInput(Piece):
    def forward(self, x, world):
        return torch.tanh(self.lin(torch.nn.functional.silu(x * 1.0, inplace=True)))


class Slotted:
    __slots__ = ("level",)

    def __init__(self):
        self.level = 1.0

    def bump(self):
        self.level *= 1.1
        return self.level


class InSlots(Piece):
    total = 0

    def make(self, seed):
        self.box, self.tally, self.names = Slotted(), Counter(), OrderedDict()

    def body(self, h, world):
        type(self).total += 1
        self.tally["x"] += 1
        self.names[len(self.names)] = float(h.detach().mean())
        return torch.sin(h * self.box.bump() * self.tally["x"]) + sum(self.names.values())


class Global(Piece):
    def body(self, h, world):
        GLOBAL["calls"] += 1
        GLOBAL["log"].append(float(h.detach().mean()))
        return torch.sin(h * GLOBAL["calls"]) + len(GLOBAL["log"])


class TrainerFlag(Piece):
    """The trainer changes ``temperature`` between forward and backward."""

    def make(self, seed):
        self.temperature = 1.0

    def body(self, h, world):
        return torch.softmax(h / self.temperature, -1)


class Hooked(Piece):
    def make(self, seed):
        self.inner, self.log = nn.Linear(WIDTH, WIDTH), []
        self.inner.register_forward_hook(lambda module, args, out: self.log.append(float(out.detach().mean())))

    def body(self, h, world):
        return torch.tanh(self.inner(h)) * (1 + len(self.log))


class Closure(Piece):
    def make(self, seed):
        calls = 0

        def bump():
            nonlocal calls
            calls += 1
            return calls

        self.bump = bump

    def body(self, h, world):
        return torch.sin(h * self.bump())


class InnerGradient(Piece):
    def make(self, seed):
        self.register_buffer("scale", torch.ones(()))

    def body(self, h, world):
        with torch.enable_grad():
            (g,) = torch.autograd.grad(torch.sin(h).square().sum(), h, create_graph=True)
        self.scale.mul_(0.9)
        return torch.tanh(h - g * self.scale.clone())


KINDS = list(Piece.__subclasses__())


class Chain(nn.Module):
    """Pieces one after another; a nested chain runs as a region of its own."""

    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x, world):
        for part in self.parts:
            x = world["run"](part, x, world) if isinstance(part, Chain) else x + part(x, world)
        return x


def build(seed):
    """The model and the shape of the training of program ``seed``."""
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def chain(depth):
        parts = []
        for _ in range(draw.randint(1, 3)):
            nest = depth and draw.random() < 0.25
            parts.append(chain(depth - 1) if nest else draw.choice(KINDS)(draw.randrange(1000)))
        return Chain(parts)

    model = nn.ModuleList(chain(2) for _ in range(draw.randint(1, 3)))
    order = draw.choice(["plain", "plain", "interleaved", "reversed", "twice", "dropped", "penalty"])
    return model, order, draw.random() < 0.3


def forward(model, x, world):
    for region in model:
        x = world["run"](region, x, world)
    loss = x.square().mean()
    if world["bag"]:
        loss = loss + torch.stack(world["bag"]).sum()
        world["bag"].clear()
    return loss


def train(seed, checkpoint, steps=3):
    """Run program ``seed`` and return everything that must not depend on ``checkpoint``."""
    GLOBAL.update(calls=0, log=[])
    InSlots.total = 0
    model, order, autocast = build(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    record = []
    world = {"run": checkpoint, "bag": [], "state": torch.zeros(WIDTH), "step": 0}
    for step in range(steps):
        world["step"] = step
        xs = [torch.randn(ROWS, WIDTH).requires_grad_() for _ in range(2)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses = []
            for x in xs:
                world["cache"] = {}
                losses.append(forward(model, x, world))
        for module in model.modules():
            if isinstance(module, TrainerFlag):
                module.temperature *= 0.9
        backward(order, losses, xs, model)
        record += [loss.detach().clone() for loss in losses] + [x.grad for x in xs]
        record += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
    return record + observed(model, world)


def backward(order, losses, xs, model):
    if order == "reversed":
        losses = losses[::-1]
    if order == "interleaved" or order == "reversed":
        for loss in losses:
            loss.backward()
    elif order == "twice":
        total = sum(losses)
        total.backward(retain_graph=True)
        total.backward()
    elif order == "dropped":
        losses[0].backward()
    elif order == "penalty":
        (g,) = torch.autograd.grad(losses[0], xs[0], create_graph=True)
        (losses[0] + losses[1] + g.square().sum()).backward()
    else:
        sum(losses).backward()


def observed(model, world):
    found = [world["state"].clone(), dict(GLOBAL, log=list(GLOBAL["log"])), InSlots.total]
    for module in model.modules():
        found += [p.detach().clone() for p in module._parameters.values() if p is not None]
        found += [b.clone() for b in module._buffers.values() if b is not None]
        for name, value in vars(module).items():
            if name in ("calls", "at", "temperature", "window", "total", "seen", "tally", "names", "log"):
                found.append((name, freeze(value)))
            elif name == "generator":
                found.append(value.get_state())
            elif name == "numbers":
                found.append(repr(value.bit_generator.state))
            elif name == "dice":
                found.append(value.getstate())
            elif name == "ids":
                found.append(repr(value))
            elif name == "box":
                found.append(value.level)
            elif name in ("low", "high"):
                found += [value.clone(), value.untyped_storage().data_ptr() == module.flat.untyped_storage().data_ptr()]
    _kind, keys, *rest = np.random.get_state()
    return [*found, torch.get_rng_state(), random.getstate(), keys.tobytes(), tuple(rest), torch.is_grad_enabled()]


def freeze(value):
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return tuple((key, freeze(item)) for key, item in value.items())
    if isinstance(value, (list, deque)):
        return tuple(map(freeze, value))
    return value


def differences(one, other):
    """Positions at which two records differ, to the bit."""
    if len(one) != len(other):
        return [-1]
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not same(a, b)]


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and freeze(a) == freeze(b)
    return type(a) is type(b) and a == b
