"""Which saved tensors of a forward can be moved, and how: read off a run of it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from taping import names_of, run

from regrad.torch.regions.kept import retained_bytes
from regrad.torch.tape import Move, Range, Ranges, Tape
from regrad.torch.tape.calls import Kind, Numbering
from regrad.torch.tape.codec import Packed, pack
from regrad.torch.tape.mover import RELUS


class Saves(Numbering):
    """Notes what each call saves: (call, index, tensor as it is after the call, function, name of the call)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, torch.Tensor, Any, str]] = []

    def call(self, ordinal: int, kind: Kind, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor.detach()

        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return func(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = func(*args, **kwargs)
        for index, tensor in enumerate(saved):
            if tensor.layout is torch.strided and type(tensor) is torch.Tensor:
                self.found.append((ordinal, index, tensor if tensor.is_leaf else tensor.detach(), func, kind.name))
        return result


def saves_of(forward: Any) -> Saves:
    """What the calls of ``forward()`` save."""
    noted = Saves()
    with noted:
        forward()
    return noted


def moves_of(
    forward: Any, persistent: Iterable[torch.Tensor] = (), ranges: Iterable[Range] = ()
) -> dict[str, list[Move]]:
    """For each way the moves of all storages that can be moved so: those that the forward makes, and of which no save is
    in a range."""
    there = {tensor.untyped_storage()._cdata for tensor in persistent}
    groups: dict[int, list[tuple[int, int, torch.Tensor, Any, str]]] = {}
    for one in saves_of(forward).found:
        if not one[2].requires_grad and one[2].untyped_storage()._cdata not in there:
            groups.setdefault(one[2].untyped_storage()._cdata, []).append(one)
    ranges = list(ranges)
    found: dict[str, list[Move]] = {"bits": [], "signs": [], "narrow": [], "offload": []}
    for group in groups.values():
        if any(part.start <= call < part.stop for call, *_ in group for part in ranges):
            continue
        saves, tensor = tuple((call, index) for call, index, *_ in group), group[0][2]
        size = tensor.untyped_storage().nbytes()
        if size:
            found["offload"].append(Move(saves, "offload", group[0][4], size))
        if all(func in RELUS for *_, func, _ in group):
            found["signs"].append(Move(saves, "signs", group[0][4], size))
        for how in ("bits", "narrow"):
            row = torch.empty(0, dtype=tensor.dtype)
            if not size or size % tensor.element_size() or len({one[2].dtype for one in group}) > 1:
                continue
            packed = pack(how, row.set_(tensor.untyped_storage(), 0, (size // tensor.element_size(),), (1,)))
            if isinstance(packed, Packed):
                found[how].append(Move(saves, how, group[0][4], size, packed.nbytes))
    return found


def mixed(found: dict[str, list[Move]]) -> list[Move]:
    """Every storage moved once, in the first way that it can be."""
    chosen: dict[tuple[int, int], Move] = {}
    for how in ("signs", "bits", "narrow", "offload"):
        for move in found[how]:
            chosen.setdefault(move.saves[0], move)
    return list(chosen.values())


def reports(tape: Tape) -> dict[str, Any]:
    """Sums over all moves."""
    found = tape.report_moves()
    kept: dict[str, int] = {}
    for report in found:
        for reason, count in report.kept:
            kept[reason] = kept.get(reason, 0) + count
    return {
        "moved": sum(report.moved for report in found),
        "payloads": sum(report.payloads for report in found),
        "restored": sum(report.restored for report in found),
        "held_bytes": sum(report.held_bytes for report in found),
        "kept": kept,
    }


def check(forward: Any, moves: Any, place: Any = None, ranges: Any = ()) -> dict[str, Any]:
    """Forward and backward with the moves give eager's bytes; what was reported. Nothing is held afterwards."""
    names, held = names_of(forward), retained_bytes()
    tape = Tape(place=place)
    for seed in (1, 2):
        assert run(forward, tape, Ranges(ranges, names), moves, seed=seed) == run(forward, seed=seed)
    gc.collect()
    assert retained_bytes() == held
    return reports(tape)
