"""A step recorded on this machine and translated to another device: kernels, bytes, seconds, segments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import GPT, gpt_batch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import regrad.torch as rt
from regrad.core.errors import InvalidSubject
from regrad.core.simulate_trace import TraceArithmetic, live_levels
from regrad.memory.devices import find_device
from regrad.torch.dryrun import Rehearsal
from regrad.torch.moments import TypedAdam, with_moments
from regrad.torch.on_device import device_form, on_device
from regrad.torch.translate import DeviceClock, reserved, translate

H100, T4 = find_device("h100-80gb"), find_device("t4")


class Attend(nn.Module):
    """One linear layer on each side of attention."""

    def __init__(self, dropout=0.1, mask=False, groups=4, width=32):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout, self.mask, self.groups = dropout, mask, groups

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.inner(x).view(batch, length, 4, width // 4).transpose(1, 2)
        few = heads[:, : self.groups]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.mask else None
        mixed = F.scaled_dot_product_attention(
            heads, few, few, attn_mask=mask, dropout_p=self.dropout, is_causal=not self.mask, enable_gqa=self.groups < 4
        )
        return self.outer(mixed.transpose(1, 2).flatten(2)).float().square().mean()


def recorded(model, batch, device, optimizer=None):
    with on_device(device):
        rehearsal = Rehearsal(rt.Step(model, batch, optimizer=optimizer))
        if device is not None:
            device_form(rehearsal.step.optimizer)
        return rehearsal.record()


def names_of(record):
    return [operation.name for operation in record.trace.operations]


def made_by(record, name):
    trace = record.trace
    at = names_of(record).index(name)
    return [trace.storages[index].bytes for index in trace.operations[at].makes]


@pytest.mark.parametrize(
    ("dtype", "device", "settings", "kernel"),
    [
        (torch.bfloat16, H100, {}, "flash"),
        (torch.float16, H100, {"groups": 2}, "flash"),
        (torch.bfloat16, H100, {"mask": True}, "efficient"),
        (torch.float32, H100, {}, "efficient"),
        (torch.float16, T4, {}, "efficient"),
        (torch.float32, H100, {"groups": 2}, None),
        (torch.bfloat16, T4, {}, None),
    ],
)
def test_attention_ends_in_the_devices_kernel(dtype, device, settings, kernel):
    record = recorded(Attend(**settings).to(dtype), torch.randn(2, 16, 32, dtype=dtype), device)
    forward = [name for name in names_of(record) if "scaled_dot_product" in name and "backward" not in name]
    if kernel is None:
        assert not any("flash_attention.default" in name or "efficient" in name for name in forward)
    else:
        assert forward == [f"aten._scaled_dot_product_{kernel}_attention.default"]
        result, rows = made_by(record, forward[0])[:2]
        assert result == 2 * 16 * 32 * dtype.itemsize
        assert rows == 4 * 2 * 4 * (16 if kernel == "flash" else 32)  # the other one rounds rows up to 32
        assert any(f"{kernel}_attention_backward" in name for name in names_of(record))


def test_without_a_device_nothing_changes():
    with_dropout = recorded(Attend(), torch.randn(2, 16, 32), None)
    assert "aten._safe_softmax.default" in names_of(with_dropout) or "aten._softmax.default" in names_of(with_dropout)
    assert not any("efficient" in name for name in names_of(with_dropout))


def test_heads_that_are_padded():
    record = recorded(Attend(width=24).bfloat16(), torch.randn(2, 16, 24, dtype=torch.bfloat16), H100)
    assert made_by(record, "aten._scaled_dot_product_flash_attention.default")[0] == 2 * 2 * 4 * 16 * 8


def test_autocast_reaches_attention():
    class Cast(Attend):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    record = recorded(Cast(), torch.randn(2, 16, 32), H100)
    assert "aten._scaled_dot_product_flash_attention.default" in names_of(record)


@pytest.mark.parametrize("call", [lambda x: F.dropout(x, 0.1), lambda x: torch.dropout(x, 0.1, True), nn.Dropout(0.1)])
def test_masks_take_a_byte(call):
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return call(self.linear(x)).sum()

    record = recorded(Drop(), torch.randn(64, 8), H100)
    assert made_by(record, "aten.native_dropout.default") == [4 * 64 * 8, 64 * 8]
    assert "aten.bernoulli_.float" not in names_of(record)
    assert "aten.bernoulli_.float" in names_of(recorded(Drop(), torch.randn(64, 8), None))


def test_dropout_that_does_nothing_is_left_alone():
    x = torch.randn(4)
    with on_device(H100):
        assert F.dropout(x, 0.5, training=False) is not None
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert F.dropout(x, 1.0).eq(0).all()
        assert F.dropout(x.clone(), 0.5, inplace=True).shape == x.shape


def gpt_record(device):
    model = GPT()
    return recorded(model, gpt_batch(), device, torch.optim.AdamW(model.parameters()))


def test_translate_is_pure_and_rounds():
    record = gpt_record(H100)
    before = [storage.bytes for storage in record.trace.storages], [o.seconds for o in record.trace.operations]
    trace = translate(record, H100)
    assert before == (
        [storage.bytes for storage in record.trace.storages],
        [o.seconds for o in record.trace.operations],
    )
    assert all(storage.bytes % 512 == 0 for storage in trace.storages)
    pairs = list(zip(record.trace.storages, trace.storages, strict=True))
    assert all(
        new.bytes == 0
        if old.category == "optimizer" and old.bytes <= 8 and old.birth < 0
        else 0 <= new.bytes - old.bytes < 512
        for old, new in pairs
    )
    assert [(new.birth, new.death, new.saved_by) for _, new in pairs] == [
        (old.birth, old.death, old.saved_by) for old, _ in pairs
    ]
    assert trace.device == "h100-80gb"
    assert any("not been validated on hardware" in note for note in trace.notes)
    clocked = gpt_record(H100)
    DeviceClock(H100).read(clocked)
    assert live_levels(clocked.trace).peak_bytes == live_levels(trace).peak_bytes


def test_seconds_are_a_roofline():
    record = gpt_record(H100)
    trace = translate(record, H100)
    views = [o for o in trace.operations if not o.makes and not o.writes]
    work = [o for o in trace.operations if o.makes or o.writes]
    assert views
    assert all(o.seconds == 0 for o in views)
    assert all(o.seconds >= 5e-6 for o in work)
    slow = translate(record, T4)
    assert sum(o.seconds for o in slow.operations) > sum(o.seconds for o in trace.operations)


def test_attention_backward_has_a_workspace():
    record = recorded(Attend(0.0).bfloat16(), torch.randn(2, 16, 32, dtype=torch.bfloat16), H100)
    held = {o.name: o.workspace_bytes for o in translate(record, H100).operations if o.workspace_bytes}
    assert held == {"aten._scaled_dot_product_flash_attention_backward.default": 4 * 2 * 4 * 128 * (8 + 1)}


def test_optimizers_take_their_form_for_gpus():
    names = names_of(gpt_record(H100))
    assert "aten._foreach_sqrt.default" in names
    assert "aten._foreach_sqrt.default" not in names_of(gpt_record(None))
    model = nn.Linear(2, 2)
    chosen = torch.optim.Adam(model.parameters(), foreach=False)
    device_form(chosen)
    assert chosen.param_groups[0]["foreach"] is False


def test_reserved_is_at_least_what_is_alive():
    trace = translate(gpt_record(H100), H100)
    arithmetic = TraceArithmetic(trace)
    found = reserved(trace, lambda live: arithmetic.levels((), live), H100)
    most = max(live_levels(trace).before)
    assert most <= found.allocated_peak_bytes <= live_levels(trace).peak_bytes
    assert found.allocated_peak_bytes <= found.reserved_peak_bytes
    assert found.reserved_peak_bytes % (2 << 20) == 0


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_typed_adam_is_adam(kind, foreach):
    mine, theirs = small_model(), small_model()
    typed = TypedAdam(
        mine.parameters(),
        torch.float32,
        lr=1e-2,
        weight_decay=0.1,
        decoupled=kind is torch.optim.AdamW,
        foreach=foreach,
    )
    plain = kind(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    x = torch.randn(32, 8)
    for _ in range(5):
        for model, optimizer in ((mine, typed), (theirs, plain)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_moments_in_their_own_type():
    model = small_model().bfloat16()
    optimizer = with_moments(None, torch.float32)(model.parameters())
    model(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    state = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in state} == {torch.float32}
    same = with_moments(None, torch.bfloat16)(model.parameters())
    assert type(same) is torch.optim.AdamW
    with pytest.raises(InvalidSubject, match="adam and adamw"):
        with_moments(lambda given: torch.optim.SGD(given, lr=0.1), torch.float32)(model.parameters())


def test_a_model_without_bytes():
    width, layers = 1 << 14, 8
    with FakeTensorMode():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    optimizer = torch.optim.Adam(model.parameters())
    step = rt.Step(model, torch.zeros(4, width, dtype=torch.bfloat16), lambda m, x: m(x).sum(), optimizer)
    found = rt.estimate(step, device=H100)
    assert found.parameters == layers * width * width
    assert found.parameter_memory_bytes == 8 * found.parameters
    assert found.training.peak_moment.phase == "optimizer"
    assert found.peak_bytes >= 10 * found.parameters  # and one copy of the moments while foreach steps
