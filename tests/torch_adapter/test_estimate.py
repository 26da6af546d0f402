"""``rt.estimate``: the figures by trace, beside the formulas and beside a measured step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import GPT as SmallGPT
from models import ConvNet, digits_batch, gpt_batch
from torch import nn

import regrad.torch as rt
from regrad.bench.zoo.attention import GPT, MLP, Block, FusedAttention
from regrad.core.errors import InvalidSubject, UsageError
from regrad.memory.optimizers import state_bytes
from regrad.memory.transformer import Layer

BATCH, LENGTH, WIDTH, HEADS = 4, 512, 256, 4  # a·s/h = 8
LAYER = Layer(WIDTH, HEADS)


class Rotated(nn.Module):
    """Fused attention without biases over a gated MLP, both behind root-mean-square norms: Llama-like."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        heads = (
            layer(normed).view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def blocks(kind: str) -> nn.Module:
    model = GPT(WIDTH, HEADS, LENGTH, 3, dropout=0.1 if kind == "dropout" else 0.0)
    if kind == "fused":
        model.blocks = nn.ModuleList(Block(WIDTH, FusedAttention(WIDTH, HEADS, True), MLP(WIDTH)) for _ in range(3))
    if kind == "llama-like":
        model.blocks = nn.ModuleList(Rotated() for _ in range(3))
    return model.bfloat16()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (BATCH, LENGTH)), torch.randint(256, (BATCH, LENGTH))


@pytest.mark.parametrize(
    ("kind", "layer", "formula", "trace"),
    [
        ("dropout", LAYER, 84, 84.5),
        ("no dropout", LAYER, 48, 48.5),
        ("fused", LAYER, 32, 32.1),
        ("llama-like", Layer(WIDTH, HEADS, gated=True, norm="rms"), 60, 60.1),
    ],
)
def test_bytes_of_a_block_over_sbh(kind, layer, formula, trace):
    found = rt.estimate(rt.Step(blocks(kind), tokens()), layer=layer).comparison
    assert found is not None
    assert found.over_unit(found.textbook_bytes) == 74
    assert abs(found.over_unit(found.formula_bytes) - formula) < 0.1
    assert round(found.over_unit(found.trace_bytes), 1) == trace
    differing = [one for one in found.differences if one.trace_bytes != one.formula_bytes]
    assert differing
    assert all(one.why for one in differing)


def test_on_a_gpu_the_textbook_is_right():
    found = rt.estimate(rt.Step(blocks("dropout"), tokens()), layer=LAYER, device="h100-80gb").comparison
    assert found is not None
    assert found.over_unit(found.formula_bytes) == 74
    assert round(found.over_unit(found.trace_bytes), 1) == 74.5  # the rest is the mask of the order, 0.5


def gpt_step(optimizer=torch.optim.AdamW):
    model = SmallGPT()
    return rt.Step(model, gpt_batch(), optimizer=optimizer(model.parameters(), lr=1e-3))


def test_the_books_balance():
    found = rt.estimate(gpt_step())
    for usage in (found.training, found.inference):
        assert sum(usage.by_category().values()) == usage.peak_bytes
        assert sum(holder.bytes for holder in usage.holders) == usage.peak_bytes
    assert found.inference.peak_bytes < found.training.peak_bytes
    assert found.inference.gradients_bytes == found.inference.optimizer_bytes == 0
    weights = sum(block.count * block.weights_bytes for block in found.blocks)
    assert weights == found.training.weights_bytes
    assert sum(block.count * block.parameters for block in found.blocks) == found.parameters
    assert abs(found.parameter_memory_bytes - 4 * weights) < 4096  # and step counters
    text = str(found)
    assert all(words in text for words in ("training peak", "inference peak", "blocks.0 … 5 (6)", "with another"))


@pytest.mark.memory
@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_beside_a_measured_step(kind):
    if kind == "gpt":
        step = gpt_step()
    else:
        model = ConvNet()
        step = rt.Step(model, digits_batch(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    found = rt.estimate(step)
    measured = rt.measure(step, steps=1).peak_bytes
    assert found.band_ratio is not None
    assert abs(found.peak_bytes - measured) <= found.band_ratio * measured


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum"),
        (lambda p: torch.optim.Adam(p), "adam"),
        (lambda p: torch.optim.AdamW(p), "adamw"),
        (lambda p: torch.optim.Adafactor(p), "adafactor"),
    ],
)
def test_states_by_formula_are_those_of_torch(make, name):
    model = nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 32, bias=False))
    step = rt.Step(model, torch.randn(4, 96), lambda m, x: m(x).square().mean(), make(model.parameters()))
    found = rt.estimate(step)
    assert found.optimizer == name
    own = next(choice for choice in found.optimizers if choice.name == name)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert 0 <= own.optimizer_bytes - state_bytes(name, shapes) <= 8 * len(shapes)
    other = next(choice for choice in rt.estimate(gpt_step()).optimizers if choice.name == name)
    assert other.peak_bytes > 0


def test_another_optimizer_is_predicted():
    """What the table says of Adam from a step with SGD is what a step with Adam gives, on a device too."""
    for device in (None, "t4"):
        tables = {}
        for kind in (torch.optim.SGD, torch.optim.Adam):
            found = rt.estimate(gpt_step(kind), device=device)
            tables[kind] = {choice.name: choice.peak_bytes for choice in found.optimizers}
        assert tables[torch.optim.SGD]["adam"] == pytest.approx(tables[torch.optim.Adam]["adam"], rel=0.01)
        assert tables[torch.optim.SGD]["sgd"] == pytest.approx(tables[torch.optim.Adam]["sgd"], rel=0.01)


class Branching(nn.Module):
    """Its path depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y * 2 if y.sum().item() > 0 else y).square().mean()


def test_a_model_that_needs_values_is_run_for_real():
    found = rt.estimate(Branching(), torch.randn(4, 8))
    assert found.method == "trace"
    assert any("a real step was run on a copy" in note for note in found.notes)


def test_nothing_of_the_users_changes():
    step = gpt_step()
    step.model.blocks[2].eval()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    modes = [module.training for module in step.model.modules()]
    state = torch.get_rng_state()
    rt.estimate(step, device="h100")
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in step.model.modules()]
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    assert not step.optimizer.state
    assert step.optimizer.param_groups[0]["foreach"] is None


def test_bad_input():
    with pytest.raises(UsageError, match="h1000"):
        rt.estimate(gpt_step(), device="h1000")
    with pytest.raises(InvalidSubject):
        rt.estimate(nn.Identity(), torch.zeros(1))
