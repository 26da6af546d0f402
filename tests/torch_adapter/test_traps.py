"""Known traps: each planted and found with its bytes, and each healthy neighbour left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import GPT, Block, gpt_batch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import regrad.torch as rt
from regrad.bench.zoo import ZOO
from regrad.core.simulate_trace import live_levels
from regrad.torch.traps import CACHE, EVAL_MODE, GRADIENTS_KEPT, find_traps
from regrad.torch.traps_checkpoint import AROUND_ALL, LAST_ONLY
from regrad.torch.traps_retained import KEPT_GRAPH, RETAINED, containers_kept

WIDTH = 64


class Blocks(nn.Module):
    """Blocks in a list; ``how`` says what stands under a checkpoint."""

    def __init__(self, how: str = "none", count: int = 4, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, dropout=0.0) for _ in range(count))
        self.how, self.reentrant = how, reentrant

    def run(self, x: torch.Tensor, start: int = 0, stop: int = 99) -> torch.Tensor:
        for block in list(self.blocks)[start:stop]:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def under(start: int, stop: int, value: torch.Tensor) -> torch.Tensor:
            if self.how.startswith("ours"):
                return rt.checkpoint(self.run, value, start, stop)
            return checkpoint(self.run, value, start, stop, use_reentrant=self.reentrant)

        count = len(self.blocks)
        if self.how in ("all", "ours all"):
            x = under(0, count, x)
        elif self.how == "last":
            x = under(count - 1, count, self.run(x, 0, count - 1))
        elif self.how == "first":
            x = self.run(under(0, 1, x), 1)
        elif self.how in ("each", "ours each"):
            for index in range(count):
                x = under(index, index + 1, x)
        elif self.how == "halves":
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        else:
            x = self.run(x)
        return x.square().mean()


def inputs(length: int = 32) -> torch.Tensor:
    return torch.randn(8, length, WIDTH).requires_grad_()


def traps_of(step: rt.Step) -> dict[str, object]:
    with containers_kept(step):
        return {trap.name: trap for trap in find_traps(rt.profile(step))}


def peak_of(step: rt.Step) -> int:
    return live_levels(rt.trace(step)).peak_bytes


# -- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reentrant", "name", "covered"),
    [("all", False, AROUND_ALL, 4), ("all", True, AROUND_ALL, 4), ("ours all", False, AROUND_ALL, 4),
     ("last", False, LAST_ONLY, 1), ("last", True, LAST_ONLY, 1)],
)  # fmt: skip
def test_a_checkpoint_that_saves_nothing(how, reentrant, name, covered):
    found = traps_of(rt.Step(Blocks(how, reentrant=reentrant), inputs()))
    assert set(found) == {name}
    trap = found[name]
    assert trap.modules == tuple(f"blocks.{index}" for index in range(4 - covered, 4))
    # What it says is so: the step without the checkpoint peaks no higher, within the boundary that the region keeps.
    with_it, without = (
        peak_of(rt.Step(Blocks(how, reentrant=reentrant), inputs())),
        peak_of(rt.Step(Blocks(), inputs())),
    )
    assert with_it >= 0.98 * without
    weights = sum(p.nbytes for p in Blocks().blocks[0].parameters())
    kept_by_a_block = without - peak_of(rt.Step(Blocks(count=3), inputs())) - weights
    assert trap.bytes == pytest.approx(covered * kept_by_a_block, rel=0.07)  # the last result need not be made again


@pytest.mark.parametrize("how", ["none", "each", "halves", "first", "ours each"])
def test_a_checkpoint_that_helps(how):
    step = rt.Step(Blocks(how), inputs())
    assert traps_of(step) == {}
    if how != "none":
        assert peak_of(step) < 0.95 * peak_of(rt.Step(Blocks(), inputs()))


def test_the_last_stage_alone_helps_where_the_loss_is_the_peak():
    """Before its replay the step is over its peak, which lies in the logits: there the checkpoint did save something."""

    class WithHead(Blocks):
        def __init__(self, how: str) -> None:
            super().__init__(how)
            self.head = nn.Linear(WIDTH, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.run(x, 0, 3)
            if self.how == "last":
                x = checkpoint(self.run, x, 3, 4, use_reentrant=False)
            else:
                x = self.run(x, 3)
            return F.cross_entropy(self.head(x).flatten(0, 1), torch.zeros(8 * x.shape[1], dtype=torch.long))

    step = rt.Step(WithHead("last"), inputs())
    assert peak_of(step) < peak_of(rt.Step(WithHead("none"), inputs()))
    assert LAST_ONLY not in traps_of(step)


# -- eval() -------------------------------------------------------------------------------------------------------------


def test_eval_while_training():
    model = GPT(blocks=2).eval()
    found = traps_of(rt.Step(model, gpt_batch()))
    assert set(found) == {EVAL_MODE}
    assert found[EVAL_MODE].modules == ("blocks.0.dropout", "blocks.1.dropout")
    assert not model.training


@pytest.mark.slow
def test_eval_switches_a_librarys_checkpointing_off():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=64, n_positions=64, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    tokens = torch.randint(64, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    in_training, trained = traps_of(rt.Step(model, batch)), peak_of(rt.Step(model, batch))
    model.eval()
    found, now = traps_of(rt.Step(model, batch)), peak_of(rt.Step(model, batch))
    assert EVAL_MODE not in in_training
    assert "gradient checkpointing" in found[EVAL_MODE].what
    assert now > trained
    assert found[EVAL_MODE].bytes == pytest.approx(now - trained, rel=0.02)


def test_frozen_parts_in_eval_are_meant_so():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 1))
    model[1].eval()
    step = rt.Step(model, torch.randn(4, 1, 8, 8), loss=lambda m, x: m(x).mean())
    assert traps_of(step) == {}


# -- what a step leaves behind ------------------------------------------------------------------------------------------

HISTORY: list[torch.Tensor] = []


class Leaving(nn.Module):
    """Two layers; ``how`` says what becomes of the hidden layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)
        self.how, self.kept, self.features = how, [], {}
        self.last = self.state = torch.zeros(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.how == "list":
            self.kept.append(hidden)
        elif self.how == "detached list":
            self.kept.append(hidden.detach())
        elif self.how == "dict":
            self.features[len(self.features)] = hidden.detach()
        elif self.how == "global":
            HISTORY.append(hidden.detach())
        elif self.how == "attribute":
            self.last = hidden.detach()
        elif self.how == "state":
            hidden = hidden + 0.5 * self.state
            self.state = hidden.detach()
        elif self.how == "number":
            self.kept.append(hidden.detach().mean())
        return self.second(hidden).square().mean()


HIDDEN_BYTES = 128 * 64 * 4


@pytest.mark.parametrize(
    ("how", "words"),
    [("list", "more with every step"), ("detached list", "more with every step"), ("dict", "more with every step"),
     ("global", "more with every step"), ("attribute", "never read again")],
)  # fmt: skip
def test_retained_outputs(how, words):
    found = traps_of(rt.Step(Leaving(how), torch.randn(128, 32)))
    assert set(found) == {RETAINED}
    assert words in found[RETAINED].what
    assert found[RETAINED].bytes == HIDDEN_BYTES
    assert HISTORY == []


@pytest.mark.parametrize("how", ["none", "state", "number"])
def test_what_may_be_kept(how):
    assert traps_of(rt.Step(Leaving(how), torch.randn(128, 32))) == {}


def test_outputs_that_a_hook_collects():
    model, seen = Leaving("none"), []
    model.first.register_forward_hook(lambda module, args, output: seen.append(output))
    found = traps_of(rt.Step(model, torch.randn(128, 32)))
    assert set(found) == {RETAINED}
    assert found[RETAINED].modules == ("first",)
    assert "seen in forward hook of first" in found[RETAINED].what
    assert seen == []


@pytest.mark.parametrize("how", ["sum", "list", "numbers", "last"])
def test_a_kept_loss_graph(how):
    model, losses = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), []
    model.total = torch.zeros(())

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = model(x).square().mean()
        if how == "sum":
            model.total = model.total + value
        elif how == "list":
            losses.append(value)
        elif how == "numbers":
            losses.append(value.detach())
        else:
            model.total = value
        return value

    found = traps_of(rt.Step(model, torch.randn(128, 32), loss))
    if how in ("sum", "list"):
        assert set(found) == {KEPT_GRAPH}
        assert "7 nodes more with every one" in found[KEPT_GRAPH].what
    else:
        assert found == {}
    assert losses == []
    assert model.total.grad_fn is None


# -- models that people train -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_in_no_trap_but_the_librarys_cache(name):
    """Fifteen models, many with state of their own: what they keep is meant to be kept."""
    if name in ("gpt2", "llama", "mixtral", "bert"):
        pytest.importorskip("transformers")
    caching = {CACHE} if name in ("gpt2", "llama", "mixtral") else set()
    assert set(traps_of(ZOO[name].make())) == caching


# -- gradients and caches -----------------------------------------------------------------------------------------------


def test_gradients_kept():
    model = GPT(blocks=2)
    step = rt.Step(model, gpt_batch(), gradients="kept")
    found = traps_of(step)
    assert set(found) == {GRADIENTS_KEPT}
    dropped = peak_of(rt.Step(model, gpt_batch(), gradients="fresh"))
    assert found[GRADIENTS_KEPT].bytes == pytest.approx(peak_of(step) - dropped, rel=0.02)
    assert traps_of(rt.Step(model, gpt_batch(), gradients="fresh")) == {}


@pytest.mark.parametrize("on", [True, False])
def test_a_cache_in_training(on):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=64, use_cache=on
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.randint(64, (2, 32))
    found = traps_of(rt.Step(model, {"input_ids": tokens, "labels": tokens}))
    assert set(found) == ({CACHE} if on else set())
