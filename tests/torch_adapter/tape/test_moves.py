"""What calls save, held in fewer bytes or elsewhere: exact, shared, let go, and as strict about changes as eager."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moving import check, mixed, moves_of, reports
from taping import names_of
from torch import nn

from regrad.torch.regions.kept import retained_bytes
from regrad.torch.regions.region import RegionKept
from regrad.torch.tape import Move, Tape

# -- exact ------------------------------------------------------------------------------------------------------------


def relu_function(x):
    return F.relu(x)


def relu_inplace_function(x):
    return F.relu(x, inplace=True)


@pytest.mark.parametrize(
    "relu",
    [torch.relu, torch.relu_, torch.Tensor.relu, torch.Tensor.relu_, relu_function, relu_inplace_function, nn.ReLU(),
     nn.ReLU(inplace=True), torch.ops.aten.relu],
    ids=["relu", "relu_", "Tensor.relu", "Tensor.relu_", "F.relu", "F.relu inplace", "ReLU", "ReLU inplace", "aten"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_relu_runs_backward_from_its_signs(relu: Any, dtype: torch.dtype) -> None:
    x = torch.randn(33, 65, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        x[0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])

    def forward():
        return relu(x * 1).mul(3).nan_to_num().sum(), [x]

    found = moves_of(forward)
    assert len(found["signs"]) == 1
    report = check(forward, found["signs"])
    assert report == {"moved": 2, "payloads": 2, "restored": 2, "held_bytes": (33 * 65 + 7) // 8, "kept": {}}


def test_signs_are_refused_for_what_is_not_saved_by_relu() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def forward():
        return torch.tanh(x * 1).sum(), [x]

    with pytest.warns(RegionKept, match="is not saved by relu"):
        report = check(forward, [Move(((1, 0),), "signs")])
    assert report["moved"] == report["payloads"] == 0
    assert report["kept"] == {"it is not saved by relu": 2}


def test_indices_of_pooling_take_two_bytes() -> None:
    x = torch.randn(2, 3, 20, 20, requires_grad=True)

    def forward():
        return F.max_pool2d(x * 1, 2).pow(2).sum(), [x]

    found = moves_of(forward)["narrow"]
    assert len(found) == 1
    report = check(forward, found)
    assert (report["moved"], report["held_bytes"]) == (2, 2 * 3 * 10 * 10 * 2)


def test_indices_of_an_embedding_take_one_byte() -> None:
    weight = torch.randn(200, 8, requires_grad=True)
    tokens = torch.arange(50)

    def forward():
        return F.embedding((tokens * 3).view(5, 10), weight).pow(2).sum(), [weight]

    found = moves_of(forward, [tokens])["narrow"]
    report = check(forward, found)
    assert (report["moved"], report["held_bytes"]) == (2, 50)


def test_the_noise_of_dropout_takes_a_bit_an_element_and_nothing_is_drawn_again() -> None:
    x = torch.randn(64, 33, requires_grad=True)

    def forward():
        return F.dropout(F.dropout(x, 0.3).tanh(), 0.6).sum(), [x]

    found = moves_of(forward)["bits"]
    assert len(found) == 2
    report = check(forward, found)
    assert (report["moved"], report["held_bytes"], report["kept"]) == (4, 2 * 64 * 33 // 8, {})


@pytest.mark.parametrize("how", ["offload", "bits"])
@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x * 1,
        lambda x: (x * 1).t(),
        lambda x: (x * 1)[2:, 1::3],
        lambda x: (x * 1)[:, :1].expand(-1, 9),
        lambda x: (x * 1).unsqueeze(0).expand(4, -1, -1),
        lambda x: (x * 1).as_strided((5, 5), (2, 3), 1),
        lambda x: (x * 1)[0, 0],
        lambda x: (x * 1)[:0],
        lambda x: (x * 1).chunk(2)[1],
    ],
)
def test_any_view_of_a_storage(shape: Any, how: str, place: Any) -> None:
    x = (torch.rand(12, 10) > 0.5).float().requires_grad_()

    def forward():
        y = shape(x)
        return (y * y.detach()).sum(), [x]

    call = len(names_of(forward)) - 2
    report = check(forward, [Move(((call, 0),), how)], place)
    assert (report["moved"], report["payloads"], report["kept"]) == (2, 2, {})
    assert report["held_bytes"] == (0 if how == "offload" else 15)


@pytest.mark.parametrize("values", ["three", "minus zero"])
def test_what_is_not_two_values_is_kept_and_counted(values: str) -> None:
    x = torch.tensor([0.0, -0.0, 1.0] if values == "minus zero" else [0.0, 2.0, 1.0], requires_grad=True)

    def forward():
        return (x * 1).pow(2).sum(), [x]

    with pytest.warns(RegionKept) as told:
        report = check(forward, [Move(((1, 0),), "bits")])
    assert len(told) == 1  # once, though it is kept in every forward
    assert report["kept"] == {"it holds more than zero and one other value": 2}
    assert report["moved"] == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float64, torch.bfloat16])
def test_any_dtype_can_be_offloaded(dtype: torch.dtype, place: Any) -> None:
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)

    def forward():
        if dtype == torch.bool:
            return torch.where(x > 0, x, x * 2).sum(), [x]
        y = (x * 1).to(dtype)
        return (y * y).abs().sum(), [x]

    found = [move for move in moves_of(forward)["offload"] if move.bytes == 35 * dtype.itemsize]
    assert found
    report = check(forward, found, place)
    assert report["moved"] >= 2 * len(found)
    assert report["kept"] == {}


# -- shared -----------------------------------------------------------------------------------------------------------


def test_a_storage_that_several_nodes_save_is_held_once_and_read_once_while_it_lives(place: Any) -> None:
    x = torch.randn(6, 8, requires_grad=True)

    def forward():
        y = x * 1
        q, k = y.chunk(2, dim=1)
        return (q * k).sum() + (y * y).sum() + y.exp().sum(), [x]

    found = [move for move in moves_of(forward)["offload"] if len(move.saves) > 1]
    assert [len(move.saves) for move in found] == [4]
    report = check(forward, found, place)
    assert report["moved"] == 8
    assert report["payloads"] == 2
    assert report["restored"] == 4  # once for the product of the chunks, once for the square; both operands share it


def test_what_somebody_keeps_alive_is_not_made_again(place: Any) -> None:
    x, kept = torch.randn(6, 8, requires_grad=True), []

    def forward():
        kept[:] = [(x * 1).tanh()]
        return kept[0].sum(), [x]

    report = check(forward, [Move(((1, 0),), "offload")], place)
    assert (report["moved"], report["restored"]) == (2, 0)


def test_the_storage_is_dead_between_forward_and_backward(place: Any) -> None:
    x, seen = torch.randn(16, 16, requires_grad=True), []

    def forward():
        seen.clear()
        h = x * 1
        for make in (torch.tanh, torch.relu, lambda h: F.dropout(h, 0.5), lambda h: h.sigmoid() * 2):
            h = make(h)
            seen.append(weakref.ref(h.untyped_storage()))
        return h.sum(), [x]

    found = moves_of(forward)
    gc.collect()
    gc.disable()  # not by luck of the collector
    try:
        loss, _ = forward()
        eager = [ref() is not None for ref in seen]
        with Tape(place=place).forward((), mixed(found)):
            loss, _ = forward()
        assert [ref() is not None for ref in seen] == [False] * 4
        assert eager == [True, True, False, False]  # of dropout and the product other tensors are saved
        loss.backward()
    finally:
        gc.enable()


# -- changes after the save ---------------------------------------------------------------------------------------------


def _changed(write: Any, moves: Any, place: Any = None) -> BaseException | None:
    x = torch.ones(4, 4, requires_grad=True)
    with Tape(place=place).forward((), moves):
        y = (x * 1).exp()
        loss = y.sum()
        write(y)
    try:
        loss.backward()
    except RuntimeError as error:
        return error
    return None


@pytest.mark.parametrize("how", ["offload", "bits", None])
@pytest.mark.parametrize(
    ("write", "wrong"),
    [
        (lambda y: y.add_(1), True),
        (lambda y: y.view(-1)[3:].mul_(2), True),
        (lambda y: y.detach().zero_(), True),
        (lambda y: y.data.clone().zero_(), False),
        (lambda y: (y + 1).zero_(), False),
    ],
)
def test_a_change_in_place_is_noticed_as_eager_notices_it(write: Any, wrong: bool, how: str | None, place: Any) -> None:
    error = _changed(write, [Move(((1, 0),), how)] if how else [], place)
    assert (error is not None) == wrong
    if wrong:
        assert "modified by an inplace operation: [torch.FloatTensor [4, 4]]" in str(error)
        assert "is at version 1; expected version 0 instead" in str(error)


def test_a_change_that_no_counter_tells_of_reaches_the_backward_as_in_eager(place: Any) -> None:
    found = []
    for moves in ([], [Move(((1, 0),), "offload")]):
        x = torch.ones(4, requires_grad=True)
        with Tape(place=place).forward((), moves):
            y = (x * 1).exp()
            loss = y.sum()
        y.data.mul_(3)
        loss.backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1]


def test_a_change_between_backward_and_double_backward_is_noticed(place: Any) -> None:
    """By the node that saved what was unpacked, which knows nothing of moves."""
    for moves in ([], [Move(((2, 0),), "offload")]):
        x, gradient = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
        tape = Tape(place=place)
        with tape.forward((), moves):
            factor = torch.ones(4) * 2
            y = x * factor
        (first,) = torch.autograd.grad(y, x, grad_outputs=gradient, create_graph=True)
        factor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(first.sum(), gradient)
    assert reports(tape)["moved"] == 1


def test_a_storage_that_is_saved_changed_and_saved_again_is_held_twice(place: Any) -> None:
    found = []
    for moves in ([], [Move(((1, 0), (3, 0)), "offload")]):
        x, tape = torch.ones(4, requires_grad=True), Tape(place=place)
        with tape.forward((), moves):
            y = x * 1
            first = y.sin()
            y.add_(1)
            second = y.sin()
        del y
        (gradient,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
            torch.autograd.grad(first.sum(), x)
        found.append(gradient.tolist())
    assert found[0] == found[1]
    assert reports(tape)["payloads"] == 2


# -- backwards of other kinds -------------------------------------------------------------------------------------------


def test_a_second_backward_through_a_kept_graph(net: Any, place: Any) -> None:
    tape, found = Tape(place=place), mixed(moves_of(net, net()[1]))
    torch.manual_seed(1)
    with tape.forward((), found):
        loss, watched = net()
    first = torch.autograd.grad(loss, watched, retain_graph=True)
    second = torch.autograd.grad(loss, watched)
    torch.manual_seed(1)
    loss, watched = net()
    for eager, one, two in zip(torch.autograd.grad(loss, watched), first, second, strict=True):
        assert torch.equal(eager, one)
        assert torch.equal(eager, two)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(_run_twice(tape, net, found), watched)


def _run_twice(tape: Tape, net: Any, moves: Any) -> torch.Tensor:
    with tape.forward((), moves):
        loss, watched = net()
    torch.autograd.grad(loss, watched)
    return loss


def test_gradients_of_gradients(net: Any, place: Any) -> None:
    results = []
    for moves in ([], mixed(moves_of(net, net()[1]))):
        torch.manual_seed(2)
        with Tape(place=place).forward((), moves):
            loss, watched = net()
        first = torch.autograd.grad(loss, watched, create_graph=True)
        second = torch.autograd.grad(sum(one.pow(2).sum() for one in first), watched)
        results.append((first, second))
    for eager, moved in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
        assert torch.equal(eager, moved)


def test_what_a_backward_does_not_reach_is_freed_with_the_graph(net: Any, place: Any) -> None:
    found, held = mixed(moves_of(net, net()[1])), retained_bytes()
    for drop in (True, False):
        with Tape(place=place).forward((), found):
            loss, watched = net()
        assert retained_bytes() > held
        if not drop:
            loss.backward(inputs=watched[1:])
        del loss
        assert retained_bytes() == held
