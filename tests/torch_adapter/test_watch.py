"""Which calls become segments, in any module."""

from __future__ import annotations

from typing import Any

import models
import torch
from torch import nn

import regrad.torch as rt
from regrad.torch.watch import matches


def names(model: nn.Module, batch: Any, **settings: Any) -> dict[str, str]:
    """Segment names that are module calls, with the reason against each."""
    profile = rt.profile(model, batch, **settings)
    found = zip(profile.chain.segments, profile.pieces, strict=True)
    return {segment.name: piece.reason for segment, piece in found if piece.module}


def scalar(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


class Composite(nn.Module):
    """A block with parts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def test_blocks_of_a_module_list() -> None:
    assert list(names(models.GPT(blocks=4), models.gpt_batch())) == [f"blocks.{i}" for i in range(4)]


def test_blocks_deep_inside_nested_containers() -> None:
    model = nn.Sequential(
        nn.Linear(16, 16),
        nn.Sequential(*(Composite() for _ in range(4))),
        nn.Sequential(*(Composite() for _ in range(4))),
        nn.Linear(16, 16),
    )
    found = names(model, torch.randn(64, 16), loss=scalar)
    assert {f"{stage}.{i}" for stage in (1, 2) for i in range(4)} <= set(found)


def test_a_pattern_replaces_the_search() -> None:
    found = names(models.GPT(blocks=4), models.gpt_batch(), segments="blocks.*.up")
    assert list(found) == [f"blocks.{i}.up" for i in range(4)]


def test_the_model_itself_matches_no_pattern() -> None:
    assert not matches("", "*")
    assert not matches("", "")
    assert matches("blocks", "*")
    assert not matches("blocks.0", "*")
    assert "" not in names(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16), loss=scalar, segments="*"
    )


def test_every_call_of_a_shared_module_is_a_segment_of_its_own() -> None:
    assert list(names(models.Shared(), torch.randn(4, 32, 64))) == ["blocks.0#0", "blocks.0#1", "blocks.0#2"]


def test_one_call_of_a_shared_module_can_be_recomputed_alone() -> None:
    step = rt.Step(models.Shared(), torch.randn(4, 32, 64))
    profile = rt.profile(step)
    plans = [rt.plan_profile(profile, f"{share}%") for share in (97, 90, 80)]
    partly = [plan for plan in plans if 0 < len(plan.recomputed) < 3]
    assert partly, "some budget recomputes some calls and keeps others"
    for plan in partly:
        rt.apply(step.model, plan)
        measured = rt.measure(step, steps=1).peak_bytes
        rt.remove(step.model)
        assert measured <= plan.budget_bytes
        assert 0 <= plan.predicted_peak_bytes / measured - 1 <= 0.03, "first replays run what later ones leave out"


def test_calls_that_cannot_be_told_apart_are_left_out_with_a_reason() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = model.blocks[0](x)
        return x.square().mean()

    found = names(models.Shared(), torch.randn(4, 32, 64), loss=loss)
    assert all("cannot be told apart" in reason for reason in found.values())


def test_a_model_without_repeated_blocks_says_so() -> None:
    plan = rt.plan(nn.Linear(16, 16), torch.randn(8, 16), loss=scalar, budget="100%")
    assert any("no repeated blocks" in note for note in plan.notes)


class Doubling(nn.Module):
    """Saves its result, not its input: eager allows the input to change afterwards, a replay would read the change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2)


class Changing(nn.Module):
    """Changes the input of its first block in place when that block is done."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Doubling() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        y = self.blocks[0](hidden)
        hidden.add_(1)
        return (y + self.blocks[1](hidden)).square().mean()


def test_an_input_that_is_changed_after_the_call_keeps_the_segment() -> None:
    found = names(Changing(), torch.randn(8, 16))
    assert "written later in the forward" in found["blocks.0"]
    assert found["blocks.1"] == ""
