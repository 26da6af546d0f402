"""Everything mutable that a region can reach by name from its function, its arguments and the modes around it.

The walk runs at the entry of every call and holds nothing between calls. It costs about two microseconds a module.
"""

from __future__ import annotations

import array
import enum
import functools
import io
import random
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from regrad.torch.regions.discover import boxes as bx
from regrad.torch.regions.discover.names import Reach, is_library

MOST_OBJECTS = 200_000
_SMALL_BOX = 256
_LONG_LIST = 8

_ATOMS: set[type] = {
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.CodeType, types.BuiltinFunctionType, types.ModuleType, types.MappingProxyType, types.GetSetDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.FrameType, types.TracebackType,
    weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
}  # fmt: skip
_MODULE_BOXES = ("_parameters", "_buffers", "_modules")
_MODULE_TABLES = {
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_is_full_backward_hook",
    "_non_persistent_buffers_set", *_MODULE_BOXES,
}  # fmt: skip
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ITERATORS: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter({})), type(iter("")), type(iter(range(0))), type(iter(set())), zip, map,
    filter, enumerate, types.GeneratorType, types.AsyncGeneratorType,
)  # fmt: skip


_TENSOR, _MODULE, _TUPLE, _CONTAINER, _CALLABLE, _CELL, _OTHER = range(7)
_HOW: dict[type, int] = {}


def _how(kind: type) -> int:
    for how, types_ in (
        (_TENSOR, torch.Tensor),
        (_MODULE, nn.Module),
        (_TUPLE, (tuple, frozenset)),
        (_CONTAINER, (dict, list, set, deque)),
        (_CALLABLE, (types.FunctionType, types.MethodType, functools.partial)),
        (_CELL, types.CellType),
    ):
        if issubclass(kind, types_):
            return how
    return _OTHER


@functools.cache
def _is_sharded(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


class Found:
    """What a walk found. ``boxes`` are (how, box, contents); everything else by identity, each once."""

    def __init__(self) -> None:
        self.boxes: list[tuple[bx.Box, Any, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Any] = []
        self.caches: list[Any] = []
        self.iterators: list[Any] = []
        self.files: list[Any] = []
        self.lazy: list[Any] = []
        self.compiled = self.sharded = False
        self.modules = 0
        self.deferred: set[int] = set()
        self.names: dict[int, str] = {}


class Walk:
    """One walk. ``reach`` may grow; then :attr:`grew` is set and the walk must be done again."""

    def __init__(self, reach: Reach, ran: set[int] | None = None) -> None:
        self.reach, self._ran = reach, ran
        self.found = Found()
        self.grew = False
        self._seen: set[Any] = set()
        self._waiting: list[Any] = []
        self._fsdp = False

    def run(self, roots: tuple[Any, ...]) -> Found:
        """Walk from ``roots`` and from the globals and class attributes that their code names."""
        waiting, seen = self._waiting, self._seen
        waiting.extend(roots)
        self._names()
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind in _ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            if len(seen) > MOST_OBJECTS:
                break
            self._visit(value, kind)
            if not waiting:
                self._names()  # code met on the way may name more globals
        return self.found

    def _names(self) -> None:
        for key, pair in tuple(self.reach.globals.items()):
            if key not in self._seen:
                self._seen.add(key)
                self._box(bx.NAME, pair)
        for attribute in tuple(self.reach.classes):
            if attribute not in self._seen:
                self._seen.add(attribute)
                self._box(bx.CLASS, attribute)

        for cell in tuple(self.reach.cells.values()):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._box(bx.CELL, cell)

    def _box(self, how: bx.Box, box: Any) -> Any:
        token = how.take(box)
        self.found.boxes.append((how, box, token))
        self._waiting.extend(how.values(token))
        return token

    def _visit(self, value: Any, kind: type) -> None:
        how = _HOW.get(kind)
        if how is None:
            how = _HOW[kind] = _how(kind)
        if how == _TENSOR:
            if isinstance(value, (UninitializedParameter, UninitializedBuffer)):
                self.found.lazy.append(value)
                return
            self.found.tensors.append(value)
            attributes = value.__dict__
            if attributes:
                self._attributes(attributes)
        elif how == _MODULE:
            self._module(value, kind)
        elif how == _TUPLE:
            self._waiting.extend(value)
        elif how == _CONTAINER:
            self._container(value)
        elif how == _CALLABLE:
            self._callable(value)
        elif how == _CELL:
            self._box(bx.CELL, value)
        elif not self._leaf(value, kind):
            self._object(value, kind)

    def _container(self, value: Any) -> None:
        if isinstance(value, OrderedDict):
            self._box(bx.ORDERED, value)
        elif isinstance(value, dict):
            self._box(bx.DICT, value)
        elif isinstance(value, list):
            self._box(bx.LIST, value)
        else:
            self._box(bx.DEQUE if isinstance(value, deque) else bx.SET, value)
        attributes = getattr(value, "__dict__", None)
        if attributes:
            self._attributes(attributes)

    def _children(self, kind: type, children: tuple[Any, ...]) -> Any:
        """All of them; of a long list only those that are known to run, if that is known."""
        if self._ran is None or len(children) <= _LONG_LIST or kind not in (nn.ModuleList, nn.ModuleDict):
            return children
        self.found.deferred.update(id(child) for child in children if id(child) not in self._ran)
        return [child for child in children if id(child) in self._ran]

    def _module(self, module: nn.Module, kind: type) -> None:
        reach = self.reach
        if not reach.knows(kind):
            self._learn(reach.add_class, kind)
        self.found.modules += 1
        attributes = vars(module)
        fsdp = self._fsdp or _is_sharded(kind)
        found, waiting = self.found.boxes, self._waiting
        token = bx.ATTRIBUTES.take(attributes)
        found.append((bx.ATTRIBUTES, attributes, token))
        plain = kind.__module__.startswith("torch.nn.modules")
        for name in _MODULE_BOXES:
            box = attributes.get(name)
            if box is None or (plain and not box and name != "_parameters"):
                continue
            if not (fsdp and name == "_parameters"):
                contents = bx.DICT.take(box)
                found.append((bx.DICT, box, contents))
                if contents[1]:
                    waiting.extend(self._children(kind, contents[1]) if name == "_modules" else contents[1])
        for name in _HOOKS:
            hooks = attributes.get(name)
            if hooks:
                waiting.extend(hooks.values())
        if fsdp != self._fsdp:
            self._inside_fsdp(module)
        self._follow(token)
        if "_orig_mod" in attributes["_modules"] or attributes.get("_compiled_call_impl") is not None:
            self.found.compiled = True
        if not plain:
            slots = bx.slots_of(kind)
            if slots is not None:
                self._box(slots, module)

    def _inside_fsdp(self, module: nn.Module) -> None:
        """The wrapper swaps parameters between forward and backward itself: they are left alone in its whole subtree."""
        self.found.sharded = True
        waiting, self._waiting, self._fsdp = self._waiting, [], True
        for inner in module.modules():
            if id(inner) not in self._seen:
                self._seen.add(id(inner))
                self._module(inner, type(inner))
        rest, self._waiting, self._fsdp = self._waiting, waiting, False
        self._waiting.extend(value for value in rest if not isinstance(value, nn.Parameter))

    def _follow(self, token: Any) -> None:
        """Put attribute values in the queue: containers and tensors always, objects if code names the attribute."""
        names, waiting = self.reach.names, self._waiting
        for name, value in zip(*token, strict=True):
            kind = type(value)
            if kind in _ATOMS or name in _MODULE_TABLES:
                continue
            plain = isinstance(value, (torch.Tensor, nn.Module, tuple)) or (
                isinstance(value, (list, dict, set, deque)) and len(value) <= _SMALL_BOX
            )
            if plain or name in names:
                waiting.append(value)

    def _attributes(self, attributes: dict[str, Any]) -> None:
        token = bx.ATTRIBUTES.take(attributes)
        self.found.boxes.append((bx.ATTRIBUTES, attributes, token))
        self._follow(token)

    def _learn(self, add: Any, value: Any) -> None:
        before = self.reach.size()
        add(value)
        self.reach.settle()
        self.grew |= before != self.reach.size()

    def _callable(self, value: Any) -> None:
        if isinstance(value, types.MethodType):
            self._waiting += [value.__self__, value.__func__]
            return
        if isinstance(value, functools.partial):
            self._waiting += [value.func, value.args, value.keywords]
            return
        original = value.__dict__.get("_torchdynamo_orig_callable")
        if original is not None:
            self.found.compiled = True
            self._waiting.append(original)
            return
        if is_library(value.__module__) and not value.__closure__:
            return
        if value.__module__ and value.__module__.startswith(("torch.distributed", "torch._", "regrad")):
            return
        self._learn(self.reach.add_function, value)
        if value.__closure__:
            self._waiting.extend(value.__closure__)
        for extra in (value.__defaults__, value.__kwdefaults__):
            if extra:
                self._waiting.append(extra)
        if value.__dict__:
            self._attributes(value.__dict__)

    def _leaf(self, value: Any, kind: type) -> bool:
        """Take what is state by itself and has no elements to follow. True if ``value`` was such a thing."""
        found = self.found
        module = kind.__module__
        if isinstance(value, (torch.Generator, random.Random)) or module.startswith("numpy.random"):
            found.generators.append(value)
        elif module == "numpy" and kind.__name__ == "ndarray":
            found.arrays.append(value)
        elif isinstance(value, (bytearray, array.array)):
            self._box(bx.BYTES, value)
        elif isinstance(value, functools._lru_cache_wrapper):
            found.caches.append(value)
            self._learn(self.reach.add_function, value.__wrapped__)
            self._waiting.append(value.__wrapped__)
        elif isinstance(value, _ITERATORS) or module == "itertools":
            found.iterators.append(value)
        elif isinstance(value, io.IOBase):
            found.files.append(value)
        elif isinstance(value, type):
            if not is_library(value.__module__) and not self.reach.knows(value):
                self._learn(self.reach.add_class, value)
        else:
            return isinstance(value, enum.Enum)
        return True

    def _object(self, value: Any, kind: type) -> None:
        module = kind.__module__
        if module.startswith(("torch.distributed", "torch._", "torch.autograd", "regrad", "concurrent", "threading")):
            return
        if not is_library(module) and not self.reach.knows(kind):
            self._learn(self.reach.add_class, kind)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._attributes(attributes)
        slots = bx.slots_of(kind)
        if slots is not None:
            self._box(slots, value)


def walk(reach: Reach, roots: tuple[Any, ...], ran: set[int] | None = None) -> Found:
    """Walk until no new code is met. With ``ran``, members of long module lists that are not in it are deferred."""
    for _ in range(5):
        one = Walk(reach, ran)
        found = one.run(roots)
        if not one.grew:
            break
    return found
