"""What no move can hold: it is left to eager, counted by reason, and told once."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from moving import check, mixed, moves_of, reports, saves_of
from taping import names_of, run
from torch import nn

from regrad.core.errors import InvalidPlan
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape import Move, Moves, Range, Ranges, Tape


def kept_reasons(forward: Any, moves: Any, **arguments: Any) -> dict[str, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegionKept)
        report = check(forward, moves, **arguments)
    assert report["moved"] == 0
    return report["kept"]


def test_saves_inside_a_range_are_its_own() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def forward():
        return torch.relu((x * 2).tanh()).sum(), [x]

    reasons = kept_reasons(forward, [Move(((1, 0),), "offload")], ranges=[Range(0, 3)])
    assert reasons == {"a call that saves it is inside a range that is recomputed": 2}


def test_hooks_of_other_code_and_parameters_and_missing_saves() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(4, 4)

    def hooked():
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return (x @ weight).tanh().sum(), [weight]

    assert list(kept_reasons(hooked, [Move(((1, 0),), "offload")])) == [
        "it begins inside a part whose saved tensors other code takes (a checkpoint, save_on_cpu)"
    ]

    def plain():
        return (x.clone() @ weight).tanh().sum(), [weight]

    where = {
        index
        for call, index, tensor, *_ in saves_of(plain).found
        if call == 1 and tensor.is_leaf and tensor.requires_grad
    }
    assert where == set()  # a product saves no weight for the gradient of what needs none
    other = (x.clone().requires_grad_() * 1).detach().requires_grad_()

    def both():
        return (other @ weight).sum(), [weight, other]

    reasons = kept_reasons(both, [Move(((0, 0),), "offload"), Move(((0, 1),), "offload"), Move(((0, 7),), "bits")])
    assert reasons == {
        "it is a parameter, or no plain strided tensor": 2,
        "it is a leaf that gets a gradient": 2,
        "its call saved 2 tensors": 2,
    }


def test_hooks_around_the_whole_forward_get_what_they_ask_for() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    shown: list[torch.Size] = []
    tape = Tape()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: shown.append(t.shape) or t, lambda t: t),
        pytest.warns(RegionKept, match="other code"),
        tape.forward((), [Move(((1, 0),), "bits")]),
    ):
        (x * 1).tanh().sum().backward()
    assert torch.Size([4, 4]) in shown
    assert reports(tape)["moved"] == 0


def test_another_path_leaves_the_rest_to_eager(place: Any) -> None:
    x, way = torch.randn(4, 4, requires_grad=True), ["tanh"]

    def forward():
        y = (x * 1).sigmoid()
        return getattr(y, way[0])().exp().sum(), [x]

    names, moves = names_of(forward), moves_of(forward)["offload"]
    tape = Tape(place=place)
    way[0] = "sin"
    with pytest.warns(RegionKept, match="took another path"):
        planned = run(forward, tape, Ranges((), names), moves)
    assert planned == run(forward)
    report = reports(tape)
    assert report["moved"] == 1  # of the sigmoid, before the paths part
    assert list(report["kept"].values()) == [2]


def test_under_no_grad_and_in_inference_mode_nothing_happens() -> None:
    x, tape = torch.randn(4, requires_grad=True), Tape()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), tape.forward((), [Move(((0, 0),), "bits")]):
            (x * 1).tanh()
    assert tape.report_moves() == ()


def test_bad_moves_are_told() -> None:
    for make, message in (
        (lambda: Move(((0, 0),), "zip"), "'zip'; a move is bits, signs, narrow, offload"),
        (lambda: Move((), "bits"), "names no saved tensor"),
        (lambda: Move(((0, -1),), "bits"), "before the first"),
        (lambda: Moves([Move(((0, 0),), "bits"), Move(((0, 0),), "offload")], Ranges(())), "two moves name"),
        (lambda: Moves([Move(((3, 0),), "bits")], Ranges((), ["a", "b"])), "call 3 of a forward of 2 calls"),
    ):
        with pytest.raises(InvalidPlan, match=message):
            make()


def test_a_tape_with_moves_can_be_copied_and_pickled(net: Any, place: Any) -> None:
    found = mixed(moves_of(net, net()[1]))
    tape = Tape(place=place)
    with tape.forward((), found):
        net()
    for twin in (copy.deepcopy(tape), pickle.loads(pickle.dumps(tape))):
        assert twin.place == place
        assert run(net, twin, (), found) == run(net)
        assert reports(twin)["moved"] == 2 * reports(tape)["moved"]
