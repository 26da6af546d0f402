"""Single slots that are looked at again and again while a step runs, to see which operation or line changes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from regrad.torch.audit.names import ATTRIBUTE, Named, Names
from regrad.torch.audit.survey import Surveyor, frozen, generator_slot
from regrad.torch.audit.world import digest_of, generators
from regrad.torch.regions import ambient
from regrad.torch.regions.discover import boxes as bx
from regrad.torch.regions.discover import sources
from regrad.torch.regions.entry import plain_array

MOST = 64
_GRADIENT = "gradient of "


class Suspect:
    """One slot and how to look at it. ``look`` gives something whose ``==`` (or ``is``) tells a change."""

    __slots__ = ("last", "look", "slot")

    def __init__(self, slot: str, look: Callable[[], Any]) -> None:
        self.slot, self.look = slot, look
        self.last: Any = None

    def moved(self) -> bool:
        """Whether it changed since it was last asked."""
        now, last = self.look(), self.last
        self.last = now
        return not _same(now, last)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    plain = (str, int, float, bool, bytes, frozenset)
    return type(one) is type(other) and isinstance(one, plain) and one == other


def suspects(surveyor: Surveyor, slots: list[str]) -> list[Suspect]:
    """A suspect for each slot that there is a way to look at; of a slot in something new, the place where that stands."""
    world = surveyor.world
    names = Names(world.step, world.found)
    looks: dict[str, Callable[[], Any]] = {}
    for key, slot in surveyor.storages.items():
        if key in world.bytes:
            looks[slot] = _bytes(world.bytes[key][0])
    for slot, alias, _ in world.hidden.values():
        looks[slot] = _bytes(alias)
    for source in generators(world.found):
        looks[generator_slot(source, names.paths)] = partial(_generator, source)
    for array in world.found.arrays:
        if plain_array(array):
            looks[f"array {names.paths.get(id(array), 'without a name')}"] = array.tobytes
    for word, get, _ in ambient.SWITCHES:
        looks[word] = get
    for index, device in enumerate(ambient.DEVICES):
        looks[f"autocast on {device}"] = partial(_autocast, index)
    looks["grad mode"] = torch.is_grad_enabled
    for slot, tensor in names.tensors:
        if tensor.requires_grad and tensor.is_leaf:
            looks[_GRADIENT + slot.removeprefix("parameter ")] = _gradient(tensor)
    found = []
    for slot in dict.fromkeys(slots):
        places = [look for look in (looks.get(slot), _in_box(names.boxes, slot)) if look is not None]
        if places:
            found.append(Suspect(slot, partial(_all, places)))
    return found[:MOST]


def _generator(source: sources.Source) -> str:
    return frozen(source.get())


def _autocast(index: int) -> Any:
    return ambient.autocast()[index]


def _all(places: list[Callable[[], Any]]) -> tuple[Any, ...]:
    return tuple(look() for look in places)


def _bytes(alias: torch.Tensor) -> Callable[[], str]:
    return lambda: digest_of(alias)


def _gradient(tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: None if tensor.grad is None else digest_of(tensor.grad)


def _in_box(boxes: list[Named], slot: str) -> Callable[[], Any] | None:
    """How to look at the box whose element is ``slot``, or at the nearest one around it that was there at the start."""
    best: tuple[int, Callable[[], Any]] | None = None
    for named in boxes:
        if named.kind == "module":
            continue
        whole = f" {named.path}"
        if slot.endswith(whole) and not _attributes(named):
            candidate = (len(named.path) + 1000 * (1 + slot.startswith(f"{named.how.word} ")), _whole(named))
        else:
            key = _key_in(named, slot)
            if key is None:
                continue
            candidate = (len(named.inside(key)), _element(named, key))
        if best is None or candidate[0] > best[0]:
            best = candidate
    return None if best is None else best[1]


def _attributes(named: Named) -> bool:
    return named.kind in ("Python attribute", "parameter", "buffer")


def _key_in(named: Named, slot: str) -> Any:
    """The key of the element that ``slot`` is, or is inside of."""
    if named.how.keyed and not _attributes(named):
        keys = [key for key in named.how.take(named.box)[0] if f" {named.inside(key)}" in slot]
        return max(keys, key=lambda key: len(named.inside(key)), default=None)
    if isinstance(named.how, bx.SlotsBox):
        return next((name for name in named.how.names if slot.endswith(f" {named.inside(name)}")), None)
    kind = slot.partition(" ")[0]
    own = named.kind == ATTRIBUTE and kind not in ("parameter", "buffer")
    if not _attributes(named) or not (own or kind == named.kind):
        return None
    start = f" {named.path}." if named.path else " "
    if start not in slot:
        return None
    rest = slot.partition(start)[2] if named.path else slot.rpartition(" ")[2]
    name = rest.partition(".")[0].partition("[")[0]
    exists = name in named.box or rest == name
    return name if exists and name.isidentifier() else None


def _whole(named: Named) -> Callable[[], Any]:
    return lambda: named.how.take(named.box)


def _element(named: Named, key: Any) -> Callable[[], Any]:
    if isinstance(named.how, bx.SlotsBox):
        at = named.how.names.index(key)
        return lambda: named.how.take(named.box)[at]
    return lambda: dict.get(named.box, key, bx.MISSING)
