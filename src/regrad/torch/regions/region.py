"""What is known about each region from its calls so far, and the report of it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter, OrderedDict
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from regrad.torch.regions.ambient import unseen
from regrad.torch.regions.cut import Cut
from regrad.torch.regions.discover.names import Reach

LEARN_CALLS = 2
AUTO_ENGINE, SNAPSHOT, JOURNAL, READ_SET = "auto", "snapshot", "journal", "read_set"
LARGE_SHARE = 0.25  # a call that overwrites less of a storage than this is cheaper to journal than to copy
_MOST_REGIONS = 4096
MANY_MODULES = 64  # more than these are walked at every call only if most of them run


class RegionKept(UserWarning):
    """A call of a region keeps its activations because it cannot be replayed."""


@dataclass(frozen=True)
class RegionReport:
    """What happened to one region: calls of it, replays, calls that kept their activations and why."""

    name: str
    calls: int
    replays: int
    kept: tuple[tuple[str, int], ...]


class Region:
    """One callable, by its code and the modules that it is bound to."""

    def __init__(self, name: str, line: str) -> None:
        self.name, self.line = name, line
        self.reach = Reach()
        self.settings: Any = None
        self.engines: dict[int, str] = {}
        self.hidden: dict[int, StorageWeakRef] = {}
        self.hidden_generators: dict[int, Any] = {}
        self.mutated: set[int] = set()
        self.draws_numpy = False
        self.ran: dict[tuple[Any, ...], set[int]] = {}
        self.modules = 0
        self.cuts: dict[Any, Cut | None] = {}
        self.calls = self.replays = 0
        self.kept: Counter[str] = Counter()
        self.version = 0
        self._learnt: Counter[Any] = Counter()
        self._checked: set[Any] = set()

    def learning(self, signature: Any) -> bool:
        """Whether this call is watched operation by operation."""
        if len(self._learnt) > 256:
            self._learnt.clear()
            self.cuts.clear()
        self._learnt[signature] += 1
        return self._learnt[signature] <= LEARN_CALLS

    def few(self, numbers: tuple[Any, ...]) -> set[int] | None:
        """The modules that calls with these numbers ran, if the region can reach many and they ran less than half."""
        ran = self.ran.get(numbers)
        return ran if ran is not None and self.modules > MANY_MODULES and len(ran) < self.modules / 2 else None

    @property
    def writes_data(self) -> bool:
        """Whether the user's code names ``.data``: such writes leave no trace on version counters."""
        return "data" in self.reach.names

    def choose(self, storage: int, wanted: str, written_bytes: int, storage_bytes: int) -> None:
        """Fix how the old bytes of a large storage are kept from now on."""
        if wanted in (SNAPSHOT, JOURNAL, READ_SET):
            self.engines[storage] = wanted
        else:
            self.engines[storage] = JOURNAL if written_bytes <= LARGE_SHARE * storage_bytes else SNAPSHOT

    def hide(self, storage: int, alias: torch.Tensor) -> None:
        """Remember state that only operations showed. No reference keeps it alive."""
        self.hidden[storage] = StorageWeakRef(alias.untyped_storage())

    def hide_generators(self, generators: list[Any]) -> None:
        """Remember generators that only operations showed (a few; later ones replace earlier ones)."""
        for generator in generators:
            self.hidden_generators[id(generator)] = generator
        while len(self.hidden_generators) > 8:
            del self.hidden_generators[next(iter(self.hidden_generators))]

    def hidden_state(self) -> tuple[tuple[tuple[int, torch.Tensor], ...], tuple[Any, ...]]:
        """Aliases of the hidden storages that still live, and the hidden generators."""
        alive = []
        for key, weak in tuple(self.hidden.items()):
            storage = None if weak.expired() else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None:
                del self.hidden[key]
            else:
                with unseen(), torch.no_grad():
                    alive.append((key, torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)))
        return tuple(alive), tuple(self.hidden_generators.values())

    def changed(self) -> None:
        """The footprint grew: look closely again for a while."""
        self.version += 1
        self._learnt.clear()
        self.cuts.clear()
        self.ran.clear()

    def must_check(self, signature: Any) -> bool:
        """Whether the next replay of such a call is to be compared with its forward."""
        return (signature, self.version) not in self._checked

    def checked(self, signature: Any) -> None:
        """A replay of such a call gave what its forward gave."""
        if len(self._checked) > 1024:
            self._checked.clear()
        self._checked.add((signature, self.version))

    def keep(self, reason: str) -> None:
        """Count a call that keeps its activations; the first for each reason is told."""
        if not self.kept[reason]:
            warnings.warn(
                f"region {self.name} keeps its activations instead of being replayed: it {reason}. The result is exact "
                "and no memory is saved for this call. Move it out of the region, or wrap it in rt.once(...).",
                RegionKept,
                stacklevel=7,
            )
        self.kept[reason] += 1

    def report(self) -> RegionReport:
        """Its figures now."""
        return RegionReport(self.name, self.calls, self.replays, tuple(self.kept.items()))


_REGIONS: OrderedDict[Any, Region] = OrderedDict()


def region_of(function: Any, settings: Any) -> Region:
    """The region of ``function``: by identity of a module, by code and bound modules of anything else."""
    key = (_key(function), id(settings))
    region = _REGIONS.get(key)
    if region is None:
        region = _REGIONS[key] = Region(*_name(function))
        region.settings = settings  # the key has its identity
        if len(_REGIONS) > _MOST_REGIONS:
            _REGIONS.popitem(last=False)
    return region


def reports(settings: Any = None) -> tuple[RegionReport, ...]:
    """One report a region (of those that ran under ``settings``), in the order of their first calls."""
    return tuple(region.report() for region in _REGIONS.values() if settings is None or region.settings is settings)


def _key(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return ("partial", _key(function.func))
    if isinstance(function, MethodType):
        return (_key(function.__func__), type(function.__self__), id(function.__self__))
    if isinstance(function, nn.Module):
        return (type(function), id(function))
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        bound = []
        for cell in getattr(function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, nn.Module):
                bound.append(id(value))
        return (code, tuple(bound))
    return (type(function), id(function))


def numbers_of(function: Any) -> tuple[Any, ...]:
    """Plain numbers and strings that a function is bound to: the index in ``lambda x: blocks[i](x)``."""
    while isinstance(function, functools.partial):
        function = function.func
    found = [value for value in getattr(function, "__defaults__", None) or () if isinstance(value, (int, str))]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if isinstance(value, (int, str)):
            found.append(value)
    return tuple(found)


def _name(function: Any) -> tuple[str, str]:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
        function = function.__self__
    source = type(function).forward if isinstance(function, nn.Module) else function
    name = type(function).__name__ if isinstance(function, nn.Module) else getattr(function, "__qualname__", None)
    code = getattr(inspect.unwrap(source) if callable(source) else source, "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
    return str(name or type(function).__name__), line


def describe(tensor: torch.Tensor) -> str:
    """Shape and type of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
