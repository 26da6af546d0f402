"""State that only operations show: no walk finds it, since its name is made at run time."""

from __future__ import annotations

import pytest
import torch

from regrad.torch.regions.public import Checkpoint

ENGINES = ["auto", "snapshot", "journal", "read_set", "guarded"]
SIZES = [200, 100_000]  # below and above what is copied at every call
HIDDEN = None


def hidden():
    return globals()["HID" + "DEN"]


def by_slice(x):
    h = torch.tanh(x + hidden()[:100])
    hidden()[50:150] = h.detach()
    return torch.sin(h)


def by_alias_with_its_own_counter(x):
    h = torch.tanh(x + hidden()[:100])
    hidden().detach()[50:150].copy_(h.detach())
    hidden()[:10].mul_(0.5)
    return torch.sin(h)


def whole(x):
    h = torch.tanh(x + hidden()[:100])
    hidden().mul_(0.9).add_(h.detach().mean())
    return torch.sin(h)


def train(region, checkpoint, size):
    """Three steps, two backwards each; what is saved outside the region is under eager's own version check."""
    global HIDDEN
    torch.manual_seed(0)
    HIDDEN, found = torch.randn(size), []
    x, w = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    for _ in range(4):
        loss = (checkpoint(region, x) + w * HIDDEN[:100]).sum()
        before = HIDDEN._version
        loss.backward(retain_graph=True)
        loss.backward()
        assert HIDDEN._version == before
        found += [loss.detach(), x.grad.clone(), w.grad.clone(), HIDDEN.clone()]
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("region", [by_slice, by_alias_with_its_own_counter, whole])
def test_a_replay_leaves_version_counters_as_they_were(region, size, engine):
    checkpoint = Checkpoint(engine=engine)
    expected = train(region, lambda function, x: function(x), size)
    assert all(map(torch.equal, expected, train(region, checkpoint, size)))
    (report,) = checkpoint.report()
    assert (report.calls, report.replays, report.kept) == (4, 8, ())


def test_a_real_change_is_still_refused():
    global HIDDEN
    HIDDEN = torch.randn(100_000)
    x, w = torch.randn(100, requires_grad=True), torch.randn(100, requires_grad=True)
    loss = (Checkpoint()(by_slice, x) + w * HIDDEN[:100]).sum()
    loss.backward(retain_graph=True)
    HIDDEN.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
