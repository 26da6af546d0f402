"""What is held between forward and backward is what the moves say, to within 1 %, by the allocator's own account."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moving import mixed, moves_of
from taping import names_of, of_step

from regrad.bench.zoo import ZOO
from regrad.torch.measure import measure_peak
from regrad.torch.offload import FilePlace
from regrad.torch.store import persistent_tensors
from regrad.torch.tape import Move, Ranges, Tape

MARKER = 1 << 32


def held_after(forward: Any, tape: Tape, names: Any, moves: list[Move]) -> int:
    """Bytes that a forward has allocated and that still live at its end. A tensor that is never written marks that moment."""

    def once() -> Any:
        forward.reset()
        torch.manual_seed(11)
        with tape.forward(Ranges((), names), moves):
            loss = forward()[0]
        torch.empty(MARKER, dtype=torch.uint8)
        return loss

    return measure_peak(once).peak_bytes - MARKER


@pytest.mark.memory
@pytest.mark.parametrize("name", ["gpt", "batchnorm_conv", "moe"])
def test_what_is_held_is_what_was_said(name: str, tmp_path: Any) -> None:
    step = ZOO[name].make("small")
    forward = of_step(step)
    names = names_of(forward)
    forward.reset()
    torch.manual_seed(11)
    found = moves_of(forward, [tensor for tensor, _ in persistent_tensors(step)])
    eager = held_after(forward, Tape(), names, [])
    assert eager > 1 << 20
    for how in ("bits", "narrow", "offload", "all"):
        moves = mixed(found) if how == "all" else found[how]
        if not moves:
            continue
        tape = Tape(place=FilePlace(tmp_path))
        measured = held_after(forward, tape, names, moves)
        predicted = eager - sum(move.bytes for move in moves) + sum(one.held_bytes for one in tape.report_moves())
        assert sum(len(one.kept) for one in tape.report_moves()) == 0
        assert abs(measured - predicted) <= 0.01 * eager
        assert measured < eager
        if how in ("offload", "all"):
            assert measured < 0.1 * eager


@pytest.mark.memory
def test_the_peak_of_a_backward_holds_one_storage_at_a_time(tmp_path: Any) -> None:
    x = torch.randn(1 << 18, requires_grad=True)
    names = ["Tensor.mul", *["tanh"] * 12, "Tensor.sum"]

    def step() -> None:
        x.grad = None
        with tape.forward(Ranges((), names), moves):
            h = x * 1
            for _ in range(12):
                h = torch.tanh(h)
            loss = h.sum()
            del h
        loss.backward()

    tape, moves = Tape(place=FilePlace(tmp_path)), [Move(((at, 0),), "offload") for at in range(1, 13)]
    offloaded = measure_peak(step).peak_bytes
    assert [report.moved for report in tape.report_moves()] == [2] * 12
    moves = []
    eager = measure_peak(step).peak_bytes
    assert eager >= 13 << 20
    assert offloaded <= 4 << 20  # the storage, the gradient that comes in and the one that goes out


@pytest.mark.memory
def test_what_a_moved_call_keeps_goes_with_the_node_that_saved_it(tmp_path: Any) -> None:
    """An einsum of three operands is two products: what only the second saved is not held while the first goes back."""
    a, b, c = (torch.randn(size, requires_grad=True) for size in ((512, 1024), (1024, 1024), (1024, 8)))
    names = ["einsum", "Tensor.sum"]

    def step() -> None:
        a.grad = b.grad = c.grad = None
        with torch.backends.opt_einsum.flags(enabled=False), tape.forward(Ranges((), names), moves):
            loss = torch.einsum("ij,jk,kl->il", a, b, c).sum()
        loss.backward()

    tape, moves = Tape(place=FilePlace(tmp_path)), []
    eager = measure_peak(step).peak_bytes
    moves = [Move(((0, 2),), "offload")]
    moved = measure_peak(step).peak_bytes
    assert [(report.moved, report.kept) for report in tape.report_moves()] == [(2, ())]
    assert moved <= eager
