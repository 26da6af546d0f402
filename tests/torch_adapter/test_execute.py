"""Under a plan a step leaves the bytes of the eager one, and the model still behaves as a model."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import models
import numpy
import pytest
import torch
from comparing import as_bytes, forward_counter, train
from torch import nn

import regrad.torch as rt
from regrad.core.errors import PlanMismatch
from regrad.core.plan import Plan
from regrad.planners.recompute_all import RecomputeAll
from regrad.torch.recompute import replays


def transformers_model(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small GPT-2 or Llama with random weights, as the library makes it, and a batch."""
    import transformers

    tokens = torch.randint(100, (2, 32))
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3, n_embd=32, n_head=2, vocab_size=100, n_positions=32, bos_token_id=1, eos_token_id=2
        )
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=100,
        )
        model = transformers.LlamaForCausalLM(config)
    return model.train(), {"input_ids": tokens, "labels": tokens}


SUBJECTS: dict[str, Any] = {
    "gpt": lambda: (models.GPT(), models.gpt_batch()),
    "conv": lambda: (models.ConvNet("group"), models.digits_batch()),
    "conv, in-place ReLU": lambda: (models.ConvNet("group", inplace=True), models.digits_batch()),
    "one block called three times": lambda: (models.Shared(), torch.randn(4, 32, 64)),
    "dataclasses, keywords, nested dicts": lambda: (models.BundleNet(), torch.randn(64, 16)),
    "transformers GPT-2": lambda: transformers_model("gpt2"),
    "transformers Llama": lambda: transformers_model("llama"),
}


def make_plan(model: nn.Module, batch: Any) -> Plan:
    """Everything that can be recomputed is."""
    optimizer = torch.optim.AdamW(model.parameters())
    return rt.plan(model, batch, optimizer=optimizer, budget=1 << 40, planner=RecomputeAll())


@pytest.mark.parametrize("subject", SUBJECTS)
def test_bit_identical_and_really_recomputed(subject: str) -> None:
    model, batch = SUBJECTS[subject]()
    twin = copy.deepcopy(model)
    plan = make_plan(model, batch)
    calls = [segment.module for segment in plan.recomputed]
    assert len(calls) >= 3
    eager = train(twin, batch)
    before = replays()
    rt.apply(model, plan)
    planned = train(model, batch)
    assert planned == eager
    assert replays() - before == 3 * len(calls)


@pytest.mark.parametrize("effect", ["buffer", "data", "rebind", "counter", "list", "python random", "numpy random"])
def test_state_is_recomputed_exactly(effect: str) -> None:
    model, batch = models.StatefulNet(effect), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    plan = make_plan(model, batch)
    assert {s.name for s in plan.recomputed} >= {f"blocks.{i}" for i in range(3)}
    before = replays()
    random.seed(0)
    numpy.random.seed(0)
    expected = train(twin, batch)
    random.seed(0)
    numpy.random.seed(0)
    rt.apply(model, plan)
    assert train(model, batch) == expected
    assert replays() - before >= 3 * 2


def test_an_input_changed_in_place_keeps_the_segment() -> None:
    model, batch = models.StatefulNet("input"), torch.randn(64, 16)
    twin = copy.deepcopy(model)
    plan = make_plan(model, batch)
    by_name = {segment.name: segment for segment in plan.segments}
    assert by_name["blocks.1"].option == "keep"
    assert "in place" in by_name["blocks.1"].reason
    rt.apply(model, plan)
    assert train(model, batch) == train(twin, batch)


def test_batch_norm_is_recomputed_and_its_statistics_move_once() -> None:
    model, batch = models.ConvNet("batch"), models.digits_batch()
    twin = copy.deepcopy(model)
    plan = make_plan(model, batch)
    states = [state for segment in plan.recomputed for state in segment.state if state.written]
    assert any("running_mean" in state.name for state in states)
    assert {segment.engine for segment in plan.recomputed} >= {"snapshot"}
    before = replays()
    rt.apply(model, plan)
    assert train(model, batch) == train(twin, batch)
    assert replays() - before == 3 * len(plan.recomputed)


def test_hidden_write_of_running_statistics_alone_is_found() -> None:
    class Quiet(nn.Module):
        """Batch norm as a function: nothing in the schema says that the statistics are written."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("mean", torch.zeros(16))
            self.register_buffer("var", torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=True)

    model = nn.Sequential(nn.Linear(16, 16), Quiet(), Quiet())
    plan = rt.plan(
        model, torch.randn(8, 16), loss=lambda m, b: m(b).square().mean(), budget=1 << 40, planner=RecomputeAll()
    )
    states = {
        state.name for segment in plan.segments if segment.name == "1" for state in segment.state if state.written
    }
    assert {"buffer 1.mean", "buffer 1.var"} <= states


def test_a_copy_runs_its_own_weights() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    rt.apply(model, make_plan(model, batch))
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert rt.is_applied(clone)
    plain = rt.remove(copy.deepcopy(clone))
    torch.manual_seed(1)
    expected = plain(*batch)
    torch.manual_seed(1)
    loss = clone(*batch)
    assert as_bytes(loss) == as_bytes(expected)
    loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in clone.parameters())


def test_pickle_and_state_dict() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    keys = list(model.state_dict())
    rt.apply(model, make_plan(model, batch))
    assert list(model.state_dict()) == keys
    again = pickle.loads(pickle.dumps(model))
    assert rt.is_applied(again)
    assert train(again, batch) == train(model, batch)


def test_eval_and_no_grad_change_nothing() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    counts = forward_counter(model, ["blocks.0.up"])
    rt.apply(model, make_plan(model, batch))
    counts["blocks.0.up"] = 0
    model.eval()
    model(*batch).backward()
    assert counts["blocks.0.up"] == 1
    model.train()
    with torch.no_grad():
        model(*batch)
    assert counts["blocks.0.up"] == 2
    model(*batch).backward()
    assert counts["blocks.0.up"] == 4


def test_hooks_of_a_segment_fire_once_a_step() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    fired = {"before": 0, "after": 0}
    model.blocks[1].register_forward_pre_hook(lambda *_: fired.update(before=fired["before"] + 1))
    model.blocks[1].register_forward_hook(lambda *_: fired.update(after=fired["after"] + 1))
    plan = make_plan(model, batch)
    assert fired == {"before": 0, "after": 0}, "planning must not be seen by the user's hooks"
    assert {s.name: s.option for s in plan.segments}["blocks.1"] == "recompute"
    rt.apply(model, plan)
    model(*batch).backward()
    assert fired == {"before": 1, "after": 1}


def test_a_hook_inside_a_segment_has_its_effects_once() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    seen: list[float] = []
    model.blocks[1].up.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().sum())))
    twin = copy.deepcopy(model)
    plan = make_plan(model, batch)
    assert "blocks.1" in {segment.name for segment in plan.recomputed}
    seen.clear()
    expected = train(twin, batch)
    eager, before = list(seen), replays()
    seen.clear()
    rt.apply(model, plan)
    assert train(model, batch) == expected
    assert seen == eager
    assert len(seen) == 3
    assert replays() - before == 3 * len(plan.recomputed)


def test_remove_leaves_nothing_behind() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    rt.apply(model, make_plan(model, batch))
    assert rt.is_applied(model)
    rt.remove(model)
    assert not rt.is_applied(model)
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before


def test_an_instance_forward_of_the_users_is_kept_and_comes_back() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    own = model.blocks[0].forward
    seen = []

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return own(x)

    model.blocks[0].forward = wrapped
    plan = make_plan(model, batch)
    seen.clear()
    rt.apply(model, plan)
    model(*batch).backward()
    assert len(seen) == 1, "what the user's forward does to a list happens once, replayed or not"
    rt.remove(model)
    assert model.blocks[0].forward is wrapped


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_cache_of_transformers_is_off_and_the_config_untouched(kind: str) -> None:
    model, batch = transformers_model(kind)
    plan = make_plan(model, batch)
    assert plan.cache_off == ""
    assert any("use_cache is False" in note for note in plan.notes)
    rt.apply(model, plan)
    assert model.config.use_cache is True
    assert model(**batch).past_key_values is None
    rt.remove(model)
    assert model(**batch).past_key_values is not None


def test_a_loss_that_reads_the_cache_keeps_it_on() -> None:
    model, batch = transformers_model("llama")

    def loss(net: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        output = net(**given)
        return output.loss + output.past_key_values.layers[0].keys.square().mean()

    plan = rt.plan(model, batch, loss=loss, budget=1 << 40, planner=RecomputeAll())
    assert plan.cache_off is None
    assert any("the loss" in note for note in plan.notes)
    assert len(plan.recomputed) >= 3, "a cache that grows is state like any other"
    twin = copy.deepcopy(model)
    loss(twin, batch).backward()
    rt.apply(model, plan)
    before = replays()
    loss(model, batch).backward()
    assert replays() - before == len(plan.recomputed)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert as_bytes(mine.grad) == as_bytes(other.grad)
    assert model(**batch).past_key_values.layers[0].keys.shape[-2] == batch["input_ids"].shape[1]


def test_a_plan_of_another_model_is_refused_and_changes_nothing() -> None:
    batch = models.gpt_batch()
    plan = make_plan(models.GPT(), batch)
    other = models.GPT(blocks=7)
    with pytest.raises(PlanMismatch, match="another model"):
        rt.apply(other, plan)
    assert not rt.is_applied(other)
    trained = models.GPT()
    train(trained, batch)
    rt.apply(trained, plan)
    assert rt.is_applied(trained), "a plan is for a model of any values"


def test_a_plan_survives_json() -> None:
    model, batch = models.GPT(), models.gpt_batch()
    plan = make_plan(model, batch)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    rt.apply(model, again)
    assert rt.is_applied(model)
