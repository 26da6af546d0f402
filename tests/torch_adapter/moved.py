"""Steps whose saved tensors can be moved, plans of given ranges and moves, and the bytes that a forward leaves behind."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.chain import KEEP
from regrad.core.plan import Plan
from regrad.core.simulate_moves import Movable
from regrad.core.simulate_tape import TapeRange
from regrad.torch.describe import Found, describe
from regrad.torch.measure import measure_peak
from regrad.torch.profile import Profile

SAVED = 1 << 31
"""A tensor of so many bytes, never touched, marks a moment as the peak."""


class Pooled(nn.Module):
    """Saves the places of maxima, the order of a sort, and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(self.convolution(x), 2)
        h = h.masked_fill(h < 0, 0.0)
        h = self.head(h.flatten(1))
        best, order = h.sort(dim=1)
        again = h.gather(1, order) + best.flip(1)
        return F.relu(again + 0.1).mean() + F.dropout(again, 0.2, training=self.training).square().mean()


class Grouped(nn.Module):
    """Attention whose keys and values are repeated for groups of heads, each where it is used."""

    def __init__(self, width: int = 512, heads: int = 16, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.depth = heads, groups, width // heads
        self.scale, self.both = nn.Parameter(torch.ones(width)), nn.Linear(width, 2 * groups * self.depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query = (x * self.scale).view(batch, length, self.heads, self.depth).transpose(1, 2)
        key, value = self.both(x).view(batch, length, 2, self.groups, self.depth).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(query @ self.repeated(key).transpose(-2, -1), -1)
        h = attention @ self.repeated(value)
        return x + h.transpose(1, 2).reshape(batch, length, width)

    def repeated(self, one: torch.Tensor) -> torch.Tensor:
        batch, groups, length, depth = one.shape
        each = one[:, :, None].expand(batch, groups, self.heads // groups, length, depth)
        return each.reshape(batch, self.heads, length, depth)


class Decoder(nn.Module):
    """Blocks of grouped-query attention."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Grouped() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(name: str) -> rt.Step:
    torch.manual_seed(0)
    if name == "pooled":
        model: nn.Module = Pooled()
        return rt.Step(model, torch.randn(16, 1, 16, 16), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    if name == "grouped":
        model = Decoder()
        return rt.Step(model, torch.randn(4, 64, 512), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return ZOO[name].make("small")


@cache
def base(name: str) -> tuple[rt.Step, Profile]:
    """A step and its profile; tests run copies of the step."""
    step = make(name)
    return step, rt.profile(step)


def forced(profile: Profile, ranges: tuple[TapeRange, ...], moves: tuple[Movable, ...]) -> tuple[Found, Plan]:
    """The plan of these ranges and moves, whether or not it is a good one."""
    search = profile.search
    assert search is not None
    one = search.price(ranges, moves)
    levels = search.levels(one.ranges, one.moves)
    found = Found(tuple(KEEP for _ in profile.pieces), levels, one.ranges, search, one.moves)
    return found, describe(profile, found, budget_bytes=1 << 40, least_bytes=0, planner="forced", notes=())


def retained(step: rt.Step) -> int:
    """Bytes alive when the forward has ended, beyond what was there before it."""

    def forward() -> None:
        loss = step.compute_loss()
        torch.empty(SAVED, dtype=torch.uint8)
        loss.backward()  # some models hold on to their last graph
        step.clear_gradients()

    peak = measure_peak(forward, persistent=step)
    return peak.peak_bytes - SAVED - peak.baseline_bytes
