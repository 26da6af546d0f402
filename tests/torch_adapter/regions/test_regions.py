"""What a call of a region promises: entry restored, present brought back, memory given up, errors that name things."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from regrad.core.errors import InvalidRegion, ModifiedArgument, ReplayDivergence
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.public import Checkpoint, StateSpec, checkpoint, is_replaying, once
from regrad.torch.regions.region import RegionKept

ENGINES = ["auto", "snapshot", "journal", "read_set", "guarded"]


def eager(function, *args, **kwargs):
    return function(*args, **kwargs)


class Queue(nn.Module):
    """A large bank that is read and then written in part."""

    def __init__(self, rows=40_000):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("bank", torch.linspace(0, 1, rows * 4).view(rows, 4))
        self.at = 0

    def forward(self, x):
        h = torch.tanh(self.lin(x))
        out = torch.sin(h + self.bank[self.at : self.at + 8].clone().sum(0))
        self.bank[self.at : self.at + 2] += h.detach()[:2]
        self.at += 1
        return out


def train(make, ck, steps=4, calls=3):
    torch.manual_seed(0)
    model, out = make(), []
    for _ in range(steps):
        losses = [ck(model, torch.randn(5, 4, requires_grad=True)).square().sum() for _ in range(calls)]
        for loss in losses:
            loss.backward()
        out += [loss.detach() for loss in losses]
    return [*out, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_same(one, other):
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_are_exact_on_a_large_queue(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionKept)
        assert_same(train(Queue, eager), train(Queue, Checkpoint(engine=engine)))


@pytest.mark.parametrize("engine", ENGINES)
def test_live_bytes_stay_what_they_were(engine):
    model, ck = Queue(), Checkpoint(engine=engine)
    after = []
    for _ in range(1000):
        ck(model, torch.randn(5, 4)).sum().backward()
        after.append(retained_bytes())
        if len(after) == 2:
            gc.collect()
            objects = len(gc.get_objects())
        model.at = 0
    gc.collect()
    assert after[-1] == after[1]
    assert len(gc.get_objects()) < objects + 300


def test_what_is_reported_as_retained_is_what_is_held():
    model = Queue()
    ck = Checkpoint(engine="snapshot")
    for _ in range(3):
        ck(model, torch.randn(5, 4)).sum().backward()
    before = retained_bytes()
    out = ck(model, torch.randn(5, 4))
    size = model.bank.nbytes
    assert size <= retained_bytes() - before <= 1.01 * size + 16_384
    del out
    assert retained_bytes() == before


def test_a_journal_holds_rows_only():
    model = Queue()
    ck = Checkpoint(engine="journal")
    for _ in range(3):
        ck(model, torch.randn(5, 4)).sum().backward()
    before = retained_bytes()
    out = ck(model, torch.randn(5, 4))
    assert 0 < retained_bytes() - before < 20_000
    out.sum().backward()


def test_an_interior_tensor_is_dead_between_forward_and_backward():
    lin, seen = nn.Linear(4, 4), []

    def region(x):
        h = torch.tanh(lin(x))
        seen.append(weakref.ref(h))
        return torch.sin(h)

    out = checkpoint(region, torch.randn(3, 4))
    assert seen[0]() is None
    out.sum().backward()


def test_an_output_that_is_dropped_keeps_nothing():
    big = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True) * 1
    alive = weakref.ref(x)
    before = retained_bytes()
    out = checkpoint(big, x)
    del out, x
    assert alive() is None
    assert retained_bytes() == before


def test_nested_regions_drop_inner_arguments():
    a, b, seen = nn.Linear(4, 4), nn.Linear(4, 4), []

    def outer(x):
        h = torch.tanh(a(x))
        seen.append(weakref.ref(h))
        return checkpoint(lambda t: torch.sin(b(t)), h)

    x = torch.randn(3, 4, requires_grad=True)
    out = checkpoint(outer, x)
    assert seen[0]() is None
    out.sum().backward()
    got = x.grad.clone()
    x.grad = None
    torch.sin(b(torch.tanh(a(x)))).sum().backward()
    assert torch.equal(got, x.grad)


def test_a_selective_policy_that_saves_one_draw_and_recomputes_a_later_one():
    calls = []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.rand_like.default:
            calls.append(op)
            return CheckpointPolicy.MUST_SAVE if len(calls) == 1 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def region(x):
        return torch.sin(torch.sin(x * torch.rand_like(x)) * torch.rand_like(x))

    grads = []
    for run in (
        lambda x: region(x),
        lambda x: checkpoint(region, x, context_fn=lambda: create_selective_checkpoint_contexts(policy)),
    ):
        torch.manual_seed(0)
        x = torch.linspace(0, 3, 1000, requires_grad=True)
        run(x).sum().backward()
        grads.append((x.grad, torch.get_rng_state()))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_randomized_leaky_relu():
    grads = []
    for run in (eager, checkpoint):
        torch.manual_seed(0)
        x = torch.randn(100, requires_grad=True)
        run(lambda t: F.rrelu(t * 1.0, 0.1, 0.9, training=True), x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_backward_in_other_threads():
    def run(ck):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        xs = [torch.randn(6, 4, requires_grad=True) for _ in range(40)]
        losses = [ck(model, x).square().sum() for x in xs]
        others = [torch.randn(6, 4) for _ in range(40)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread, other in zip(threads, others, strict=True):
            thread.start()
            ck(model, other)
        for thread in threads:
            thread.join()
        return [x.grad for x in xs] + [b.clone() for b in model.buffers()]

    assert_same(run(eager), run(checkpoint))


def test_the_present_is_back_after_an_exception():
    model = nn.BatchNorm1d(4)

    def region(x):
        out = torch.tanh(model(x))
        if is_replaying():
            raise MemoryError("no more")
        return torch.sin(out)

    out = checkpoint(region, torch.randn(5, 4))
    present = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    with pytest.raises(MemoryError):
        out.sum().backward()
    assert_same(present, list(model.buffers()))
    assert torch.equal(state, torch.get_rng_state())
    assert not is_replaying()
    assert torch.is_grad_enabled()


def test_once_happens_once_and_gives_the_same_again():
    lin, drawn, happened = nn.Linear(4, 4), [], []

    def draw():
        happened.append(1)
        return float(torch.rand(()))

    draw_once = once(draw)

    def region(x):
        value = draw_once()
        drawn.append((is_replaying(), value))
        return torch.sin(torch.tanh(lin(x)) * value)

    checkpoint(region, torch.randn(3, 4)).sum().backward()
    assert len(happened) == 1


def test_entropy_is_refused_with_file_and_line():
    import os

    lin = nn.Linear(4, 4)

    def region(x):
        noise = torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.uint8).float()
        return torch.sin(torch.tanh(lin(x)) * noise)

    with pytest.raises(ReplayDivergence, match="differs") as caught:
        checkpoint(region, torch.randn(3, 4)).sum().backward()
    assert "region" in caught.value.segment
    assert __file__ in caught.value.line
    assert caught.value.gradients_touched
    assert ".grad" in str(caught.value)


def test_an_argument_changed_later_is_refused_by_name():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    h = a(torch.randn(3, 4))
    out = checkpoint(lambda hidden: torch.sin(b(hidden * 2)), h)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(ModifiedArgument, match="argument 0 was modified"):
        out.sum().backward()


def test_a_file_written_in_a_region_keeps_it(tmp_path):
    lin, path = nn.Linear(4, 4), tmp_path / "log"

    def region(x):
        with open(path, "a") as file:
            file.write("x")
        return torch.sin(lin(x))

    with pytest.warns(RegionKept, match="once"):
        out = checkpoint(region, torch.randn(3, 4))
    out.sum().backward()
    assert path.read_text() == "x"


class TestBadInput:
    def test_a_callable_that_is_none(self):
        with pytest.raises(InvalidRegion, match="cannot be called"):
            checkpoint(3, torch.randn(3))

    def test_settings_that_are_not_known_or_exclude_each_other(self):
        for settings in ({"guard": "often"}, {"engine": "magic"}, {"state": "all"}):
            with pytest.raises(InvalidRegion, match="is not known"):
                Checkpoint(**settings)
        with pytest.raises(InvalidRegion, match="state=None"):
            Checkpoint(state=None, engine="journal")
        with pytest.raises(InvalidRegion, match="guard"):
            Checkpoint(engine="guarded", guard="off")
        with pytest.raises(InvalidRegion, match="determinism_check"):
            checkpoint(torch.sin, torch.randn(3), determinism_check="yes")

    def test_a_spec_that_names_what_is_no_state(self):
        with pytest.raises(InvalidRegion, match="not a tensor"):
            StateSpec(tensors={"a": 3})
        with pytest.raises(InvalidRegion, match="nothing can change"):
            StateSpec(objects=[3])

    def test_a_spec_that_names_a_tensor_which_is_never_seen(self):
        model, other = nn.BatchNorm1d(4), torch.zeros(3)
        spec = StateSpec(tensors={"other": other, "mean": model.running_mean, "var": model.running_var})
        before = [b.clone() for b in model.buffers()][:2]
        with pytest.raises(InvalidRegion, match="other"):
            Checkpoint(state=spec)(model, torch.randn(5, 4, requires_grad=True))
        assert_same(before, list(model.buffers())[:2])

    def test_an_argument_that_was_freed(self):
        x = torch.randn(3, 4, requires_grad=True)
        x.untyped_storage().resize_(0)
        with pytest.raises(InvalidRegion, match="freed or resized"):
            checkpoint(torch.sin, x)

    def test_an_argument_that_was_freed_between(self):
        lin = nn.Linear(4, 4)
        x = torch.randn(3, 4, requires_grad=True)
        out = checkpoint(lambda t: torch.sin(torch.tanh(lin(t))), x)
        x.untyped_storage().resize_(0)
        with pytest.raises((ModifiedArgument, RuntimeError)):
            out.sum().backward()


def test_a_spec_replaces_discovery():
    model = nn.BatchNorm1d(4)
    names = ("running_mean", "running_var", "num_batches_tracked")
    spec = StateSpec(tensors={name: getattr(model, name) for name in names})
    net = nn.Sequential(nn.Linear(4, 4), model, nn.Tanh())
    Checkpoint(state=spec)(net, torch.randn(5, 4)).sum().backward()
    assert model.num_batches_tracked == 1


def test_state_none_does_what_torch_does():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    Checkpoint(state=None)(model, torch.randn(5, 4)).sum().backward()
    assert model[1].num_batches_tracked == 2


def test_transformers_gradient_checkpointing_takes_it():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    grads = []
    for on in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
        if on:
            model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
        ids = torch.arange(20).view(2, 10) % 64
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)


def test_a_call_that_never_ends_does_not_keep_the_log_of_others():
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    waiting = checkpoint(other, torch.randn(5, 4))  # its backward never comes while the queue trains
    model, ck, after = Queue(), Checkpoint(engine="journal"), []
    for _ in range(20):
        ck(model, torch.randn(5, 4)).sum().backward()
        after.append(retained_bytes())
    assert after[-1] == after[2]
    waiting.sum().backward()


def test_fake_tensors_pass_through():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Tanh())
        x = torch.randn(5, 4, requires_grad=True)
        for _ in range(4):
            checkpoint(model, x).sum().backward()
        assert x.grad.shape == (5, 4)
