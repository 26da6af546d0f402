"""All movable storages of every model of the zoo, moved in each way and in all, and beside random ranges: eager's bytes."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from moving import mixed, moves_of
from taping import names_of, of_step, random_ranges, run

from regrad.bench.zoo import ZOO
from regrad.torch.offload import FilePlace
from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept
from regrad.torch.store import persistent_tensors
from regrad.torch.tape import Ranges, Tape


def fresh(name: str) -> tuple[Any, list[torch.Tensor]]:
    """The same forward every time, with whatever state the model keeps in Python, and what is there before it."""
    step = ZOO[name].make("small")
    torch.manual_seed(11)
    random.seed(11)
    return of_step(step), [tensor for tensor, _ in persistent_tensors(step)]


@pytest.fixture(scope="module", params=sorted(ZOO))
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    name = request.param
    return {
        "name": name,
        "names": names_of(fresh(name)[0]),
        "found": moves_of(*fresh(name)),
        "eager": run(fresh(name)[0]),
    }


@pytest.mark.parametrize("how", ["bits", "signs", "narrow", "offload", "all"])
def test_every_model_is_exact_with_all_that_it_saves_moved(model: dict[str, Any], how: str, tmp_path: Any) -> None:
    moves = mixed(model["found"]) if how == "all" else model["found"][how]
    if not moves:
        assert how != "offload"
        return
    tape, held = Tape(place=FilePlace(tmp_path)), retained_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RegionKept)
        assert run(fresh(model["name"])[0], tape, Ranges((), model["names"]), moves) == model["eager"]
    reports = tape.report_moves()
    assert len(reports) == len(moves)
    for report in reports:
        assert report.kept == ()
        assert report.moved == len(report.move.saves)
        assert report.payloads == 1
        if how in ("bits", "narrow"):
            assert report.held_bytes == report.move.held_bytes < report.move.bytes
    assert sum(report.restored for report in reports) > 0
    assert retained_bytes() == held


@pytest.mark.parametrize("seed", [1, 2])
def test_every_model_is_exact_with_moves_beside_ranges(model: dict[str, Any], seed: int, tmp_path: Any) -> None:
    ranges = random_ranges(random.Random(seed), len(model["names"]))
    moves = mixed(moves_of(*fresh(model["name"]), ranges))
    tape, held = Tape(place=FilePlace(tmp_path)), retained_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RegionKept)  # of ranges, which are drawn without regard to what may be one
        assert run(fresh(model["name"])[0], tape, Ranges(ranges, model["names"]), moves) == model["eager"]
    for report in tape.report_moves():
        assert report.kept == ()
        assert report.moved == len(report.move.saves)
    assert retained_bytes() == held
