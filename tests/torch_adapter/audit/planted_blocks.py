"""Blocks with one kind of state each. A line with a mark (``# <- kind``) is where the first difference shows if a replay
forgets it; the tests look the line's number up here."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8
GLOBAL_TABLE = torch.zeros(WIDTH)


def line_of(mark: str, file: str = __file__) -> str:
    """``file:line`` of the only line with ``# <- mark``."""
    found = [i for i, text in enumerate(Path(file).read_text().splitlines(), 1) if text.endswith(f"# <- {mark}")]
    assert len(found) == 1, (mark, found)
    return f"{file}:{found[0]}"


class Plain(nn.Module):
    """A block without state; the others add ``effect``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """Make the state."""

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        """Read and change the state."""
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.out(self.effect(torch.tanh(self.linear(x)))))


class Dropout(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return F.dropout(y, 0.5)  # <- dropout


class DropoutModule(Plain):
    def prepare(self) -> None:
        self.drop = nn.Dropout(0.5)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return self.drop(y)  # <- dropout module


class Noise(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y + torch.randn(WIDTH)  # <- noise


class PythonRandom(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * random.random()  # <- python random


class NumpyRandom(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(np.random.rand())  # <- numpy random


class NumpyGenerator(Plain):
    def prepare(self) -> None:
        self.rng = np.random.default_rng(3)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(self.rng.random())  # <- numpy generator


class PythonGenerator(Plain):
    def prepare(self) -> None:
        self.rng = random.Random(3)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.rng.random()  # <- python generator


class TorchGenerator(Plain):
    def prepare(self) -> None:
        self.gen = torch.Generator().manual_seed(3)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * torch.rand(WIDTH, generator=self.gen)  # <- torch generator


class Counter(Plain):
    def prepare(self) -> None:
        self.calls = 0

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # <- counter
        return y


class CounterRead(Plain):
    def prepare(self) -> None:
        self.calls = 0

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        y = y / (1 + self.calls)  # <- counter read
        self.calls += 1
        return y


class ObjectCounter(Plain):
    def prepare(self) -> None:
        self.stats = Stats()

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.stats.count += 1  # <- object counter
        return y


class Stats:
    """A plain object that a block holds."""

    def __init__(self) -> None:
        self.count = 0


class SlottedCounter(Plain):
    def prepare(self) -> None:
        self.stats = Slotted()

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.stats.count += 1  # <- slots
        return y


class Slotted:
    """A plain object without a ``__dict__``."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class List(Plain):
    def prepare(self) -> None:
        self.seen: list[int] = []

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))  # <- list
        return y


class Dict(Plain):
    def prepare(self) -> None:
        self.table = {"calls": 0}

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.table["calls"] += 1  # <- dict
        return y


class Deque(Plain):
    def prepare(self) -> None:
        self.window: deque[float] = deque(maxlen=3)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.window.append(float(len(self.window)))  # <- deque
        return y


class Set(Plain):
    def prepare(self) -> None:
        self.kinds: set[int] = set()

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.kinds.add(len(self.kinds))  # <- set
        return y


class Array(Plain):
    def prepare(self) -> None:
        self.histogram = np.zeros(4)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.histogram[1] += 1  # <- array
        return y


class Rebound(Plain):
    def prepare(self) -> None:
        self.average = torch.zeros(WIDTH)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + y.detach().mean(0)  # <- rebound
        return y


class ReboundBuffer(Plain):
    def prepare(self) -> None:
        self.register_buffer("average", torch.zeros(WIDTH))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + y.detach().mean(0)  # <- rebound buffer
        return y


def closure_block() -> nn.Module:
    """A block whose state only a closure holds."""
    hidden = torch.zeros(WIDTH)

    class Closure(Plain):
        def effect(self, y: torch.Tensor) -> torch.Tensor:
            hidden.add_(1)  # <- closure
            return y * hidden

    return Closure()


class Global(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        GLOBAL_TABLE.add_(1)  # <- global
        return y * GLOBAL_TABLE


class ClassAttribute(Plain):
    total = 0

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        ClassAttribute.total += 1  # <- class attribute
        return y


class BatchNorm(Plain):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return self.norm(y)  # <- batch norm


class Queue(Plain):
    def prepare(self) -> None:
        self.register_buffer("queue", torch.randn(6, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        y = y + (y @ self.queue.clone().T) / 8 @ torch.ones(6, WIDTH)  # <- queue read
        rows = (self.pointer + torch.arange(2)) % 6
        self.queue.index_copy_(0, rows, y.detach()[:2])
        self.pointer.add_(2)  # <- queue pointer
        return y


class Pointer(Plain):
    def prepare(self) -> None:
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.pointer.add_(2)  # <- pointer
        return y


class Codebook(Plain):
    def prepare(self) -> None:
        self.codebook = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(y.detach(), self.codebook).argmin(1)  # <- codebook read
        quantised = y + (self.codebook[nearest] - y).detach()
        self.codebook.data[nearest] = 0.9 * self.codebook[nearest] + 0.1 * y.detach()
        return quantised


class DataWrite(Plain):
    def prepare(self) -> None:
        self.register_buffer("scale", torch.ones(WIDTH))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.scale.data.mul_(0.5)  # <- data write
        return y * self.scale.clone()


class Teacher(Plain):
    def prepare(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.linear.weight, 0.1)  # <- teacher
            target = self.teacher(y)
        return y + target


class Spectral(Plain):
    def prepare(self) -> None:
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.out(self.linear(x)))  # <- spectral norm


class GrowingCache(Plain):
    def prepare(self) -> None:
        self.cache = torch.zeros(1, WIDTH)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.cache = torch.cat([self.cache, y.detach()])  # <- growing cache
        return y + self.cache.mean(0)


class KeyCache(Plain):
    def prepare(self) -> None:
        self.register_buffer("keys", torch.zeros(8, WIDTH))
        self.length = 0

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.keys[self.length] = y.detach()[0]  # <- key cache
        self.length += 1
        return y + self.keys.mean(0)


class Carry(Plain):
    def prepare(self) -> None:
        self.register_buffer("state", torch.zeros(WIDTH))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        y = y + self.state  # <- carry read
        self.state.copy_(y.detach().mean(0))
        return y


class CarryAfter(Plain):
    def prepare(self) -> None:
        self.register_buffer("state", torch.zeros(WIDTH))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        self.state.mul_(0.5).add_(y.detach().mean(0))  # <- carry
        return y


class FirstCall(Plain):
    def prepare(self) -> None:
        self.ready = False

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if self.ready else 3.0
        self.ready = True
        return y * scale  # <- first call


class Lazy(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "statistics"):
            self.statistics = y.detach().mean(0)
        else:
            self.statistics = self.statistics * 0.5  # <- lazy
        return y + self.statistics


class Flagged(Plain):
    def prepare(self) -> None:
        self.scale = 1.0

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * self.scale  # <- flag


class DefaultDtype(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        steps = torch.linspace(0, 1, WIDTH)  # <- default dtype
        return y * steps.exp().float()


class Autocast(Plain):
    marked = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().float() @ self.linear.weight.detach()  # <- autocast
        return x * scale.float() * self.linear.bias


class GradMode(Plain):
    def effect(self, y: torch.Tensor) -> torch.Tensor:
        return y * (2.0 if torch.is_grad_enabled() else 3.0)  # <- grad mode


class ChangedArgument(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.add_(1)  # <- argument
        return x * torch.tanh(self.linear(x.clone())).detach() + self.out(x.clone())


class Hooked(Plain):
    def prepare(self) -> None:
        seen: list[int] = []

        def count(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(len(seen))  # <- hook

        self.linear.register_forward_hook(count)


class Late(Plain):
    def prepare(self) -> None:
        self.phase = -1
        self.register_buffer("state", torch.zeros(WIDTH))

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        if self.phase == 2:
            self.state.add_(1)  # <- late
        return y


class Marked(Plain):
    """Without state, and with a mark that some engines look for."""

    marked = True


class Constant(Plain):
    def prepare(self) -> None:
        self.register_buffer("constant", torch.ones(3))


class Everything(Plain):
    """Many kinds at once: a wrapper that forgets one of them must not be taken for one that forgets another."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("queue", torch.randn(6, WIDTH))
        self.register_buffer("carry", torch.zeros(WIDTH))
        self.calls = 0
        self.seen: list[int] = []
        self.table = {"calls": 0}
        self.window: deque[int] = deque(maxlen=3)
        self.kinds: set[int] = set()
        self.gen = torch.Generator().manual_seed(5)
        self.rng = np.random.default_rng(5)

    def effect(self, y: torch.Tensor) -> torch.Tensor:
        y = self.norm(y)  # <- all: norm
        y = y * random.random()  # <- all: python random
        y = y * float(np.random.rand())  # <- all: numpy random
        y = y * float(self.rng.random())  # <- all: numpy generator
        y = y * torch.rand(WIDTH, generator=self.gen)  # <- all: torch generator
        y = F.dropout(y, 0.2)  # <- all: torch random
        y = y + y @ self.queue.clone().T @ torch.ones(6, WIDTH) / 8  # <- all: queue
        self.queue[self.calls % 6] = y.detach()[0]  # <- all: calls
        self.carry.mul_(0.5).add_(y.detach().mean(0))  # <- all: carry
        self.calls += 1
        self.seen.append(len(self.seen))  # <- all: seen
        self.table["calls"] += 1  # <- all: table
        self.window.append(len(self.window))  # <- all: window
        self.kinds.add(len(self.kinds))  # <- all: kinds
        return y


class Net(nn.Module):
    """Three blocks, the middle one with state."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Plain(), block, Plain()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
