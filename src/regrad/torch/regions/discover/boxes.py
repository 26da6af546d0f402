"""Mutable Python objects whose contents a replay must find as they were: how to look, compare and put back.

A box is looked at shallowly: its elements are compared by identity, and elements that are boxes themselves have
entries of their own. The base class's methods are used on subclasses, so that no override of the user's runs
(``Counter.update`` would add).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from types import CellType
from typing import Any

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

_KEYS: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class Box(ABC):
    """How one type of container is read and written. Stateless; one instance a type."""

    word = "object"
    keyed = False  # whether a token is (keys, values)

    @abstractmethod
    def take(self, box: Any) -> Any:
        """The contents now, as a value that does not change."""

    @abstractmethod
    def put(self, box: Any, token: Any) -> None:
        """Make the contents those of ``token``."""

    def same(self, box: Any, token: Any) -> bool:
        """Whether the contents are those of ``token``."""
        now = self.take(box)
        return len(now) == len(token) and all(map(is_, now, token))

    def values(self, token: Any) -> tuple[Any, ...]:
        """The elements in ``token`` that may be boxes."""
        return tuple(token)


def shared_keys(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """One tuple for all equal tuples of names, so that a thousand modules of a class hold one."""
    try:
        return _KEYS.setdefault(keys, keys) if len(_KEYS) < 4096 else _KEYS.get(keys, keys)
    except TypeError:
        return keys


class DictBox(Box):
    word, keyed = "dict", True

    def take(self, box: Any) -> Any:
        return (tuple(dict.keys(box)), tuple(dict.values(box)))

    def same(self, box: Any, token: Any) -> bool:
        keys, values = token
        if len(box) != len(keys):
            return False
        return all(map(is_, dict.values(box), values)) and all(map(is_, dict.keys(box), keys))

    def put(self, box: Any, token: Any) -> None:
        keys, values = token
        if len(box) == len(keys) and all(map(is_, dict.keys(box), keys)):
            for key, now, value in zip(keys, tuple(dict.values(box)), values, strict=True):
                if now is not value:
                    dict.__setitem__(box, key, value)
            return
        dict.clear(box)
        for key, value in zip(keys, values, strict=True):
            dict.__setitem__(box, key, value)

    def values(self, token: Any) -> tuple[Any, ...]:
        return token[1]  # type: ignore[no-any-return]


class AttributesBox(DictBox):
    """An instance's ``__dict__``: keys are names, shared between instances."""

    word = "attributes"

    def take(self, box: Any) -> Any:
        return (shared_keys(tuple(box)), tuple(box.values()))

    def same(self, box: Any, token: Any) -> bool:
        keys, values = token
        return len(box) == len(keys) and all(map(is_, box.values(), values)) and tuple(box) == keys


class OrderedBox(Box):
    word, keyed = "dict", True

    def take(self, box: Any) -> Any:
        return (tuple(OrderedDict.keys(box)), tuple(OrderedDict.values(box)))

    def same(self, box: Any, token: Any) -> bool:
        keys, values = self.take(box)
        return len(keys) == len(token[0]) and all(map(is_, keys, token[0])) and all(map(is_, values, token[1]))

    def put(self, box: Any, token: Any) -> None:
        OrderedDict.clear(box)
        for key, value in zip(*token, strict=True):
            OrderedDict.__setitem__(box, key, value)

    def values(self, token: Any) -> tuple[Any, ...]:
        return token[1]  # type: ignore[no-any-return]


class ListBox(Box):
    word = "list"

    def take(self, box: Any) -> Any:
        return tuple(list.__iter__(box))

    def put(self, box: Any, token: Any) -> None:
        list.__setitem__(box, slice(None), token)


class DequeBox(Box):
    word = "deque"

    def take(self, box: Any) -> Any:
        return tuple(deque.__iter__(box))

    def put(self, box: Any, token: Any) -> None:
        deque.clear(box)
        deque.extend(box, token)


class SetBox(Box):
    word = "set"

    def take(self, box: Any) -> Any:
        return frozenset(set.__iter__(box))

    def same(self, box: Any, token: Any) -> bool:
        return len(box) == len(token) and frozenset(set.__iter__(box)) == token

    def put(self, box: Any, token: Any) -> None:
        set.clear(box)
        set.update(box, token)


class BytesBox(Box):
    """``bytearray``, ``array.array`` and what else is written through a flat buffer of fixed length or slices."""

    word = "bytes"

    def take(self, box: Any) -> Any:
        return bytes(box) if isinstance(box, bytearray) else box[:]

    def same(self, box: Any, token: Any) -> bool:
        return bool(box == token)

    def put(self, box: Any, token: Any) -> None:
        box[:] = token

    def values(self, token: Any) -> tuple[Any, ...]:
        return ()


class CellBox(Box):
    """A variable that a closure shares with its function."""

    word = "variable"

    def take(self, box: CellType) -> Any:
        try:
            return (box.cell_contents,)
        except ValueError:
            return (MISSING,)

    def put(self, box: CellType, token: Any) -> None:
        if token[0] is not MISSING:
            box.cell_contents = token[0]
        elif self.take(box)[0] is not MISSING:
            del box.cell_contents


class NameBox(Box):
    """One name in a module's globals: the box is the pair (globals, name)."""

    word = "global"

    def take(self, box: tuple[dict[str, Any], str]) -> Any:
        return (box[0].get(box[1], MISSING),)

    def put(self, box: tuple[dict[str, Any], str], token: Any) -> None:
        names, name = box
        if token[0] is MISSING:
            names.pop(name, None)
        else:
            names[name] = token[0]


class ClassBox(Box):
    """One attribute of a class: the box is the pair (class, name)."""

    word = "class attribute"

    def take(self, box: tuple[type, str]) -> Any:
        return (vars(box[0]).get(box[1], MISSING),)

    def put(self, box: tuple[type, str], token: Any) -> None:
        if token[0] is MISSING:
            type.__delattr__(box[0], box[1])
        else:
            type.__setattr__(box[0], box[1], token[0])


class SlotsBox(Box):
    """The ``__slots__`` of an instance: the box is the instance."""

    word = "slots"

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def take(self, box: Any) -> Any:
        return tuple(_slot(box, name) for name in self.names)

    def put(self, box: Any, token: Any) -> None:
        for name, value in zip(self.names, token, strict=True):
            if value is MISSING:
                if _slot(box, name) is not MISSING:
                    object.__delattr__(box, name)
            else:
                object.__setattr__(box, name, value)


def _slot(box: Any, name: str) -> Any:
    try:
        return object.__getattribute__(box, name)
    except AttributeError:
        return MISSING


DICT, ATTRIBUTES, ORDERED, LIST = DictBox(), AttributesBox(), OrderedBox(), ListBox()
DEQUE, SET, BYTES, CELL, NAME, CLASS = DequeBox(), SetBox(), BytesBox(), CellBox(), NameBox(), ClassBox()
_SLOTS: dict[type, SlotsBox | None] = {}


def slots_of(cls: type) -> SlotsBox | None:
    """The box for the ``__slots__`` that instances of ``cls`` have, if it is a class of the user's that has some."""
    if cls not in _SLOTS:
        names: list[str] = []
        for base in cls.__mro__:
            own = vars(base).get("__slots__", ())
            for name in (own,) if isinstance(own, str) else own:
                if name not in ("__weakref__", "__dict__"):
                    hidden = name.startswith("__") and not name.endswith("__")
                    names.append(f"_{base.__name__.lstrip('_')}{name}" if hidden else name)
        _SLOTS[cls] = SlotsBox(tuple(names)) if names else None
    return _SLOTS[cls]


Capture = Callable[[Any], Any]
