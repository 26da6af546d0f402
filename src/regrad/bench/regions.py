"""What ``rt.checkpoint`` costs: step time over torch's checkpoint, and time and bytes of each engine on a large queue."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint as plain

import regrad.torch as rt
from regrad.bench.record import write_result
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept

ENGINES = ("snapshot", "journal", "read_set", "guarded")
QUEUE_BYTES = 64 * 2**20
Ck = Callable[..., Any]


class Block(nn.Module):
    """A transformer block without state."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed: torch.Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + y


class NormBlock(nn.Module):
    """A residual block with two batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return x + y


class Queue(nn.Module):
    """64 MiB, of which each call reads and writes 64 rows (16 KiB)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.at = nn.Linear(64, 64), 0
        self.register_buffer("bank", torch.zeros(QUEUE_BYTES // 256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.lin(x))
        bank = self.get_buffer("bank")
        out = torch.sin(h + bank[self.at : self.at + 64].clone().mean(0))
        bank[self.at : self.at + 64] = h.detach()
        self.at = (self.at + 64) % 4096
        return out


def step(blocks: nn.ModuleList, x: torch.Tensor, ck: Ck) -> None:
    """One forward and backward, each block a region."""
    for block in blocks:
        x = ck(block, x)
    x.square().mean().backward()
    for parameter in blocks.parameters():
        parameter.grad = None


def against_torch(name: str, blocks: nn.ModuleList, x: torch.Tensor, aim: float, rounds: int) -> dict[str, Any]:
    """Paired rounds of both; the median of the ratios, and the medians of the times."""
    runs: dict[str, Ck] = {"torch": lambda f, *a: plain(f, *a, use_reentrant=False), "regrad": rt.checkpoint}
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for index in range(rounds + 3):
        for key, ck in runs.items():
            start = time.perf_counter()
            step(blocks, x, ck)
            if index >= 3:  # the first calls learn
                seconds[key].append(time.perf_counter() - start)
    ratios = [ours / theirs for ours, theirs in zip(seconds["regrad"], seconds["torch"], strict=True)]
    return {
        "name": name,
        "torch_seconds": statistics.median(seconds["torch"]),
        "regrad_seconds": statistics.median(seconds["regrad"]),
        "step_ratio": statistics.median(ratios),
        "aim_ratio": aim,
    }


def on_a_queue(engine: str, rounds: int) -> dict[str, Any]:
    """Added time a call over plain calls, and retained bytes, reported and counted by hand."""
    model, x = Queue(), torch.randn(64, 64)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "eager forward": [], "eager backward": []}
    ck: Ck = rt.Checkpoint(engine=engine)
    retained = 0
    both: tuple[tuple[str, Ck], ...] = (("eager ", lambda f, *a: f(*a)), ("", ck))
    for index in range(rounds + 3):
        for prefix, run in both:
            before, start = retained_bytes(), time.perf_counter()
            loss = run(model, x).sum()
            middle = time.perf_counter()
            retained = retained_bytes() - before
            loss.backward()
            end = time.perf_counter()
            if index >= 3:
                times[f"{prefix}forward"].append(middle - start)
                times[f"{prefix}backward"].append(end - middle)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "engine": engine,
        "added_forward_seconds": medians["forward"] - medians["eager forward"],
        "added_backward_seconds": medians["backward"] - medians["eager backward"],
        "retained_bytes": retained,
    }


def main() -> int:
    """Print both tables and write ``regions_[hardware]_[date].json``."""
    parser = argparse.ArgumentParser(prog="python -m regrad.bench.regions", description="What rt.checkpoint costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the result")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", RegionKept)
    transformer = nn.ModuleList(Block(256, 4) for _ in range(12))
    net = nn.ModuleList(NormBlock(32) for _ in range(8))
    steps = [
        against_torch("12-block transformer", transformer, torch.randn(4, 128, 256), 1.02, settings.rounds),
        against_torch("batch-norm net", net, torch.randn(16, 32, 32, 32), 1.05, settings.rounds),
    ]
    queues = [on_a_queue(engine, settings.rounds) for engine in ENGINES]
    console = Console()
    table = Table(title="step time over torch's checkpoint", title_justify="left")
    for column in ("", "torch", "regrad", "ratio", "aim"):
        table.add_column(column, justify="right")
    for row in steps:
        table.add_row(
            row["name"], f"{row['torch_seconds'] * 1e3:.1f} ms", f"{row['regrad_seconds'] * 1e3:.1f} ms",
            f"{row['step_ratio']:.3f}", f"{row['aim_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
    table = Table(title="a 64 MiB queue, 16 KiB written a call", title_justify="left")
    for column in ("engine", "added forward", "added backward", "retained bytes"):
        table.add_column(column, justify="right")
    for row in queues:
        table.add_row(
            row["engine"], f"{row['added_forward_seconds'] * 1e3:.2f} ms",
            f"{row['added_backward_seconds'] * 1e3:.2f} ms", f"{row['retained_bytes']:,}",
        )  # fmt: skip
    console.print(table)
    console.print(f"written to {write_result('regions', {'steps': steps, 'queues': queues}, settings.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
