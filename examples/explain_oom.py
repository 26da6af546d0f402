"""Run a training step out of memory on purpose, and read who asked for how much, and which changes would make it fit.

The process limits itself to little more than it has, so that this is over at once on any machine with Linux.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn

import regrad.torch as rt
from regrad import format_bytes

ROOM = 512 << 20


class Net(nn.Module):
    """Layers whose results are 64 MiB each, all of them kept for the backward."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(layers))
        self.head = nn.Linear(512, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def limit(room: int) -> None:
    """Let this process have so many bytes more than it has now."""
    sizes = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(sizes["VmSize"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))


def main() -> None:
    """Fail, and print the note that the error carries."""
    model, batch = Net(), torch.randn(32768, 512)
    step = rt.Step(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    rt.Step(Net(1), batch[:8])()  # what a first step loads is there before the limit
    limit(ROOM)
    try:
        with rt.explain_oom(step):
            step()
    except RuntimeError as error:  # on a GPU: torch.OutOfMemoryError, as ever
        print(error.__notes__[-1])
        first = error.advice.suggestions[0]
        print("\nfirst of all:", first.what, "for a peak of", format_bytes(first.predicted_peak_bytes))


if __name__ == "__main__":
    main()
