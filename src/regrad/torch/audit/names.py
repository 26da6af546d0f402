"""What each piece of state is called: "buffer blocks.3.norm.running_mean", "list blocks.1.seen", "global cache.TABLE"."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from regrad.torch.regions.discover import boxes as bx
from regrad.torch.regions.discover.walk import Found
from regrad.torch.step import Step

HIDDEN_KEYS = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook", "forward",
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
}  # fmt: skip
"""Attributes of every module that are not state of a forward; ``forward`` is where plans and probes sit."""
_PLACES = {"_parameters": "parameter", "_buffers": "buffer"}
_WORDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (torch.Tensor, "tensor"),
    (torch.Generator, "torch.Generator"),
    (list, "list"), (dict, "dict"), (deque, "deque"), ((set, frozenset), "set"),
)  # fmt: skip


class Named:
    """One box with what it and its elements are called. ``kind`` is the word for a plain element."""

    __slots__ = ("box", "how", "kind", "path", "token")

    def __init__(self, how: bx.Box, box: Any, token: Any, path: str, kind: str) -> None:
        self.how, self.box, self.token, self.path, self.kind = how, box, token, path, kind

    def elements(self, token: Any | None = None) -> Iterator[tuple[str, Any]]:
        """(slot, value) for each element of a box whose elements are slots of their own."""
        token = self.token if token is None else token
        if self.how.keyed:
            for key, value in zip(*token, strict=True):
                if not (self.kind == ATTRIBUTE and key in HIDDEN_KEYS):
                    yield self.slot(key, value), value
        elif isinstance(self.how, bx.SlotsBox):
            for name, value in zip(self.how.names, token, strict=True):
                yield self.slot(name, value), value
        else:
            yield self.slot("", token[0]), token[0]

    def slot(self, key: Any, value: Any) -> str:
        """What an element is called."""
        return f"{_kind(self.kind, value)} {self.inside(key)}"

    def inside(self, key: Any) -> str:
        """The path of an element."""
        if self.how in (bx.CELL, bx.NAME, bx.CLASS):
            return self.path
        if self.kind in (ATTRIBUTE, *_PLACES.values()):
            return f"{self.path}.{key}" if self.path else str(key)
        return f"{self.path}[{key!r}]" if isinstance(key, (str, int)) else f"{self.path}[a {type(key).__name__}]"


ATTRIBUTE = "Python attribute"


def _kind(kind: str, value: Any) -> str:
    if kind in _PLACES.values():
        return kind
    if isinstance(value, torch.Tensor):
        return {ATTRIBUTE: "tensor attribute", "global": "global tensor", "class attribute": "class tensor"}.get(
            kind, "tensor"
        )
    return kind


def object_word(value: Any) -> str:
    """The word for an object that is state by itself."""
    for kinds, word in _WORDS:
        if isinstance(value, kinds):
            return word
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}" if kind.__module__ != "builtins" else kind.__name__


class Names:
    """Names for everything that one walk found.

    boxes     every box, named          paths   id of an object -> its path, of everything that was met
    tensors   (slot, tensor), each tensor once
    """

    def __init__(self, step: Step, found: Found) -> None:
        self.paths: dict[int, str] = {}
        self.boxes: list[Named] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._index = {id(box): (how, box, token) for how, box, token in found.boxes}
        self._waiting: deque[tuple[Any, str, str]] = deque()
        self._parameters = {id(p): name for name, p in step.model.named_parameters()}
        for name, module in step.model.named_modules():
            self._put(module, name, "")
            for table in ("_forward_pre_hooks", "_forward_hooks"):
                for hook in getattr(module, table).values():
                    self._put(hook, f"hook of {name}", "")
        if step.optimizer is not None:
            self._put(step.optimizer.state, "optimizer state", "optimizer")
            self._put(step.optimizer.param_groups, "optimizer groups", "")
        self._put(step.batch, "batch", "")
        self._put(step.loss, "loss", "")
        self._drain()
        for function in _methods(step.model):
            self._function(function)
        self._drain()
        for how, box, token in list(found.boxes):
            if id(box) in self._index:
                self._rest(how, box, token)
        for tensor in found.tensors:
            self._put(tensor, "an unnamed tensor", "tensor")
        self._drain()

    def _put(self, value: Any, path: str, slot: str) -> None:
        if id(value) in self.paths or value is None or isinstance(value, (bool, int, float, str, type)):
            return
        self.paths[id(value)] = path
        if isinstance(value, torch.Tensor):
            self.tensors.append((slot if " " in slot else f"tensor {path}", value))
        self._waiting.append((value, path, slot))

    def _drain(self) -> None:
        while self._waiting:
            value, path, slot = self._waiting.popleft()
            self._visit(value, path, slot)

    def _rest(self, how: bx.Box, box: Any, token: Any) -> None:
        """A box that nothing leads to by name: a global, a class attribute, a variable of a class's methods."""
        if how is bx.NAME:
            self._take(box, f"{box[0].get('__name__', 'main')}.{box[1]}", "global")
        elif how is bx.CLASS:
            self._take(box, f"{box[0].__qualname__}.{box[1]}", "class attribute")
        elif how is bx.CELL:
            if not isinstance(token[0], type):
                self._take(box, f"of a closure ({type(token[0]).__name__})", "variable")
        else:
            self._take(box, f"(a {how.word} that no name leads to)", "entry")
        self._drain()

    def _take(self, box: Any, path: str, kind: str) -> None:
        found = self._index.pop(id(box), None)
        if found is None:
            return
        named = Named(*found, path, kind)
        self.boxes.append(named)
        if named.how.keyed or named.how in (bx.CELL, bx.NAME, bx.CLASS) or isinstance(named.how, bx.SlotsBox):
            keys = named.token[0] if named.how.keyed else getattr(named.how, "names", ("",))
            for key, value in zip(keys, named.how.values(named.token), strict=True):
                if not (kind == ATTRIBUTE and key in HIDDEN_KEYS):
                    self._put(value, self._inside(named, key, value), named.slot(key, value))
        else:
            for i, value in enumerate(named.how.values(named.token)):
                self._put(value, f"{path}[{i}]", f"tensor {path}[{i}]")

    def _inside(self, named: Named, key: Any, value: Any) -> str:
        if id(key) in self._parameters and isinstance(key, torch.Tensor):
            return f"{named.path} of {self._parameters[id(key)]}"
        return named.inside(key)

    def _visit(self, value: Any, path: str, slot: str) -> None:
        if isinstance(value, nn.Module):
            for place, kind in _PLACES.items():
                self._take(vars(value).get(place), path, kind)
            self._take(vars(value).get("_modules"), path, "module")
            self._take(vars(value), path, ATTRIBUTE)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._put(value.__self__, path, "")
            self._put(value.__func__, path, "")
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._put(part, path, "")
        elif isinstance(value, tuple):
            for i, part in enumerate(value):
                self._put(part, f"{path}[{i}]", f"tensor {path}[{i}]")
        elif isinstance(value, (dict, list, deque, set)):
            self._take(value, path, "entry")
        elif id(value) in self._index:
            self._take(value, path, ATTRIBUTE if isinstance(self._index[id(value)][0], bx.SlotsBox) else "entry")
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._take(attributes, path, ATTRIBUTE)

    def _function(self, function: types.FunctionType) -> None:
        name = function.__qualname__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._take(cell, f"`{variable}` of {name}", "variable")
        for extra in (function.__defaults__, function.__kwdefaults__):
            self._put(extra, f"default of {name}", "")


def _methods(model: nn.Module) -> Iterator[types.FunctionType]:
    """Methods of the model's classes: they share variables with the function in which their class was made."""
    for base in dict.fromkeys(base for module in model.modules() for base in type(module).__mro__):
        for value in vars(base).values():
            if isinstance(value, types.FunctionType) and value.__closure__:
                yield value
