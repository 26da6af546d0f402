"""Plans with moves on a model: beside recomputed segments, in copies and pickles, and with places that will not do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import train
from moving import mixed, moves_of
from taping import names_of
from torch import nn

import regrad.torch as rt
from regrad.core.errors import InvalidPlace
from regrad.core.plan import MovePlan, Plan
from regrad.torch.execute import PlannedForward, Taped, install_plan, is_applied, replays
from regrad.torch.offload import FilePlace, HostPlace

BLOCKS, CALLS = 4, 5


class Net(nn.Module):
    """Blocks with batch statistics and draws; the forward gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)) for _ in range(BLOCKS)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean of the squares."""
        result: torch.Tensor = self.blocks(x).square().mean()
        return result


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 16)


def found_in(x: torch.Tensor) -> tuple[list[str], list[Any]]:
    """Calls of the net, and a move for everything that it saves."""
    net = Net()
    names = names_of(lambda: net(x))
    assert len(names) == BLOCKS * CALLS + 2
    return names, mixed(moves_of(lambda: net(x), [*net.parameters(), *net.buffers(), x]))


def tape_of(model: nn.Module) -> Any:
    planned = vars(model)["forward"]
    assert isinstance(planned, PlannedForward)
    assert planned.taped is not None
    return planned.taped.tape


@pytest.fixture
def plan(x: torch.Tensor) -> Plan:
    """A plan of moves alone."""
    made = rt.plan(Net(), x, budget="1 GiB", optimizer=None)
    names, moves = found_in(x)
    return replace(
        made,
        calls=tuple(names),
        moves=tuple(MovePlan(one.saves, one.how, one.name, one.bytes, one.held_bytes, 0.0) for one in moves),
    )


def test_moves_beside_a_segment_that_is_recomputed(x: torch.Tensor, tmp_path: Path) -> None:
    names, moves = found_in(x)
    inside = range(CALLS, 2 * CALLS)
    moves = [move for move in moves if not any(call in inside for call, _ in move.saves)]
    assert len(moves) > 10
    model = Net()
    taped = Taped((), names, moves=moves, place=FilePlace(tmp_path))
    install_plan(model, {"blocks.1": ("recompute",)}, training=True, cache_off=None, taped=taped)
    before = replays(model)
    assert train(model, x) == train(Net(), x)
    assert replays(model) == before + 3
    for report in taped.tape.report_moves():
        assert report.moved == 3 * len(report.move.saves)
        assert report.kept == ()


def test_an_applied_plan_survives_copies_and_pickles(x: torch.Tensor, plan: Plan, tmp_path: Path) -> None:
    model = rt.apply(Net(), plan, place=FilePlace(tmp_path))
    eager = train(Net(), x)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model]
    for twin in twins:
        assert tape_of(twin).place == FilePlace(tmp_path)
        assert train(twin, x) == eager
        assert [report.moved for report in tape_of(twin).report_moves()] == [3 * len(one.saves) for one in plan.moves]
    assert not is_applied(rt.remove(model))
    assert train(Net(), x) == eager


def test_a_plan_is_not_applied_where_its_place_will_not_do(x: torch.Tensor, plan: Plan, tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(InvalidPlace, match=f"cannot be moved to a file in {tmp_path}/nowhere: No such file"):
        rt.apply(model, plan, place=FilePlace(tmp_path / "nowhere"))
    if not torch.cuda.is_available():
        with pytest.raises(InvalidPlace, match="no CUDA device here"):
            rt.apply(model, plan, place=HostPlace())
    assert not is_applied(model)
    rt.apply(model, plan)  # nobody says where: among the temporary files
    assert tape_of(model).place == FilePlace()


def test_in_eval_and_without_gradients_nothing_is_moved(x: torch.Tensor, plan: Plan, tmp_path: Path) -> None:
    model = rt.apply(Net(), plan, place=FilePlace(tmp_path))
    with torch.no_grad():
        model(x)
    model.eval()(x).backward()
    assert tape_of(model).report_moves() == ()
