"""Which calls count, and that a rehearsal numbers them as the real forward does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from taping import names_of
from torch import nn
from torch.utils._device import DeviceContext

import regrad.torch.tape.calls as calls
from regrad.bench.zoo import ZOO
from regrad.torch.dryrun import Rehearsal
from regrad.torch.tape import CallCounter, counts


@pytest.mark.parametrize("name", sorted(ZOO))
def test_fake_and_real_forwards_make_the_same_calls(name):
    step = ZOO[name].make()
    step()  # what only a first forward does is not of the steady state
    rehearsal = Rehearsal(step)
    rehearsal._reset_generators()
    fake = CallCounter()
    with rehearsal.entered(), fake:
        rehearsal.step.compute_loss()
    assert fake.names == names_of(step.compute_loss)
    assert len(fake.names) >= 20


def test_what_counts():
    for func in (
        torch.add,
        torch.Tensor.add_,
        torch.Tensor.T.__get__,
        torch.Tensor.data.__set__,
        F.dropout,
        torch.rand,
    ):
        assert counts(func)
    for func in (torch.Tensor.size, torch.Tensor.shape.__get__, torch.Tensor.item, torch.Tensor.is_cuda.__get__):
        assert not counts(func)
    for func in (torch.Tensor.backward, torch.Tensor.register_hook, torch.Tensor.grad.__get__, torch.equal):
        assert not counts(func)


def test_functions_are_opened_to_the_built_in_calls():
    x, weight = torch.randn(3, 4), torch.randn(4)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    y = torch.randn(2, 5, 8)
    assert names_of(lambda: F.dropout(F.layer_norm(x, (4,), weight), 0.5)) == ["layer_norm", "dropout"]
    assert names_of(lambda: F.softmax(x, -1)) == ["Tensor.softmax"]
    assert names_of(lambda: F.max_pool2d(x[None], 2)) == ["Tensor.__getitem__", "max_pool2d"]
    assert "multi_head_attention_forward" not in names_of(lambda: attention(y, y, y))
    assert names_of(lambda: x.unique(return_inverse=True)) != []


def test_opened_functions_compute_the_same():
    x, target = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1])
    for function in (
        lambda: F.cross_entropy(x, target, label_smoothing=0.1),
        lambda: F.gumbel_softmax(x, hard=True).sum(),
        lambda: torch.einsum("ab,cb->ac", x, x).norm(),
        lambda: (2 - x).split(2)[1].sum() + 3 // x.detach().abs().sum(),
        lambda: F.interpolate(x[None], scale_factor=2.0).sum(),
        lambda: torch.unique(x.detach(), dim=0, return_counts=True)[1].sum() + x.sum(),
        lambda: F.embedding(target, x, max_norm=1.0).sum() if not x.requires_grad else x.sum(),
        lambda: torch.stft(x.flatten(), 8, window=torch.ones(8), return_complex=True).abs().sum(),
    ):
        torch.manual_seed(1)
        expected = function()
        torch.manual_seed(1)
        with CallCounter():
            assert torch.equal(function(), expected)


def test_a_call_knows_its_ordinal_and_nothing_is_left_on_the_stack():
    counter = CallCounter()
    with counter:
        assert counter.current == -1
        torch.ones(2).add(1)
        assert counter.current == -1
        assert counter.ordinal == 2
        with pytest.raises(RuntimeError):
            torch.ones(2).matmul(torch.ones(3, 3))
        assert counter.current == -1
    assert not torch._C._len_torch_function_stack()
    with counter:
        assert counter.names == []


def test_another_mode_sees_whole_functions():
    with DeviceContext(torch.device("cpu")):
        assert names_of(lambda: F.dropout(torch.ones(3), 0.5)) == ["ones", "dropout"]

    class Plain(torch.Tensor):
        pass

    assert names_of(lambda: F.softmax(torch.ones(3).as_subclass(Plain), -1))[-1] == "softmax"


def test_opened_copies_look_their_names_up_live(monkeypatch):
    calls.kind_of(F.softmax)
    monkeypatch.setattr(F, "_get_softmax_dim", lambda *_: 1 / 0)
    with CallCounter(), pytest.raises(ZeroDivisionError):
        F.softmax(torch.ones(3))
