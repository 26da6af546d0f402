"""Several names for one large storage: views at other places, and aliases that count versions apart."""

from __future__ import annotations

import pytest
import torch

from regrad.core.errors import ModifiedArgument
from regrad.torch.regions.public import Checkpoint

ELEMENTS = 100_000  # more than 256 KiB: looked at by signature, kept by an engine


class Holder:
    """A buffer, a view of its middle, and an alias with a version counter of its own."""

    def __init__(self):
        self.buffer = torch.linspace(-1, 1, ELEMENTS)
        self.middle = self.buffer[500:600]
        self.apart = self.buffer.data

    def call(self, x):
        h = torch.tanh(x + self.middle)
        self.buffer[550:650] = h.detach()
        return torch.sin(h + self.apart[540:640])

    def other(self, x):
        """Writes the same storage and reaches it by the view alone."""
        h = torch.tanh(x - self.middle)
        self.middle.add_(h.detach(), alpha=0.1)
        return h


def steps(checkpoint):
    holder, found = Holder(), []
    for step in range(3):
        x = (torch.arange(100.0) / (step + 40)).requires_grad_()
        out = checkpoint(holder.call, x) + checkpoint(holder.other, x)
        out.sum().backward()
        found += [out.detach(), x.grad, holder.buffer.clone(), holder.apart.clone()]
    return found


@pytest.mark.parametrize("engine", ["auto", "snapshot", "journal", "read_set", "guarded"])
def test_aliases_are_restored_and_not_taken_for_changed(engine):
    checkpoint = Checkpoint(engine=engine)
    expected, got = steps(lambda function, x: function(x)), steps(checkpoint)
    assert all(map(torch.equal, expected, got))
    assert sum(report.replays for report in checkpoint.report()) == 6


def test_a_change_through_any_alias_is_still_refused():
    for name in ("buffer", "middle", "apart"):
        holder, x = Holder(), torch.arange(100.0).requires_grad_()
        out = Checkpoint()(holder.call, x)
        getattr(holder, name).mul_(2)
        with pytest.raises(ModifiedArgument, match="modified in place"):
            out.sum().backward()
