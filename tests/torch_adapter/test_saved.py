"""``rt.saved`` against what autograd really holds: weak references to every other storage die, and bytes match."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT, ConvNet, digits_batch, gpt_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import regrad.torch as rt
from regrad.core.codec import plain
from regrad.core.errors import InvalidSubject
from regrad.core.saved import NUMBER
from regrad.torch.record import tensors_in


class Births(TorchDispatchMode):
    """Notes every storage that an operation makes: the operation, the bytes and a weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int, Any]] = []
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in given:
                self.made.append((str(func), storage.nbytes(), weakref.ref(storage)))
        return result

    def alive(self) -> list[tuple[str, int, Any]]:
        gc.collect()
        found = {}
        for name, size, ref in self.made:
            storage = ref()
            if storage is not None:
                found.setdefault(id(storage), (name, size, storage))
        return list(found.values())


def graph(loss: torch.Tensor) -> list[Any]:
    pending, seen = [loss.grad_fn], {}
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen[node] = None
            pending += [following for following, _ in node.next_functions]
    return list(seen)


def on_the_nodes(loss: torch.Tensor) -> Counter[tuple[int, bool]]:
    """Bytes of every storage that the nodes below ``loss`` show as saved, and whether it is a bare number."""
    storages = {}
    for node in graph(loss):
        values = [getattr(node, name) for name in dir(type(node)) if name.startswith("_saved_")]
        for tensor in tensors_in(values):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return Counter(storages.values())


def attend(dropout: float, causal: bool = True):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.into(x).chunk(3, -1)]
            return F.scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=causal)

    return Attention()


class ByHand(nn.Module):
    """Attention written out, with a Python number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(16)
        return F.dropout(scores.softmax(-1), 0.1) @ self.value(x)


class DropsABranch(nn.Module):
    """What the result does not depend on is let go with its graph before the forward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.sigmoid(self.unused(x)).sum()
        return torch.sigmoid(self.used(x))


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    """A sum, which saves nothing of its own; the double makes it need a tensor argument of none."""
    result = model(*batch) if isinstance(batch, tuple) else model(batch)
    return (result[0] if isinstance(result, tuple) else result).sum()


def step(model: nn.Module, batch: Any) -> rt.Step:
    return rt.Step(model, batch, loss=total)


WORDS = (4, 12, 16)
CASES = {
    "linear": lambda: step(nn.Linear(16, 8), torch.randn(4, 16)),
    "two linears": lambda: step(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(4, 16)),
    "linear of 3-d": lambda: step(nn.Linear(16, 8), torch.randn(WORDS)),
    "layer norm": lambda: step(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(WORDS)),
    "fused attention": lambda: step(attend(0.0), torch.randn(WORDS)),
    "unfused attention": lambda: step(attend(0.2), torch.randn(WORDS)),
    "attention by hand": lambda: step(ByHand(), torch.randn(WORDS)),
    "multihead": lambda: step(nn.MultiheadAttention(16, 2, batch_first=True), (torch.randn(WORDS),) * 3),
    "multihead with dropout": lambda: step(nn.MultiheadAttention(16, 2, 0.1), (torch.randn(WORDS),) * 3),
    "convolution": lambda: step(nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)),
    "batch norm": lambda: step(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        torch.randn(2, 3, 9, 9),
    ),
    "dropout": lambda: step(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)), torch.randn(4, 16)),
    "embedding": lambda: step(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 4)), torch.randint(20, (4, 12))),
    "lstm": lambda: step(nn.LSTM(16, 8, batch_first=True), torch.randn(WORDS)),
    "a branch let go": lambda: step(DropsABranch(), torch.randn(4, 16)),
    "gpt": lambda: rt.Step(GPT(blocks=2), gpt_batch(2)),
    "conv net": lambda: rt.Step(ConvNet("batch", 2), digits_batch(4)),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_what_autograd_holds(name):
    subject = CASES[name]()
    said = rt.saved(subject)
    assert said.source == ("real" if name == "lstm" else "fake")  # its workspace has no size in fakes

    births = Births()
    with births:
        loss = subject.compute_loss()
    on_nodes = on_the_nodes(loss)
    own = loss.untyped_storage()._cdata
    saved_loss = any(
        tensor.untyped_storage()._cdata == own
        for node in graph(loss)
        for tensor in tensors_in([getattr(node, n) for n in dir(type(node)) if n.startswith("_saved_")])
    )
    alive = [(made, size) for made, size, ref in births.alive() if saved_loss or ref._cdata != own]

    expected = Counter(alive)
    listed = Counter((one.operation, one.bytes) for one in said.activations if one.operation != NUMBER)
    assert listed == expected
    assert Counter(one.bytes for one in said.storages) == on_nodes
    assert said.activation_bytes == sum(size for _, size in alive) + sum(
        one.bytes for one in said.storages if one.operation == NUMBER
    )
    del loss
    assert births.alive() == []  # and nobody else held any of them


def test_real_tensors_give_the_same_list():
    from regrad.torch.saved import saved_of

    subject = rt.Step(GPT(blocks=2), gpt_batch(2))
    assert saved_of(subject) == rt.saved(subject).storages


def test_reasons():
    said = rt.saved(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), torch.randn(4, 16), loss=total)
    hidden = next(one for one in said.activations)
    assert hidden.reason == "AddmmBackward0 saved its argument 1 (mat1)"
    assert (hidden.operation, hidden.module, hidden.shape, hidden.dtype) == (
        "aten.addmm.default",
        "0",
        (4, 32),
        "float32",
    )
    assert hidden.saves[0].module == "1"
    assert hidden.where.startswith(__file__)
    weight = next(one for one in said.storages if one.name == "1.weight")
    assert (weight.category, weight.saves[0].view) == ("weights", True)  # transposed
    assert {one.name for one in said.storages if one.category == "inputs"} == {"batch"}


def test_views_and_several_saves_of_one_storage_are_one():
    said = rt.saved(attend(0.0), torch.randn(WORDS), loss=total)
    (projected,) = [one for one in said.activations if one.operation == "aten.addmm.default"]
    assert projected.bytes == 4 * 12 * 48 * 4
    assert {save.name for save in projected.saves} == {"query", "key", "value"}
    assert all(save.view and save.shape == (4, 2, 12, 8) for save in projected.saves)
    assert projected.reason.endswith("a view of it, and 2 more")


def test_results():
    said = rt.saved(nn.LayerNorm(16), torch.randn(WORDS), loss=total)
    assert [one.reason for one in said.activations] == [
        "NativeLayerNormBackward0 saved its result 1",
        "NativeLayerNormBackward0 saved its result 2",
    ]


def test_a_python_number_is_said_to_be_one():
    said = rt.saved(nn.Linear(16, 8), torch.randn(4, 16), loss=lambda model, batch: (model(batch) * 0.5).sum())
    (number,) = said.activations
    assert (number.operation, number.bytes, number.shape, number.dtype) == (NUMBER, 8, (), "float64")
    assert number.reason == "MulBackward0 saved its argument 1 (other)"


def test_a_tensor_made_of_python_values_is_an_activation_and_a_constant_is_not():
    constant = torch.full((8,), 3.0)
    made = lambda model, batch: (model(batch) * torch.tensor([2.0] * 8)).sum()  # noqa: E731
    captured = lambda model, batch: (model(batch) * constant).sum()  # noqa: E731
    assert rt.saved(nn.Linear(16, 8), torch.randn(4, 16), loss=made).activation_bytes == 32
    assert rt.saved(nn.Linear(16, 8), torch.randn(4, 16), loss=captured).activation_bytes == 0


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x * 2
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept


def test_a_function_of_the_users_own():
    said = rt.saved(nn.Linear(16, 8), torch.randn(4, 16), loss=lambda model, batch: Squares.apply(model(batch)).sum())
    reasons = {one.operation: one.reason for one in said.activations}
    assert reasons["aten.addmm.default"].startswith("SquaresBackward saved its ")
    assert reasons["aten.mul.Tensor"] == "SquaresBackward saved its attribute (kept)"
    assert said.activation_bytes == 2 * 4 * 8 * 4


def test_totals_per_module():
    said = rt.saved(GPT(blocks=3), gpt_batch(2))
    totals = {one.module: one for one in said.modules}
    assert totals[""].total_bytes == said.activation_bytes
    assert sum(one.own_bytes for one in said.modules) == said.activation_bytes
    assert sum(one.count for one in said.modules) == len(said.activations)
    inner = sum(totals[f"blocks.{i}"].total_bytes for i in range(3))
    assert totals["blocks"].total_bytes == inner
    assert totals["blocks.1.up"].total_bytes == totals["blocks.1.up"].own_bytes == 2 * 32 * 256 * 4
    assert sum(row.bytes for row in said.rows()) == said.activation_bytes
    assert {row.count for row in said.rows() if row.module == "blocks.*.up"} == {3}


def test_it_reads_well_and_goes_to_json():
    said = rt.saved(GPT(blocks=3), gpt_batch(2))
    text = str(said)
    for words in (
        f"{said.activation_bytes:,} bytes",
        "3 × float32[64, 256]",
        "GeluBackward0 saved",
        "blocks.*.up",
        "models.py:",
    ):
        assert words in text
    assert json.loads(json.dumps(plain(said)))["storages"][0]["saves"]


def test_the_users_objects_stay_as_they_are():
    model, batch = GPT(blocks=2), gpt_batch(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    rt.saved(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_fakes_cannot_carry_runs_for_real():
    def loss(model, batch):
        hidden = model(batch)
        return hidden.sigmoid().sum() if float(hidden.detach().sum()) > -1e9 else hidden.sum()

    said = rt.saved(nn.Linear(16, 8), torch.randn(4, 16), loss=loss)
    assert said.source == "real"
    assert said.notes
    assert [one.operation for one in said.activations] == ["aten.sigmoid.default"]


def test_bad_input():
    with pytest.raises(InvalidSubject, match="scalar"):
        rt.saved(nn.Linear(16, 8), torch.randn(4, 16))
    with pytest.raises(InvalidSubject, match="no parameter"):
        rt.saved(nn.ReLU(), torch.randn(4, 16), loss=total)
